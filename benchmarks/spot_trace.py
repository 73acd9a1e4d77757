"""Availability of spot machines over time: synthetic or recorded, and the useful share of what was available.

A recorded trace is a CSV file with the header `seconds,machines`: from which time on how many machines were up. Lines
that begin with # are comments. `benchmarks/spot_p3.csv` is one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


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


@dataclass(frozen=True)
class Recording:
    """Numbers of machines over time, as recorded.

    Attributes:
        times_s: When each number begins, ascending, seconds.
        machines: The numbers.
    """

    times_s: tuple[float, ...]
    machines: tuple[int, ...]

    def scale(self, slots: int) -> Recording:
        """Return the same with a largest number of `slots`, rounded, and at least one."""
        most = max(self.machines)
        return Recording(self.times_s, tuple(max(1, int(slots * each / most + 0.5)) for each in self.machines))

    def num_changes(self) -> int:
        """Count the machines that were lost or returned."""
        return sum(abs(after - before) for before, after in itertools.pairwise(self.machines))

    def mean_change_s(self) -> float:
        """Return the mean time between two changes of any machine."""
        return (self.times_s[-1] - self.times_s[0]) / self.num_changes()


def read_recording(path: Path) -> Recording:
    """Read a CSV file of seconds and numbers of machines."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    if not lines or lines[0] != "seconds,machines":
        raise ValueError(f"{path}: the first line is not the header seconds,machines")
    pairs = [line.split(",") for line in lines[1:]]
    times_s, machines = tuple(float(pair[0]) for pair in pairs), tuple(int(pair[1]) for pair in pairs)
    if list(times_s) != sorted(set(times_s)) or min(machines, default=-1) < 0 or len(set(machines)) < 2:
        raise ValueError(f"{path}: times must ascend, and numbers of machines must be 0 or more and change")
    return Recording(times_s, machines)


def make_recorded_trace(
    recording: Recording, seed: int, slots: int, seconds: float, change_s: float, start_s: float
) -> tuple[list[Change], float]:
    """Make a trace of a part of a recording, scaled to fewer machines and compressed in time.

    Args:
        seed: Chooses which machine is lost or returns.
        slots: Number of machines; stands for the largest number in the recording.
        change_s: Mean time between two changes of any machine in the whole recording, after compression, seconds.
        start_s: Begin of the part, in seconds of the recording.

    Returns:
        The trace, and how many recorded seconds stand for one second of it.
    """
    scaled = recording.scale(slots)
    factor = scaled.mean_change_s() / change_s
    if start_s < scaled.times_s[0] or start_s + factor * seconds > scaled.times_s[-1]:
        length_s = scaled.times_s[-1] - scaled.times_s[0]
        raise ValueError(f"{seconds:.0f} s from {start_s:.0f} s on need {factor * seconds:.0f} s of {length_s:.0f} s")
    rng, up, found = random.Random(seed), set[int](), []
    for time_s, wanted in zip(scaled.times_s, scaled.machines, strict=True):
        at_s = max(0.0, (time_s - start_s) / factor)
        if at_s >= seconds:
            break
        if time_s <= start_s:
            up = set(range(wanted))
            found = [Change(0.0, slot, True) for slot in up]
        while len(up) != wanted:
            is_up = len(up) < wanted
            slot = rng.choice(sorted(set(range(slots)) - up if is_up else up))
            up ^= {slot}
            found.append(Change(at_s, slot, is_up))
    return found, factor


def batches(trace: Sequence[Change]) -> Iterator[tuple[float, list[Change]]]:
    """Yield the changes of each time together."""
    for at_s, changes in itertools.groupby(trace, key=lambda change: change.at_s):
        yield at_s, list(changes)


def intervals(trace: Sequence[Change], seconds: float) -> list[tuple[float, int]]:
    """Return the lengths of the times with an equal number of machines, in seconds, and that number."""
    found, up, since = [], 0, 0.0
    for change in trace:
        if change.at_s > since:
            found.append((change.at_s - since, up))
        up, since = up + (1 if change.is_up else -1), change.at_s
    return [*found, (seconds - since, up)]


def goodput(useful: float, trace: Sequence[Change], seconds: float, rate: Callable[[int], float]) -> float:
    """Return the useful samples as a share of what undisturbed runs do in the same time on the same machines."""
    return useful / sum(length * rate(up) for length, up in intervals(trace, seconds))
