"""Silent corruption, found by what idle ranks compute anyway: the gradient of one micro-batch on several ranks.

    rank 0      0  1  2
    rank 1      3  4  0      its last one repeats a micro-batch of rank 0, and its gradient is dropped
    rank 2      5  6  0

Where micro-batches do not divide, a rank with fewer repeats one of another rank, in turn those of each rank that has
most. Its gradient has the bits of that rank's, unless memory or a processor has made an error. The ranks compare a sum
of each gradient's bits, of several steps at once, so that the comparison costs no time.
"""

from collections import Counter

from torch import Tensor

from samebits.bits import as_integers
from samebits.cluster import collectives
from samebits.cluster.rendezvous import ranks_text
from samebits.cluster.world import World
from samebits.data.order import MicroBatch, Step
from samebits.errors import TrainError

NUM_STEPS = 8  # compared at once: a message of its own in each step would show in steps of a few ms

Sums = list[list[int]]  # of a rank: step, and sum of the gradient's bits


class IdleSlots:
    """Compares the gradients of repeated micro-batches with those of their owners."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[int, Tensor | int] = {}
        self._now: int | None = None  # the step whose repeated micro-batch is running here
        self._num_steps = 0

    def begin(self, step: Step, micro_batch: MicroBatch) -> None:
        """Start a micro-batch."""
        self._now = None
        is_repeated = micro_batch.index == step.division.repeated(step.leaves, step.number)
        # The first time: the owner may repeat it too, to find what the script keeps.
        if is_repeated and _has_idle(step) and step.number not in self._sums:
            self._now = step.number
            self._sums[step.number] = 0

    def take(self, gradient: Tensor | None) -> None:
        """Add a parameter's gradient, of any shape, in a backward pass of the micro-batch."""
        if self._now is not None and gradient is not None:
            # Of integers, so that the order does not matter, and each flipped bit changes it. Read later: on a GPU, it
            # would wait for the backward pass.
            self._sums[self._now] += as_integers(gradient).sum()

    def end_step(self, step: Step, *, is_finite: bool = True) -> None:
        """End a step; after several of them, compare. Called on all ranks.

        Args:
            is_finite: Whether the step's gradient is finite, on all ranks. One that is not ends the loop, so what is
                there is compared before.

        Raises:
            TrainError: Ranks have computed different gradients of one micro-batch; the same error on all ranks.
        """
        self._num_steps += _has_idle(step)
        if self._num_steps < NUM_STEPS and is_finite:
            return
        mine = [[number, int(total)] for number, total in self._sums.items()]
        self._num_steps = 0
        self._sums = {}
        compare(collectives.all_gather_object(self._world, mine))


def _has_idle(step: Step) -> bool:
    return len(set(map(len, step.leaves))) > 1


def compare(by_rank: list[Sums]) -> None:
    """Compare the sums of all ranks.

    Raises:
        TrainError: Those of a step differ.
    """
    steps: dict[int, dict[int, int]] = {}
    for rank, sums in enumerate(by_rank):
        for number, total in sums:
            steps.setdefault(number, {})[rank] = total
    wrong = {number: found for number, found in steps.items() if len(set(found.values())) > 1}
    if not wrong:
        return
    suspects: Counter[int] = Counter()
    for found in wrong.values():
        common, votes = Counter(found.values()).most_common(1)[0]
        # Of two ranks, each may be the one.
        suspects.update(rank for rank, total in found.items() if votes == 1 or total != common)
    most = max(suspects.values())
    guilty = sorted(rank for rank, times in suspects.items() if times == most)
    who = ranks_text(guilty) if len(guilty) == 1 else f"one of {ranks_text(guilty)}"
    first = min(wrong)
    raise TrainError(
        f"{who} computed a wrong gradient at step {first:,}: other bits than another rank for the same micro-batch",
        given=f"{len(wrong)} of {len(steps)} compared steps differ",
        cause="Memory or a processor of its machine made an error, its libraries are not those of the others, or the "
        "script computes another loss on it: by the rank, or by loader.is_padding.",
        fix=f"Take the machine out, and resume from a checkpoint before step {first:,}. If most steps differ, let all "
        "ranks compute the same loss.",
    )
