"""Availability of spot machines over time: a synthetic trace, and the useful share of what was available."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A machine that is lost or returns.

    Attributes:
        at_s: Seconds after the start.
        slot: Its number.
        is_up: Whether it returns.
    """

    at_s: float
    slot: int
    is_up: bool


def make_trace(seed: int, slots: int, seconds: float, availability: float, change_s: float) -> list[Change]:
    """Draw a trace: each machine is up and down for exponential times, and one is always up.

    Args:
        seed: Repeats it.
        slots: Number of machines.
        seconds: Its length.
        availability: Mean share of the machines that are up.
        change_s: Mean time between two changes of any machine, seconds.
    """
    rng, cycle_s = random.Random(seed), 2 * slots * change_s
    is_up = [slot < max(1, round(slots * availability)) for slot in range(slots)]
    found = [Change(0.0, slot, True) for slot in range(slots) if is_up[slot]]

    def draw(slot: int) -> float:
        return rng.expovariate(1 / (cycle_s * (availability if is_up[slot] else 1 - availability)))

    times = [draw(slot) for slot in range(slots)]
    while (now := min(times)) < seconds:
        slot = times.index(now)
        if not is_up[slot] or sum(is_up) > 1:
            is_up[slot] = not is_up[slot]
            found.append(Change(now, slot, is_up[slot]))
        times[slot] = now + draw(slot)
    return found


def intervals(trace: Sequence[Change], seconds: float) -> list[tuple[float, int]]:
    """Return the lengths of the times with an equal number of machines, in seconds, and that number."""
    found, up, since = [], 0, 0.0
    for change in trace:
        if change.at_s > since:
            found.append((change.at_s - since, up))
        up, since = up + (1 if change.is_up else -1), change.at_s
    return [*found, (seconds - since, up)]


def goodput(useful: float, trace: Sequence[Change], seconds: float, rate: Callable[[int], float]) -> float:
    """Return the useful samples as a share of what undisturbed runs do in the same time on the same machines.

    Args:
        useful: Samples that the result contains.
        trace: The trace.
        seconds: Its length.
        rate: Samples per second of an undisturbed run, by number of machines.
    """
    return useful / sum(length * rate(up) for length, up in intervals(trace, seconds))
