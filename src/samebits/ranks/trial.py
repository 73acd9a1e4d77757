"""The first steps of a launched script under observation, for `samebits check --as N` and `samebits gate --as N`.

    a rank        batch  forward  backward    batch  forward  backward    optimizer.step()
                  |---- micro-batch -------|  |---- micro-batch -------|

A script has no place where its micro-batches begin: one begins with the first call of a module after a backward pass.
"""

from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.data import dataloader

from samebits.ranks.devices import replaces
from samebits.ranks.trained import modules_of
from samebits.replay.script_trial import ScriptTrial
from samebits.replay.trace import digest


class RankTrial:
    """What one rank notes of a script.

    Args:
        trace: FOLDER:STEPS:PURPOSE, where the purpose is "gate" for a trace of each step, and else of its weights.
        rank, num_ranks: This rank, and how many there are.
        device: Where it computes.
    """

    def __init__(self, trace: str, rank: int, num_ranks: int, device: torch.device) -> None:
        folder, num_steps, purpose = trace.rsplit(":", 2)
        self._trial = ScriptTrial(folder, num_steps, purpose, rank, device)
        self._rank = self._index = rank
        self._num_ranks = num_ranks
        self._samples: dict[str, str] = {}
        self._is_open = True  # until there is an optimizer
        self._optimizers: list[Optimizer] = []
        register_module_forward_pre_hook(self._begin)

        @replaces(Optimizer, "__init__")
        def make(plain: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            self._optimizers.append(optimizer)
            # Before the first step: calls of the modules are seen from the first one on.
            every = [module for each in self._optimizers for module in modules_of(each)]
            self._trial.watch(every, self._optimizers)
            self._is_open = False

        @replaces(torch.autograd, "backward")
        def backward(plain: Any, *args: Any, **kwargs: Any) -> None:
            self._begin()  # of parameters without a module
            plain(*args, **kwargs)
            if self._optimizers:
                self._index += self._num_ranks
                self._is_open = False
                self._samples = {}

        @replaces(dataloader._BaseDataLoaderIter, "__next__")
        def read(plain: Any, batches: Any) -> Any:
            batch = plain(batches)
            if torch.is_grad_enabled():
                self._samples[str(len(self._samples))] = digest(batch)
            return batch

    def step(self) -> None:
        """Note the state after a step of the first optimizer.

        Raises:
            SystemExit: The trial has all of its steps.
        """
        self._index = self._rank
        self._is_open = False
        self._trial.step()

    def _begin(self, *_: Any) -> None:
        if self._is_open or not torch.is_grad_enabled():
            return  # of an evaluation, which is not traced
        self._is_open = True
        self._trial.begin(self._index, self._samples)
