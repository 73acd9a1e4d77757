"""Detection of ranks that compute wrong values: some micro-batches are computed on a second rank too (`watch.recheck`).

A rank with a faulty processor or memory spoils the gradient of all ranks alike, so their weights stay equal and no
later check can see it. A step with rechecks (`data/division.py`) in which the results for micro-batch 3 differ:

    own micro-batches | repeats | reduce                                    | update
                                  compare checksums of the leaves: 3 differs
                                  all ranks compute 3 again: most results agree, rank 1's does not
                                  all ranks repeat the step and compare again: equal, a warning names rank 1

A leaf is all that a micro-batch adds to a step: gradients, loss terms and changes of buffers. Its checksum is computed
immediately before it enters the tree. Nothing was applied before the comparison, so a repeated step leaves no trace. A
rank that is wrong again, in the repeated step or in a later one, ends the run.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from samebits.cluster import collectives
from samebits.cluster.activity import REDUCING
from samebits.cluster.rendezvous import ranks_text
from samebits.cluster.world import World
from samebits.data.division import Recheck
from samebits.data.order import MicroBatch, Order, Step
from samebits.errors import TrainError
from samebits.parallel.checksum import checksum
from samebits.parallel.layer_sums import Suspects
from samebits.parallel.reduce import Reducer

T = TypeVar("T")
LOGGER = logging.getLogger("samebits")
MAX_DISPUTED = 8  # of a step: with more, no computation is repeatable, and no rank can be named


@dataclass(frozen=True)
class _Dispute:
    """A micro-batch with two results: `(rank, checksum)` of its owner, of its repeat and of a third computation."""

    recheck: Recheck
    results: list[tuple[int, int]]

    @property
    def wrong_ranks(self) -> list[int] | None:
        """The ranks with a result that most others do not have; None if that cannot be decided."""
        (agreed, most), *others = Counter(found for _, found in self.results).most_common()
        if most < 2 or (others and others[0][1] == most):
            return None
        return sorted({rank for rank, found in self.results if found != agreed})


class RecheckedReducer(Reducer):
    """A `Reducer` that compares what two ranks computed by its `order`, and repeats a step in which they differ."""

    def __init__(
        self, model: nn.Module, world: World, order: Order, *, num_extras: int, compress: str
    ) -> None:
        super().__init__(model, world, num_extras=num_extras, compress=compress)
        self._order = order
        self._watched: set[int] = set()
        self._sums: dict[tuple[int, bool], torch.Tensor] = {}
        self._body: Callable[[MicroBatch], Any] | None = None
        self._wrong_at: dict[int, int] = {}
        #: Called on every rank with the `TrainError` that names a wrong rank, when training continues.
        self.notify: Callable[[object], None] = lambda error: LOGGER.warning("%s", error)

    def begin(self, step: Step, loss_scale: float = 1.0) -> None:
        """Start a step; see `Reducer.begin`."""
        super().begin(step, loss_scale)
        self._watched = {each.index for each in step.rechecks if each.owner == self._world.rank}
        self._sums = {}

    def run(self, body: Callable[[MicroBatch], T], suspects: Suspects | None = None) -> list[T]:
        """Run the step's own micro-batches; see `Reducer.run`. `body` is called again to settle a difference."""
        self._body = body
        return super().run(body, suspects)

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Context of one forward and backward pass; see `Reducer.micro_batch`. A repeat adds nothing to the step."""
        with super().micro_batch(micro_batch):
            leaves = self._sum.leaves
            yield
        sums = [leaf.checksum for leaf in leaves if leaf.checksum is not None]
        if sums:
            self._sums[micro_batch.index, micro_batch.is_repeat] = checksum(torch.stack(sums))

    def reduce(self, flag: float = 0.0) -> None:
        """Finish the sums over all ranks; see `Reducer.reduce`. Repeats the step if two results differ.

        Raises:
            TrainError: They differ again, a rank was wrong in an earlier step too, or no rank can be named.
        """
        super().reduce(flag)
        step = self._step
        loss_scale = self._loss_scale
        body = self._body
        assert step is not None
        if not step.rechecks or not (differing := self._compare(step)):
            return
        assert body is not None, "micro-batches run in `reducer.run`"
        self.undo_buffers()
        # The workers' stream is past these samples, so this process reads them again.
        reread = tuple(replace(each, is_reread=True) for each in step.micro_batches)
        repeats = tuple(replace(each, is_reread=True) for each in step.repeats)
        again = replace(step, micro_batches=reread, repeats=repeats)
        self.begin(again, loss_scale)
        disputes = [self._dispute(step, *each, body) for each in differing[:MAX_DISPUTED]]
        error, must_stop = self._judge(step, disputes)
        if must_stop:
            raise error
        super().run(body)
        for micro_batch in repeats:
            body(micro_batch)
        self._world.activity.enter(REDUCING, waits=True)
        super().reduce(flag)
        if self._compare(again):
            raise self._error(
                step,
                disputes,
                "the run stopped, because results differed again when it was repeated",
            )
        self.notify(error)

    def _enter(self, micro_batch: MicroBatch) -> None:
        is_alone = micro_batch.is_repeat or micro_batch.index in self._watched
        self._sum.start_leaves(micro_batch.index, is_alone=is_alone)
        self._now = micro_batch

    def _end(self, number: int) -> None:
        assert self._now is not None
        bucket = self._sum.buckets[number]
        leaf = self._sum.leaves[number]
        if self._now.is_repeat or leaf.index in self._watched:
            bucket.fill_missing(leaf)
            bucket.zero_gaps(leaf)
            leaf.checksum = checksum(leaf.flat.values)
        if self._now.is_repeat:
            bucket.drop_leaf(leaf)
        else:
            super()._end(number)

    def _compare(self, step: Step) -> list[tuple[Recheck, int, int]]:
        """Return the rechecks whose two checksums differ, with both; equal on all ranks."""
        table = torch.zeros(len(step.rechecks), 2, dtype=torch.int64, device=self._world.device)
        for row, each in enumerate(step.rechecks):
            for column, rank in enumerate((each.owner, each.rank)):
                if rank == self._world.rank:
                    table[row, column] = self._sums[each.index, column == 1]
        with self._world.activity.waiting("comparing repeated micro-batches"):
            dist.all_reduce(table)  # each place has one rank's number, and zeros of the others
        rows = zip(step.rechecks, table.tolist(), strict=True)
        return [(each, mine, other) for each, (mine, other) in rows if mine != other]

    def _dispute(
        self,
        step: Step,
        recheck: Recheck,
        first: int,
        second: int,
        body: Callable[[MicroBatch], Any],
    ) -> _Dispute:
        """Compute a micro-batch once more, on all ranks: the others would only wait."""
        body(replace(self._order.repeat(step.number, recheck.index), is_reread=True))
        third = int(self._sums[recheck.index, True])
        thirds = collectives.all_gather_object(self._world, third)
        return _Dispute(
            recheck, [(recheck.owner, first), (recheck.rank, second), *enumerate(thirds)]
        )

    def _judge(self, step: Step, disputes: Sequence[_Dispute]) -> tuple[TrainError, bool]:
        """Return the error that names the wrong ranks, and whether the run has to stop."""
        if any(each.wrong_ranks is None for each in disputes):
            return self._error(
                step, disputes, "the run stopped, since a repeated step would be no better"
            ), True
        wrong = sorted({rank for each in disputes for rank in each.wrong_ranks or ()})
        before = [rank for rank in wrong if rank in self._wrong_at]
        if before:
            reaction = f"the run stopped, since rank {before[0]} was wrong at step {self._wrong_at[before[0]]:,} too"
            return self._error(step, disputes, reaction), True
        self._wrong_at |= dict.fromkeys(wrong, step.number)
        return self._error(
            step, disputes, "the step was repeated with equal results, and training continues"
        ), False

    def _error(self, step: Step, disputes: Sequence[_Dispute], reaction: str) -> TrainError:
        hosts = collectives.all_gather_object(self._world, self._world.host)
        first = disputes[0]
        wrong = sorted({rank for each in disputes for rank in each.wrong_ranks or ()})
        ranks = wrong or sorted({first.recheck.owner, first.recheck.rank})
        where = "\n".join(f"rank {rank} (host {hosts[rank]})" for rank in ranks[:8])
        results = _results_text(first)
        what = f"micro-batch {first.recheck.index} of step {step.number:,}"
        rest = f"only {self._order.recheck:.3g} of the micro-batches are compared, so earlier steps may be wrong too"
        if first.wrong_ranks is None:
            return TrainError(
                f"{ranks_text(ranks)} computed other values for {what}, without a majority for either",
                given=f"{results}\nreaction: {reaction} (watch.recheck)",
                where=where,
                cause="With two ranks: one of them is always wrong, or their machines compute different bits.\n"
                "With more: a computation of the model is not repeatable.",
                fix="Run the same settings on a third machine, or with three or more processes, to find the wrong one.",
            )
        return TrainError(
            f"{ranks_text(wrong)} computed wrong values: {what} has another result on most ranks",
            given=f"{results}\nreaction: {reaction} (watch.recheck)",
            where=where,
            cause=f"A fault of that processor, memory or device, or of its data. {rest[0].upper()}{rest[1:]}.",
            fix="Test or replace that machine. For weights that are right bit for bit, repeat the run without it.",
        )


def _results_text(dispute: _Dispute) -> str:
    """Return `rank 1: 3fa0…; rank 2, repeated: 77b1…; again on all ranks: 77b1… (ranks 0 1 2)`."""
    (owner, first), (rank, second), *thirds = dispute.results
    by_result: dict[int, list[int]] = {}
    for third, found in thirds:
        by_result.setdefault(found, []).append(third)
    again = ", ".join(
        f"{_brief(found)} on {ranks_text(ranks)}" for found, ranks in list(by_result.items())[:4]
    )
    return f"{_brief(first)} on rank {owner}, {_brief(second)} repeated on rank {rank};\nagain on all ranks: {again}"


def _brief(found: int) -> str:
    return f"{found & (1 << 64) - 1:016x}"[:8]
