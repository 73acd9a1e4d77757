"""Name the right command to `python benchmarks/NAME.py`, where Python finds this file in place of the folder."""

from __future__ import annotations

import sys
from pathlib import Path

name = Path(sys.argv[0]).stem
raise SystemExit(
    f"{sys.argv[0]} is part of a package, so a script cannot start it\n"
    f"  fix: In the root of the checkout, run python -m benchmarks.{name}, or make bench-{name.replace('_', '-')}."
)
