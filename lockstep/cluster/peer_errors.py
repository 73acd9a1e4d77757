"""The texts and errors of ranks that have joined and then wait to be connected to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.cluster.rendezvous import RankInfo, ranks_text
from lockstep.cluster.store import as_clock
from lockstep.errors import LaunchError
from lockstep.open_files import explained, is_too_many_files, too_many_files

# How gloo reports a peer that had connected and then ended.
# What a rank sees when another one is gone.
LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "gloo",
    "nccl",
    "timed out waiting",
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error looks like the loss of another process, which has its own words about why.

    What torch raises for it is a RuntimeError; an OSError about a connection has to do with something else: a
    download, or a terminal that was closed.
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in LOST_PEER)


_ENDED_PEER = ("closed by peer", "reset by peer", "broken pipe")
_BLAME_INTERFACE = {
    "cause": "these processes are alive, but the machines see each other on another network interface than the one "
    "taken, or a firewall blocks their ports",
    "fix": "set GLOO_SOCKET_IFNAME (cpu) or NCCL_SOCKET_IFNAME (cuda) to the interface's name, see: ip address",
}


def name(info: RankInfo) -> str:
    """A rank with its host and process id."""
    return f"rank {info.rank} ({info.host}, pid {info.pid})"


def still_waiting(
    infos: Sequence[RankInfo], missing: Sequence[int], waited_s: float, limit_s: float, quiet: Sequence[RankInfo]
) -> str:
    """The line for the log while connecting takes long.

    Args:
        infos: All ranks.
        missing: Those that have not connected.
        waited_s: For how long.
        limit_s: How long they have in all.
        quiet: Those of them that do not report any more.
    """
    names = f"\n  no sign of life from {', '.join(map(name, quiet[:4]))}" if quiet else ""
    have = "has" if len(missing) == 1 else "have"
    return (
        f"connecting {len(infos)} processes: {ranks_text(missing)} {have} not connected, {waited_s:.0f} s{names}"
        f"\n  giving up in {as_clock(limit_s - waited_s)} (cluster.join_timeout_s)"
    )


def lost(info: RankInfo, reason: str) -> LaunchError:
    """A rank has ended, or can't be seen any more."""
    return LaunchError(
        f"lost {name(info)} before all ranks were connected: {reason}",
        cause="it was killed or has failed, and its own output says why; or its machine or network is down",
        fix="start again, with --resume auto where the run has saved",
    )


def lost_agent(rank: int, reason: str) -> LaunchError:
    """The agent that serves the store has ended."""
    return LaunchError(
        f"rank {rank} lost the store of torchrun's agent before all ranks were connected",
        given=reason,
        cause="that agent has ended",
    )


def gave_up(
    missing: Sequence[int], limit_s: float, stopped: Sequence[RankInfo], quiet: Sequence[RankInfo]
) -> LaunchError:
    """Connecting took too long.

    Args:
        missing: The ranks that had not connected.
        limit_s: How long they had.
        stopped: Those of them on this host that a signal or a debugger has stopped.
        quiet: Those of them that did not report any more.
    """
    what = f"gave up connecting: {ranks_text(missing)} had not connected after {limit_s:.0f} s"
    where = "cluster.join_timeout_s"
    if stopped:
        names = ", ".join(map(name, stopped))
        return LaunchError(what, where=where, cause=f"stopped by SIGSTOP or a debugger: {names}")
    if quiet:
        return LaunchError(what, where=where, cause=f"no sign of life from {', '.join(map(name, quiet[:4]))}")
    return LaunchError(what, where=where, **_BLAME_INTERFACE)


def could_not_connect(info: RankInfo, failure: BaseException, refusals: str = "") -> LaunchError:
    """torch gave up, though all ranks are alive.

    Args:
        info: Of the rank that could not connect.
        failure: What torch raised.
        refusals: That another program writes to the store; empty if none is known of.
    """
    if is_too_many_files(failure):
        return too_many_files()
    reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
    if any(words in reason.lower() for words in _ENDED_PEER):
        return LaunchError(
            f"{name(info)} lost another process before all ranks were connected",
            given=reason[:200],
            cause="that process has ended; its own output says why",
        )
    what = f"{name(info)} met the others, but can't connect to them: {reason}"
    if refusals:
        return LaunchError(what, cause=refusals, fix="ss -tnp shows which programs are connected to the run's ports")
    return explained(LaunchError(what, **_BLAME_INTERFACE))


def to_json(error: LaunchError, num_lost: int) -> dict[str, Any]:
    """A verdict for the store.

    Args:
        error: What all ranks raise.
        num_lost: How many ranks can't read it.
    """
    return {"what": error.what, "slots": error.slots, "num_lost": num_lost}


def from_json(verdict: Any) -> tuple[LaunchError, int]:
    """Read a verdict; a damaged one is an error too."""
    try:
        slots = {str(key): str(value) for key, value in verdict["slots"].items()}
        return LaunchError(str(verdict["what"]), **slots), int(verdict["num_lost"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return LaunchError("another rank gave up connecting, but its reason in the store is damaged"), 1
