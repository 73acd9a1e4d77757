"""A small run of a recipe with facts, and what tests look up in it."""

import json
from pathlib import Path
from typing import Any

from samebits.storage.checkpoint import steps

RECIPE = Path(__file__).with_name("recipe_of_dots.py")
SETTINGS = ["epochs=2", "global_batch=2", "micro_batch=1", "eval_batch=1", "device=cpu", "report.tensorboard=false"]
SETTINGS += ["optim.ema=0.9", "loader.num_workers=0"]
RESUME = ["train", "--run-dir", "run", "--resume", "auto", "--procs", "1"]


def result(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


def checkpoints(run: Path) -> list[Path]:
    return [run / "checkpoints" / f"step-{step:06}" for step in steps(run / "checkpoints")]
