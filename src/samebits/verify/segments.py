"""Which steps a verification replays: pure arithmetic, equal for everyone who has the root.

A run is cut into segments at its starting points: step 0 and the checkpoints that were kept.

    step      0          100         200         300       345
    segment   |----------|-----------|-----------|---------|
              replayed from the seed; the others from the checkpoint at their start

A segment is replayed whole or not at all: its start is a checkpoint, and its end is the next one, so equal steps and
equal weights there show that nothing between was changed. A change within one segment shows in no other, since the next
one starts from the changed checkpoint.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod


@dataclass(frozen=True, order=True)
class Segment:
    """The steps [start, stop) of a run, replayed from the run's state before `start`."""

    start: int  #: First step: 0, or the step of a checkpoint.
    stop: int  #: The step after the last one.

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return self.stop - self.start


def cut(starts: Iterable[int], num_steps: int) -> list[Segment]:
    """Cut a run at its starting points. `starts`: steps of the checkpoints that were kept; step 0 is always a start."""
    bounds = sorted({0, *(step for step in starts if 0 < step < num_steps), num_steps})
    return [Segment(start, stop) for start, stop in pairwise(bounds)]


def choose(segments: Sequence[Segment], share: float, seed: str) -> list[Segment]:
    """Choose the last segment, and others at random until these cover a share of all steps.

    The published weights are those at the end, so they are always the result of a replay.

    The order is that of SHA-256(seed, start), so everyone who knows the seed chooses the same ones, and the run's
    publisher, whose root is the seed, cannot choose them freely.

    Args:
        share: Fraction of the steps to cover, above 0.
        seed: The root, with the verifier's own number if there is one.

    Returns:
        The chosen segments, by step.
    """
    last = max(segments)
    others = [segment for segment in segments if segment != last]
    total, covered = sum(segment.num_steps for segment in others), 0
    chosen = [last]
    for segment in sorted(others, key=lambda each: hashlib.sha256(f"{seed} {each.start}".encode()).digest()):
        if covered >= share * total:
            break
        chosen.append(segment)
        covered += segment.num_steps
    return sorted(chosen)


def covering(segments: Sequence[Segment], first: int, stop: int) -> list[Segment]:
    """Return the segments that have steps of [first, stop), each from its start; the last one ends at `stop`.

    Args:
        stop: The step after the last one to cover.
    """
    return [
        Segment(segment.start, min(segment.stop, stop))
        for segment in segments
        if segment.start < stop and segment.stop > first
    ]


def escape_probability(num_segments: int, num_replayed: int, num_changed: int) -> float:
    """Return the probability that changes in some segments escape a random choice of segments."""
    # Without factorials: they would have millions of digits for as many segments.
    num_left = num_segments - num_replayed
    return prod(max(0, num_left - each) / (num_segments - each) for each in range(min(num_changed, num_segments)))


def describe(segments: Iterable[Segment], limit: int = 5) -> str:
    """Describe segments as ranges of steps, neighbors joined: "steps 0-99, 300-399 and 4 more".

    Args:
        segments: The segments, by step.
    """
    ranges: list[Segment] = []
    for segment in segments:
        if ranges and ranges[-1].stop == segment.start:
            ranges[-1] = Segment(ranges[-1].start, segment.stop)
        else:
            ranges.append(segment)
    named = ", ".join(f"{each.start:,}-{each.stop - 1:,}" for each in ranges[:limit])
    return f"steps {named}" + (f" and {len(ranges) - limit} more ranges" if len(ranges) > limit else "")
