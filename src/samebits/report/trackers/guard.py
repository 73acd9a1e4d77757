"""Keep a tracker's process from disturbing the training next to it, and ends it when nothing else does.

| resource | limit |
|---|---|
| CPU | a low priority: it runs while the training waits |
| memory | the kernel ends this process first when memory runs out |
| disk | half of the space that was free at its start, in its folder |
| GPU | none is visible |
| time | ended without the training process, or when it makes no progress after the end of the training |
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

CHECK_EVERY_S = 1.0
# Without the training process: time to store what has arrived. A restarted run needs the tracked run soon.
_ORPHAN_S = 20.0
_LAST_CALL_S = 600.0
# A scheduler or terminal may send these to every process of a job. Records of the last steps are still to come then.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def limit_resources(folder: Path) -> int:
    """Limit what this process and its children take from the machine.

    Args:
        folder: Where it writes.

    Returns:
        The bytes that its folder may have.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    quota = min(size_of(folder) + shutil.disk_usage(folder).free // 2, 1 << 60)
    for limit, value in ((resource.RLIMIT_FSIZE, quota), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    return quota


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder and below it."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def find_way_out(folder: Path) -> Path | None:
    """Return a link through which a tracker would write outside of its folder: a stranger's run folder may have one.

    That is a file of the folder itself, or a folder at any depth. W&B links files of finished runs to its own logs.
    """
    inside = folder.resolve()
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *(files if place == str(folder) else ()))):
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                return path
    return None


class Guard:
    """Receives the end of the training on standard input, and watches disk and time in a thread.

    Args:
        folder: The tracker's folder.
        quota: The bytes that it may have.
        report: Called with the reason before this process is ended.
    """

    def __init__(self, folder: Path, quota: int, report: Callable[[str], None]) -> None:
        self._folder, self._quota, self._report = folder, quota, report
        self._ended = threading.Event()
        self._outcome = "failed"
        self._deadline = float("inf")
        self._is_orphan = False
        threading.Thread(target=self._watch, name="tracker-guard", daemon=True).start()

    def wait(self, seconds: float) -> str | None:
        """Wait for the end of the training.

        Returns:
            How it ended: "done", "stopped" or "failed". None while it runs.
        """
        return self._outcome if self._ended.wait(seconds) else None

    def progress(self) -> None:
        """Note that the tracker made progress."""
        if self._ended.is_set() and not self._is_orphan:
            self._deadline = time.monotonic() + _LAST_CALL_S

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        while True:
            if self._ended.is_set():
                time.sleep(CHECK_EVERY_S)
            elif selector.select(CHECK_EVERY_S):
                word = os.read(sys.stdin.fileno(), 100).decode().strip()
                self._is_orphan, self._outcome = not word, word or "failed"
                self._deadline = time.monotonic() + (_LAST_CALL_S if word else _ORPHAN_S)
                self._ended.set()
            if size_of(self._folder) > self._quota:
                self._report(f"its folder has more than {self._quota / 1e6:,.0f} MB, half of the free space")
                end_all()
            if time.monotonic() > self._deadline:
                self._report("it made no progress after the end of the training")
                end_all()


def end_all() -> None:
    """End this process and its children at once."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
