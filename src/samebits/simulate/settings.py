"""Settings that `samebits simulate` cannot run."""

from __future__ import annotations

from samebits.config.schema import RunConfig
from samebits.errors import ConfigError


def check_simulated(config: RunConfig) -> None:
    """Check that the settings can be simulated.

    Raises:
        ConfigError: They need a part of Samebits that the simulation does not run.
    """
    obstacles = {
        f"mode={config.mode}": config.mode != "exact",
        f"parallel={config.parallel}": config.parallel != "ddp",
        "watch.recheck": config.watch.recheck is not None,
        "compile=true": config.compile,
    }
    for name, is_there in obstacles.items():
        if is_there:
            raise ConfigError(f"{name} cannot be simulated", fix="Simulate the run without this setting.")
