"""What `samebits check SCRIPT` observes of a script: samples of its first micro-batches, and its state after each step.

The command starts the script as its user does, with the variable SAMEBITS_TRIAL. `exact` then writes one file for each
rank and ends the script after a few steps.
"""

import atexit
import gc
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samebits.check.compare import digest_of
from samebits.cluster.world import World
from samebits.data.order import MicroBatch
from samebits.parallel.checksum import checksums
from samebits.portable.listing import listed_operations

VARIABLE = "SAMEBITS_TRIAL"  # FOLDER:STEPS


class ScriptTrial:
    """The record of one rank. `num_steps`: number of steps after which the script ends; `is_over`: whether it does.

    Attributes:
        has_moved: Whether a step has changed a parameter.
    """

    def __init__(self, folder: Path, num_steps: int, world: World) -> None:
        self._path = folder / f"rank-{world.rank}.json"
        self._num_steps = num_steps
        self._samples: dict[str, str] = {}
        self._states: list[dict[str, int]] = []
        self._held: dict[
            int, tuple[str, dict[str, int]]
        ] = {}  # other modules of the script, by identity
        self.settings: dict[str, int] = {}
        self.is_over = self.has_moved = False
        atexit.register(self._write)  # a script may make fewer steps

    def batch(self, micro_batch: MicroBatch, inputs: Any) -> None:
        """Note a micro-batch of this rank."""
        if micro_batch.weight > 0.0:
            self._samples[f"{micro_batch.step}.{micro_batch.index}"] = digest_of(inputs)

    def step(self, state: dict[str, Tensor], modules: Sequence[nn.Module]) -> None:
        """Note the state after a step, and end the script after the last one.

        Args:
            state: All that the step changes, tensors of any shape by name.
            modules: The loop's modules. The weights of others that the script holds, such as a teacher or an average
                by hand, are noted too.

        Raises:
            SystemExit: The trial has all of its steps.
        """
        known = {id(each) for module in modules for each in module.modules()}
        # The garbage collector also knows the modules that the script did not give to `exact`.
        # By type: isinstance() would ask each object for its __class__, at which torch's deprecated names warn.
        found = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        others = [each for each in found if id(each) not in known]
        inner = {id(each) for other in others for each in other.children()}
        outer = {
            id(each): (type(each).__name__, checksums(each.state_dict()))
            for each in others
            if id(each) not in inner
        }
        # Only those that change: a module that the script never uses may have weights from anywhere.
        changed = [held for number, held in outer.items() if self._held.get(number, held) != held]
        self._held = outer
        more = {
            f"{kind} that exact() was not given: {name}": own[name]
            for kind, own in changed
            for name in own
        }
        self._states.append(checksums(state) | more)
        if len(self._states) == self._num_steps:
            self.is_over = True
            raise SystemExit(0)

    def _write(self) -> None:
        content: dict[str, Any] = {
            "samples": self._samples,
            "states": self._states,
            "settings": self.settings,
            "has_moved": self.has_moved,
        }
        content["operations"] = listed_operations()
        self._path.write_text(json.dumps(content), encoding="utf-8")


def trial_of(world: World) -> ScriptTrial | None:
    """Return the trial that the environment asks for; None outside of `samebits check`."""
    folder, _, num_steps = os.environ.get(VARIABLE, "").rpartition(":")
    return (
        ScriptTrial(Path(folder), int(num_steps), world) if folder and num_steps.isdigit() else None
    )
