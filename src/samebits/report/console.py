"""Console output of a run, drawn by rich: header, progress line, validation table, closing block.

On a terminal, the progress line is redrawn in place. To a log file or a pipe, the same calls write plain lines without
escape sequences and carriage returns.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TextIO

from rich.console import Console as TerminalConsole
from rich.console import RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from samebits.errors import SamebitsError, printable, wrap_error
from samebits.report.format import (
    COLUMNS,
    block,
    clock,
    metric_name,
    metric_value,
    metric_width,
)

# Terminals, log files and pipes as places for a run's console output.


class SafeStream:
    """A stream that can write any character. Unless it is strict, a run does not notice that its reader has gone."""

    def __init__(self, stream: TextIO, *, strict: bool) -> None:
        self._stream = stream
        self._strict = strict
        self._is_gone = False
        self.encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        """Write a text; characters that the encoding lacks as escapes."""
        self._do(lambda: self._stream.write(encodable(text, self._stream)))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._do(self._stream.flush)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def _do(self, call: Callable[[], Any]) -> None:
        if self._is_gone:
            return
        try:
            call()
        except (OSError, ValueError):
            if self._strict:
                raise
            # The reader went away (`| head`, a closed terminal). The run's records are elsewhere, so it continues.
            self._is_gone = True


def encodable(text: str, stream: TextIO) -> str:
    """Return a text that a stream can write: characters outside of its encoding become escapes."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


class RichStream(TerminalConsole):
    """A console of rich that leaves the cursor and a closed pipe to its caller."""

    def show_cursor(self, show: bool = True) -> bool:
        """Never hide the cursor: a killed process could not show it again."""
        return False

    def on_broken_pipe(self) -> None:
        """Re-raise the error, which rich is handling: rich itself would end the process."""
        raise


# Drawing takes 0.4 ms of rank 0's time.
_REDRAW_S = 0.25
# In a log file: a line for each tenth of an epoch, but at most one every 5 s and at least one a minute.
_SHORTEST_S = 5.0
_LONGEST_S = 60.0
_MAX_COLUMNS = 110  # longer lines are hard to read
# Columns left free for the "^C" that the terminal echoes after the progress line. If it wrapped, clearing the line
# would not remove it.
_ECHO_COLUMNS = 5
_WIDE = 100
_MAX_BAR = 40
_MIN_BAR = 6


class Console:
    """Writes what a run reports. Safe to call from several threads. A closed pipe does not stop the run.

    Args:
        stream, interactive: Where to write, and whether that is a terminal; detected if None.
        now: Returns the time in seconds; only differences count.
        strict: Raise errors of the stream, for commands whose only result is their output.
        columns: Width for tables that use more than 80 columns; None: that of the terminal, 80 in a file.
    """

    def __init__(
        self,
        stream: TextIO,
        interactive: bool | None = None,
        now: Callable[[], float] = time.monotonic,
        *,
        strict: bool = False,
        columns: int | None = None,
    ) -> None:
        self._interactive = is_terminal(stream) if interactive is None else interactive
        is_colored = self._interactive and not os.environ.get("NO_COLOR")
        self._stream = SafeStream(stream, strict=strict)
        self._rich = RichStream(
            file=self._stream,  # type: ignore[arg-type]  # it has all that rich uses of a file
            force_terminal=self._interactive,
            force_interactive=self._interactive,
            force_jupyter=False,
            color_system="auto" if is_colored else None,
            width=columns or (None if self._interactive else COLUMNS),
            markup=False,
            highlight=False,
            emoji=False,
        )
        self._live: Live | None = None
        self._now = now
        self._lock = threading.RLock()
        self._drawn_at = -_LONGEST_S
        self._drawn_step = 0

    @property
    def width(self) -> int:
        """Number of columns to fill: those of the terminal, up to a readable maximum; 80 in a file."""
        return min(self._rich.width, _MAX_COLUMNS)

    def say(self, text: str) -> None:
        """Write one or more lines above the progress line. Control characters and markup in them have no effect."""
        self._print(Text(printable(text)))

    def block(self, title: str, rows: Mapping[str, str], whole: Collection[str] = ()) -> None:
        """Write a title and an indented line per row: the header of a run, or its closing block.

        Args:
            title, rows: First line, and texts by label; empty ones are left out.
            whole: Labels of rows that are never wrapped, since users copy them.
        """
        lines = printable(block(title, rows, whole, self.width)).splitlines()
        text = Text("\n").join(Text(line) for line in lines)
        text.stylize("bold", 0, len(lines[0]))
        text.highlight_regex(r"(?m)^  \S+( \S+)*(?=  )", "dim")
        self._print(text)

    def draw(self, renderable: RenderableType) -> None:
        """Write a table or a text with styles. The caller has replaced control characters in it."""
        self._print(renderable, wraps=True)

    def error(self, error: SamebitsError) -> None:
        """Write an error with its kind and its slots highlighted."""
        text = Text(wrap_error(str(error), self.width) if self._interactive else str(error))
        text.stylize("bold red", 0, len(error.kind) + 1)
        text.highlight_regex(r"(?m)^  [a-z]+(?=  )", "bold")
        self._print(text)

    def progress(
        self,
        *,
        epoch: int,
        num_epochs: int,
        steps_per_epoch: int,
        step: int,
        num_steps: int,
        loss: float,
        samples_per_s: float,
        left_s: float | None,
        data_wait: float | None = None,
    ) -> None:
        """Show that a step is done.

        Args:
            epoch, num_epochs: Epoch of the step, from 1, and epochs of the whole run, with one that is cut short.
            loss, samples_per_s: Training loss, and samples per second over all ranks.
            left_s: Seconds until the run is complete; None if not known yet.
            data_wait: Share of training time that waits for data, 0 to 1; shown from 110 columns on.
        """
        with self._lock:
            now = self._now()
            waited_s = now - self._drawn_at
            epochs = (step - self._drawn_step) / steps_per_epoch
            if self._interactive:
                is_due = waited_s >= _REDRAW_S or step == num_steps
            else:
                is_due = waited_s >= _LONGEST_S or (waited_s >= _SHORTEST_S and epochs >= 0.1)
            if not is_due:
                return
            self._drawn_at = now
            self._drawn_step = step
            head = f"epoch {epoch}/{num_epochs}"
            loss_text = metric_value("loss", loss)
            rate = f"{samples_per_s:,.0f} samples/s"
            left = f"{clock(left_s)} left"
            if not self._interactive:  # the values of all lines are aligned
                loss_text = f"{loss_text:<{metric_width('loss')}}"
                self._print(
                    Text(f"{head}  step {step:,}/{num_steps:,}  loss {loss_text}  {rate}  {left}")
                )
                return
            waits = ""
            if self.width >= _WIDE:
                head += f" {step / steps_per_epoch - (epoch - 1):.0%}"
                has_room = self.width >= _MAX_COLUMNS and data_wait is not None
                waits = f"  data wait {data_wait:.1%}" if has_room else ""
            parts = [
                (1, f"{step:,}/{num_steps:,}"),
                (2, f"loss {loss_text}"),
                (0, f"{rate}{waits}"),
                (3, left),
            ]
            self._draw(head, parts, step / num_steps)

    def share_done(self, activity: str, done: int, total: int) -> None:
        """Show how much of an activity, such as "measuring 2 processes", is done; on a terminal only."""
        with self._lock:
            now = self._now()
            if self._interactive and (now - self._drawn_at >= _REDRAW_S or done == total):
                self._drawn_at = now
                self._draw(activity, [(0, f"{done:,}/{total:,}")], done / total)

    def evaluation(
        self,
        epoch: float,
        values: Mapping[str, float],
        train_loss: float | None = None,
        *,
        is_best: bool = False,
    ) -> None:
        """Write the line of a validation. Each names its metrics: there may be other lines between two of them.

        Args:
            epoch, values: Epochs done, with a fraction inside an epoch, and metrics by name.
            train_loss: Mean training loss since the last validation; None if there was no step.
        """
        when = f"{epoch:g}" if epoch == int(epoch) else f"{epoch:.2f}"
        loss = metric_value("loss", train_loss) if train_loss is not None else "-"
        # A slash marks a detail, such as the accuracy of one class: those are in the files.
        texts = [
            f"{printable(metric_name(name))} {metric_value(name, value):<{metric_width(name)}}"
            for name, value in values.items()
            if "/" not in name
        ]
        train = f"train loss {loss:<{metric_width('loss')}}"
        line = Text("  ".join([f"epoch {when}", train, "validation " + "  ".join(texts)]))
        if is_best:
            line.append("  best", "bold green")
        line.rstrip()
        self._print(line)

    def close(self) -> None:
        """Remove the progress line."""
        with self._lock:
            if self._live is not None:
                self._live.update(Text())  # stop() draws it once more
                self._live.stop()
            self._live = None

    def _draw(self, head: str, parts: list[tuple[int, str]], share: float) -> None:
        """Draw the progress line, always within one line: the bar is left out first, then the least important part."""
        columns = self._rich.width - _ECHO_COLUMNS
        while len(parts) > 1 and len("  ".join([head, *(part for _, part in parts)])) > columns:
            parts = [part for part in parts if part != min(parts)]
        tail = "  ".join(part for _, part in parts)
        space = min(columns - len(head) - len(tail) - 4, _MAX_BAR)
        cells: list[RenderableType] = [head, tail]
        if space >= _MIN_BAR:
            bar = ProgressBar(
                1,
                min(max(share, 0.0), 1.0),
                width=space,
                complete_style="green",
                finished_style="green",
            )
            cells.insert(1, bar)
        line = Table.grid(padding=(0, 2, 0, 0))
        for _ in cells:
            line.add_column(no_wrap=True, overflow="crop")
        line.add_row(*cells)
        if self._live is None:
            self._live = Live(
                console=self._rich,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(Constrain(line, max(columns, 1)), refresh=True)

    def _print(self, renderable: RenderableType, *, wraps: bool = False) -> None:
        with self._lock:
            if self._interactive:
                self._rich.print(renderable, soft_wrap=not wraps)
                return
            with self._rich.capture() as captured:
                self._rich.print(renderable, soft_wrap=not wraps)
            # rich pads the cells of a table with spaces.
            self._stream.write(
                "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
            )
            self._stream.flush()
