"""Run the quick checks of `samebits doctor` before a run."""

import sys
from pathlib import Path

from samebits.config.schema import RunConfig
from samebits.doctor.check_result import table
from samebits.report.console import Console


def warn_before(folder: Path, config: RunConfig) -> None:
    """Run the checks of `samebits doctor` that take milliseconds, and print their warnings and problems."""
    from samebits.doctor.machine import short  # late, since it imports torch

    needs_shared_memory = isinstance(config.loader.num_workers, int) and config.loader.num_workers > 0
    results = short(folder, needs_shared_memory=needs_shared_memory)
    if found := [result for result in results if result.verdict in ("warning", "problem")]:
        console = Console(sys.stderr)
        console.draw(table(found))
        console.say("For all checks: samebits doctor")
