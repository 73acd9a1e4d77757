"""Check files with settings and recipes, and import recipe files."""

import difflib
import hashlib
import importlib.util
import stat
import sys
import traceback
from pathlib import Path
from types import ModuleType

from samebits.config.load import short_path
from samebits.errors import ConfigError, cannot_read
from samebits.extras import extra_with, pip_line
from samebits.garbage import without_collections
from samebits.recipes.trust import MAX_RECIPE_BYTES, check_trusted, read_recipe


def check_file(path: Path) -> None:
    """Check that a path is a regular file of a plausible size."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        beside = [file.name for file in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        raise ConfigError(
            f"there is no file {short_path(path)}",
            cause=None if path.parent.is_dir() else f"there is no folder {short_path(path.parent)} either",
            fix=f"Use {path.parent / near[0]}." if near else "Check the path.",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise cannot_read(ConfigError, ascii(short_path(path)), error, "Use another file.") from None
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{short_path(path)} is a folder", fix="Use a file in it.")
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{short_path(path)} is not a regular file", fix="Use a regular file.")
    if status.st_size > MAX_RECIPE_BYTES:
        raise ConfigError(
            f"{short_path(path)} has {status.st_size:,} bytes, too many for settings or a recipe",
            allowed=f"at most {MAX_RECIPE_BYTES:,} bytes",
            fix="Check the path.",
        )


def expand_user(text: str) -> Path:
    """Replace ~ by the home folder of the user. Raises ConfigError if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{text!r} can't be found: there is no such user", fix="Write the full path.") from None


def import_recipe(path: Path, named_in: str | None) -> tuple[Path, ModuleType]:
    """Check a recipe file, and import the bytes that were checked. One that FILE:LINE `named_in` names must be trusted.

    Raises:
        ConfigError: There is no such file, it is not trusted, or it raises an exception.
    """
    check_file(path)
    path = path.resolve()
    content = read_recipe(path)
    if named_in is not None:
        check_trusted(path, content, named_in)
    return path, load_file(path, content)


def load_file(path: Path, content: bytes | None) -> ModuleType:
    """Import a recipe file once, with its folder in sys.path, so that it can import the modules next to it.

    Args:
        content: Its bytes, which were checked. They are executed: neither the file as it may be a moment later, nor
            a `.pyc` file next to it. None: read the file, if it was not imported before.

    Raises:
        ConfigError: The file raises an exception or calls sys.exit.
    """
    name = path.stem
    taken = sys.modules.get(name)
    if taken is not None and getattr(taken, "__file__", None) == str(path):
        return taken
    if taken is not None or name in sys.stdlib_module_names:
        # Another module has this name, such as a recipe file of another folder.
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            return sys.modules[name]
    content = read_recipe(path) if content is None else content
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it is executed: dataclasses and pickle look classes up by this name
    try:
        with without_collections():  # they take a fifth of the time of importing torch
            # dont_inherit: this file's `from __future__` imports would otherwise apply to the recipe.
            exec(compile(content, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:  # a script may end with sys.exit()
        # A later import would otherwise take the unfinished module.
        sys.modules.pop(name, None)
        extra = extra_with((error.name or "").partition(".")[0]) if isinstance(error, ModuleNotFoundError) else None
        frames = traceback.extract_tb(error.__traceback__)
        places = [(path, frame.lineno) for frame in frames if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename:
            places = [(Path(error.filename), error.lineno)]
        raise ConfigError(
            f"{short_path(path)} can't be imported: {type(error).__name__}",
            where=f"{short_path(places[-1][0])}:{places[-1][1]}" if places else None,
            cause=error.msg if isinstance(error, SyntaxError) else error,
            fix=f"Run {pip_line(extra)}." if extra else "Correct the file. Set SAMEBITS_DEBUG=1 to see the traceback.",
        ) from error
    return module
