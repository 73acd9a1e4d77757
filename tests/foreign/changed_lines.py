"""How many lines of a script were changed."""

from __future__ import annotations

import difflib
from pathlib import Path


def count_changed_lines(before: Path, after: Path) -> int:
    """Lines that were replaced, added or removed. A line that was replaced counts once."""
    one, two = (path.read_text(encoding="utf-8").splitlines() for path in (before, after))
    changes = difflib.SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
    return sum(max(last - first, stop - start) for kind, first, last, start, stop in changes if kind != "equal")
