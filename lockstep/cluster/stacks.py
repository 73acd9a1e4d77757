"""The Python stacks of a process that does not get on, written while it hangs, even inside of native code."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

# Whoever gets it writes its stacks down, without Python's help. Schedulers and people use none of the real-time ones.
SIGNAL = signal.SIGRTMIN + 4 if hasattr(signal, "SIGRTMIN") else None
WRITING_S = 0.15
_WATCHING = ("watchdog/detector.py", "cluster/signals.py")


class StackDumper:
    """While it is open, this process and the loader workers that it forks write their stacks down when asked to.

    Attributes:
        descriptor: Of the file without a name that they write into; others find it as /proc/PID/fd/descriptor.
    """

    def __init__(self) -> None:
        # It has no name, and is gone with the last process that has it open.
        self._file: IO[bytes] = _in_memory() if hasattr(os, "memfd_create") else tempfile.TemporaryFile()  # noqa: SIM115  # open as long as this object
        self.descriptor = self._file.fileno()
        if SIGNAL is not None:
            faulthandler.register(SIGNAL, file=self._file, all_threads=True)

    def write(self, path: Path, head: str) -> None:
        """Write the stacks of this process and of its workers to a file; what can't be written is left out."""
        self._file.truncate(0)
        self._file.seek(0)
        faulthandler.dump_traceback(self._file, all_threads=True)
        for child in multiprocessing.active_children():
            if child.pid is not None:
                with suppress(OSError):
                    os.write(self.descriptor, f"\nchild process {child.pid}, {child.name}:\n".encode())
                request_stacks(child.pid)
        with suppress(OSError):
            os.lseek(self.descriptor, 0, os.SEEK_SET)
            _keep(path, head, self._file.read())

    def close(self) -> None:
        """Forget about it."""
        if SIGNAL is not None:
            faulthandler.unregister(SIGNAL)
        self._file.close()


def _in_memory() -> IO[bytes]:
    return os.fdopen(os.memfd_create("stacks"), "w+b")


def request_stacks(pid: int) -> bool:
    """Have a process of this machine write its stacks into its own file, and give it the time.

    Returns:
        Whether it could be asked: to others than ours the signal would be deadly.
    """
    if SIGNAL is None or not _catches(pid, SIGNAL):
        return False
    with suppress(OSError):
        os.kill(pid, SIGNAL)
        time.sleep(WRITING_S)
        return True
    return False


def write_for(pid: int, descriptor: int, path: Path, head: str) -> bool:
    """Write the stacks of a process of this machine that can't do so itself.

    Returns:
        Whether it gave any: a process that is stopped does not.
    """
    if is_stopped(pid) or not request_stacks(pid):
        return False
    try:
        content = Path(f"/proc/{pid}/fd/{descriptor}").read_bytes()
    except OSError:
        return False
    return bool(content) and _keep(path, head, content)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, by SIGSTOP or a debugger."""
    return _status(pid).get("State", "")[:1] in ("T", "t")


def namespace() -> str:
    """What a process id means something in: the machine since it was started, and the container."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _catches(pid: int, number: int) -> bool:
    return bool(int(_status(pid).get("SigCgt", "0"), 16) & 1 << (number - 1))


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _keep(path: Path, head: str, content: bytes) -> bool:
    # The main thread comes last there, and what watches is of no interest.
    stacks = content.decode(errors="replace").strip().split("\n\n")
    shown = [stack for stack in reversed(stacks) if not any(name in stack for name in _WATCHING)]
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # in a stranger's run folder it may be a link or a FIFO
        with path.open("x", encoding="utf-8") as file:
            file.write("\n\n".join([head, *shown]) + "\n")
        return True
    return False
