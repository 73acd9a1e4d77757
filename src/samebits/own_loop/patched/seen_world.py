"""The world that a script without `samebits.exact` sees, and its collective calls.

While it sets up, the script sees a world of `global_batch / micro_batch` processes, whatever number runs. So what it
computes from the world, such as batch sizes, learning rates and the lengths of schedules, is equal in every world.
From the first training iteration on it sees the processes that run (ADR 64).
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samebits.cluster.env import ALONE, read_assignment
from samebits.frames import is_user
from samebits.own_loop.patched.refuse import check_framework, refusal, user_line
from samebits.own_loop.session import ExactLoop

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REDUCTIONS = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor")
SMALL = 64  # elements of a tensor that a script reduces to print it


class SeenWorld:
    """The processes that run, and those that the script sees while it sets up.

    Args:
        replicas: Number of processes that the script sees; 0: the batch sizes are not given, so those that run.

    Attributes:
        has_group: Whether the script has made a process group, so that it knows its rank.
    """

    def __init__(self, replicas: int) -> None:
        assignment = read_assignment(os.environ) or ALONE
        self.rank = assignment.rank
        self.size = assignment.world_size
        self.local_rank = assignment.local_rank
        self._is_given = replicas > 0
        self.replicas = replicas or self.size
        self._launcher = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        os.environ["WORLD_SIZE"] = str(self.replicas)
        self.has_group = False

    @property
    def is_alone(self) -> bool:
        """Whether the script was written for one process, as far as it has shown."""
        return self._is_given and not self.has_group

    def seen_size(self, file: str, *, has_begun: bool) -> int:
        """Return the size of the world that a source file sees, before or after the training loop has begun."""
        # A learning rate of each epoch may be computed from it; an evaluation and a library count what they reduce.
        return (
            self.size
            if has_begun and not (is_user(file) and torch.is_grad_enabled())
            else self.replicas
        )

    @contextmanager
    def launcher_environment(self) -> Iterator[None]:
        """Restore what the launcher has set: the real world, and an address that the script may have replaced."""
        before = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        os.environ.update(self._launcher)
        try:
            yield
        finally:
            os.environ.update(before)

    def check(self, name: str, world_size: int | None, rank: int | None) -> None:
        """Check the arguments of a function `name`, -1 or None if left out; the launcher's world is used anyway."""
        self.has_group = True
        if not self._is_given:
            self.replicas = (
                self.replicas if world_size in (-1, None) else world_size
            )  # for the refusal that follows
            return
        check_framework()
        if world_size not in (-1, None, self.replicas) or rank not in (-1, None, self.rank):
            given = f"world_size={world_size}, rank={rank} on rank {self.rank}"
            raise refusal("world", user_line(), part=name, given=given, replicas=self.replicas)


class CollectiveCheck:
    """Checks the collective calls of a script in its training loop: their results must not reach the weights.

    Attributes:
        first: Name and line of the first one in a body before backward(); empty: there was none.
    """

    def __init__(self, world: SeenWorld) -> None:
        self._world = world
        self._has_summed = False
        self.first = "", ""

    def check(
        self,
        name: str,
        values: Sequence[Any],
        loop: ExactLoop,
        models: Sequence[nn.Module],
        *,
        is_async: bool,
    ) -> bool:
        """Check one call.

        Returns:
            Whether to change its result a little, in the repetition of a micro-batch: its gradients must stay equal.
        """
        tensors = [each for each in values if isinstance(each, Tensor)]
        if name in ("all_reduce", "reduce"):
            self._check_sum(name, tensors, models)
        if not loop.is_inside or not any(each.training for each in models):
            return False
        every = [
            each.grad for model in models for each in model.parameters() if each.grad is not None
        ]
        gradients = {each.data_ptr() for each in every}
        is_large = any(each.data_ptr() in gradients or each.numel() > SMALL for each in tensors)
        if is_large or (not loop.has_backward and (name not in REDUCTIONS or is_async)):
            raise refusal("collective", user_line(), part=name)
        if loop.has_backward:
            return False
        if not self.first[0]:  # those for the log come last
            self.first = name, user_line()
        return loop.repeat is not None and loop.repeat.is_again

    def _check_sum(self, name: str, tensors: Sequence[Tensor], models: Sequence[nn.Module]) -> None:
        own = {
            each.data_ptr() for model in models for each in (*model.parameters(), *model.buffers())
        }
        if any(each.data_ptr() in own for each in tensors):
            raise refusal("state", user_line(), part=name)
        world = self._world
        if world.size != world.replicas and not self._has_summed and world.rank == 0:
            text = f"{name}() at {user_line()} sums over the {world.size} processes that run: a mean over the"
            say(f"{text} {world.replicas} that the script saw at its start is too small")
        self._has_summed = True


def say(text: str) -> None:
    """Print a line for the user."""
    # Scripts replace print() on some ranks.
    sys.stderr.write(f"samebits  {text}\n")
    sys.stderr.flush()
