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
from samebits.parallel.checksum import checksums
from samebits.portable.mode import listed_operations
from samebits.portable.scripts import own_kernels
from samebits.provenance.fingerprint import describe_kernels
from samebits.replay.compare import digest_of, digests
from samebits.replay.steps import LoopRecorder


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
        self._modules = modules
        self._samples: dict[str, str] = {}
        self._states: list[dict[str, int]] = []
        # Other modules of the script, by identity.
        self._held: dict[int, tuple[str, dict[str, int]]] = {}
        self.settings: dict[str, int] = {}
        self.is_over = self.has_moved = False
        self._device = world.device
        self._traced: list[dict[str, Any]] = []
        self._recorder: LoopRecorder | None = None
        if is_traced:
            self._recorder = LoopRecorder(modules, optimizers, has_operations=True)
            self._start = digests(dict(self._recorder.model.named_parameters()))
            _observe_losses(self._recorder)
        atexit.register(self._write)  # a script may make fewer steps

    def batch(self, micro_batch: MicroBatch, inputs: Any) -> None:
        """Note a micro-batch of this rank."""
        if micro_batch.weight > 0.0:
            self._samples[f"{micro_batch.step}.{micro_batch.index}"] = digest_of(inputs)
        if self._recorder is not None:
            indices = map(str, micro_batch.indices.tolist())
            self._recorder.batch(micro_batch.index, {",".join(indices): digest_of(inputs)})

    def step(self, state: dict[str, Tensor]) -> None:
        """Note the state after a step, tensors of any shape by name, and end the script after the last step.

        The weights of modules that the script holds beside those of the loop, such as a teacher or an average by hand,
        are noted too.

        Raises:
            SystemExit: The trial has all of its steps.
        """
        known = {id(each) for module in self._modules for each in module.modules()}
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
        if self._recorder is not None:
            self._traced.append({"values": self._recorder.values(), **self._recorder.step()})
        if len(self._states) == self._num_steps:
            self.is_over = True
            raise SystemExit(0)

    def _write(self) -> None:
        content: dict[str, Any] = {
            "samples": self._samples,
            "states": self._states,
            "settings": self.settings,
            "has_moved": self.has_moved,
            "operations": listed_operations(),
        }
        if self._recorder is not None:
            content["trace"] = {
                "start": {"initial weights": self._start},
                "steps": self._traced,
                "evaluation": {},
                "environment": describe_kernels(self._device, own_kernels()),
                **self._recorder.described(),
            }
        self._path.write_text(json.dumps(content), encoding="utf-8")


def _observe_losses(recorder: LoopRecorder) -> None:
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
