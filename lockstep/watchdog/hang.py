"""From what the ranks last said of themselves to who holds all of them up. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.cluster.activity import COMPUTING, READING
from lockstep.cluster.rendezvous import ranks_text
from lockstep.errors import HangError

SILENT_S = 10.0  # a status comes about once a second


@dataclass(frozen=True)
class RankStatus:
    """What one rank last said of itself.

    Attributes:
        rank: Who.
        host: Its machine.
        pid: Its process.
        doing: What it was at; empty if it has never said.
        waits: Whether that was waiting for others.
        step: The optimizer step; None outside of steps.
        stalled_s: How long it had been without progress when it said so, seconds.
        silent_s: How long ago that is, seconds; by the clock of who has reported it.
        is_here: It runs on the machine of who says so.
        is_stopped: Its process is known to be stopped, by SIGSTOP, say.
        serves: It holds the world's store, through which the ranks hear of each other.
    """

    rank: int
    host: str
    pid: int
    doing: str
    waits: bool
    step: int | None
    stalled_s: float
    silent_s: float = 0.0
    is_here: bool = False
    is_stopped: bool = False
    serves: bool = False

    @property
    def still_s(self) -> float:
        """How long it has certainly or possibly made no progress."""
        return self.stalled_s + self.silent_s

    @property
    def where(self) -> str:
        """What it was at, in words."""
        return self.doing + (f", step {self.step:,}" if self.step is not None else "")


def find_stalled_ranks(statuses: Sequence[RankStatus], timeout_s: float) -> list[RankStatus]:
    """Who holds the world up: those that are silent or at something of their own, while all stand still.

    Those that wait for others are to blame only where nobody else is: then they wait for each other.

    Args:
        statuses: Of all ranks.
        timeout_s: How long all must have made no progress.

    Returns:
        Nobody while some rank still gets on.
    """
    if any(status.still_s < timeout_s for status in statuses):
        return []
    silent = [status for status in statuses if is_silent(status, timeout_s)]
    if any(status.serves for status in silent):
        # Nothing can be known of the others then.
        return [status for status in silent if status.serves]
    return silent + [status for status in statuses if not status.waits and status not in silent] or list(statuses)


def is_silent(status: RankStatus, timeout_s: float) -> bool:
    """Whether a rank has said nothing for so long that it can't."""
    return status.silent_s >= min(SILENT_S, timeout_s / 2)


def explain(culprits: Sequence[RankStatus], size: int, timeout_s: float, stacks: str) -> HangError:
    """Put it into words.

    Args:
        culprits: What `find_stalled_ranks` found, at least one.
        size: How many ranks there are.
        timeout_s: `watch.hang_timeout_s`.
        stacks: Where the stacks are.
    """
    first = culprits[0]
    names = ranks_text([status.rank for status in culprits]) if size > 1 else "the run"
    verb = "have" if len(culprits) > 1 else "has"
    silent = is_silent(first, timeout_s)
    still = f"{first.still_s:.0f} s"
    if first.waits and not silent:
        what = f"all ranks have waited for each other for {still}: {first.where}"
    elif silent:
        last = f"; last seen {first.where}" if first.doing else ""
        what = f"{names} {verb} given no status of life for {first.silent_s:.0f} s{last}"
    else:
        what = f"{names} {verb} made no progress for {still}: {first.where}"
    others = size - len(culprits)
    error = HangError(
        what,
        rank="\n".join(f"{status.rank} (host {status.host}, pid {status.pid})" for status in culprits[:8]),
        others=f"{others} rank{'s' if others > 1 else ''} waited for {'it' if len(culprits) == 1 else 'them'}"
        if others
        else None,
        cause=_likely_cause(first, silent),
        stacks=stacks,
        fix=f"If it is only slow, set watch.hang_timeout_s={3 * timeout_s:.0f}. --max-restarts restarts it.",
    )
    error.ranks = tuple(status.rank for status in culprits)
    return error


def _likely_cause(status: RankStatus, silent: bool) -> str:
    if status.is_stopped:
        return f"its process is stopped, by SIGSTOP or a debugger: kill -CONT {status.pid} lets it go on"
    if silent and status.is_here:
        return "native code never gives Python's lock back; its stack says where"
    if silent:
        return "its machine or the network to it is gone, or native code there never gives Python's lock back"
    if status.waits:
        return "the network between them is cut, or model code on one rank talks to the others by itself"
    if status.doing == READING:
        return "a read that never ends: a network disk, a lock, a download; its stack says where"
    if status.doing == COMPUTING:
        return "the model's own code never ends, or the device does not answer; its stack says where"
    return "its stack says where"
