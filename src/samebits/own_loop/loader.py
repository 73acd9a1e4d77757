"""The loader of an exact loop: this rank's micro-batches of one epoch, in the exact order."""

import zlib
from collections.abc import Iterator, Mapping
from itertools import tee
from typing import Any, TypeVar

from samebits.cluster.world import World
from samebits.data.loader import requests_of
from samebits.data.order import Order
from samebits.data.seeding import preserved
from samebits.errors import CheckpointError, TrainError
from samebits.own_loop.current import check_equal_state
from samebits.own_loop.ending import Iteration, check_start
from samebits.own_loop.guard import fault, script_line
from samebits.own_loop.optimizer import follow
from samebits.own_loop.samples import LoaderSource
from samebits.own_loop.session import ExactLoop
from samebits.own_loop.text import carried_into_loss

POSITION = "step"
ORDER = "parameters"  # a checksum of the parameters' names in the order of the optimizers
CARRIED = (
    "has_gradients"  # only in a position at which gradients of earlier steps wait for `step()`
)
FollowerT = TypeVar("FollowerT")


def content_of(order: Order) -> dict[str, int]:
    """Return what decides the samples of each step, for a checkpoint."""
    return {
        name: getattr(order, name)
        for name in ("seed", "global_batch", "micro_batch", "num_samples")
    }


def check_content(
    state: Mapping[str, Any], order: Order, what: str, fix: str, where: object = None
) -> None:
    """Check that the state in a checkpoint belongs to the same data, batch sizes and seed.

    Args:
        what, fix, where: The problem, what to do, and the checkpoint, for the error.

    Raises:
        CheckpointError: It does not.
    """
    here = content_of(order)
    other = [
        f"{name}: {state.get(name)} there, {here[name]} here"
        for name in here
        if state.get(name) != here[name]
    ]
    if other:
        raise CheckpointError(what, given="\n".join(other), where=where, fix=fix)


class ExactLoader:
    """Iterates over this rank's micro-batches of an epoch. The next iteration is the next epoch.

    All ranks run equally many micro-batches; a rank with fewer repeats one of another, and drops what it gives.
    An iteration in which nothing is trained, such as a look at the first batch, does not move the position.

    Args:
        source: The samples and how to read them.
        order: The order of the samples.
        loop: The engine.
        world: The ranks.
        num_workers: DataLoader workers of each rank.

    Attributes:
        loop: The engine.
        is_padding: Whether the current micro-batch is a repeated one, whose results do not count.
    """

    def __init__(
        self, source: LoaderSource, order: Order, loop: ExactLoop, world: World, num_workers: int
    ) -> None:
        self._source = source
        self._order = order
        self.loop = loop
        self._world = world
        self.is_padding = False
        self._epoch = 0
        self._is_loaded = (
            False  # whether a loaded position has not been compared with the loop's epochs
        )
        self._is_positioned = False  # whether the script has set where training begins
        self.current_pass: Iteration | None = None
        self._set_epoch = 0 if source.sampler is None else source.sampler.epoch
        self.dataset = source.samples.dataset
        self.batch_size = order.micro_batch
        self.num_workers = num_workers
        self.collate_fn = source.collate_fn
        self.drop_last = order.drop_last

    @property
    def sampler(self) -> Any:
        """What has the `set_epoch` that scripts call: the DataLoader's DistributedSampler, or this loader."""
        return self if self._source.sampler is None else self._source.sampler

    def __len__(self) -> int:
        """Return the number of steps of an epoch, which does not depend on the number of ranks.

        An iteration has more micro-batches than that, unless the ranks are as many as a step's micro-batches.
        """
        return self._order.steps_per_epoch

    @property
    def step(self) -> int:
        """Number of steps done, over all epochs."""
        # A script that reads the position counts steps, which `habits` has to know.
        self.loop.look()
        return self.loop.step

    @property
    def epoch(self) -> int:
        """Epoch of the current or next iteration, from 0."""
        return self._epoch

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last one of its step: the one in which the optimizer acts."""
        self.loop.look()
        return self.loop.is_last

    def per_step(self, follower: FollowerT) -> FollowerT:
        """Let an object act once a step, as in `exact(per_step=[...])`: a scheduler that is made from `len(loader)`.

        Returns:
            The same object.
        """
        follow(follower, self.loop)
        return follower

    @property
    def micro_batches_per_epoch(self) -> int:
        """Number of micro-batches that an iteration over a whole epoch has on each rank."""
        steps = self._order.steps(self._world, stop=self._order.steps_per_epoch)
        return sum(map(self.loop.repeat.num_bodies, steps))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from 0. A position within it, set by a resume, is kept.

        Raises:
            TrainError: The loop counts from 0 after a resume, so it would train an epoch again.
        """
        if self._is_loaded and epoch < self._epoch:
            raise TrainError(
                f"set_epoch({epoch}) goes back to an epoch that is done",
                given=f"loader.epoch {self._epoch}, loader.step {self.loop.step:,}, after load_state_dict()",
                cause="The loop counts its epochs from 0 after a resume.",
                fix="Write: for epoch in range(loader.epoch, EPOCHS). "
                "To train these epochs again, do not load the loader's state.",
            )
        begin = epoch * self._order.steps_per_epoch
        self.loop.step = max(self.loop.step, begin) if epoch == self._epoch else begin
        self._epoch = epoch
        self._is_loaded = False
        self._is_positioned = True

    def state_dict(self) -> dict[str, int]:
        """Return the position, for a checkpoint: the number of steps done, and what decides their content."""
        self.loop.look()
        return self.position()

    def position(self) -> dict[str, int]:
        """Return the same; for an integration, which does not count steps for the script."""
        names = zlib.crc32(self.loop.order.encode())
        position = {POSITION: self.loop.step, **content_of(self._order), ORDER: names}
        return {**position, CARRIED: 1} if self.loop.carries_gradients else position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the steps that were done, also at another number of ranks.

        `state` is a result of `state_dict`.

        Raises:
            CheckpointError: It belongs to other data or another batch size or seed, or is no position.
        """
        mine = self.state_dict()
        state = {ORDER: mine[ORDER], **state}  # older ones have none
        has_names = {*state, CARRIED} == {*mine, CARRIED}
        if (
            not has_names
            or not all(isinstance(each, int) for each in state.values())
            or state[POSITION] < 0
        ):
            raise CheckpointError(
                "the state of the loader is not one of an exact loader",
                given=str(dict(state))[:200],
                allowed=", ".join(mine),
                fix="Load the value of loader.state_dict().",
            )
        check_content(
            state,
            self._order,
            "the state of the loader belongs to another run",
            "Call exact() with the same data, global_batch, micro_batch and seed.",
        )
        if state[ORDER] != mine[ORDER]:
            raise fault("order", given=self.loop.order, there="where the checkpoint was saved")
        self.loop.step = int(state[POSITION])
        if CARRIED in state:
            self.loop.lose_gradients()
        self._epoch = self.loop.step // self._order.steps_per_epoch
        self._is_loaded = self._is_positioned = True

    def __iter__(self) -> Iterator[Any]:
        self.loop.habits.raise_fault()
        sampler = self._source.sampler
        if sampler is not None and sampler.epoch != self._set_epoch:
            self._set_epoch = sampler.epoch
            self.set_epoch(sampler.epoch)
        check_start(self.loop, self._is_positioned)
        if sampler is None or sampler.epoch == self._epoch:
            self._is_loaded = (
                False  # the loop counts as the loader does, so a later step back is meant
            )
        if len(self._source.samples) != self._order.num_samples:
            raise fault("length", now=len(self._source.samples), before=self._order.num_samples)
        per_epoch = self._order.steps_per_epoch
        # A loop that was left early continues with the next epoch, like a DataLoader.
        start = max(self.loop.step, self._epoch * per_epoch)
        stop = (self._epoch + 1) * per_epoch
        self.loop.finish()
        self._world.activity.is_paused = False
        repeat = self.loop.repeat
        every = repeat.repeated(self._order.steps(self._world, start=start, stop=stop))
        # `tee`: DataLoader workers are sent the requests ahead of the loop.
        steps, ahead = tee(every)
        loader = self._source.open(
            lambda: requests_of(ahead),
            self._world.device,
            num_ranks_here=self._world.num_ranks_here,
        )
        self.current_pass = current = Iteration(
            self.loop, start, stop, preserved(self._world.device)
        )
        try:
            for planned in steps:
                step = repeat.extended(planned)
                for micro_batch in step.micro_batches:
                    inputs = repeat.read(micro_batch, loader)
                    self.loop.begin(step, micro_batch, inputs)
                    if current.num_read == 0:
                        name, line = carried_into_loss(script_line())
                        if name:
                            raise fault("kept", name=name).with_slots(where=line)
                    self.is_padding = micro_batch.weight == 0.0
                    current.num_read += 1
                    yield inputs
                if step.number == start:  # not before it: a single rank may look at the first batch
                    self.loop.finish()
                    check_equal_state(self.loop, self._world)
            self.loop.finish()
            current.is_whole = True
            check_equal_state(self.loop, self._world)
        finally:
            loader.close()
            self.end_pass()
            self.loop.leave()

    def end_pass(self) -> None:
        """Judge the current iteration, which has ended. An error of one that was left is raised at the next use.

        Raises:
            TrainError: A whole pass has trained nothing.
        """
        current = self.current_pass
        self.current_pass = None
        if current is not None and current.end():
            self._epoch += 1
