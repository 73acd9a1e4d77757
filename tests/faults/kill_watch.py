"""When the steps and epochs of a run come, for benchmarks/kills.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.faults.faults import Job

HEADER_BYTES, RECORD_BYTES = 56, 72  # of steps.bin; see src/samebits/provenance/record.py
VIEWS = "*/*/views.json"  # in the folder for temporary files


class Watch:
    """Notes when steps are recorded and when the launcher begins epochs, in a thread.

    Args:
        running: The job.
        tmp: The launcher's folder for temporary files; None: that of the job.
    """

    def __init__(self, running: Job, tmp: Path | None = None) -> None:
        self._running, self._is_over = running, threading.Event()
        self._tmp = tmp or running.folder / "tmp"
        self.steps: list[tuple[float, int]] = [(time.monotonic(), 0)]
        self.epochs: list[tuple[float, dict[str, Any]]] = []
        self._thread = threading.Thread(target=self._look, name="watch")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        path, file, seen = self._running.run / "steps.bin", None, 0
        while not self._is_over.wait(0.004):
            with contextlib.suppress(OSError):
                if (count := (path.stat().st_size - HEADER_BYTES) // RECORD_BYTES) != self.steps[-1][1]:
                    self.steps.append((time.monotonic(), count))
            with contextlib.suppress(OSError, ValueError, StopIteration):
                file = file or next(self._tmp.glob(VIEWS))
                if seen != (seen := file.stat().st_mtime_ns):
                    self.epochs.append((time.monotonic(), json.loads(file.read_text(encoding="utf-8"))))

    @property
    def num_repeated(self) -> int:
        """Steps that were recorded and then taken back."""
        counts = [count for _, count in self.steps]
        return sum(max(0, before - after) for before, after in itertools.pairwise(counts))

    def urgent(self) -> int:
        """Return the number of the last epoch that followed a loss."""
        return self.epochs[-1][1]["urgent"] if self.epochs else -1

    def number(self) -> int:
        """Return the number of the last epoch."""
        return self.epochs[-1][1]["number"] if self.epochs else -1

    def stages_s(self, since: float) -> tuple[float, float, float] | tuple[()]:
        """Return the times from a loss to the world that continues after it; see `Outcome`."""
        for (_, before), (at, epoch) in itertools.pairwise(self.epochs):
            if at > since and epoch["urgent"] > before["urgent"]:
                done = max(count for when, count in self.steps if when <= at)
                step = next((when for when, count in self.steps if when > at and count > done), None)
                group = next((when for when in self._continued() if when >= at), None)
                return (at - since, group - since, step - since) if step and group and group < step else ()
        return ()

    def _continued(self) -> list[float]:
        """Return when new worlds continued, as the logs of the ranks say."""
        shift_s, found = time.time() - time.monotonic(), []
        for path in (self._running.run / "logs").glob("rank-*.log"):
            for line in path.read_text(encoding="utf-8").splitlines():
                if "samebits: continuing with" in line:
                    at = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").astimezone()
                    found.append(at.timestamp() - shift_s)
        return sorted(found)
