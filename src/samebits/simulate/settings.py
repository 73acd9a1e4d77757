"""Settings that `samebits simulate` cannot run."""

from samebits.config.combinations import first_met
from samebits.config.schema import RunConfig
from samebits.errors import ConfigError


def check_simulated(config: RunConfig) -> None:
    """Check that the settings can be simulated.

    Raises:
        ConfigError: They need a part of Samebits that the simulation does not run.
    """
    if obstacle := first_met(config, "mode!=exact", "parallel!=ddp", "watch.recheck", "compile=true"):
        raise ConfigError(f"{obstacle} cannot be simulated", fix="Simulate the run without this setting.")
