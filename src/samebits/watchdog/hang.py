"""Determine which ranks keep a stalled world waiting, from the ranks' last heartbeats. Plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

from samebits.cluster.activity import COMPUTING, READING
from samebits.cluster.rendezvous import ranks_text
from samebits.errors import HangError

TIMEOUT_SETTING = "watch.hang_timeout_s"
SILENT_S = 10.0  # a heartbeat arrives about once a second


@dataclass(frozen=True)
class RankStatus:
    """Last heartbeat of one rank."""

    rank: int  #: Its rank.
    host: str  #: Its machine.
    pid: int  #: Its process id.
    doing: str  #: Its activity; empty if it has never reported.
    waits: bool  #: Whether the activity waits for other ranks.
    step: int | None  #: The optimizer step; None outside of steps.
    stalled_s: float  #: Time without progress at the heartbeat, seconds.
    silent_s: float = 0.0  #: Age of the heartbeat by the reader's clock, seconds.
    is_here: bool = False  #: It runs on the reader's machine.
    is_stopped: bool = False  #: Its process is stopped, for example by SIGSTOP.
    serves: bool = False  #: It serves the store through which ranks exchange heartbeats.

    @property
    def still_s(self) -> float:
        """Return the longest time that it may have made no progress, seconds."""
        return self.stalled_s + self.silent_s

    @property
    def where(self) -> str:
        """Describe its activity and step."""
        return self.doing + (f", step {self.step:,}" if self.step is not None else "")


def find_stalled_ranks(statuses: Sequence[RankStatus], timeout_s: float) -> list[RankStatus]:
    """Find the ranks that keep all others waiting, if none has made progress for `timeout_s` seconds.

    These are the ranks that are silent or busy with an activity of their own while no rank makes progress. Ranks that
    wait for others are to blame only if there is no other: then they wait for each other.

    Returns:
        The stalled ranks; empty while some rank makes progress.
    """
    if any(status.still_s < timeout_s for status in statuses):
        return []
    silent = [status for status in statuses if is_silent(status, timeout_s)]
    if any(status.serves for status in silent):
        # Without the store, the state of the other ranks is unknown.
        return [status for status in silent if status.serves]
    return silent + [status for status in statuses if not status.waits and status not in silent] or list(statuses)


def is_silent(status: RankStatus, timeout_s: float) -> bool:
    """Return whether a rank has sent no heartbeat for so long that it probably cannot."""
    return status.silent_s >= min(SILENT_S, timeout_s / 2)


def explain(
    culprits: Sequence[RankStatus], size: int, timeout_s: float, stacks: str, setting: str = TIMEOUT_SETTING
) -> HangError:
    """Build the error for the user.

    Args:
        culprits: Result of `find_stalled_ranks`, at least one rank.
        size, timeout_s: Number of ranks, and the setting `watch.hang_timeout_s`.
        setting: How the user sets the timeout. A script has no launcher of Samebits that could restart it.
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
        what = f"{names} {verb} given no sign of life for {first.silent_s:.0f} s{last}"
    else:
        what = f"{names} {verb} made no progress for {still}: {first.where}"
    others = size - len(culprits)
    error = HangError(
        what,
        given=f"{others} rank{'s' if others > 1 else ''} waited for {'it' if len(culprits) == 1 else 'them'}"
        if others
        else None,
        where="\n".join(
            [
                *(f"rank {status.rank} (host {status.host}, pid {status.pid})" for status in culprits[:8]),
                f"stacks: {stacks}",
            ]
        ),
        cause=_likely_cause(first, silent),
        fix=f"If it is only slow, set {setting}={3 * timeout_s:.0f}."
        + (" To restart after a hang, set --max-restarts." if setting == TIMEOUT_SETTING else ""),
    )
    error.ranks = tuple(status.rank for status in culprits)
    return error


def _likely_cause(status: RankStatus, silent: bool) -> str:
    if status.is_stopped:
        return f"its process is stopped, by SIGSTOP or a debugger: kill -CONT {status.pid} resumes it"
    if silent and status.is_here:
        return "native code never releases Python's interpreter lock; see its stack"
    if silent:
        return "its machine or the network to it is down, or native code there never releases the interpreter lock"
    if status.waits:
        return "the network between them is cut, or model code on one rank starts collectives of its own"
    if status.doing == READING:
        return "a read that never returns: a network disk, a lock, a download; see its stack"
    if status.doing == COMPUTING:
        return "the model's code does not return, or the device does not answer; see its stack"
    return "see its stack"
