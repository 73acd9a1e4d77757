"""A script without `samebits.exact`: what it has made, and the exact loop that starts at its first training iteration.

`worker.py` replaces a few functions and classes of torch, and calls the methods here::

    DataLoader, Optimizer, LRScheduler, DistributedDataParallel, ...   noted when they are made
    for batch in loader            the training DataLoader: `exact()` of what was noted, then its micro-batches
    loss.backward()                refused outside of that iteration

What it sees of the world: `seen_world.py`.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler

from samebits.cluster import collectives
from samebits.errors import ConfigError, TrainError
from samebits.frames import callers, is_user
from samebits.own_loop.current import current_world
from samebits.own_loop.ending import BATCH_SIZES
from samebits.own_loop.exact import exact
from samebits.own_loop.habits import RepeatCheck
from samebits.own_loop.loader import CARRIED, POSITION, ExactLoader
from samebits.own_loop.patched.decisions import decision
from samebits.own_loop.patched.found import followers, trained_modules
from samebits.own_loop.patched.loop_text import LoopText, makes_list, sets_training
from samebits.own_loop.patched.refuse import check_framework, refusal, user_line
from samebits.own_loop.patched.seen_world import CollectiveCheck, SeenWorld, say
from samebits.own_loop.samples import num_samples_of, order_of_sampler, source_of
from samebits.own_loop.session import ExactLoop
from samebits.storage.weights import weights_sha256


class Script:
    """The script of this process, with the batch sizes in the environment."""

    def __init__(self) -> None:
        self._global_batch, self._micro_batch, self.seed = map(
            int, os.environ[BATCH_SIZES].split(":")
        )  # 0: not given
        self.world = SeenWorld(self._global_batch // self._micro_batch if self._micro_batch else 0)
        self.collectives = CollectiveCheck(self.world)
        self.exact: ExactLoader | None = None  # made at the first training iteration
        self._data: DataLoader[Any] | None = None  # what is trained on
        self._read = "none"  # the one that was read last without being trained on
        self._models: list[nn.Module] = []
        self._backward = ""  # line of the last backward()
        self._loop: ExactLoop | None = None
        self._text: LoopText | None = None  # of the loop that has read the last batch
        self._decision = "", ""  # a number of that loop by which the script decides, and its line
        self._num_bodies = 0
        self._numbers_steps = False
        self._has_trained = False
        self.is_by_hand = False  # whether the script has an exact loop of its own
        self.has_loaded = False  # whether it has loaded the state of an optimizer
        self._skipped = 0  # the epoch that the loaded file has already
        self.record: dict[str, int] | None = None  # the position in the file that it has loaded
        # With their lines, in the order in which the script has made them, which is equal on all ranks.
        self._made: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def has_begun(self) -> bool:
        """Whether the training loop has."""
        return self.exact is not None or self.is_by_hand

    def note(self, part: Any) -> None:
        """Note an object that the script has made, with its line."""
        self._made[part] = user_line()
        # In the modules of the script only: torch.compile compares with Python's own.
        for module in [getattr(each, "__dict__", {}) for each in list(sys.modules.values())]:
            if is_user(str(module.get("__file__") or "<")):
                module.setdefault("enumerate", self.enumerate)

    def all_of(self, kind: type) -> list[Any]:
        """Return the objects of a class that the script has made."""
        return [part for part in self._made if isinstance(part, kind)]

    def length(self, data: DataLoader[Any]) -> int | None:
        """Return the number of steps of an epoch over a DataLoader to train on; None for any other."""
        is_other = self._data is not None and data is not self._data and not self._replaces(data)
        if (
            not self._micro_batch
            or is_other
            or not self._may_train_on(data)
            or not hasattr(data.dataset, "__len__")
        ):
            return None
        full, rest = divmod(num_samples_of(data), self._global_batch)
        return full + (rest > 0 and not getattr(data.batch_sampler, "drop_last", data.drop_last))

    def iterate(self, data: DataLoader[Any], plain: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the micro-batches of the DataLoader to train on; of any other its `plain` iteration."""
        if self.is_by_hand or type(data.dataset).__module__.startswith(
            "samebits."
        ):  # the engine's own
            return plain()
        is_other = self.exact is not None and data is not self._data
        if (
            is_other
            and self.exact is not None
            and self._replaces(data)
            and self._has_training_model()
        ):
            self.exact.replace_source(source_of(data))
            self._data = data
            is_other = False
        if is_other or not self._trains_on(data) or makes_list(callers(sys._getframe()), data):
            self._read = f"the DataLoader of {self._made.get(data)}"
            return self._others(data, plain())
        if self.exact is None:
            self.exact = self._start(data)
        self._follow(self.exact)
        if self._is_done(data):
            say(
                f"epoch {self._skipped} is in the loaded checkpoint already, and is not trained again"
            )
            return iter(())
        return SizedBatches(self._bodies(self.exact, user_line()), len(self.exact))

    def _replaces(self, data: DataLoader[Any]) -> bool:
        """Return whether the script has made a DataLoader in place of the one that is trained on, as in each epoch."""
        old = self._data
        is_alike = (
            old is not None
            and self._made.get(data) == self._made.get(old)
            and not self._is_inside()
        )
        return is_alike and all(
            part(data) == part(old)  # type: ignore[arg-type]
            for part in (num_samples_of, self._size_of, shuffles, lambda each: each.drop_last)
        )

    def _others(self, data: DataLoader[Any], batches: Iterator[Any]) -> Iterator[Any]:
        is_split = isinstance(data.sampler, DistributedSampler)
        begun = None
        for batch in batches:
            # Whole within a pass, as a batch to show is, it has the random numbers of that pass.
            begun = self._num_bodies if begun is None else begun
            is_read_along = self._is_inside() and (is_split or begun != self._num_bodies)
            if (
                is_read_along
                and torch.is_grad_enabled()
                and any(model.training for model in self._models)
            ):
                raise refusal("second", self._made.get(data, ""))
            yield batch

    def _bodies(self, loader: ExactLoader, line: str) -> Iterator[Any]:
        batches = iter(loader)
        habits = loader.loop.habits
        try:
            for batch in batches:
                if not self._has_trained:  # before that, it may look at a batch elsewhere
                    self._text = text = LoopText(callers(sys._getframe(1)), self._data)
                    self._numbers_steps = text.sets_rate or not text.divides
                    habits.ends_by_number = text.ends_by_number
                    if (
                        text.sets_rate
                        and text.divides
                        and self._num_bodies == 0
                        and self.world.rank == 0
                    ):
                        say(
                            f"enumerate() at {line} counts steps: a mean by it sums several passes of each"
                        )
                    self._decision = decision(callers(sys._getframe(1)))
                self._num_bodies += 1
                self.collectives.first = "", ""
                yield batch
                if not (self._has_trained or habits.num_forwards):
                    raise refusal("ahead", line)
        except TrainError as error:
            error.slots.setdefault("where", line)
            raise
        finally:
            # Here, not when the collector finds it: the loop judges an iteration where it is left.
            batches.close()  # type: ignore[attr-defined]  # a generator
            if (fault := loader.loop.habits.fault) is not None:
                fault.slots.setdefault("where", line)

    def enumerate(self, items: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        """Number items as Python's `enumerate()` does, but the passes of a step have the same number."""
        return (
            enumerate(items, start)
            if torch.compiler.is_compiling()
            else self._count(iter(items), start)
        )

    def _count(self, items: Iterator[Any], start: int) -> Iterator[tuple[int, Any]]:
        number = start - 1
        bodies = 0
        step = None
        for item in items:
            before = step
            step = self.exact.loop.step if self.exact is not None and self._is_inside() else None
            # What is numbered within a pass, or outside of the loop, reads no batches of it.
            reads_batches = self._numbers_steps and step is not None and self._num_bodies > bodies
            number += not reads_batches or step != before
            if reads_batches and self.exact is not None:
                self.exact.loop.habits.is_numbered = True
            bodies = self._num_bodies
            yield number, item

    def end(self) -> None:
        """Print the hash of the final weights and buffers on rank 0, by which runs are compared."""
        if self._loop is None:
            raise refusal("nothing")
        states = enumerate(module.state_dict() for module in self._loop.modules)
        named = (
            (f"{i}.{name}" if i else name, value)
            for i, state in states
            for name, value in state.items()
        )
        tensors = {name: value for name, value in named if isinstance(value, Tensor)}
        if self.world.rank == 0:
            say(f"{self._loop.step:,} steps done; weights sha256 {weights_sha256(tensors)}")

    def explain(self, error: Exception) -> None:
        """Add a note to an error of the script in the training loop, which may count on its own batch size."""
        if (
            self._data is not None
            and not self._has_trained
            and self._size_of(self._data) != self._micro_batch
        ):
            error.add_note(
                f"samebits: the DataLoader has batch_size={self._size_of(self._data)}, and the loop gets the "
                f"{self._micro_batch} samples of --micro-batch. If it counts on the former, give it batch_size="
                f"{self._micro_batch}."
            )

    @staticmethod
    def _size_of(data: DataLoader[Any]) -> int | None:
        return getattr(data.batch_sampler, "batch_size", data.batch_size)

    def begin_backward(self) -> None:
        """Check that a backward pass belongs to a body of the exact loop, and that a resume has a position."""
        if self.is_by_hand:
            return
        if self.exact is None or not self._is_inside():
            is_stage = self.exact is not None and self._read != "none"
            raise refusal("stage" if is_stage else "backward", user_line(), read=self._read)
        self._backward = user_line()
        if not self._has_trained and self._text is not None and self._text.counted_end:
            raise refusal("counted", self._text.counted_end, instead=self._text.instead)
        if not self._has_trained and self._decision[0]:
            raise refusal("decided", self._decision[1], number=self._decision[0])
        self._has_trained = True
        record = self.record
        self.record = None
        if (
            record is not None
            and self._belongs(record)
            and self.exact.position()["step"] < record["step"]
        ):
            raise refusal("weights", user_line(), **record, begin=self.exact.position()["step"])

    def _refuse_repeat(self) -> None:
        name, line = self.collectives.first
        if name:
            raise refusal("collective", line, part=name)
        raise refusal("carried", self._backward)

    def _belongs(self, record: dict[str, int]) -> bool:
        own = self.exact.position() if self.exact is not None else {}
        rest = {POSITION: 0, CARRIED: 0}
        return self.exact is not None and {**record, **rest} == {**own, **rest}

    def _is_done(self, data: DataLoader[Any]) -> bool:
        """Return whether the loaded file has the epoch that the script sets: some save the number of the last one."""
        epoch = getattr(data.sampler, "epoch", 0)
        record = self.record
        # Once: a look at a batch comes before the script sets the next epoch.
        if (
            epoch in (0, self._skipped)
            or record is None
            or not self._belongs(record)
            or self.exact is None
        ):
            return False
        is_done = (epoch + 1) * len(self.exact) <= record["step"]
        # One that is stepped after each epoch would be stepped twice.
        if is_done and self.all_of(LRScheduler):
            raise refusal("repeated", user_line(), epoch=epoch, **record)
        self._skipped = epoch
        return is_done

    def check_process(self, process: Any) -> None:
        """Check a process that the script starts itself: training in it would not be seen."""
        if self.exact is None and not self.is_by_hand and not process.daemon:
            raise refusal("process", user_line())

    def note_loop(self, loop: ExactLoop) -> None:
        """Note that an exact loop is made: by `samebits.exact` or an integration, if it is not the one made here."""
        self._loop = loop
        self.is_by_hand = self._data is None
        if self.is_by_hand and self._micro_batch:
            raise refusal("by hand", user_line())

    def check_collective(self, name: str, values: Sequence[Any], is_async: bool) -> bool:
        """Check a collective call of the script; see `CollectiveCheck.check`."""
        return self.exact is not None and self.collectives.check(
            name, values, self.exact.loop, self._models, is_async=is_async
        )

    def _is_inside(self) -> bool:
        return self.exact is not None and self.exact.loop.is_inside

    def _trains_on(self, data: DataLoader[Any]) -> bool:
        if not self._may_train_on(data):
            return False
        # Some loops call model.train() themselves, after they have read a batch.
        return self._has_training_model() or (
            torch.is_grad_enabled() and sets_training(callers(sys._getframe()))
        )

    def _has_training_model(self) -> bool:
        models = self._models or trained_modules(self.all_of(Optimizer))
        return torch.is_grad_enabled() and any(model.training for model in models)

    def _may_train_on(self, data: DataLoader[Any]) -> bool:
        # Some scripts shuffle on GPUs only.
        return (
            data is self._data or shuffles(data) or not any(map(shuffles, self.all_of(DataLoader)))
        )

    def _start(self, data: DataLoader[Any]) -> ExactLoader:
        check_framework()
        line = self._made.get(data, "")
        size = self._size_of(data)
        if not self._micro_batch or size not in (self._micro_batch, self._global_batch):
            name = "other size" if self._micro_batch else "no sizes"
            raise refusal(
                name,
                line,
                size=size,
                replicas=self.world.replicas,
                total=(size or 1) * self.world.replicas,
            )
        optimizers = self.all_of(Optimizer)
        self._models += trained_modules(optimizers)
        self._check_parts(
            [data, *optimizers, *(each for model in self._models for each in model.modules())]
        )
        self._data = data
        batches: dict[str, Any] = {
            "global_batch": self._global_batch,
            "micro_batch": self._micro_batch,
        }
        try:
            with self.world.launcher_environment():
                *_, loader = exact(self._models, optimizers, data, seed=self.seed, **batches)
        except ConfigError as error:
            error.slots.setdefault("where", line)
            raise
        loader.loop.repeat = RepeatCheck(self._refuse_repeat)
        if self.record is not None and self.has_loaded:
            loader.load_state_dict(self.record)
        # The loader compares with the sampler's epoch from here on; the script may have set it before.
        epoch = getattr(data.sampler, "epoch", 0)
        if epoch and (
            self.record is None or epoch >= loader.epoch
        ):  # otherwise `_is_done` judges it
            loader.set_epoch(epoch)
        if self.world.rank == 0:
            names = [
                ", ".join(type(each).__name__ for each in parts)
                for parts in (self._models, optimizers)
            ]
            number = f"{self.world.size} process{'es' if self.world.size > 1 else ''}"
            text = f"{self.world.replicas} micro-batches of {self._micro_batch} on {number}, seed {self.seed}"
            where = (
                f"trains {names[0]} by {names[1]} on the DataLoader of {line} (batch_size={size})"
            )
            say(f"global batch {self._global_batch}: {text}\n          {where}")
        return loader

    def _check_parts(self, parts: Sequence[Any]) -> None:
        for part in parts:
            if isinstance(part, nn.SyncBatchNorm):
                raise refusal("batch norm", self._made.get(part, ""))
            is_other = (
                isinstance(part, DataLoader) and type(part).__iter__ is not DataLoader.__iter__
            )
            # FullyShardedDataParallel, ZeroRedundancyOptimizer, PostLocalSGDOptimizer, ...
            if is_other or type(part).__module__.startswith("torch.distributed."):
                raise refusal("part", self._made.get(part, ""), part=type(part).__name__)
        for each in self.all_of(ReduceLROnPlateau):
            raise refusal("plateau", self._made.get(each, ""))

    def _follow(self, loader: ExactLoader) -> None:
        """Let schedulers, averages and scalers act once a step, also those that were made since the last epoch."""
        schedulers = self.all_of(LRScheduler)
        inner = {
            id(each) for scheduler in schedulers for each in getattr(scheduler, "_schedulers", ())
        }
        scalers = [each for each in self.all_of(torch.amp.GradScaler) if each.is_enabled()]
        kept = followers(self._models, self.all_of(Optimizer))
        for follower in (*schedulers, *scalers, *(each for each, _ in kept)):
            if follower not in self._followed and id(follower) not in inner:
                self._followed.add(follower)
                loader.per_step(follower)
                # A copy of the weights that a rank began with: it continues with rank 0's, as they do.
                tensors = next((tensors for each, tensors in kept if each is follower), [])
                if tensors:
                    with self.world.launcher_environment():
                        collectives.broadcast_tensors(current_world(tensors[0].device), tensors)


class SizedBatches:
    """An iterator over the batches of the training loop, with a length, as that of a DataLoader has."""

    def __init__(self, batches: Iterator[Any], num_steps: int) -> None:
        self._batches = batches
        self._num_steps = num_steps

    def __iter__(self) -> "SizedBatches":
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return self._num_steps


def shuffles(data: DataLoader[Any]) -> bool:
    """Return whether a DataLoader has no fixed order: it shuffles, or its sampler is unknown."""
    try:
        return order_of_sampler(data)[0]
    except ConfigError:
        return True
