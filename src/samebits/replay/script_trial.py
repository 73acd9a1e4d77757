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
from pathlib import Path
from typing import Any

import torch
from torch import nn
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

    Args:
        folder, num_steps, purpose: Where to write it, after how many steps; "gate" for a trace of each step, and else
            of its weights.
        rank, device: This rank, and where it computes.

    Attributes:
        settings, is_over, has_moved: See `LoopObserver`.
    """

    def __init__(
        self, folder: str, num_steps: str, purpose: str, rank: int, device: torch.device
    ) -> None:
        self._path = Path(folder, f"rank-{rank}.json")
        self._num_steps = int(num_steps)
        # Other modules of the script, by identity.
        self._held: dict[int, dict[str, str]] = {}
        self.settings: dict[str, int] = {}
        self.is_over = self.has_moved = False
        is_traced = purpose == "gate"
        self._detail = OPERATIONS if is_traced else STATE
        self._recorder = Recorder([])
        self._trace = Trace(environment=describe_kernels(device, own_kernels()))
        self._step = 0
        if is_traced:
            self._observe_losses()
        atexit.register(self._write)  # a script may make fewer steps

    def watch(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> "ScriptTrial":
        """Record these from now on; return the trial."""
        self._recorder.remove()
        self._recorder = Recorder(modules, optimizers, detail=self._detail)
        return self

    def begin(self, index: int, samples: dict[str, str]) -> None:
        """Begin a micro-batch, with the digest of each of its samples."""
        if not self._trace.start:
            weights = dict(self._recorder.model.named_parameters())
            self._trace.start = {"initial weights": digests(weights)}
        self._recorder.start(index, samples)

    def batch(self, micro_batch: MicroBatch, inputs: Any) -> None:
        """Note a micro-batch of this rank."""
        self._step = micro_batch.step
        if micro_batch.weight > 0.0:
            samples = {",".join(map(str, micro_batch.indices.tolist())): digest(inputs)}
            self.begin(micro_batch.index, samples)
        else:  # repeated: it counts on the rank that has it
            self._recorder.pause()

    def step(self) -> None:
        """Note the state after a step, and end the script after the last step.

        The weights of modules that the script holds beside those that are trained, such as a teacher or an average by
        hand, are noted too.

        Raises:
            SystemExit: The trial has all of its steps.
        """
        # The garbage collector also knows the modules that the script did not give to `exact`.
        # By type: isinstance() would ask each object for its __class__, at which torch's deprecated names warn.
        found = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        inner = {id(each) for other in found for each in other.children()}
        outer = {id(each): self._others(each) for each in found if id(each) not in inner}
        # Only those that change: a module that the script never uses may have weights from anywhere.
        changed = [held for number, held in outer.items() if self._held.get(number, held) != held]
        self._held = outer
        trace = self._recorder.step(self._recorder.values())
        # By their values: the garbage collector has no order of its own.
        for held in sorted(changed, key=lambda each: sorted(each.values())):
            trace.weights |= held
        self._trace.steps[str(self._step)] = trace
        self._step += 1
        if len(self._trace.steps) == self._num_steps:
            self.is_over = True
            raise SystemExit(0)

    def _others(self, module: nn.Module) -> dict[str, str]:
        """Return digests of a module's weights that are not trained: it may wrap what is."""
        model = self._recorder.model
        known = {id(each) for each in (*model.parameters(), *model.buffers())}
        state = module.state_dict(keep_vars=True).items()
        kind = type(module).__name__
        return digests(
            {f"{kind} beside it: {name}": value for name, value in state if id(value) not in known}
        )

    def _observe_losses(self) -> None:
        plain = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._recorder.loss({"": tensors})
            plain(tensors, *args, **kwargs)

        torch.autograd.backward = backward  # Tensor.backward() calls it

    def _write(self) -> None:
        content = {
            "settings": self.settings,
            "has_moved": self.has_moved,
            "operations": listed_operations(),
            "trace": self._trace.to_plain(),
        }
        self._path.write_text(json.dumps(content), encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Run a script in this process, under observation."""
    folder, num_steps, purpose, *command = arguments

    def observe(
        world: World, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> ScriptTrial:
        trial = ScriptTrial(folder, num_steps, purpose, world.rank, world.device)
        return trial.watch(modules, optimizers)

    session.observe = observe
    # -P has put no folder there.
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
