"""The user's line at which a piece of state changes."""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from samebits.check.state import Cell, snapshot, value_of
from samebits.frames import Line, is_user, user_line


class LineWatch:
    """Names the user's line at which each cell changes, while a block of code runs.

    Args:
        cells: What to watch; each is read once a line.

    Attributes:
        lines: Path of a cell -> the line that changed it first.
    """

    def __init__(self, cells: Mapping[str, Cell]) -> None:
        self._cells = cells
        self._values: dict[str, object] = {}
        self._last: Line | None = None
        self.lines: dict[str, Line] = {}

    def __enter__(self) -> "LineWatch":
        self._values = snapshot(self._cells)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._look()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return self._local if is_user(frame.f_code.co_filename) else None

    def _local(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if event not in ("line", "return"):
            return self._local
        self._look()
        self._last = (frame.f_code.co_filename, frame.f_lineno) if event == "line" else user_line(frame.f_back)
        return self._local

    def _look(self) -> None:
        if self._last is None:
            return
        for path, cell in self._cells.items():
            value = value_of(cell)
            if path not in self.lines and value != self._values[path]:
                self.lines[path] = self._last
            self._values[path] = value
