"""What `samebits check SCRIPT` observes of a script: samples of its first micro-batches, and its state after each step.

The command starts the script as its user does, with the variable SAMEBITS_TRIAL. `exact` then writes one file for each
rank and ends the script after a few steps.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from samebits.check.digest import digest_of
from samebits.cluster.world import World
from samebits.data.order import MicroBatch
from samebits.parallel.checksum import checksums

VARIABLE = "SAMEBITS_TRIAL"  # FOLDER:STEPS


class ScriptTrial:
    """The record of one rank.

    Args:
        folder: Where to write it.
        num_steps: Number of steps after which the script ends.
        world: The ranks.
    """

    def __init__(self, folder: Path, num_steps: int, world: World) -> None:
        self._path = folder / f"rank-{world.rank}.json"
        self._num_steps = num_steps
        self._samples: dict[str, str] = {}
        self._states: list[dict[str, int]] = []

    def batch(self, micro_batch: MicroBatch, inputs: Any) -> None:
        """Note a micro-batch of this rank."""
        if micro_batch.weight > 0.0:
            self._samples[f"{micro_batch.step}.{micro_batch.index}"] = digest_of(inputs)

    def step(self, state: dict[str, Tensor]) -> None:
        """Note the state after a step, tensors of any shape by name, and end the script after the last one.

        Raises:
            SystemExit: The trial has all of its steps.
        """
        self._states.append(checksums(state))
        if len(self._states) == self._num_steps:
            self._path.write_text(json.dumps({"samples": self._samples, "states": self._states}), encoding="utf-8")
            raise SystemExit(0)


def trial_of(world: World) -> ScriptTrial | None:
    """Return the trial that the environment asks for; None outside of `samebits check`."""
    folder, _, num_steps = os.environ.get(VARIABLE, "").rpartition(":")
    return ScriptTrial(Path(folder), int(num_steps), world) if folder and num_steps.isdigit() else None
