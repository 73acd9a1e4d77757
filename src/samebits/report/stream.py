"""Terminals, log files and pipes as places for a run's console output."""

import os
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console


class SafeStream:
    """A stream that can write any character. Unless it is strict, a run does not notice that its reader has gone."""

    def __init__(self, stream: TextIO, *, strict: bool) -> None:
        self._stream, self._strict = stream, strict
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


class RichStream(Console):
    """A console of rich that leaves the cursor and a closed pipe to its caller."""

    def show_cursor(self, show: bool = True) -> bool:
        """Never hide the cursor: a killed process could not show it again."""
        return False

    def on_broken_pipe(self) -> None:
        """Re-raise the error, which rich is handling: rich itself would end the process."""
        raise
