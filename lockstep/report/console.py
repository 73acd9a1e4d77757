"""What a run says on the console: a head, one line of progress, a table of evaluations, a closing block.

Everything is plain numbers and text; the same calls give a moving line on a terminal and a few lines in a log file.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from lockstep.errors import printable
from lockstep.report.format import block, clock, metric_name, metric_value, metric_width

_REDRAW_S = 0.1
# In a log file: a line for each tenth of an epoch, but not in quick epochs, and at least one a minute.
_SHORTEST_S, _LONGEST_S = 5.0, 60.0
_TO_LINE_START = "\r\x1b[2K"


class Console:
    """Speaks for a run. Safe to call from several threads. A reader that goes away does not stop the run.

    Args:
        stream: Where to write.
        interactive: Whether a person looks at it on a terminal; found out from the stream if None.
        now: Gives the time in seconds; only differences count.
    """

    def __init__(
        self, stream: TextIO, interactive: bool | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._interactive = _is_terminal(stream) if interactive is None else interactive
        self._colour = self._interactive and "NO_COLOR" not in os.environ
        self._full, self._empty = _bar_signs(stream)
        self._now = now
        self._lock = threading.RLock()
        self._line = ""
        self._said_at = -_LONGEST_S
        self._said_step = 0
        self._columns: dict[str, int] = {}
        self._gone = False

    def say(self, text: str) -> None:
        """Write a line or several, above the line of progress; nothing in them moves or styles the terminal."""
        self._add(printable(text))

    def _add(self, text: str) -> None:
        with self._lock:
            self._write(f"{_TO_LINE_START if self._line else ''}{text}\n{self._line}")

    def block(self, title: str, rows: Mapping[str, str]) -> None:
        """Write a title with one indented line for each fact: the head of a run, or its end."""
        first, *rest = map(printable, block(title, rows).splitlines())
        self._add("\n".join([self._styled(first, "1"), *rest]))

    def progress(
        self,
        *,
        epoch: int,
        num_epochs: int,
        step: int,
        num_steps: int,
        loss: float,
        samples_per_s: float,
        left_s: float | None,
    ) -> None:
        """A step is done.

        Args:
            epoch: The epoch it belongs to, from 1.
            num_epochs: Epochs of the whole run.
            step: How many steps of the whole run are done.
            num_steps: Steps of the whole run.
            loss: Training loss.
            samples_per_s: Samples a second, all ranks together.
            left_s: Seconds until the run is done; None if not known yet.
        """
        with self._lock:
            now = self._now()
            waited_s, share = now - self._said_at, (step - self._said_step) * num_epochs / num_steps
            if self._interactive:
                due = waited_s >= _REDRAW_S or step == num_steps
            else:
                due = waited_s >= _LONGEST_S or (waited_s >= _SHORTEST_S and share >= 0.1)
            if not due:
                return
            self._said_at, self._said_step = now, step
            head = f"epoch {epoch}/{num_epochs}"
            rate = f"{samples_per_s:,.0f} samples/s"
            figure = metric_value("loss", loss)
            if not self._interactive:  # lines stand one below the other
                figure = f"{figure:<{metric_width('loss')}}"
            tail = f"{step:,}/{num_steps:,}  loss {figure}  {rate}  {clock(left_s)} left"
            if self._interactive:
                self._line = self._bar(head, tail, step / num_steps)
                self._write(f"{_TO_LINE_START}{self._line}")
            else:
                self._write(f"{head}  step {tail}\n")

    def share_done(self, doing: str, done: int, total: int) -> None:
        """So much of something is done; only on a terminal."""
        with self._lock:
            now = self._now()
            if self._interactive and (now - self._said_at >= _REDRAW_S or done == total):
                self._said_at = now
                self._line = self._bar(doing, f"{done:,}/{total:,}", done / total)
                self._write(f"{_TO_LINE_START}{self._line}")

    def evaluation(self, epoch: float, values: Mapping[str, float], num_samples: int) -> None:
        """Add a row to the table of evaluations; on a terminal its head is written with the first row.

        Args:
            epoch: After how many epochs; a fraction inside an epoch.
            values: Figures by name, the same names each time.
            num_samples: How many samples were evaluated.
        """
        when = f"{epoch:g}" if epoch == int(epoch) else f"{epoch:.2f}"
        # A slash means a detail, such as one class's accuracy: those are in the files.
        shown = {name: value for name, value in values.items() if "/" not in name}
        figures = {printable(metric_name(name)): metric_value(name, value) for name, value in shown.items()}
        if not self._interactive:
            # Progress stands between the rows of a log file, so each row names its figures.
            named = "  ".join(f"{name} {figure:<{metric_width(name)}}" for name, figure in figures.items())
            self.say(f"evaluation after epoch {when}  {named}  {num_samples:,} samples")
            return
        cells = {"epoch": when, **figures, "samples": f"{num_samples:,}"}
        lines = []
        if list(cells) != list(self._columns):
            self._columns = {name: max(len(name), len(cell), metric_width(name)) for name, cell in cells.items()}
            lines.append(self._styled(_row({name: name for name in cells}, self._columns), "2"))
        lines.append(_row(cells, self._columns))
        self._add("\n".join(lines))

    def close(self) -> None:
        """Take the line of progress away."""
        with self._lock:
            if self._line:
                self._write(_TO_LINE_START)
            self._line = ""

    def _bar(self, head: str, tail: str, share: float) -> str:
        """One line, never wider than the terminal: what doesn't fit is left out, the bar first, then figures."""
        width = _width(self._stream) - 1
        space = min(width - len(head) - len(tail) - 4, 40)
        if space >= 8:
            full = int(space * min(max(share, 0.0), 1.0))
            bar = self._styled(self._full * full, "32") + self._styled(self._empty * (space - full), "2")
            return f"{head}  {bar}  {tail}"
        return f"{head}  {tail}"[:width]

    def _styled(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and text else text

    def _write(self, text: str) -> None:
        if self._gone:
            return
        try:
            self._stream.write(encodable(text, self._stream))
            self._stream.flush()
        except (OSError, ValueError):
            # The reader went away (`| head`, a closed terminal). The run's records are elsewhere, so it goes on.
            self._gone = True


def encodable(text: str, stream: TextIO) -> str:
    """A text that a stream can write: characters that its encoding does not have are written as escapes."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _row(cells: Mapping[str, str], widths: Mapping[str, int]) -> str:
    return "  ".join(f"{cell:>{widths[name]}}" for name, cell in cells.items())


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


def _bar_signs(stream: TextIO) -> tuple[str, str]:
    try:
        "━─".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "#", "."
    return "━", "─"
