"""The engine inside a loop of the user: what happens before, during and after the body of the loop.

One step with two micro-batches on this rank, seen from the loop (`loader` calls `begin`):

    begin        seed by the micro-batch's key, buffers and gradients as at the start of the step
      forward, loss.backward()      hooks move the gradients into the tree
      optimizer.step()              nothing: the step has a micro-batch more
    begin
      forward, loss.backward()      hooks as above; at its end `p.grad` is the mean over the global batch, on all ranks
      clipping, unscaling           the user's, on these gradients
      optimizer.step()              buffers are summed, the optimizer acts, `sync_gradients` work such as schedulers too

Exactness rests on these rules. Every micro-batch of a step sees the same weights, buffers and random numbers, whichever
rank runs it and after whichever other one. All ranks run the loop's body equally often: a rank with fewer micro-batches
repeats one of another rank with weight 0, and what that gives is dropped, once its bits are compared (`idle.py`).
Several optimizers act together, after the last of them was called: otherwise the last micro-batch would see weights
that the others did not (ADR 41).
"""

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samebits.cluster import collectives
from samebits.cluster.activity import COMPUTING, READING
from samebits.cluster.world import World
from samebits.data import loader as data_loader
from samebits.data.order import MicroBatch, Step
from samebits.data.seeding import seed_between, seed_forward
from samebits.errors import ConfigError
from samebits.own_loop.gradients import Trained
from samebits.own_loop.guard import fault, script_line
from samebits.own_loop.habits import Habits, RepeatCheck
from samebits.own_loop.idle import IdleSlots
from samebits.own_loop.samples import warn_of_share
from samebits.own_loop.state_sum import BufferSum
from samebits.own_loop.weights import AverageWatch, OutsideNorms, WeightGuard
from samebits.portable.scripts import check_schedulers, own_kernels

_UPDATE = 1 << 34  # part of the key of random numbers in the update


# Weak, since the patch below stays for the life of the process.
_LOOPS: "weakref.WeakSet[ExactLoop]" = weakref.WeakSet()


class LoopObserver(Protocol):
    """Sees what each loop of this process computes, and may end the script after some steps."""

    settings: dict[str, int]  #: The arguments of `exact()` that decide on the result.
    is_over: bool  #: Whether it has ended the script.
    has_moved: bool  #: Whether a step has changed a parameter.

    def batch(self, micro_batch: MicroBatch, inputs: Any) -> None:
        """Note a micro-batch of this rank, before its forward pass."""

    def step(self) -> None:
        """Note what a step has changed."""


#: Makes the observer of a loop, given its modules and optimizers. `samebits check` and `gate` set it in the process
#: of a script, before they run it.
observe: Callable[[World, Sequence[nn.Module], Sequence[Optimizer]], LoopObserver] | None = None


class ExactLoop:
    """The state of an exact loop in one process. Making one is a collective call: rank 0's weights go to all ranks.

    Args:
        check_finite: Raise an error if a step's gradient is not finite.

    Attributes:
        check_finite: As above; False with a GradScaler, which does its own.
        step: Number of steps done.
        is_last: Whether the current micro-batch is the last one of its step on this rank.
        has_acted: Whether the optimizers have acted in the current micro-batch.
        habits: What the script does in its loop.
        repeat: Compares repeated micro-batches.
        modules: The models.
        unchecked: Optimizers and what follows them, until the first iteration has looked at their state.
        observer: Records the steps for `samebits check` or `gate`; None: the script runs without them.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[tuple[Optimizer, Callable[[], Any]]],
        world: World,
        *,
        seed: int,
        check_finite: bool = True,
    ) -> None:
        self._world = world
        self._seed = seed
        self.check_finite = check_finite
        self.modules = list(modules)
        self._trained = [
            Trained(optimizer, act, number, len(optimizers), world)
            for number, (optimizer, act) in enumerate(optimizers)
        ]
        tensors = [
            tensor for module in modules for tensor in (*module.parameters(), *module.buffers())
        ]
        # An optimizer may also train parameters outside of the modules, such as a learned temperature.
        tensors += [
            parameter for trained in self._trained for parameter in trained.all_parameters()
        ]
        collectives.broadcast_tensors(world, list(dict.fromkeys(tensors)))
        self._buffers = BufferSum(modules, world)
        if len(self._trained) == 1:
            self._trained[0].buffers = self._buffers
        self._owners: dict[nn.Parameter, Trained] = {}
        self._round = 0
        self._is_backward = False
        self._step: Step | None = None
        self._current: MicroBatch | None = None
        # iterators of other DataLoaders, with the micro-batch that has read them first
        self._others: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()
        self._after: list[Callable[[], Any]] = []
        plain = [each for each, _ in optimizers]
        self.unchecked: list[Any] = [*plain]
        self.observer = None if observe is None else observe(world, modules, plain)
        self._seeded: Tensor | None = (
            None  # torch's random state at the start of a body, until its forward pass
        )
        self._drawn: Tensor | None = (
            None  # that after the last backward pass, in a step with a repetition
        )
        # a script may compile its whole step
        self._end_pass = torch.compiler.disable(self._end_backward)
        self._nodes: list[Node] = []  # those that add to the parameters' gradients
        self.step = 0
        self.is_last = self.has_acted = False
        self.habits = Habits()
        self.repeat = RepeatCheck()
        self._idle = IdleSlots(world)
        self._refresh()
        self._guard = WeightGuard(modules, plain, self._owners.__contains__)
        self._averages = AverageWatch(self.modules, self._owners.__contains__)
        self._outside = OutsideNorms(self.modules)
        self._guard.drop_unowned(warns=world.is_main)
        self._guard.begin_step(with_values=False)  # for `find_loaded`
        self._num_threads = torch.get_num_threads()
        _LOOPS.add(self)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._world.is_main

    @property
    def carries_gradients(self) -> bool:
        """Whether gradients of earlier steps wait for `step()`: a position does not hold them."""
        return any(trained.carries_gradients for trained in self._trained)

    def lose_gradients(self) -> None:
        """Note that the loop continues where gradients waited for `step()`, without them."""
        for trained in self._trained:
            trained.lacks_gradients = True

    @property
    def is_inside(self) -> bool:
        """Whether a micro-batch is running."""
        return self._current is not None

    def begin(self, step: Step, micro_batch: MicroBatch, inputs: Any = None) -> None:
        """Start a micro-batch, after the end of the one before.

        Args:
            step: The step, with all micro-batches of this rank, padded.
            micro_batch: One of them, in order.
            inputs: What the loop gets, for the observer.

        Raises:
            TrainError: The loop changed weights or a learning rate within a step, or called `optimizer.step()` in some
                micro-batches of the step before only.
        """
        self.habits.end_body(self._round)
        self._finish()
        if torch.get_num_threads() != self._num_threads:
            raise fault("threads", now=torch.get_num_threads(), before=self._num_threads)
        if self._step is not step:
            self._begin_step(step)
        else:
            self._buffers.drop_changes()
            for trained in self._trained:
                trained.check_settings(step, is_first_step=self.habits.is_first_step)
            self._guard.check(step.number)
            self._averages.check(step.number)
        for trained in self._trained:
            trained.begin()
        self._round = 0
        self.habits.num_forwards = 0
        self._current = micro_batch
        self._drawn = None
        self._guard.micro_batch = micro_batch
        self.repeat.begin(step, micro_batch, inputs)
        self._idle.begin(step, micro_batch)
        self._outside.begin(looks=self.repeat.is_fresh and micro_batch is step.micro_batches[0])
        self.is_last = micro_batch is step.micro_batches[-1]
        self.has_acted = False
        seed_forward(micro_batch.forward_key, self._world.device)
        if self.habits.is_first_step:
            self._seeded = torch.get_rng_state()
        if self.observer is not None:
            self.observer.batch(micro_batch, inputs)
        self._world.activity.is_paused = False
        self._world.activity.enter(COMPUTING)

    def finish(self) -> None:
        """End the current micro-batch, and with its last one the step. Does nothing if none is running."""
        if self._finish():
            # What is drawn between steps must not depend on the micro-batches that this rank had.
            seed_between(self._world.device, self._seed, self.step, 1 << 32)

    def _finish(self) -> bool:
        """End the current micro-batch; return whether it was its step's last one."""
        if self._current is None:
            return False
        if not all(trained.is_closed for trained in self._trained):
            self._close()
        if self.is_last and not self.has_acted:
            assert self._step is not None
            self.habits.check_calls(self._trained, self._step)
            for trained in self._trained:
                trained.complete(self._current)
            self._act()
        if self.is_last:
            self._end_step()
        self._current = self._guard.micro_batch = None
        self._world.activity.enter(READING)
        return self.is_last

    def _end_step(self) -> None:
        assert self._step is not None
        if (
            self.habits.num_forwards
        ):  # after the update: before it they were counted as those of the body
            self._buffers.drop_changes()
        for trained in self._trained:
            trained.check_settings(self._step, is_last=True, counts_steps=self.habits.counts_steps)
        self.habits.end_step(self._trained, self._step)

    def leave(self) -> None:
        """Leave the loop, also in the middle of a step, which is then dropped."""
        self._current = self._step = self._guard.micro_batch = None
        self._averages.end_pass()
        self.habits.num_forwards = 0
        self._world.activity.is_paused = True
        self._world.activity.enter("between epochs")

    def look(self) -> None:
        """Note that the script looks at the position in steps."""
        if self.is_inside:
            self.habits.look()

    def place(self) -> tuple[int, int] | None:
        """Return how many micro-batches of the current step have begun on this rank, and how many it has."""
        if self._step is None or self._current is None:
            return None
        bodies = self._step.micro_batches
        return 1 + next(i for i, each in enumerate(bodies) if each is self._current), len(bodies)

    def find_loaded(self) -> str:
        """Return what is not as a new run begins before the first step of this loop; empty if all is."""
        if any(trained.optimizer.state for trained in self._trained):
            return "the optimizer has a state of earlier steps"
        return (
            "weights were loaded or changed after exact()"
            if self._guard.with_other_versions()
            else ""
        )

    @property
    def order(self) -> str:
        """The names of the parameters in the order of the optimizers; the shape of one that no module has."""
        named = {each: name for module in self.modules for name, each in module.named_parameters()}
        every = (each for trained in self._trained for each in trained.all_parameters())
        return ", ".join(named.get(each, str(tuple(each.shape))) for each in every)

    def on_forward(self, module: nn.Module) -> None:
        """Note that the script calls a module: progress, for the hang detector."""
        self._world.activity.num_beats += 1
        if not self.is_inside:
            self.habits.raise_fault()
        elif module.training and torch.is_grad_enabled():
            self.habits.num_forwards += 1
            if self._seeded is not None:
                self.habits.has_drawn |= not torch.equal(self._seeded, torch.get_rng_state())
                self._seeded = None

    def state(self) -> dict[str, Tensor]:
        """Return all that a step changes, by name: weights and buffers, and the optimizers' state; of any shape."""
        named = {
            f"{number}.{name}" if number else name: tensor
            for number, module in enumerate(self.modules)
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        for number, trained in enumerate(self._trained):
            for index, parameter in enumerate(trained.all_parameters()):
                for name, value in trained.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        named[f"optimizer {number}, parameter {index}: {name}"] = value
        return named

    def note_follower(self, follower: object) -> None:
        """Note what acts once a step: it may be a scheduler, which keeps its optimizer."""
        self.unchecked.append(follower)
        for trained in self._trained:
            trained.is_followed |= any(
                each is trained.optimizer for each in getattr(follower, "__dict__", {}).values()
            )

    def after_update(self, work: Callable[[], Any], kind: str = "", name: str = "") -> Any:
        """Call a function once a step: at once if the optimizers have acted, and return its result; later, or never."""
        if (place := self.place()) is not None:
            self.habits.on_follow(kind, name, place[0] - 1)
        if not self.is_inside or self.has_acted:
            return work()
        if self.is_last:
            self._after.append(work)
        return None

    def on_step(self, number: int, *, is_skipped: bool = False) -> None:
        """Note that the loop has called `step()` of an optimizer.

        `is_skipped`: its gradients are not to be applied, on any rank.
        """
        assert self._current is not None
        assert self._step is not None
        trained = self._trained[number]
        if trained.is_closed:
            raise fault("second step", kind=type(trained.optimizer).__name__)
        # In the last one `grad` is the mean over the step, and the loop may put a function of it in its place.
        by_hand = trained.changed_by_hand(in_place=False)
        if by_hand and not (self.is_last and trained.has_gradients):
            raise fault("by hand", step=self._step.number, shape=tuple(by_hand[0].shape))
        # A forward pass that is only measured may draw random numbers: it changes no gradient.
        has_drawn = self._drawn is not None and not torch.equal(self._drawn, self._random_state())
        if has_drawn and trained.changed_by_hand(in_place=True):
            raise fault("noise", step=self._step.number)
        trained.is_closed = self.habits.has_trained = True
        trained.note_gradients()
        trained.num_calls += 1
        trained.set_at_step = trained.read_settings()
        if self.is_last:
            self.habits.check_calls([trained], self._step)
            trained.complete(self._current)
            trained.is_pending = not is_skipped
        if not all(each.is_closed for each in self._trained):
            if self.is_last:
                trained.keep_gradients()
            return
        self._close()
        if self.is_last:
            self._act()

    def on_skipped_step(self, optimizer: Optimizer) -> None:
        """Note that a GradScaler has left a step out, on all ranks; nothing to do if it has not."""
        number = next(
            number for number, trained in enumerate(self._trained) if trained.optimizer is optimizer
        )
        if not self._trained[number].is_closed:
            self.on_step(number, is_skipped=True)

    def on_zero_grad(self, number: int) -> None:
        """Note that the loop has called `zero_grad()` of an optimizer: gradients before it do not count."""
        trained = self._trained[number]
        if not self.is_inside:
            trained.forget_gradients()
        elif not trained.is_closed:  # otherwise it is the usual call after step()
            trained.drop_gradients()

    def on_module_zero_grad(self, module: nn.Module) -> None:
        """Note that the loop has called `zero_grad()` of a module, as `on_zero_grad`."""
        named = set(module.parameters())
        for number, trained in enumerate(self._trained):
            if named.isdisjoint(trained.parameters):
                continue
            if (
                self.is_inside
                and trained.has_gradients
                and not named.issuperset(trained.parameters)
            ):
                raise fault("part")
            if not self.is_inside or trained.has_gradients:
                self.on_zero_grad(number)

    def _begin_step(self, step: Step) -> None:
        self._guard.begin_step(with_values=self.habits.is_first_step or self.observer is not None)
        if self.habits.is_first_step and own_kernels() == "portable":
            check_schedulers(each.optimizer for each in self._trained)
        self._step = step
        self._after = []
        self.habits.begin_step()
        self._refresh()
        for trained in self._trained:
            trained.begin_step(step)
        self._buffers.begin_step(step)
        self._world.activity.begin_step(step.number, self._world.device)

    def _refresh(self) -> None:
        for trained in self._trained:
            for parameter in trained.refresh():
                is_new = parameter not in self._owners
                if self._owners.setdefault(parameter, trained) is not trained:
                    raise ConfigError(
                        f"a parameter of shape {tuple(parameter.shape)} is in two optimizers",
                        fix="Give each to one optimizer. One that wraps another, as SAM does, is not exact.",
                    )
                if is_new:
                    # Before the node that adds to `grad`, not before the tensor: torch.autograd.grad() adds nothing.
                    # torch itself keeps the node, and so its hook, only as long as a graph has it.
                    self._nodes.append(get_gradient_edge(parameter).node)
                    self._nodes[-1].register_prehook(partial(self._forget, parameter))
                    parameter.register_post_accumulate_grad_hook(partial(self._take, trained))

    def _forget(self, parameter: nn.Parameter, _: Sequence[Tensor]) -> None:
        if self._current is not None:
            # A second backward pass would otherwise add to the sum of the first one.
            parameter.grad = None

    def _take(self, trained: Trained, parameter: Tensor) -> None:
        if self._current is None:
            return  # a backward pass outside of the loop
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise fault("graph", step=self.step)
        if not self._is_backward:
            self._is_backward = True
            # as in torch's FSDP
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        self.repeat.take(parameter, self._round)
        self._idle.take(parameter.grad)
        trained.take(parameter, self._round, self._current, is_last=self.is_last)

    def _end_backward(self) -> None:
        """End a backward pass: torch calls it after the last hook."""
        assert self._current is not None
        assert self._step is not None
        self.habits.on_backward()
        self._outside.check(self._step.number)
        self._is_backward = False
        self._buffers.take(self._round, self._current)
        self.repeat.note((self._round, self.habits.num_forwards))
        asks = self.repeat.asks(self._current)
        for trained in self._trained:
            trained.end_backward(self._round, self._current, is_last=self.is_last, asks=asks)
        if self.is_last:  # buffers before the wait for gradients, and in this order on all ranks
            self._buffers.start_reduce(self._round + 1)
            for trained in self._trained:
                trained.reduce(self._round)
        # With a single micro-batch and its repetition, the search for averages would cost more than both.
        if not self.is_last and len(self._step.micro_batches) > 1 + self.repeat.is_looking:
            self._averages.begin()
        for trained in self._trained:
            trained.note_gradients()
        self._drawn = self._random_state() if self.repeat.is_looking else None
        self._round += 1

    def on_other_read(self, reader: _BaseDataLoaderIter) -> None:
        """Note that the script reads a batch of another DataLoader, by its iterator.

        One that is read in a single micro-batch, such as that of a validation, gives each micro-batch the same.
        """
        if reader not in self._others:
            warn_of_share(reader)
            self._others[reader] = self._current
        if self._current is not None and self._others[reader] is not self._current:
            self.repeat.note_other(script_line())

    def seed_update(self) -> None:
        """Seed what a framework or an optimizer draws after the last backward pass of a step, equally on all ranks."""
        assert self._step is not None
        self._drawn = None
        seed_between(self._world.device, self._seed, self._step.number, _UPDATE)

    def _random_state(self) -> Tensor:
        """Return the state of torch's generators, (N,)."""
        states = [torch.get_rng_state()]
        if self._world.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._world.device))
        return torch.cat(states)

    def _close(self) -> None:
        """End the micro-batch's forward and backward passes."""
        assert self._current is not None
        self.repeat.end()
        for trained in self._trained:
            trained.close(self._current)
        self._buffers.end(self._current)

    def _act(self) -> None:
        """Update buffers and weights, with all that follows the optimizers."""
        assert self._step is not None and self._current is not None  # noqa: PT018
        step = self._step
        self._world.activity.end_work(sum(each.weight > 0.0 for each in step.micro_batches))
        self._buffers.finish_reduce(self._current)
        self.habits.num_forwards = 0
        self._guard.check(step.number)
        self._world.activity.end_wait()
        norms = (
            [norm for trained in self._trained for norm in trained.norms()]
            if self.check_finite
            else []
        )
        # One transfer for the norms of all optimizers.
        is_finite = not norms or all(map(math.isfinite, torch.stack(norms).tolist()))
        self._idle.end_step(step, is_finite=is_finite)
        if not is_finite:
            raise fault("not finite", step=step.number, epoch=step.epoch)
        self.repeat.is_asked = any(trained.is_asked for trained in self._trained)
        self.seed_update()
        has_rate = False
        for trained in self._trained:
            if trained.is_pending:
                if len(self._trained) > 1:
                    trained.restore_gradients()
                trained.check_gradients(step)
                has_rate |= trained.has_rate
                trained.act()
            trained.end_step()
        has_moved = self._guard.has_moved()
        if self.observer is not None:
            self.observer.has_moved |= has_moved
        if has_rate and not has_moved and self._world.is_main:
            warnings.warn(
                f"step {step.number:,} changed no parameter: the loss does not depend on them, or its gradient is zero",
                stacklevel=2,
            )
        self.has_acted = True
        self.step = step.number + 1
        for work in self._after:
            work()
        self._after = []
        if self.observer is not None:
            self.observer.step()
        self._world.activity.enter("the loop's code after the update")


_next_plain = _BaseDataLoaderIter.__next__


def _next_noted(self: _BaseDataLoaderIter) -> Any:
    """Return the next batch of a DataLoader; if the script reads it, its exact loops note that."""
    batch = _next_plain(self)
    if sys._getframe(1).f_globals is not vars(data_loader):  # that of the exact loader itself
        for loop in list(_LOOPS):
            loop.on_other_read(self)
    return batch


# For every DataLoader of the process: iterators that were made before `exact` too.
_BaseDataLoaderIter.__next__ = _next_noted  # type: ignore[method-assign]
