"""Which micro-batches of a step are computed on a second rank, whose result has to have the same bits (ADR 37).

All ranks repeat equally many in the same steps, so that none waits for another. With watch.recheck=1/50, three ranks
and two micro-batches a rank, that is one step in 25:

    rank             0        1        2
    step 7           0  1     2  3     4  5
    step 8           0  1     2  3     4  5
      repeats           4        1        2         chosen by (seed, step): a micro-batch of the rank `shift` before
"""

from dataclasses import dataclass

from samebits.data.division import Leaves
from samebits.data.keyed import RECHECK, key


@dataclass(frozen=True)
class Recheck:
    """A micro-batch that a second rank computes too (`watch.recheck`)."""

    index: int  #: Index of the micro-batch in the step.
    owner: int  #: The rank that computes it for the step.
    rank: int  #: The rank that repeats it.


def choose_rechecks(fraction: float, seed: int, number: int, leaves: Leaves) -> tuple[Recheck, ...]:
    """Return what is computed twice in a step, equal on all ranks: this fraction of its micro-batches."""
    size = len(leaves)
    if size < 2:
        return ()
    # The largest share decides how long the step takes, so one more micro-batch costs this fraction of the step.
    expected = fraction * max(map(len, leaves))
    # From seed and step, so that all ranks choose the same ones without a message.
    count = int(expected) + (key(seed, RECHECK, number) / 2.0**64 < expected % 1)
    if not count:
        return ()
    # Random, not in turn: a fault that comes at regular intervals could otherwise always be missed.
    shift = 1 + key(seed, RECHECK, number, 0) % (size - 1)
    rechecks = []
    for owner, mine in enumerate(leaves):
        begin = key(seed, RECHECK, number, 1, owner)
        rechecks += [
            Recheck(mine[(begin + turn) % len(mine)], owner, (owner + shift) % size)
            for turn in range(min(count, len(mine)))
        ]
    return tuple(rechecks)
