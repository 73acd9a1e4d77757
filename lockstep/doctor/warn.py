"""Run the quick checks of `lockstep doctor` before a run."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.config.schema import RunConfig
from lockstep.doctor.check_result import table
from lockstep.report.console import Console


def warn_before(folder: Path, config: RunConfig) -> None:
    """Run the checks of `lockstep doctor` that take milliseconds, and print their warnings and problems."""
    from lockstep.doctor.machine import short  # late, since it imports torch

    needs_shared_memory = isinstance(config.loader.num_workers, int) and config.loader.num_workers > 0
    results = short(folder, needs_shared_memory=needs_shared_memory)
    if found := [result for result in results if result.verdict in ("warning", "problem")]:
        console = Console(sys.stderr)
        console.table(table(found))
        console.say("For all checks: lockstep doctor")
