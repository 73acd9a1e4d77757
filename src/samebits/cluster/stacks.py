"""Dump the Python stacks of a process that hangs, even inside native code, by signal and faulthandler."""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from samebits.scratch import boot_id

# On this signal faulthandler writes the stacks in C, without the interpreter lock. Schedulers and users do not use
# real-time signals.
SIGNAL = signal.SIGRTMIN + 4 if hasattr(signal, "SIGRTMIN") else None
WRITING_S = 0.15
_WATCHING = ("watchdog/detector.py", "cluster/signals.py")


class StackDumper:
    """Context in which this process and the DataLoader workers that it forks dump their stacks on a signal."""

    def __init__(self) -> None:
        # An anonymous file: the kernel frees it with the last process that has it open.
        if hasattr(os, "memfd_create"):
            self._file: IO[bytes] = os.fdopen(os.memfd_create("stacks"), "w+b")
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as this object
        #: Descriptor of the anonymous file that they write to; others open it as /proc/PID/fd/DESCRIPTOR.
        self.descriptor = self._file.fileno()
        if SIGNAL is not None:
            faulthandler.register(SIGNAL, file=self._file, all_threads=True)

    def write(self, path: Path, head: str) -> None:
        """Write the stacks of this process and its child processes to a file, after `head`; errors are ignored."""
        self._file.truncate(0)
        # The file is used again for each request.
        self._file.seek(0)
        faulthandler.dump_traceback(self._file, all_threads=True)
        for child in multiprocessing.active_children():
            if child.pid is not None:
                # By the descriptor, since faulthandler writes there too, behind the back of Python's buffer.
                with suppress(OSError):
                    os.write(
                        self.descriptor, f"\nchild process {child.pid}, {child.name}:\n".encode()
                    )
                request_stacks(child.pid)
        with suppress(OSError):
            os.lseek(self.descriptor, 0, os.SEEK_SET)
            _keep(path, head, self._file.read())

    def close(self) -> None:
        """Unregister the signal and close the file."""
        if SIGNAL is not None:
            faulthandler.unregister(SIGNAL)
        self._file.close()


def request_stacks(pid: int) -> bool:
    """Signal a process of this machine to dump its stacks, wait for it to do so, and return whether it was signalled.

    A process that does not handle the signal would be killed by it.
    """
    if SIGNAL is None or not _catches(pid, SIGNAL):
        return False
    with suppress(OSError):
        os.kill(pid, SIGNAL)
        # faulthandler does not report when it is done.
        time.sleep(WRITING_S)
        return True
    return False


def write_for(pid: int, descriptor: int, path: Path, head: str) -> bool:
    """Write the stacks of a process of this machine that cannot do so itself; return whether there were any."""
    if is_stopped(pid) or not request_stacks(pid):
        return False
    try:
        # Through /proc, since the file has no name.
        content = Path(f"/proc/{pid}/fd/{descriptor}").read_bytes()
    except OSError:
        return False
    return bool(content) and _keep(path, head, content)


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped by SIGSTOP or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (psutil.Error, OSError):
        return False


def namespace() -> str:
    """Return an identifier of the scope in which a process id is valid: boot of the machine and container."""
    with suppress(OSError):
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if (boot := boot_id()) else ""
    return ""


def _catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, which would kill it otherwise. psutil does not report that."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) & 1 << (number - 1))
    return False


def _keep(path: Path, head: str, content: bytes) -> bool:
    # faulthandler dumps the main thread last; threads that only watch are left out.
    stacks = content.decode(errors="replace").strip().split("\n\n")
    shown = [stack for stack in reversed(stacks) if not any(name in stack for name in _WATCHING)]
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # in a run folder of another origin it may be a link or a FIFO
        with path.open("x", encoding="utf-8") as file:
            file.write("\n\n".join([head, *shown]) + "\n")
        return True
    return False
