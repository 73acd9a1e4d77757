"""Which stack frames are the user's: neither Samebits's engine, nor Python's library, nor an installed package."""

import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

Line = tuple[str, int]
_ROOT = Path(__file__).resolve().parent
_RECIPES = f"{_ROOT}/recipes/"
_CORE = f"{_ROOT}/"  # with its end: a user's samebits_recipe.py may be beside the package
_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")
_NOT_RECIPES = (f"{_RECIPES}catalog.py", f"{_RECIPES}trust.py")
# Packages whose own use of the clock or of process ids does not reach a sample or a loss.
_ENGINES = tuple(f"{folder}{name}/" for folder in _INSTALLED for name in ("torch", "numpy"))


@cache
def is_user(file: str) -> bool:
    """Return whether a source file belongs to the user, or to one of the package's recipes."""
    if file.startswith(_NOT_RECIPES):
        return False
    return file.startswith(_RECIPES) or _is_outside(file)


def _is_outside(file: str) -> bool:
    return not file.startswith(("<", _CORE, *_STANDARD)) and not any(
        folder in file for folder in _INSTALLED
    )


def error_line(error: BaseException) -> str:
    """Return the innermost line outside of all packages in an error's traceback: "recipe.py:13, in __getitem__"."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((each for each in reversed(frames) if _is_outside(each.filename)), frames[-1])
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


@cache
def is_engine(file: str) -> bool:
    """Return whether a source file belongs to torch, numpy, Python's import system or Samebits's engine."""
    is_core = file.startswith(_CORE) and not is_user(file)
    return (
        is_core
        or file.startswith("<frozen importlib")
        or any(folder in file for folder in _ENGINES)
    )


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that it was called from."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_level(frame: FrameType) -> int:
    """Return the `stacklevel` of the user's line, for a warning in a frame: a scheduler's wrapper may be between."""
    return next(
        (level for level, each in enumerate(callers(frame), 1) if is_user(each.f_code.co_filename)),
        1,
    )


def user_line(frame: FrameType | None) -> Line | None:
    """Return file and line of the innermost frame of the user; None if torch or the engine called for itself."""
    for each in callers(frame):
        file = each.f_code.co_filename
        if is_user(file):
            return file, each.f_lineno
        if is_engine(file) and not _passes_on(each):
            return None
    return None


def _passes_on(frame: FrameType) -> bool:
    """Return whether a frame of torch or numpy only passes a call of the user on, such as torch.seed()."""
    return frame.f_back is not None and is_user(frame.f_back.f_code.co_filename)
