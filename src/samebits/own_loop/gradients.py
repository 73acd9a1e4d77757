"""Sums the gradients of one backward pass over a step's micro-batches and all ranks, inside a loop of the user.

The loop calls `loss.backward()` itself, so gradients arrive unweighted, by hooks. Each is multiplied by the fraction of
the step's samples that its micro-batch has, and enters the tree of `parallel/tree.py`:

    start_step          before the step's first micro-batch
      begin_leaf        before a micro-batch's backward pass
        take x N        a hook for each parameter
      close_leaf
    reduce              after the last micro-batch's backward pass
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.cluster.world import World
from samebits.data.order import MicroBatch, Step
from samebits.errors import ConfigError
from samebits.own_loop.guard import fault
from samebits.own_loop.state_sum import BufferSum
from samebits.parallel.bucket import Bucket, is_dense
from samebits.parallel.reduce import JOINED_BYTES, BucketSum, bucket_bytes, group

Settings = list[dict[str, Any]]  # of each parameter group, by name


class GradientSum(BucketSum):
    """The sum of the gradients of some parameters in one of the loop's backward passes.

    Args:
        parameters: Float32 and dense, in the order of their registration, on one device.
        number: Number of this sum; different for all sums of a process.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, number: int) -> None:
        # Backward reaches the last parameters first, so buckets in that order can be sent while it continues.
        groups = group(parameters[::-1], bucket_bytes(parameters, world))
        # the last bucket also has which parameters were used, and whether a rank asks for a repetition
        tails = [0] * (len(groups) - 1) + [len(parameters) + 1]
        device = parameters[0].device
        buckets = [
            Bucket(part, tail, world.size, device) for part, tail in zip(groups, tails, strict=True)
        ]
        super().__init__(buckets, world, number)
        self._place: dict[Tensor, tuple[int, int]] = {
            parameter: (number, index)
            for number, bucket in enumerate(buckets)
            for index, parameter in enumerate(bucket.parameters)
        }
        self._weight = 1.0
        self.norm = torch.zeros(())  #: 2-norm of the summed gradient, (), after `reduce`.
        self.is_asked = False  #: Whether a rank has asked for a repetition, after `reduce`.

    @property
    def next_leaf(self) -> int:
        """Index of the next micro-batch to enter the tree."""
        return self.buckets[-1].next_leaf

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch's gradients are being taken."""
        return bool(self.leaves)

    @property
    def can_join(self) -> bool:
        """Whether another small bucket can be sent in one message with the last gradients."""
        return 4 * self.buckets[-1].length <= JOINED_BYTES

    def begin_leaf(self, micro_batch: MicroBatch) -> None:
        """Start taking the gradients of a micro-batch."""
        self._weight = micro_batch.weight
        self.start_leaves(micro_batch.index)

    def take(self, parameter: Tensor, *, is_last: bool) -> None:
        """Add a parameter's gradient of this backward pass to the micro-batch's leaf.

        Of any shape. `is_last`: complete buckets can be sent, because all ranks run their last micro-batch.

        Raises:
            RuntimeError: The backward pass has reached the parameter twice.
        """
        number, index = self._place[parameter]
        leaf = self.leaves[number]
        self.buckets[number].give(leaf, index, self._weight)
        # The last bucket waits for its tail; the others can be sent while backward continues.
        if not leaf.missing and number + 1 < len(self.leaves):
            self._end(number, may_send=is_last)

    def close_leaf(self, *, asks: bool = False) -> None:
        """End the micro-batch: gradients that it does not have count as zero.

        `asks`: the next step shall have a repetition, on all ranks.
        """
        self.leaves[-1].put_tail(nn.functional.pad(self.used(), (0, 1), value=float(asks)))
        for number, leaf in enumerate(self.leaves):
            if not leaf.is_done:
                self._end(number, may_send=False)
        self.leaves = []

    def skip_leaf(self, micro_batch: MicroBatch) -> None:
        """Enter a micro-batch that has no gradient."""
        self.begin_leaf(micro_batch)
        self.close_leaf()

    def reduce(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Finish the sums over all ranks.

        Returns:
            Each parameter with its gradient, both of the same shape `(...)`: the mean over the step's samples. None for
            a parameter that no micro-batch of the step used. The gradients are valid until the next `start_step`.
        """
        results = self.finish()
        norms = [
            torch.linalg.vector_norm(result.values[: bucket.tail_start])
            for bucket, result in zip(self.buckets, results, strict=True)
        ]
        self.norm = torch.stack(norms).norm() if len(norms) > 1 else norms[0]
        # One transfer for all numbers: on a GPU each read waits for the device.
        *used, asked = results[-1].tail[: self._num_parameters + 1].tolist()
        self.is_asked = asked > 0.0
        return list(self.gradients(results, used))

    def _end(self, number: int, *, may_send: bool) -> None:
        leaf = self.leaves[number]
        self.buckets[number].add_given(leaf, self._weight)
        self.end_leaf(number, may_send=may_send)


# The gradients of one optimizer in an exact loop: taken by hooks, summed by backward pass, handed to the optimizer.


class Trained:
    """An optimizer with the parameters that it trains, and their gradients in the current step.

    A loop may call backward several times in a micro-batch. Each of these rounds has a sum of its own, so that the
    gradients of a round are known on all ranks as soon as it ends, for a loop that clips them.

    Args:
        act: Applies the gradients: the optimizer's own `step`.

    Attributes:
        is_closed: Whether the loop has called `step()` in the current micro-batch.
        num_calls: Number of calls of `step()` in the current step.
        settings: Settings of each parameter group at the start of the step.
        set_at_step: Those that the loop had set when it called `step()` in the current micro-batch.
        set_first: Those that the first micro-batch of the step had, at `step()` and at its end.
        is_followed: Whether a scheduler that is not torch's acts once a step.
        is_pending: Whether `step()` was called in the last micro-batch, and the optimizer has not acted yet.
        buffers: Sent in the messages of the gradients; None: in messages of their own.
        lacks_gradients: Whether gradients waited for `step()` where the script was saved that this loop continues.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        act: Callable[[], Any],
        number: int,
        num_optimizers: int,
        world: World,
    ) -> None:
        self.optimizer = optimizer
        self.act = act
        self._number = number
        self._num_optimizers = num_optimizers
        self._world = world
        self.parameters: list[nn.Parameter] = []
        self.is_closed = self.is_pending = self.is_followed = self.lacks_gradients = False
        self.num_calls = 0
        self.buffers: BufferSum | None = None
        self.settings: Settings = []
        self.set_at_step: Settings = []
        self.set_first: Settings = []
        self._sums: dict[int, GradientSum] = {}  # by round
        self._active: dict[int, bool] = {}  # rounds of this step -> whether they are reduced
        self._touched: set[int] = set()  # rounds with a gradient in the current micro-batch
        # rounds of this step whose gradients the loop drops by zero_grad()
        self._void: set[int] = set()
        self._dropped: set[int] = set()  # those that it has dropped in the current micro-batch
        # gradients over all ranks, of the rounds reduced so far
        self._totals: dict[nn.Parameter, Tensor] = {}
        # those of earlier steps that were not applied
        self._carried: dict[nn.Parameter, Tensor] = {}
        # the last micro-batch's gradients: held, never read; see `reduce`
        self._replaced: list[Tensor | None] = []
        self._left: dict[int, tuple[Tensor, int]] = {}  # see `note_gradients`
        self._step: Step | None = None
        self._done: list[MicroBatch] = []

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass of the current micro-batch has reached the parameters."""
        return bool(self._touched)

    @property
    def has_rate(self) -> bool:
        """Whether a parameter group has a learning rate that is not 0."""
        return any(group.get("lr", 1.0) != 0.0 for group in self.optimizer.param_groups)

    @property
    def is_asked(self) -> bool:
        """Whether a rank has asked in this step for a repetition in the next one."""
        return any(
            self._sums[turn].is_asked for turn, is_reduced in self._active.items() if is_reduced
        )

    @property
    def carries_gradients(self) -> bool:
        """Whether gradients of earlier steps wait for `step()`."""
        return bool(self._carried)

    def all_parameters(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters, also those that do not require a gradient now."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def read_settings(self) -> Settings:
        """Return each group's settings that are plain values, such as the learning rate."""
        return [
            {name: value for name, value in group.items() if isinstance(value, int | float | tuple)}
            for group in self.optimizer.param_groups
        ]

    def refresh(self) -> list[nn.Parameter]:
        """Follow parameters that were frozen, unfrozen or added since the last step.

        Returns:
            Those that are trained now; empty if nothing has changed.

        Raises:
            ConfigError: A parameter is not float32, or not dense in memory.
        """
        every = self.all_parameters()
        # By identity, since == of two tensors compares their values.
        if len(every) == len(self.parameters) and all(map(operator.is_, every, self.parameters)):
            return []
        # A loop may freeze and unfreeze in each micro-batch, so what was trained once stays: GANs do.
        known = set(self.parameters)
        parameters = [each for each in every if each.requires_grad or each in known]
        if list(map(id, parameters)) == list(map(id, self.parameters)):
            return []
        for parameter in parameters:
            _check(parameter)
        self.parameters = parameters
        self._sums = {}
        return parameters

    def begin_step(self, step: Step) -> None:
        """Start a step."""
        self._step = step
        self._done = []
        self._active = {}
        self._totals = {}
        self.num_calls = 0
        self.is_pending = False
        self._void, self.settings, self.set_first = set(), self.read_settings(), []

    def begin(self) -> None:
        """Start a micro-batch."""
        self.is_closed = False
        self._touched = set()
        self._dropped = set()
        self._replaced = []
        self._left = {}
        self.set_at_step = []
        for parameter in self.parameters:
            parameter.grad = None

    def take(self, parameter: Tensor, turn: int, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """Take a parameter's gradient of the current backward pass.

        Args:
            parameter: The parameter, of any shape.
            micro_batch: The micro-batch; the gradient of one with weight 0 is dropped.
        """
        if self.is_closed:
            return
        self._touched.add(turn)
        if turn in self._void:
            return
        if turn not in self._active:
            self._activate(turn)
        if micro_batch.weight == 0.0:
            return
        total = self._sums[turn]
        if not total.is_open:
            total.begin_leaf(micro_batch)
        total.take(parameter, is_last=is_last)

    def end_backward(
        self, turn: int, micro_batch: MicroBatch, *, is_last: bool, asks: bool = False
    ) -> None:
        """End a backward pass, and in the last micro-batch send its gradients; `asks`: see `GradientSum.close_leaf`."""
        if turn in self._active:
            self._end_leaf(turn, micro_batch, asks=asks)
            if is_last and not self._active[turn]:
                self._start_reduce(turn, micro_batch)

    def note_gradients(self) -> None:
        """Note what a backward pass has left in `grad`, with its version, until the loop has called `step()`."""
        gradients = [] if self.is_closed else [each.grad for each in self.parameters]
        self._left = {id(each): (each, each._version) for each in gradients if each is not None}

    def changed_by_hand(self, *, in_place: bool) -> list[nn.Parameter]:
        """Return the parameters whose `grad` is none that the last backward pass has left, or is `in_place` changed."""
        given = [(each, each.grad) for each in self.parameters if each.grad is not None]
        return [
            parameter
            for parameter, now in given
            if id(now) not in self._left or (in_place and self._left[id(now)][1] != now._version)
        ]

    def reduce(self, turn: int) -> None:
        """Sum the gradients of a backward pass over all ranks, and set `grad`, unless that is done."""
        if self._active.get(turn, True):
            return
        self._active[turn] = True
        with self._world.activity.waiting("reducing gradients"):
            gradients = self._sums[turn].reduce()
        for parameter, gradient in gradients:
            if gradient is None:
                continue
            total = self._totals.get(parameter, self._carried.get(parameter))
            self._totals[parameter] = gradient if total is None else gradient.add_(total)
        # Freed as late as `zero_grad()` frees them in a usual loop: otherwise the allocator returns them to the system,
        # and the page faults of the next gradients take a tenth of ResNet-18's backward pass.
        self._replaced += [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = self._totals.get(parameter, self._carried.get(parameter))

    def complete(self, micro_batch: MicroBatch) -> None:
        """Sum what no backward pass of the last micro-batch has summed, for a loop that skips some."""
        for turn, is_reduced in list(self._active.items()):
            if not is_reduced:
                self._end_leaf(turn, micro_batch)
                self._start_reduce(turn, micro_batch)
                self.reduce(turn)

    def close(self, micro_batch: MicroBatch) -> None:
        """End the micro-batch: rounds that it did not have count as zero.

        Raises:
            TrainError: The loop has dropped gradients of a backward pass in an earlier micro-batch, and not here; or it
                adds to those that a checkpoint does not hold.
        """
        if self.lacks_gradients:
            raise fault("lost")
        if self._void & self._touched - self._dropped:
            raise fault("unequal drops")
        for turn in self._active:
            self._end_leaf(turn, micro_batch)
        if micro_batch.weight > 0.0:
            self._done.append(micro_batch)

    def keep_gradients(self) -> None:
        """Set `grad` to None until the optimizer acts: the loop may have clipped or unscaled them in place."""
        self._totals = {
            parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None
        }
        for parameter in self.parameters:
            parameter.grad = None

    def restore_gradients(self) -> None:
        """Set `grad` to what `keep_gradients` kept."""
        for parameter in self.parameters:
            parameter.grad = self._totals.get(parameter)

    def drop_gradients(self) -> None:
        """Drop what the current micro-batch has given so far.

        Raises:
            TrainError: The loop has not done so in an earlier micro-batch of the step.
        """
        self.forget_gradients()
        self._left = {}
        for turn in self._touched:
            if turn in self._active and self._done:
                raise fault("unequal drops")
            self._active.pop(turn, None)
            self._totals = {}
        self._void |= self._touched
        self._dropped |= self._touched

    def forget_gradients(self) -> None:
        """Drop those of steps in which `step()` was not called."""
        self._carried = {}
        self.lacks_gradients = False

    def end_step(self) -> None:
        """Keep the gradients of a step in which `step()` was not called: the next step's are added to them."""
        self._carried = (
            {} if self.num_calls else {p: total.clone() for p, total in self._totals.items()}
        )

    def check_settings(
        self,
        step: Step,
        *,
        is_last: bool = False,
        is_first_step: bool = False,
        counts_steps: bool = False,
    ) -> None:
        """Check at the end of a micro-batch that the loop has set what it set in the step's first one.

        In the last one it stays, as what a usual loop sets once a step. Before that, it is undone.

        Args:
            is_first_step: Whether it is the first one of an iteration: what follows from its number may not be set yet.
            counts_steps: Whether the script counts steps: it may set another value in the last one, for the next step,
                or in the last one only.
        """
        # torch's mark of a scheduler on the optimizer that it was made for: it moves on even if its change is undone.
        is_scheduled = self.is_followed or hasattr(self.optimizer.step, "_wrapped_by_lr_sched")
        first = self.settings if is_scheduled else self.set_first
        seen = self.read_settings() if is_scheduled else [*self.set_at_step, *self.read_settings()]
        self.set_first = self.set_first or seen
        if is_last and counts_steps:
            first = first[: len(self.set_at_step)]
            first = [] if first == self.settings else first
        elif not (is_last or is_first_step or is_scheduled) and self.set_at_step == self.settings:
            # what is set for the next step is set in the last one
            first = [*self.settings, *self.settings]
        for before, now in zip(first if not (is_last and is_scheduled) else (), seen, strict=False):
            name = next((name for name in now if before.get(name) != now[name]), "")
            if name:
                kind = "schedule" if is_scheduled else "setting"
                num = len(step.micro_batches)
                raise fault(
                    kind,
                    step=step.number,
                    num=num,
                    name=name,
                    before=before.get(name),
                    now=now[name],
                )
        for settings, before in zip(
            self.optimizer.param_groups, [] if is_last else self.settings, strict=False
        ):
            settings.update(before)

    def check_gradients(self, step: Step) -> None:
        """Check before the optimizer acts that it has gradients, and only those that were summed over the ranks."""
        every = self.all_parameters()
        if (self._totals or self._void) and all(each.grad is None for each in every):
            raise fault("no gradient", step=step.number)
        if len(every) > len(self.parameters):
            known = set(self.parameters)
            strays = [each for each in every if each.grad is not None and each not in known]
            if strays:
                raise fault("unfrozen", shape=tuple(strays[0].shape), step=step.number)

    def norms(self) -> list[Tensor]:
        """Return the 2-norm of each round's gradient over all ranks, 0-d tensors."""
        return [self._sums[turn].norm for turn, is_reduced in self._active.items() if is_reduced]

    def _activate(self, turn: int) -> None:
        assert self._step is not None
        if turn not in self._sums:
            number = 1 + turn * self._num_optimizers + self._number  # 0 is that of the buffers
            self._sums[turn] = GradientSum(self.parameters, self._world, number)
        self._sums[turn].start_step(self._step)
        self._active[turn] = False
        for micro_batch in self._done:
            self._sums[turn].skip_leaf(micro_batch)

    def _end_leaf(self, turn: int, micro_batch: MicroBatch, *, asks: bool = False) -> None:
        total = self._sums[turn]
        if micro_batch.weight == 0.0:
            return
        if total.is_open:
            total.close_leaf(asks=asks)
        elif total.next_leaf <= micro_batch.index:
            total.skip_leaf(micro_batch)

    def _start_reduce(self, turn: int, micro_batch: MicroBatch) -> None:
        total = self._sums[turn]
        joined = (
            self.buffers.join(turn, micro_batch)
            if self.buffers is not None and total.can_join
            else None
        )
        total.start_all(joined)


def _check(parameter: nn.Parameter) -> None:
    shape = tuple(parameter.shape)
    if str(parameter.dtype) != "torch.float32":
        raise ConfigError(
            f"a parameter of shape {shape} is {parameter.dtype}",
            allowed="float32",
            fix="Keep the weights in float32, and use torch.autocast for 16 bits.",
        )
    if not is_dense(parameter):
        raise ConfigError(
            f"a parameter of shape {shape} has gaps in memory", fix="Make it with .contiguous()."
        )
