"""What a script does in the body of an exact loop, as far as it shows what the script counts."""

import copy
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samebits.bits import plain_in, tensors_in
from samebits.data.loader import Loader
from samebits.data.order import MicroBatch, Step
from samebits.errors import TrainError
from samebits.own_loop.gradients import Trained
from samebits.own_loop.guard import fault, script_line
from samebits.parallel.checksum import checksums

NUM_FIRST = 100  # steps that begin with more repetitions
NUM_BETWEEN = 199  # micro-batches from one repetition to the next; prime, to meet what a script does now and then


class Habits:
    """Notes on a loop, from the start of an iteration on. A framework begins none: it counts steps itself."""

    def __init__(self) -> None:
        self.fault: TrainError | None = (
            None  #: The error of an iteration that was left in the wrong place.
        )
        self.has_trained = False  #: Whether there was a backward pass or an `optimizer.step()`.
        self.has_drawn = False  #: Whether torch's random numbers were drawn before a forward pass of the first step.
        self.num_forwards = (
            0  #: Forward passes in training mode since the body's start, or since the update.
        )
        self._is_open = False  # whether the body before had forward passes and no backward pass
        self._called: dict[tuple[str, str], set[int]] = {}  # what follows the optimizer -> bodies
        self._stepping: set[bool] = set()
        self._is_script = self._has_looked = False
        self._num_unseen = 0  # steps in which the script has not looked at the position
        self._unseen_before = 0  # those of earlier iterations

    @property
    def is_first_step(self) -> bool:
        """Whether no step of this iteration has ended."""
        return not self._stepping

    @property
    def counts_steps(self) -> bool:
        """Whether the script has looked at the position in each step of this iteration.

        One that has not can only count micro-batches, whose number depends on the world.
        """
        return self._num_unseen == 0

    @property
    def has_counted_steps(self) -> bool:
        """Whether it has done so in all iterations: in one that ended with its first step, it may have by chance."""
        return self._num_unseen + self._unseen_before == 0

    def look(self) -> None:
        """Note that the script looks at the position in steps."""
        self._num_unseen -= not self._has_looked
        self._has_looked = True

    def begin_pass(self) -> None:
        """Start an iteration over the loader of a script."""
        self._is_script = True
        self._has_looked = True
        self.has_trained = False
        self._unseen_before += self._num_unseen
        self._num_unseen = 0
        self._stepping = set()
        self.has_drawn = False

    def undo_pass(self) -> None:
        """Forget an iteration that has trained nothing."""
        self._num_unseen = 0

    def begin_step(self) -> None:
        """Start a step."""
        self._called = {}
        if self._is_script:
            self._num_unseen += 1
            self._has_looked = False

    def end_body(self, num_rounds: int) -> None:
        """End a micro-batch. It had `num_rounds` backward passes."""
        self._is_open = self.num_forwards > 0 and not num_rounds

    def on_backward(self) -> None:
        """Note the end of a backward pass. Raises TrainError if it belongs to the micro-batch before."""
        if self._is_open and not self.num_forwards:
            raise fault("late")
        self.has_trained = True

    def on_follow(self, kind: str, name: str, body: int) -> None:
        """Note that the script calls a method of what follows the optimizer."""
        self._called.setdefault((kind, name), set()).add(body)

    def check_calls(self, trained: Sequence[Trained], step: Step) -> None:
        """Check in the last micro-batch of a step that `step()` of optimizers was called in all of them, or in none.

        A script that looks at `loader.sync_gradients` or `loader.step` may call it in the last one only.
        """
        num = len(step.micro_batches)
        for each in trained:
            if 0 < each.num_calls < num and not (
                self.counts_steps and each.is_closed and each.num_calls == 1
            ):
                where = "" if each.is_closed else ", but not in its last micro-batch"
                raise fault(
                    "calls", where=where, step=step.number, num_calls=each.num_calls, num=num
                )

    def end_step(self, trained: Sequence[Trained], step: Step) -> None:
        """Check that a loop treats all micro-batches of a step, and all steps, in the same way.

        Raises:
            TrainError: What acts once a step was called in some micro-batches or steps only.
        """
        num = len(step.micro_batches)
        for (kind, name), called in self._called.items():
            if len(called) < num and not (self.counts_steps and called == {num - 1}):
                raise fault(
                    "follower",
                    name=name,
                    kind=kind,
                    step=step.number,
                    num_calls=len(called),
                    num=num,
                )
        if self.has_trained:
            self._stepping.add(any(each.num_calls for each in trained))
        if len(self._stepping) > 1 and not self.counts_steps:
            raise fault("steps", step=step.number, num=num)

    def raise_fault(self) -> None:
        """Raise the error of an iteration that was left in the wrong place, unless another error is being handled.

        Raises:
            TrainError: That one.
        """
        # An error that is being handled has a reason of its own, which this one must not replace.
        if self.fault is not None and sys.exc_info()[1] is None:
            fault = self.fault
            self.fault = None
            raise fault


def _content(inputs: Any) -> str:
    """Return a text of all values in a batch, of tensors their checksums."""
    tensors = {str(number): each.detach() for number, each in enumerate(tensors_in(inputs))}
    return repr((checksums(tensors), list(plain_in(inputs))))


class RepeatCheck:
    """Finds what a script keeps from one micro-batch to the next: the first one of some steps is repeated at their end.

    Which micro-batches follow each other on a rank depends on the world. So a counter that scales the loss, a hidden
    state, a bank of features, or random numbers of a generator of the script's own would give another result in each,
    in silence. The repetition has the same samples, weights, buffers and random numbers, so its gradients are equal to
    the last bit. It counts as those that pad a step: its weight is 0.

    Which steps have one follows from their numbers. One more is asked for when a micro-batch does something new, such
    as reading another DataLoader: the ranks agree on it by the sum of the gradients.

    Attributes:
        is_again: Whether the current micro-batch is the repetition.
        is_looking: Whether the current step has one.
        is_fresh: Whether the current step begins pass 0, 1, 2, 4, ..., or is compared as a rank has asked for it.
        is_asked: Whether the next step gets one that its number does not ask for; equal on all ranks.
    """

    def __init__(self) -> None:
        self._start: int | None = None  # the first step of this process
        self._step = 0
        self._inputs = self._line = ""
        self._other = ""  # the line that has read another DataLoader
        self._first: dict[tuple[int, int], Tensor] = {}
        self._is_first = self.is_again = self.is_looking = self.is_asked = self.is_fresh = False
        self._num_passes = 0
        self._begins = False  # whether a pass begins that is looked at
        self._seen: set[Hashable] = set()
        self._is_new = False  # whether something was noted for the first time
        self._unread: MicroBatch | None = None  # one that was not requested: it gets `_kept`
        self._kept: Any = None

    def num_bodies(self, step: Step, *, begins: bool = False) -> int:
        """Return the number of micro-batches that a rank runs in a step, with the repetition.

        `begins`: it begins pass 0, 1, 2, 4, ...: what a script begins with an epoch is met there.
        """
        num = len(step.micro_batches)
        done = step.number - (step.number if self._start is None else self._start)
        # The 1st, 2nd, 4th, ... step, as long as they are less than a hundredth of the micro-batches.
        is_early = done & (done + 1) == 0 and done.bit_length() < max(1, 3 * num // 4)
        is_due = is_early if done < NUM_FIRST else done * num % NUM_BETWEEN < num
        return num + (begins or is_due)

    def repeated(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield the steps of a pass; the first one of the process and some later ones end with the repetition."""
        begins = self._num_passes & (self._num_passes - 1) == 0
        self._num_passes += 1
        self._begins = begins
        for step in steps:
            self._start = step.number if self._start is None else self._start
            is_due = self.num_bodies(step, begins=begins) > len(step.micro_batches)
            begins = False
            yield self.with_repetition(step) if is_due else step

    def note(self, what: Hashable) -> None:
        """Note what a micro-batch does. The first time, the next step gets a repetition."""
        self._is_new |= what not in self._seen and not self.is_looking
        self._seen.add(what)

    def note_other(self, line: str) -> None:
        """Note the line that has read another DataLoader."""
        self.note(line)
        self._other = line

    def asks(self, micro_batch: MicroBatch) -> bool:
        """Return whether this rank asks for a repetition, in a micro-batch that counts."""
        is_new = self._is_new and micro_batch.weight > 0.0
        self._is_new &= not is_new
        return is_new

    def extended(self, step: Step) -> Step:
        """Return a step that begins now, with the repetition that was asked for."""
        # Of all ranks alike: one may repeat its first micro-batch anyway, as it has fewer than others.
        is_more = self.is_asked and len(step.micro_batches) == max(map(len, step.leaves))
        self.is_asked = False
        self._kept = None
        step = self.with_repetition(step) if is_more else step
        # DataLoader workers have their requests already.
        self._unread = step.micro_batches[-1] if is_more else None
        self.is_fresh = self._begins or is_more
        self._begins = False
        return step

    def read(self, micro_batch: MicroBatch, loader: Loader) -> Any:
        """Return the samples of a micro-batch; of a repetition that was not requested, those of the first one."""
        if micro_batch is self._unread:
            return self._kept
        inputs = loader.batch(micro_batch.indices, micro_batch.keys).inputs
        if self._unread is not None and self._kept is None:
            self._kept = copy.deepcopy(inputs)
        return inputs

    @staticmethod
    def with_repetition(step: Step) -> Step:
        """Return a step with the repetition at its end."""
        again = replace(step.micro_batches[0], weight=0.0)
        return replace(step, micro_batches=(*step.micro_batches, again))

    def begin(self, step: Step, micro_batch: MicroBatch, inputs: Any) -> None:
        """Start a micro-batch with its inputs, which are compared too."""
        first = step.micro_batches[0]
        last = step.micro_batches[-1]  # also one that pads a step
        self._step = step.number
        self.is_looking = first is not last and first.index == last.index
        self._is_first = self.is_looking and micro_batch is first
        self.is_again = self.is_looking and micro_batch is last
        if self._is_first:
            self._first = {}
            self._line = self._other = ""
            self._inputs = _content(inputs)
        elif self.is_again and _content(inputs) != self._inputs:
            raise fault("samples", number=int(micro_batch.indices[0]))

    def take(self, parameter: Tensor, turn: int) -> None:
        """Note or compare the gradient of a parameter, of any shape, in a backward pass of the micro-batch."""
        gradient = parameter.grad
        if gradient is None:
            return
        if self._is_first:
            self._line = self._line or script_line()
            self._first[turn, id(parameter)] = gradient.detach().clone()
        elif self.is_again:
            first = self._first.pop((turn, id(parameter)), None)
            # The bits: a gradient that is not a number has an error of its own before the update.
            if first is None or not torch.equal(
                first.view(torch.int32), gradient.detach().view(torch.int32)
            ):
                self._raise()

    def end(self) -> None:
        """End a micro-batch: the repetition has all gradients that the first one had."""
        if self.is_again and self._first:
            self._raise()

    def _raise(self) -> None:
        name = "second loader" if self._other else "carried"
        raise fault(name, step=self._step).with_slots(where=self._other or self._line)
