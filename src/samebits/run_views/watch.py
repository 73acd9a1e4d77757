"""The live view of a run from another terminal: it reads the run's files again and again, and writes nothing."""

from __future__ import annotations

import time
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

from samebits.report.console import Console
from samebits.report.format import clock, duration, metric_name, metric_value
from samebits.run_views.curves import Curves
from samebits.run_views.events import Event, read_events
from samebits.run_views.plot import PlotLine, plot, side_by_side
from samebits.run_views.record_reader import RecordReader
from samebits.run_views.state import newest_write
from samebits.run_views.summary import RunSummary, read_summary
from samebits.run_views.table import STYLES, cut, one_line

POLL_S = 1.0
# A run whose processes have ended may be restarted; its view ends once it has not been running for so long.
_END_S = 4.0
_LINE_S = 10.0  # between the lines in a log file
_MAX_RANKS = 16
_NUM_WARNINGS = 5
_WINDOW = 20  # records from which the time left is estimated
_WARNINGS = ("fault", "warning", "restart", "stop")
_REPORTED = (*_WARNINGS, "start", "done")


class LiveView:
    """What is shown of a run; `poll` reads what is new.

    Args:
        run: The run folder.

    Attributes:
        summary: The run in one row, as of the last poll.
        curves: Its curves.
        events: Its events.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._reader = RecordReader(run)
        self.curves = Curves()
        self._trend: list[tuple[int, float]] = []  # step and training seconds of the last records
        self.poll()

    def poll(self) -> None:
        """Read new records and events."""
        records, is_new = self._reader.poll()
        if is_new:
            self.curves, self._trend = Curves(), []
        self.curves.add(records)
        seconds = [(each["step"], each["seconds"]) for each in records if isinstance(each.get("seconds"), float)]
        self._trend = [*self._trend, *seconds][-_WINDOW:]
        self.summary: RunSummary = read_summary(self.run)
        self.events: list[Event] = read_events(self.run)

    @property
    def left_s(self) -> float | None:
        """Seconds of training until the run is complete; None if not known."""
        if len(self._trend) < 2 or not self.summary.num_steps:
            return None
        (first, since), (last, until) = self._trend[0], self._trend[-1]
        if last <= first or until <= since:
            return None
        return (until - since) / (last - first) * max(0, self.summary.num_steps - self.summary.step)

    def progress(self) -> list[str]:
        """Return the parts of the progress: epoch, step, loss, metric, speed, waiting for data and time left."""
        parts = [f"step {self.summary.step:,}/{self.summary.num_steps:,}" if self.summary.num_steps else "step 0"]
        epochs = self.summary.settings.get("epochs")
        if isinstance(epochs, int) and self.summary.step:
            parts.insert(0, f"epoch {min(int(self.summary.epoch) + 1, epochs)}/{epochs}")
        for name, value in self._values():
            parts.append(f"{name} {value}" if name != "samples/s" else f"{value} samples/s")
        if self.summary.state == "running":
            parts.append(f"{clock(self.left_s)} left")
        return [one_line(part) for part in parts]

    def rows(self, width: int, height: int, *, is_ascii: bool = False) -> list[Text]:
        """Return the whole view.

        Args:
            width: Columns.
            height: Rows that are free.
            is_ascii: Whether the output cannot show other characters than ASCII.
        """
        top = [self._head(width), self._bar(width, is_ascii), *_in_lines(self.progress(), width)]
        bottom = [*self._ranks(width, is_ascii), *self._warnings(width)]
        free = height - len(top) - len(bottom) - 3
        return [*top, *self._plots(width, max(7, min(free, 18)), is_ascii), *bottom]

    def _values(self) -> list[tuple[str, str]]:
        summary, train = self.summary, self.curves
        found = []
        if (loss := train.get("train", "loss").last) is not None:
            found.append(("loss", metric_value("loss", loss)))
        if (value := summary.metrics.get(summary.monitor)) is not None:
            found.append((metric_name(summary.monitor), metric_value(summary.monitor, value)))
        if (rate := train.get("train", "samples_per_s").last) is not None and summary.state == "running":
            found.append(("samples/s", f"{rate:,.0f}"))
        if (waited := train.get("train", "data_wait").last) is not None and summary.state == "running":
            found.append(("data wait", f"{min(max(waited, 0.0), 1.0):.0%}"))
        return found

    def _head(self, width: int) -> Text:
        summary = self.summary
        head = Text.assemble((cut(one_line(summary.name), max(20, width // 2), "..."), "bold"))
        head.append(f"  {one_line(summary.recipe)[:30]}  ", "dim")
        head.append(summary.state, STYLES[summary.state])
        if summary.procs:
            head.append(f" on {summary.procs:,} process{'es' if summary.procs != 1 else ''}")
        if summary.state == "running" and (at := newest_write(self.run)):
            head.append(f", last record {duration(max(0.0, time.time() - at))} ago", "dim")
        elif summary.state == "done" and summary.took_s is not None:
            head.append(f" in {duration(summary.took_s)}")
        head.truncate(width, overflow="crop")
        return head

    def _bar(self, width: int, is_ascii: bool) -> Text:
        share = self.summary.share_done
        if share is None:
            return Text("waiting for the first record", "dim")
        full, empty = ("#", "-") if is_ascii else ("━", "─")
        size = max(10, min(width, 100) - 6)
        num = round(size * share)
        return Text.assemble((full * num, "green"), (empty * (size - num), "dim"), f" {share:4.0%}")

    def _plots(self, width: int, height: int, is_ascii: bool) -> list[Text]:
        monitor = self.summary.monitor
        losses = [
            PlotLine(self.curves.get("train", "loss"), "training"),
            PlotLine(self.curves.get("eval", "loss"), "validation", "o"),
        ]
        metrics = [PlotLine(self.curves.get("eval", monitor), "validation")] if monitor and monitor != "loss" else []
        is_wide = width >= 100
        size = ((width - 4) // 2 if is_wide else width, height if is_wide else max(6, height // 2))
        drawn = [
            plot("loss", "loss", losses, size, is_ascii=is_ascii),
            plot(metric_name(monitor), monitor, metrics, size, is_ascii=is_ascii) if metrics else [],
        ]
        rows = side_by_side(drawn[0], drawn[1], size[0] + 4) if is_wide else [*drawn[0], *drawn[1]]
        return [Text(), *rows, Text()] if rows else [Text()]

    def _ranks(self, width: int, is_ascii: bool) -> list[Text]:
        # Ranks of a larger world before a restart have no new values.
        newest = self.curves.get("ranks", "median_ms").steps[-1:]
        ranks = [
            (rank, curve.last)
            for rank, curve in self.curves.ranks().items()
            if curve.last is not None and curve.steps[-1:] == newest
        ]
        if len(ranks) < 2:
            return []
        most = max(last for _, last in ranks) or 1.0
        size = min(40, max(8, width - 30))
        rows = [Text("own work per step", "dim")]
        for rank, last in ranks[:_MAX_RANKS]:
            bar = ("#" if is_ascii else "━") * round(size * last / most)
            rows.append(Text.assemble(f"  rank {rank:<3} {last:>8,.0f} ms  ", (bar, "cyan")))
        if len(ranks) > _MAX_RANKS:
            rows.append(Text(f"  and {len(ranks) - _MAX_RANKS} more ranks", "dim"))
        return rows

    def _warnings(self, width: int) -> list[Text]:
        found = [event for event in self.events if event.kind in _WARNINGS][-_NUM_WARNINGS:]
        rows = [Text("last warnings", "dim")] if found else []
        for event in found:
            rows.append(Text(cut(f"  {_entry(event)}", width, "..."), "red" if event.kind == "fault" else "yellow"))
        return rows


def watch(run: Path, console: Console, size: tuple[int, int], *, is_terminal: bool, is_ascii: bool = False) -> int:
    """Show a run until it ends.

    Args:
        run: The run folder.
        console: Where to show it.
        size: Columns and rows of the terminal.
        is_terminal: Whether the view is drawn again and again. Otherwise, lines are written as in a log.
        is_ascii: Whether the output cannot show other characters than ASCII.

    Returns:
        0 if the run is complete, 1 if it was stopped or failed.
    """
    view = LiveView(run)
    log = _LogLines(view, console)
    ended: float | None = None if view.summary.state == "running" else time.monotonic() - _END_S
    try:
        while True:
            if is_terminal:
                console.redraw(view.rows(*size, is_ascii=is_ascii))
            elif ended is None:
                log.write()
            if ended is not None and (view.summary.state == "done" or time.monotonic() - ended >= _END_S):
                break
            time.sleep(POLL_S)
            view.poll()
            if view.summary.state == "running":
                ended = None
            elif ended is None:
                ended = time.monotonic()
    finally:
        console.keep()
    if not is_terminal:
        for row in view.rows(*size, is_ascii=is_ascii):
            console.draw(row)
    if view.summary.reason:
        console.say(f"failed: {one_line(view.summary.reason)}")
    return 0 if view.summary.state == "done" else 1


class _LogLines:
    """Writes progress and events as lines, those that are new since the last call."""

    def __init__(self, view: LiveView, console: Console) -> None:
        self._view, self._console = view, console
        self._seen = {self._key(event) for event in view.events}
        self._written_at = float("-inf")
        self._last = ""

    def write(self) -> None:
        for event in self._view.events:
            if event.kind in _REPORTED and self._key(event) not in self._seen:
                self._console.say(_entry(event))
            self._seen.add(self._key(event))
        line = "  ".join(self._view.progress())
        if line != self._last and time.monotonic() - self._written_at >= _LINE_S:
            self._last, self._written_at = line, time.monotonic()
            self._console.say(line)

    def _key(self, event: Event) -> tuple[float, str]:
        return event.at, event.title


def _in_lines(parts: list[str], width: int) -> list[Text]:
    """Join parts to lines, which break between parts."""
    lines = [""]
    for part in parts:
        if lines[-1] and cell_len(lines[-1]) + 2 + cell_len(part) > width:
            lines.append("")
        lines[-1] += f"  {part}" if lines[-1] else cut(part, width, "...")
    return [Text(line) for line in lines]


def _entry(event: Event) -> str:
    rank = f"rank {event.rank}: " if event.rank else ""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {rank}{one_line(event.title)}"
