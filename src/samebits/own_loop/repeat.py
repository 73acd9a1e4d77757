"""Find what a script keeps from one micro-batch to the next: the first one of some steps is repeated at their end.

Which micro-batches follow each other on a rank depends on the world. So a counter that scales the loss, a hidden state,
a bank of features, or random numbers of a generator of the script's own would give another result in each, in silence.
The repetition has the same samples, weights, buffers and random numbers, so its gradients are equal to the last bit.
It counts as those that pad a step: its weight is 0.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from samebits.data.order import MicroBatch, Step


class RepeatCheck:
    """Compares the gradients of a step's first micro-batch with those of its repetition on this rank.

    Args:
        refuse: Raises the error for a difference.

    Attributes:
        is_again: Whether the current micro-batch is the repetition.
    """

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._start: int | None = None  # the first step of this process
        self._first: dict[tuple[int, int], Tensor] = {}
        self._is_first = self.is_again = False

    def repeated(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield steps; the 1st, 2nd, 4th, 8th, ... of the process end with their first micro-batch again."""
        for step in steps:
            self._start = step.number if self._start is None else self._start
            count = step.number - self._start + 1
            again = replace(step.micro_batches[0], weight=0.0)
            yield step if count & (count - 1) else replace(step, micro_batches=(*step.micro_batches, again))

    def begin(self, step: Step, micro_batch: MicroBatch) -> None:
        """Start a micro-batch."""
        first, last = step.micro_batches[0], step.micro_batches[-1]
        is_repeated = first is not last and first.index == last.index
        self._is_first, self.is_again = is_repeated and micro_batch is first, is_repeated and micro_batch is last
        if self._is_first:
            self._first = {}

    def take(self, parameter: Tensor, turn: int) -> None:
        """Note or compare the gradient of a parameter, of any shape, in a backward pass of the micro-batch."""
        gradient = parameter.grad
        if gradient is None:
            return
        if self._is_first:
            self._first[turn, id(parameter)] = gradient.detach().clone()
        elif self.is_again:
            first = self._first.pop((turn, id(parameter)), None)
            # The bits: a gradient that is not a number has an error of its own before the update.
            if first is None or not torch.equal(first.view(torch.int32), gradient.detach().view(torch.int32)):
                self._refuse()

    def end(self) -> None:
        """End a micro-batch: the repetition has all gradients that the first one had."""
        if self.is_again and self._first:
            self._refuse()
