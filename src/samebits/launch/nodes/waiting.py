"""What a launcher that waits for other nodes reports: which have joined or were refused, and how long it waits."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from torch.distributed import Store

from samebits.cluster.address import address_towards, split_endpoint
from samebits.cluster.signed import SignedStore, peek
from samebits.cluster.timeout import as_clock
from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError, printable

REFUSED = "samebits/refused"
_SHOWN = 8
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


def publish_host(store: SignedStore, endpoint: str) -> None:
    """Publish this node's host name: torch's rendezvous has addresses and process ids only."""
    addr = address_towards(*split_endpoint(endpoint)) or socket.getfqdn()  # as torch's handler has it
    store.put(_key(addr, os.getpid()), socket.gethostname())


def node_names(store: SignedStore, nodes: Collection[Any]) -> str:
    """Return the names of nodes in one line, such as `vm pid 4711`."""
    names = sorted(
        f"{store.get(_key(node.addr, node.pid)) or node.addr} pid {node.pid}" for node in list(nodes)[:_SHOWN]
    )
    return ", ".join(names) + (" …" if len(nodes) > _SHOWN else "")


def describe_wait(nodes: RendezvousConfig, state: Any, before: Collection[Any], names: str, waited_s: float) -> str:
    """Describe what this launcher waits for.

    Args:
        nodes: The rendezvous.
        state: The state of torch's rendezvous.
        before: The nodes of this launcher's last world; empty before its first.
        names: Names of the state's participants.
        waited_s: How long it has waited, seconds.
    """
    joined, size, endpoint = len(state.participants), nodes.size, nodes.endpoint
    shown, have = f" ({names})" if names else "", "has" if joined == 1 else "have"
    left = f"giving up in {as_clock(nodes.join_timeout_s - waited_s)} (cluster.join_timeout_s)"
    if state.complete and not state.participants.keys().isdisjoint(before):
        what = f"waiting for the other nodes of the last world{shown}"
        left = f"lost after {nodes.node_timeout_s:g} s without a heartbeat (cluster.node_timeout_s)"
    elif state.complete and joined >= size.most:
        what = f"the run at {endpoint} has all of its {joined} nodes{shown}"
        left = "waiting until one of them leaves or is lost"
    elif state.complete:
        what = f"waiting until the run at {endpoint} has saved and accepts this node{shown}"
    elif joined >= size.least:
        what = f"{joined} of {size.least} to {size.most} nodes {have} joined at {endpoint}{shown}"
        left = f"starting {nodes.last_call_s:g} s after the first {size.least} (cluster.last_call_s)"
    else:
        what = f"waiting for {size.least} node{'s' * (size.least > 1)} at {endpoint}: {joined} {have} joined{shown}"
    return f"{what}, {waited_s:.0f} s\n  {left}"


def _key(addr: str, pid: int) -> str:
    return f"host/{addr}/{pid}"
