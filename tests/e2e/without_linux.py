"""Put on PYTHONPATH as sitecustomize.py: hides from Python what only Linux has, as on macOS."""

import builtins
import errno
import io
import os
import signal
from pathlib import Path

# What to hide, by name; the environment may name some of them.
HIDDEN = {
    "proc": ["/proc", "/sys", "/dev/kmsg"],
    "shared memory": ["/dev/shm"],
    "scheduler": ["sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "sched_setscheduler"],
    "memfd": ["memfd_create"],
    "signals": ["SIGRTMIN", "SIGRTMAX", "sigtimedwait", "sigwaitinfo"],
    "calls": ["pidfd_open", "waitid", "fdatasync"],
}
_names = os.environ.get("SAMEBITS_TEST_HIDE", ",".join(HIDDEN)).split(",")
_hidden = [each for name in _names for each in HIDDEN[name]]
_FOLDERS = tuple(each for each in _hidden if each.startswith("/")) or ("/nothing",)
for each in _hidden:
    for owner in (os, signal):
        if hasattr(owner, each):
            delattr(owner, each)


def _without(function):
    def call(path=".", *args, **kwargs):
        if isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(_FOLDERS):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return function(path, *args, **kwargs)

    return call


builtins.open = io.open = _without(open)
for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "statvfs"):
    setattr(os, name, _without(getattr(os, name)))
Path(os.environ["SAMEBITS_TEST_HIDDEN"]).touch()
