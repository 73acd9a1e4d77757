"""The user's list of recipe files that may run although only a YAML file or a run folder names them.

One line per file: the SHA-256 of its content, a space, its absolute path. Both must match: a copy of a trusted file in
another folder would import other modules from there. docs/adr/0026 has the reasons.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from lockstep.config.load import short_path
from lockstep.config.plain_file import read_plain
from lockstep.errors import ConfigError

MAX_RECIPE_BYTES = 16 * 1024 * 1024


def list_path() -> Path:
    """Where the list is: `$XDG_CONFIG_HOME/lockstep/trusted_recipes`, by default below ~/.config.

    Raises:
        ConfigError: The user has no home folder.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".config"
    except RuntimeError:
        raise ConfigError("the user has no home folder", fix="set HOME or XDG_CONFIG_HOME") from None
    return folder / "lockstep" / "trusted_recipes"


def read_recipe(path: Path) -> bytes:
    """The source of a recipe file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return read_plain(path, MAX_RECIPE_BYTES)
    except OSError as error:
        raise ConfigError(f"recipe file {short_path(path)} cannot be read: {error.strerror}") from None


def sha256_of(content: bytes) -> str:
    """The SHA-256 of a file's content, as 64 hex digits."""
    return hashlib.sha256(content).hexdigest()


def trust(path: Path) -> str:
    """Put a recipe file as it is now into the list.

    Returns:
        Its SHA-256.

    Raises:
        ConfigError: The file cannot be read, or the list cannot be written or is not safe to use.
    """
    path = path.resolve()
    sha256 = sha256_of(read_recipe(path))
    place, line = list_path(), _line(sha256, path)
    if "\n" in str(path):
        raise ConfigError(f"{str(path)!r} cannot be trusted: its name has a line break", fix="rename the file")
    if line in _lines():
        return sha256
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(descriptor, "ab") as file:
            file.write(line + b"\n")
    except OSError as error:
        raise ConfigError(f"the list of trusted recipes {place} cannot be written: {error.strerror}") from None
    return sha256


def trust_named(source: str) -> None:
    """Remember a recipe file that the user named to train with, so that eval and predict can open its run later.

    Where the list cannot be written, training goes on: only the later command will ask for `lockstep trust`.
    """
    if source.endswith(".py"):
        with suppress(ConfigError):
            trust(Path(source).expanduser())


def check_trusted(path: Path, content: bytes, named_in: str) -> None:
    """Check that a recipe file that the command line does not name may run.

    Args:
        path: The recipe file, resolved.
        content: Its bytes.
        named_in: FILE:LINE that names it.

    Raises:
        ConfigError: It is not in the list.
    """
    sha256 = sha256_of(content)
    if _line(sha256, path) in _lines():
        return
    raise ConfigError(
        f"recipe file {short_path(path)} is not trusted, so it was not run",
        given=f"{named_in}: recipe: {path}",
        sha256=sha256,
        cause="it is someone else's, or it has changed since you trusted it or trained with it",
        fix="read the file; if you trust it and the modules that it imports, run\n"
        f"  lockstep trust {shlex.quote(str(path))}",
    )


def _line(sha256: str, path: Path) -> bytes:
    return f"{sha256} ".encode() + os.fsencode(path)


def _lines() -> set[bytes]:
    """The lines of the list; none if there is no list.

    Raises:
        ConfigError: The list cannot be read, or other users can write to it.
    """
    place = list_path()
    try:
        status = place.stat()
        content = read_plain(place)
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise ConfigError(f"the list of trusted recipes {place} cannot be read: {error.strerror}") from None
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"the list of trusted recipes {place} can be changed by other users",
            given=f"mode {stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}",
            fix=f"check its lines, then run\n  chown {os.geteuid()} {shlex.quote(str(place))}\n"
            f"  chmod 600 {shlex.quote(str(place))}",
        )
    return set(content.splitlines())
