"""A script under observation, for `samebits check` and `samebits gate`: one process of the world that they start.

    python -m samebits.replay.script_trial FOLDER STEPS check|gate SCRIPT ARGUMENTS...

The script runs as Python would run it. Its exact loops report to the observer, which
ends the script after a few steps, and writes one file for each rank.
"""

import atexit
import gc
import json
import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.cluster.world import World
from samebits.data.order import MicroBatch
from samebits.own_loop import session
from samebits.portable.mode import listed_operations
from samebits.portable.scripts import own_kernels
from samebits.provenance.fingerprint import describe_kernels
from samebits.replay.trace import OPERATIONS, STATE, Recorder, Trace, digest, digests


class ScriptTrial:
    """The record of one rank.

    Attributes:
        settings, is_over, has_moved: See `LoopObserver`.
    """

    def __init__(
        self,
        folder: Path,
        num_steps: int,
        world: World,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        is_traced: bool,
    ) -> None:
        self._path = folder / f"rank-{world.rank}.json"
        self._num_steps = num_steps
        # Other modules of the script, by identity.
        self._held: dict[int, tuple[str, dict[str, str]]] = {}
        self.settings: dict[str, int] = {}
        self.is_over = self.has_moved = False
        self._recorder = Recorder(modules, optimizers, detail=OPERATIONS if is_traced else STATE)
        self._trace = Trace(
            {"initial weights": digests(dict(self._recorder.model.named_parameters()))},
            environment=describe_kernels(world.device, own_kernels()),
        )
        self._step = 0
        if is_traced:
            _observe_losses(self._recorder)
        atexit.register(self._write)  # a script may make fewer steps

    def batch(self, micro_batch: MicroBatch, inputs: Any) -> None:
        """Note a micro-batch of this rank."""
        self._step = micro_batch.step
        if micro_batch.weight > 0.0:
            samples = {",".join(map(str, micro_batch.indices.tolist())): digest(inputs)}
            self._recorder.start(micro_batch.index, samples)
        else:  # repeated: it counts on the rank that has it
            self._recorder.pause()

    def step(self, state: dict[str, Tensor]) -> None:
        """Note the state after a step, tensors of any shape by name, and end the script after the last step.

        The weights of modules that the script holds beside those of the loop, such as a teacher or an average by hand,
        are noted too.

        Raises:
            SystemExit: The trial has all of its steps.
        """
        known = {id(each) for each in self._recorder.model.modules()}
        # The garbage collector also knows the modules that the script did not give to `exact`.
        # By type: isinstance() would ask each object for its __class__, at which torch's deprecated names warn.
        found = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        others = [each for each in found if id(each) not in known]
        inner = {id(each) for other in others for each in other.children()}
        outer = {
            id(each): (type(each).__name__, digests(each.state_dict()))
            for each in others
            if id(each) not in inner
        }
        # Only those that change: a module that the script never uses may have weights from anywhere.
        changed = [held for number, held in outer.items() if self._held.get(number, held) != held]
        self._held = outer
        trace = self._recorder.step(self._recorder.values())
        for kind, own in changed:
            trace.weights |= {
                f"{kind} that exact() was not given: {name}": own[name] for name in own
            }
        self._trace.steps[str(self._step)] = trace
        if len(self._trace.steps) == self._num_steps:
            self.is_over = True
            raise SystemExit(0)

    def _write(self) -> None:
        content = {
            "settings": self.settings,
            "has_moved": self.has_moved,
            "operations": listed_operations(),
            "trace": self._trace.to_plain(),
        }
        self._path.write_text(json.dumps(content), encoding="utf-8")


def _observe_losses(recorder: Recorder) -> None:
    plain = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        recorder.loss({"": tensors})
        plain(tensors, *args, **kwargs)

    torch.autograd.backward = backward  # Tensor.backward() calls it


def main(arguments: list[str]) -> None:
    """Run a script in this process, under observation."""
    folder, num_steps, purpose, *command = arguments
    session.observe = partial(
        ScriptTrial, Path(folder), int(num_steps), is_traced=purpose == "gate"
    )
    # -P has put no folder there.
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
