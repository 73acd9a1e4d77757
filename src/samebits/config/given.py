"""Convert settings given in Python to overrides of the command line, and check paths given in either.

Loads no pydantic: `samebits --help` uses it.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samebits.errors import ConfigError, DataError


def as_overrides(settings: Mapping[str, Any] | Sequence[str] | None) -> list[str]:
    """Convert `{"optim.lr": 0.1}` or `{"optim": {"lr": 0.1}}` to `["optim.lr=0.1"]`. Such a list is returned unchanged.

    Raises:
        ConfigError: A value has a type that no setting has.
    """
    if not isinstance(settings, Mapping):
        return list(settings or ())
    return [f"{name}={_text(name, value)}" for name, value in flat(settings).items()]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names: `{"optim": {"lr": 0.1}}` becomes `{"optim.lr": 0.1}`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _text(key: str, value: Any) -> str:
    def plain(inner: Any) -> Any:
        if isinstance(inner, Path):
            return str(inner)
        if hasattr(inner, "tolist"):  # numbers and arrays of NumPy and torch
            return inner.tolist()
        raise ConfigError(
            f"{key} is {inner!r}, of the type {type(inner).__name__}",
            allowed="numbers, text, true or false, None, paths, and lists and mappings of them",
            fix="Convert the value to one of these.",
        )

    return (
        str(value)
        if isinstance(value, Path)
        else json.dumps(value, ensure_ascii=False, default=plain)
    )


def check_exists(setting: str, path: str | Path | None) -> None:
    """Check that the file or folder of a setting, such as data.root, exists, if one is set."""
    if path is not None and not os.path.exists(Path(path).expanduser()):
        raise DataError(
            f"{setting} is {str(path)!r}, which does not exist",
            where=socket.gethostname(),
            fix=f"Set {setting} to an existing file or folder.",
        )


def given_path(text: str | Path, name: str) -> Path:
    """Return the path in an option or argument, `name`, with ~ expanded to the user's home folder.

    Raises:
        ConfigError: The text is empty, as from an unset shell variable: `Path("")` would be the current folder. Or
            there is no home folder for ~.
    """
    if not str(text).strip():
        raise ConfigError(f"{name} is empty", fix=f"Name a path, or leave {name} out.")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{name} is {str(text)!r}: no user of that name has a home folder on this machine",
            fix="Correct the name after ~, or name the path without ~.",
        ) from None
