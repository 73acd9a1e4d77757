"""Several processes of a script that was written for one: they set up in turn, and only rank 0 prints and writes files.

Such a script downloads data, makes folders, opens logs and copies checkpoints without a thought of others. The first
process of each machine runs alone until it meets the others; by then it has made a process group, or it will not.
"""

import builtins
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samebits.frames import callers, is_user

VARIABLE = "SAMEBITS_TURNS"  # a folder, from `samebits launch` to the workers of this machine
_OPEN = builtins.open
_ALONE = "alone"
_TOGETHER = "together"
_PASS_ON = ("/os.py", "<frozen os>", "/shutil.py", "/pathlib", __file__)
_CHANGES = {
    os: ("mkdir", "makedirs", "remove", "unlink", "rmdir", "rename", "replace", "symlink", "link"),
    shutil: ("copy", "copy2", "copyfile", "copytree", "move", "rmtree"),
}


def wait_for_turn(local_rank: int | None) -> bool:
    """Wait until the first process of this machine has set up.

    Returns:
        Whether the script was written for one process, and this is not rank 0.
    """
    folder = os.environ.get(VARIABLE)
    if folder is None or not local_rank:
        return False
    while not os.path.exists(
        done := os.path.join(folder, "done")
    ):  # the launcher ends this process if it fails
        time.sleep(0.02)
    return Path(done).read_text(encoding="utf-8") == _ALONE


def end_turn(local_rank: int | None, *, is_alone: bool) -> None:
    """Let the others of this machine begin. `is_alone`: the script has made no process group."""
    folder = os.environ.get(VARIABLE)
    if folder is not None and not local_rank and not os.path.exists(f"{folder}/done"):
        Path(folder, "part").write_text(_ALONE if is_alone else _TOGETHER, encoding="utf-8")
        os.replace(f"{folder}/part", f"{folder}/done")


def be_silent() -> None:
    """Let what the script prints, and the files that it writes, go nowhere."""
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the script ends

    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if (
            isinstance(file, int) or "opener" in kwargs or not set("wax") & set(mode)
        ):  # the latter: a temporary file
            return _OPEN(file, mode, *args, **kwargs)
        return tempfile.TemporaryFile(mode.replace("x", "w"), *args, **kwargs)

    builtins.open = io.open = open_file
    for module, names in _CHANGES.items():
        for name in names:
            setattr(module, name, _by_others(getattr(module, name)))


def speak() -> None:
    """Print and write again, for errors."""
    builtins.open = io.open = _OPEN
    if sys.stderr is sys.stdout:  # as `be_silent` sets them
        sys.stdout = sys.__stdout__
        sys.stderr = sys.__stderr__


def _by_others(plain: Callable[..., Any]) -> Callable[..., Any]:
    def change(*args: Any, **kwargs: Any) -> Any:
        # Python's own modules change files for libraries, too.
        files = (each.f_code.co_filename for each in callers(sys._getframe(1)))
        caller = next(file for file in files if not any(name in file for name in _PASS_ON))
        return None if is_user(caller) else plain(*args, **kwargs)

    return change
