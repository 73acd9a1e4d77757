"""A profile of some steps of rank 0 by torch.profiler: a trace for a browser, and a table (`report.profile`)."""

from pathlib import Path
from typing import Any

from samebits.config.interval import parse_steps

NUM_ROWS = 25  # of the table


class StepProfile:
    """Profiles the steps of `report.profile`, such as "10:13", into a folder. Does not change results."""

    def __init__(self, steps: str | None, folder: Path) -> None:
        self._first, self._stop = parse_steps(steps) if steps is not None else (-1, -1)
        self._folder = folder
        self._profiler: Any = None

    def at(self, step: int) -> Path | None:
        """Start or end the profile before a step; return the folder if it was written now."""
        if self._profiler is None and self._first <= step < self._stop:
            # Late: a run without `report.profile` need not import the profiler.
            from torch.profiler import profile

            self._profiler = profile(record_shapes=True)
            self._profiler.start()
        elif self._profiler is not None and step >= self._stop:
            return self.close()
        return None

    def close(self) -> Path | None:
        """End the profile, also of a run that ends before its last step, write it, and return its folder."""
        # Cleared first, so that a second `close`, after an error in writing, does not stop it again.
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / "trace.json"))
        averages = profiler.key_averages()
        device = "cuda" if any(each.self_device_time_total for each in averages) else "cpu"
        table = averages.table(sort_by=f"self_{device}_time_total", row_limit=NUM_ROWS, max_name_column_width=60)
        (self._folder / "table.txt").write_text(table, encoding="utf-8")
        return self._folder
