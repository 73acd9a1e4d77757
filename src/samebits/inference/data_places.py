"""Where the data of a run lies, and whether it came with the run folder."""

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from samebits.config.given import flat
from samebits.config.schema import RunConfig
from samebits.errors import ConfigError

_PATHS = ("data.root", "data.cache")  # text in the recipes of some users


def data_places(config: RunConfig) -> dict[str, Path]:
    """Return the files and folders of the data, absolute, by the name of their setting."""
    data = getattr(config, "data", None)
    plain = flat({"data": data.model_dump()}) if isinstance(data, BaseModel) else {}
    return {
        name: Path(os.path.abspath(Path(value).expanduser()))
        for name, value in plain.items()
        if isinstance(value, Path) or (name in _PATHS and isinstance(value, str))
    }


def describe_places(config: RunConfig) -> str:
    """Return where the data is, in one line; empty for data that needs no path, such as the bundled digits."""
    return ", ".join(f"{name} {path}" for name, path in data_places(config).items() if os.path.lexists(path))


def check_data_is_elsewhere(run: Path, config: RunConfig, overrides: Sequence[str]) -> None:
    """Check that the data does not lie in the run folder, unless the user names it there.

    The publisher of a run could put data into it on which any weights look right.
    """
    typed = {text.partition("=")[0].strip() for text in overrides}
    folders = {Path(os.path.abspath(run)), run.resolve()}
    for name, path in data_places(config).items():
        if any(name == each or name.startswith(f"{each}.") for each in typed):
            continue
        # A link in the folder came with it too, wherever it leads.
        if any(place.is_relative_to(folder) for place in (path, path.resolve()) for folder in folders):
            raise ConfigError(
                f"{name} lies in the run folder: its data came with the run",
                given=f"{name}: {path}",
                cause="The publisher of the run chose this data. On data made for them, any weights look right.",
                fix=f"Name your own copy of the data: {name}=PATH. If you trust these files: {name}={path}",
            )
