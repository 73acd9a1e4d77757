"""What a script does in the body of an exact loop, as far as it shows what the script counts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from samebits.data.order import Step
from samebits.errors import TrainError
from samebits.own_loop import mistakes
from samebits.own_loop.trained import Trained


class Habits:
    """Notes on a loop, from the start of an iteration on. A framework begins none: it counts steps itself."""

    def __init__(self) -> None:
        self.fault: TrainError | None = None  #: The error of an iteration that was left in the wrong place.
        self.has_trained = False  #: Whether there was a backward pass or an `optimizer.step()`.
        self.num_forwards = 0  #: Forward passes in training mode since the body's start, or since the update.
        self._is_open = False  # whether the body before had forward passes and no backward pass
        self._called: dict[tuple[str, str], set[int]] = {}  # what follows the optimizer -> bodies
        self._stepping: set[bool] = set()
        self._is_script = self._has_looked = False
        self._num_steps = self._num_looks = 0
        self._num_before = self._looks_before = 0  # in earlier iterations

    @property
    def is_first_step(self) -> bool:
        """Whether no step of this iteration has ended."""
        return not self._stepping

    @property
    def counts_steps(self) -> bool:
        """Whether the script has looked at the position in each step of this iteration.

        One that has not can only count micro-batches, whose number depends on the world.
        """
        return self._num_looks == self._num_steps

    @property
    def has_counted_steps(self) -> bool:
        """Whether it has done so in all iterations: in one that ended with its first step, it may have by chance."""
        return self._num_looks + self._looks_before == self._num_steps + self._num_before

    def look(self) -> None:
        """Note that the script looks at the position in steps."""
        self._num_looks += not self._has_looked
        self._has_looked = True

    def begin_pass(self) -> None:
        """Start an iteration over the loader of a script."""
        self._is_script, self._has_looked, self.has_trained = True, True, False
        self._num_before, self._looks_before = self._num_before + self._num_steps, self._looks_before + self._num_looks
        self._num_steps = self._num_looks = 0
        self._stepping = set()

    def undo_pass(self) -> None:
        """Forget an iteration that has trained nothing."""
        self._num_steps = self._num_looks = 0

    def begin_step(self) -> None:
        """Start a step."""
        self._called = {}
        if self._is_script:
            self._num_steps, self._has_looked = self._num_steps + 1, False

    def end_body(self, num_rounds: int) -> None:
        """End a micro-batch.

        Args:
            num_rounds: Its backward passes.
        """
        self._is_open = self.num_forwards > 0 and not num_rounds

    def on_backward(self) -> None:
        """Note the end of a backward pass.

        Raises:
            TrainError: It belongs to the micro-batch before.
        """
        if self._is_open and not self.num_forwards:
            raise mistakes.straddling()
        self.has_trained = True

    def on_follow(self, kind: str, name: str, body: int) -> None:
        """Note that the script calls a method of what follows the optimizer.

        Args:
            kind: The object's class.
            name: The method.
            body: Index of the micro-batch on this rank.
        """
        self._called.setdefault((kind, name), set()).add(body)

    def check_calls(self, trained: Sequence[Trained], step: Step) -> None:
        """Check the calls of `step()` in the last micro-batch of a step; see `mistakes.check_calls`."""
        mistakes.check_calls(trained, step, counts_steps=self.counts_steps)

    def end_step(self, trained: Sequence[Trained], step: Step) -> None:
        """Check a step that has ended.

        Raises:
            TrainError: What acts once a step was called in some micro-batches or steps only.
        """
        mistakes.check_followers(self._called, step, counts_steps=self.counts_steps)
        if self.has_trained:
            self._stepping.add(any(each.num_calls for each in trained))
        mistakes.check_regular(self._stepping, step, counts_steps=self.counts_steps)

    def raise_fault(self) -> None:
        """Raise the error of an iteration that was left in the wrong place, unless another error is being handled.

        Raises:
            TrainError: That one.
        """
        # An error that is being handled has a reason of its own, which this one must not replace.
        if self.fault is not None and sys.exc_info()[1] is None:
            fault, self.fault = self.fault, None
            raise fault
