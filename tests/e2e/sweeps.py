"""Runs `samebits sweep` as a user would, and reads its table."""

import json
from pathlib import Path
from typing import Any

from tests.runs import running, samebits

COMMON = ["device=cpu", "epochs=4", "report.tensorboard=false", "loader.num_workers=0", "report.every_steps=1"]
STEPS = ["optim.schedule=multi_step", "optim.milestones=[2]"]


def sweep(*arguments: object, cwd: Path) -> str:
    """Run a sweep to its end, and return what it prints."""
    with running("sweep", *arguments, cwd=cwd) as process:
        out, err = process.communicate(timeout=900)
    assert process.returncode == 0, out + err
    return out


def table(folder: Path) -> dict[str, Any]:
    """The trials of a sweep without times."""
    trials = json.loads(samebits("sweep", folder, "--show", "--json", cwd=folder.parent).stdout)["trials"]
    return {trial["trial"]: {name: trial[name] for name in trial if name != "took_s"} for trial in trials}
