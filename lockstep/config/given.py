"""Settings that are given in Python, as the command line takes them, and paths that are given in either."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, DataError


def as_overrides(settings: Mapping[str, Any] | Sequence[str] | None) -> list[str]:
    """`{"optim.lr": 0.1}` or `{"optim": {"lr": 0.1}}` as `["optim.lr=0.1"]`; such a list stays as it is.

    Raises:
        ConfigError: A value is nothing that a setting can be.
    """
    if not isinstance(settings, Mapping):
        return list(settings or ())
    return [f"{name}={_text(name, value)}" for name, value in flat(settings).items()]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted names: `{"optim": {"lr": 0.1}}` as `{"optim.lr": 0.1}`."""
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

    return str(value) if isinstance(value, Path) else json.dumps(value, ensure_ascii=False, default=plain)


def check_exists(setting: str, path: Path | None) -> None:
    """Check that the file or folder of a setting exists, if one is set.

    Args:
        setting: The dotted key, such as data.root.
        path: Its value.

    Raises:
        DataError: It does not exist.
    """
    if path is not None and not os.path.exists(path.expanduser()):
        raise DataError(
            f"{setting} is {str(path)!r}, which does not exist",
            where=socket.gethostname(),
            fix=f"Set {setting} to an existing file or folder.",
        )


def given_path(text: str | Path, name: str) -> Path:
    """Return the path of an option or argument, with ~ replaced by the home folder even if no shell did so.

    Args:
        text: What was given.
        name: As what, to name in an error.

    Raises:
        ConfigError: It is empty, as of a shell's variable that is not set: that would be the folder one is in.
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
