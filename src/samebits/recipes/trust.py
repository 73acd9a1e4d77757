"""The user's list of recipe files that may be executed if only a YAML file or a run folder names them.

One line per file: the SHA-256 of its content, a space, its absolute path. Both must match: a copy of a trusted file in
another folder would import other modules from there. docs/adr/0026 has the reasons.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from samebits.config.schema import TRACKERS
from samebits.errors import ConfigError, cannot_read
from samebits.plain_file import read_plain, short_path
from samebits.storage.manifest import sha256_of

MAX_RECIPE_BYTES = 16 * 1024 * 1024


def list_path() -> Path:
    """Return the path of the list: `$XDG_CONFIG_HOME/samebits/trusted_recipes`, by default below ~/.config.

    Raises:
        ConfigError: The user has no home folder.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".config"
    except RuntimeError:
        raise ConfigError(
            "the user has no home folder", fix="Set HOME or XDG_CONFIG_HOME."
        ) from None
    return folder / "samebits" / "trusted_recipes"


def read_recipe(path: Path) -> bytes:
    """Read the source of a recipe file. Raises ConfigError if it can't be read."""
    try:
        return read_plain(path, MAX_RECIPE_BYTES)
    except OSError as error:
        name = f"recipe file {short_path(path)}"
        raise cannot_read(ConfigError, name, error, "Make it readable, or use another.") from None


def trust(path: Path) -> str:
    """Add a recipe file with its current content to the list, and return its SHA-256.

    Raises:
        ConfigError: The file can't be read, or the list can't be written or is not safe to use.
    """
    path = path.resolve()
    sha256 = sha256_of(read_recipe(path))
    list_file = list_path()
    line = _line(sha256, path)
    if not str(path).isprintable():
        # A line break would begin another line of the list, and a terminal shows another path than the real one.
        raise ConfigError(
            f"{str(path)!r} can't be trusted: its path has an invisible character", fix="Rename it."
        )
    if line in _lines():
        return sha256
    try:
        list_file.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND: two commands may add a line at the same time.
        descriptor = os.open(
            list_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "ab") as file:
            file.write(line + b"\n")
    except OSError as error:
        raise ConfigError(
            f"the list of trusted recipes {list_file} can't be written: {error.strerror}",
            fix="Make it writable.",
        ) from None
    return sha256


def trust_named(source: str) -> None:
    """Trust a recipe file that the user trains with, so that eval and predict can open its run later.

    If the list can't be written, training continues. Only the later command then requires `samebits trust`.
    """
    if source.endswith(".py"):
        with suppress(ConfigError):
            trust(Path(source).expanduser())


def check_trusted(path: Path, content: bytes, named_in: str, kind: str = "recipe") -> None:
    """Check that a recipe or tracker file may be executed although the command line does not name it.

    Args:
        path, content: The file, resolved, and its bytes.
        named_in, kind: FILE:LINE that names it, and what it is.
    """
    sha256 = sha256_of(content)
    if _line(sha256, path) in _lines():
        return
    raise ConfigError(
        f"{kind} file {short_path(path)} is not trusted, so it was not run",
        given=f"{named_in}: {kind}: {path}\nsha256: {sha256}",
        cause="it is not your file, or it has changed since you trusted it or trained with it",
        fix="Read the file. If you trust it and the modules that it imports, run\n"
        f"  samebits trust {shlex.quote(str(path))}",
    )


def check_tracker_files(trackers: Iterable[str], overrides: Iterable[str]) -> None:
    """Check that tracker files may be executed: they are in the list, or overrides of the command line name them.

    Those that overrides name are added to the list.
    """
    is_named = any(text.startswith("report.trackers=") for text in overrides)
    for name in trackers:
        path = Path(name).expanduser()
        if name in TRACKERS or not path.is_file():
            continue  # a missing file is reported when the run starts
        if is_named:
            with suppress(ConfigError):
                trust(path)
        else:
            check_trusted(
                path.resolve(), read_recipe(path), f"report.trackers={name}", kind="tracker"
            )


def _line(sha256: str, path: Path) -> bytes:
    return f"{sha256} ".encode() + os.fsencode(path)


def _lines() -> set[bytes]:
    """Read the lines of the list; none if there is no list."""
    list_file = list_path()
    try:
        status = list_file.stat()
        content = read_plain(list_file)
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        name = f"the list of trusted recipes {list_file}"
        raise cannot_read(ConfigError, name, error, "Make it readable.") from None
    check_unshared(list_file, "the list of trusted recipes", status)
    # `splitlines` would also split at a carriage return inside of a path
    return set(content.split(b"\n"))


def check_unshared(path: Path, kind: str, status: os.stat_result) -> None:
    """Check that only the user can change a file or folder that lists what is trusted.

    Raises:
        ConfigError: Other users can change it.
    """
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (os.geteuid(), 0):
        mode = 700 if stat.S_ISDIR(status.st_mode) else 600
        raise ConfigError(
            f"{kind} {path} can be changed by other users",
            given=f"mode {stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}",
            fix=f"Check the content, then run\n  chown {os.geteuid()} {shlex.quote(str(path))}\n"
            f"  chmod {mode} {shlex.quote(str(path))}",
        )
