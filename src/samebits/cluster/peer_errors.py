"""Log lines and errors of ranks that have joined and then wait for connections to each other."""

from collections.abc import Sequence
from typing import Any

from samebits.cluster.rendezvous import RankInfo, ranks_text
from samebits.cluster.signed import error_from_store
from samebits.cluster.timeout import as_clock
from samebits.errors import LaunchError
from samebits.errors import to_json as error_to_json
from samebits.open_files import explained, is_too_many_files, too_many_files

# How gloo reports a peer that had connected and then ended.
_ENDED_PEER = ("closed by peer", "reset by peer", "broken pipe")
# Parts of the messages with which torch, gloo and NCCL report the loss of another rank.
LOST_PEER = (*_ENDED_PEER, "connection refused", "gloo", "nccl", "timed out waiting")


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error reports the loss of another process, whose own error has the reason.

    torch raises a RuntimeError for it. An OSError about a connection comes from something else, such as a download or a
    closed terminal.
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in LOST_PEER)


def name(info: RankInfo) -> str:
    """Return a rank with its host and process id: rank 1 (host, pid 77)."""
    return f"rank {info.rank} ({info.host}, pid {info.pid})"


def still_waiting(
    infos: Sequence[RankInfo], missing: Sequence[int], waited_s: float, limit_s: float, quiet: Sequence[RankInfo]
) -> str:
    """Format the log line for a group that takes long to connect; `quiet`: ranks that have stopped reporting."""
    names = f"\n  no sign of life from {', '.join(map(name, quiet[:4]))}" if quiet else ""
    have = "has" if len(missing) == 1 else "have"
    return (
        f"connecting {len(infos)} processes: {ranks_text(missing)} {have} not connected, {waited_s:.0f} s{names}"
        f"\n  giving up in {as_clock(limit_s - waited_s)} (cluster.join_timeout_s)"
    )


def lost(info: RankInfo, reason: str) -> LaunchError:
    """Return the error for a rank that has ended or become unreachable."""
    return LaunchError(
        f"lost {name(info)} before all ranks were connected: {reason}",
        cause="it was killed or has failed, and its own output gives the reason; or its machine or network is down",
        fix="Start again; add --resume auto if the run has saved a checkpoint.",
    )


def lost_agent(rank: int, reason: str) -> LaunchError:
    """Return the error for torchrun's agent, which serves the store, having ended."""
    return LaunchError(
        f"rank {rank} lost the store of torchrun's agent before all ranks were connected",
        given=reason,
        cause="that agent has ended",
        fix="Start torchrun again; add --resume auto if the run has saved a checkpoint.",
    )


def gave_up(
    missing: Sequence[int], limit_s: float, stopped: Sequence[RankInfo], quiet: Sequence[RankInfo]
) -> LaunchError:
    """Return the error for a group that has not connected in time; `stopped`: by a signal or debugger, on this host."""
    what = f"gave up connecting: {ranks_text(missing)} had not connected after {limit_s:.0f} s"
    where = "cluster.join_timeout_s"
    if stopped:
        names, pids = ", ".join(map(name, stopped)), " ".join(str(info.pid) for info in stopped)
        cause = f"stopped by SIGSTOP or a debugger: {names}"
        return LaunchError(what, where=where, cause=cause, fix=f"Resume it, then start again: kill -CONT {pids}")
    if quiet:
        cause = f"no sign of life from {', '.join(map(name, quiet[:4]))}"
        return LaunchError(what, where=where, cause=cause, fix="Check those processes and the network to them.")
    return _unreachable(what, where)


def _unreachable(what: str, where: str | None = None) -> LaunchError:
    return LaunchError(
        what,
        where=where,
        cause="these processes are alive, but they use a network interface that the other machines cannot reach, "
        "or a firewall blocks their ports",
        fix="On each machine, set GLOO_SOCKET_IFNAME (cpu) or NCCL_SOCKET_IFNAME (cuda) to the right interface; "
        "`ip address` lists them.",
    )


def could_not_connect(info: RankInfo, failure: BaseException, refusals: str = "") -> LaunchError:
    """Return the error of torch for a group of live ranks; `refusals`: evidence that another program uses the store."""
    if is_too_many_files(failure):
        return too_many_files()
    reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
    if any(part in reason.lower() for part in _ENDED_PEER):
        return LaunchError(
            f"{name(info)} lost another process before all ranks were connected",
            given=reason[:200],
            cause="that process has ended; its own output gives the reason",
            fix="Read the output of the other ranks.",
        )
    what = f"{name(info)} joined the rendezvous, but can't connect to the other ranks: {reason}"
    if refusals:
        fix = "End the other program; `ss -tnp` lists the programs connected to the run's ports."
        return LaunchError(what, cause=refusals, fix=fix)
    return explained(_unreachable(what))


def to_json(error: LaunchError, num_lost: int) -> dict[str, Any]:
    """Return a verdict, the error that all ranks but `num_lost` raise, as plain JSON for the store."""
    return {**error_to_json(error), "num_lost": num_lost}


def from_json(verdict: Any) -> tuple[LaunchError, int]:
    """Read a verdict from the store.

    Returns:
        The error that all ranks raise, and the number of lost ranks. For a damaged verdict, an error that reports the
        damage.
    """
    error = error_from_store(verdict)
    if error is None or type(verdict.get("num_lost")) is not int:
        return LaunchError(
            "another rank gave up connecting, but its reason in the store is damaged",
            fix="Read the output of the other ranks.",
        ), 1
    return error, verdict["num_lost"]
