"""What a launcher that waits for other nodes reports: who has joined or was refused, and why it gives up."""

import json
import socket
from contextlib import suppress
from typing import Literal

from torch.distributed import Store

from samebits.cluster.signed import peek
from samebits.cluster.timeout import as_clock
from samebits.config.process_range import ProcessRange, RendezvousConfig
from samebits.errors import LaunchError, printable

REFUSED = "samebits/refused"
FIX = "Resume the run with --resume auto on all machines."
# first: the first view has not begun; others: nodes of the last view still have processes; turn: others train.
Wait = Literal["first", "others", "turn"]
_MAX_CHARS = 600  # of a note, which is not signed: any program that reaches the port may have written it


def as_note(error: BaseException) -> str:
    """Return the note that a refused launcher leaves for those that wait; empty for another kind of error."""
    if not isinstance(error, LaunchError):
        return ""
    given = "; ".join((error.slots.get("given") or error.slots.get("cause", "")).splitlines())
    text = f"{error.what} ({given})" if given else error.what
    return json.dumps({"host": socket.gethostname(), "text": text[:_MAX_CHARS]})


def read_refusal(store: Store) -> str:
    """Return what the last refused launcher reported; an empty text if none was refused."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        if (found := peek(store, REFUSED)) is not None:
            note = json.loads(found[: 8 * _MAX_CHARS])
            text = " ".join(f"{note['host']} was refused: {note['text']}"[:_MAX_CHARS].split())
            return printable(text)
    return ""


def describe_wait(nodes: RendezvousConfig, num_ready: int, names: str, wait: Wait, waited_s: float) -> str:
    """Describe what this launcher waits for; `num_ready` nodes wait, or are in the view that it waits for."""
    size, endpoint = nodes.size, nodes.endpoint
    shown, have = f" ({names})" if names else "", "has" if num_ready == 1 else "have"
    left = f"giving up in {as_clock(nodes.join_timeout_s - waited_s)} (cluster.join_timeout_s)"
    if wait == "others":
        what = f"waiting for the other nodes of the last world{shown}"
        left = f"lost after {nodes.node_timeout_s:g} s without a heartbeat (cluster.node_timeout_s)"
    elif wait == "turn" and num_ready >= size.most:
        what = f"the run at {endpoint} has all of its {num_ready} nodes{shown}"
        left = "waiting until one of them leaves or is lost"
    elif wait == "turn":
        what = f"waiting until the run at {endpoint} has saved and accepts this node{shown}"
    elif num_ready >= size.least:
        what = f"{num_ready} of {size.least} to {size.most} nodes {have} joined at {endpoint}{shown}"
        left = f"starting {nodes.last_call_s:g} s after the first {size.least} (cluster.last_call_s)"
    else:
        what = f"waiting for {size.least} node{'s' * (size.least > 1)} at {endpoint}: {num_ready} {have} joined{shown}"
    return f"{what}, {waited_s:.0f} s\n  {left}"


def describe_world(size: int, num_nodes: int, gone: str, new: str) -> str:
    """Describe a world that follows another one."""
    changes = (f"; lost or left: {gone}" if gone else "") + (f"; new: {new}" if new else "")
    return f"continuing with {count(size, 'process', 'es')} on {count(num_nodes, 'node')}{changes}"


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{plural if number != 1 else ''}"


def too_few_nodes(num_nodes: int, size: ProcessRange, lost: set[int]) -> LaunchError:
    """Return the error of a run that has lost more nodes than it can do without. `size`: how many the run may have."""
    return LaunchError(
        f"{num_nodes} of {size} nodes remain",
        given=f"lost: {', '.join(f'node {node}' for node in sorted(lost))}",
        fix=f"{FIX} With --nodes MIN:MAX, a run continues down to MIN machines.",
    )


def gave_up_waiting(nodes: RendezvousConfig, given: str, cause: str = "") -> LaunchError:
    """Return the error of a run that too few launchers have joined in time; `cause`: why one was refused."""
    return LaunchError(
        f"gave up waiting for {nodes.size.least} nodes at {nodes.endpoint}",
        given=given,
        where=f"after {nodes.join_timeout_s:.0f} s (cluster.join_timeout_s)",
        cause=cause,
        fix="Start the same command on the missing machines.",
    )
