"""Put on PYTHONPATH as sitecustomize.py: hides from Python what only Linux has, as on macOS."""

import builtins
import errno
import io
import os
import signal
from pathlib import Path

HIDDEN = ("/proc", "/sys", "/dev/shm", "/dev/kmsg")
for owner, names in (
    (os, ["sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "waitid", "fdatasync"]),
    (signal, ["SIGRTMIN", "SIGRTMAX", "sigtimedwait", "sigwaitinfo"]),
):
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)


def _without(function):
    def call(path=".", *args, **kwargs):
        if isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return function(path, *args, **kwargs)

    return call


builtins.open = io.open = _without(open)
for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "statvfs"):
    setattr(os, name, _without(getattr(os, name)))
Path(os.environ["SAMEBITS_TEST_HIDDEN"]).touch()
