"""Compares the clocks of the machines of a run before they train together.

torch's rendezvous keeps the time of each machine's last sign of life by that machine's own clock. Where clocks differ
by more than the time after which a silent machine is lost, each machine drops the other one and trains alone.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lockstep.cluster.signed import peek
from lockstep.config.process_range import RendezvousConfig
from lockstep.errors import LaunchError

CLOCK = "lockstep/clock"
PERIOD_S = 1.0
# How long a launcher waits for a new time of a clock that seems to be wrong.
FRESH_S = 5.0
_SYNCHRONISE = "synchronise the clocks (NTP: chronyc tracking, timedatectl), then start again"


def limit_s(node_timeout_s: float) -> float:
    """How far a clock may be from the clock of the launcher that serves the rendezvous, in seconds.

    Machines send a sign of life every quarter of `cluster.node_timeout_s`. Two clocks that are this far off on
    different sides leave another quarter for delays.
    """
    return node_timeout_s / 4


def publish(store: Store, nodes: RendezvousConfig) -> None:
    """On the launcher that serves the store: write its time there every second, as long as this process lives."""
    host = socket.gethostname()
    period_s = min(PERIOD_S, limit_s(nodes.node_timeout_s) / 2)
    _write(store, host)

    def run() -> None:
        with suppress(dist.DistError):
            client = store.clone()
            while True:
                time.sleep(period_s)
                _write(client, host)

    threading.Thread(target=run, name="clock", daemon=True).start()


def check(store: Store, nodes: RendezvousConfig) -> None:
    """On any other launcher: compare its clock with the server's.

    Raises:
        LaunchError: They are too far apart.
    """
    limit = limit_s(nodes.node_timeout_s)
    end = time.monotonic() + FRESH_S
    first = text = peek(store, CLOCK)
    while text is not None:
        host, theirs = _read(text)
        mine = time.time()
        is_fresh = text != first
        if abs(theirs - mine) <= limit:
            return
        # A time that was there already may be old, as the server was busy or suspended.
        if is_fresh:
            raise _differ(host, theirs, mine, limit)
        if time.monotonic() > end:
            return  # the server does not answer, which has an error of its own
        time.sleep(0.02)
        text = peek(store, CLOCK)


def _differ(host: str, theirs: float, mine: float, limit: float) -> LaunchError:
    return LaunchError(
        f"the clocks of {host} and {socket.gethostname()} differ by {abs(theirs - mine):,.1f} s",
        where=f"{host}: {_utc(theirs)}\n{socket.gethostname()}: {_utc(mine)}",
        allowed=f"{limit:g} s, a quarter of cluster.node_timeout_s: a machine seems lost to the others otherwise",
        fix=_SYNCHRONISE,
    )


def check_size(num_nodes: int, nodes: RendezvousConfig) -> None:
    """See that a world that the rendezvous has formed has enough machines.

    Raises:
        LaunchError: It has fewer than --nodes asks for.
    """
    if num_nodes < nodes.size.least:
        raise LaunchError(
            f"the rendezvous has let {num_nodes} of {nodes.size.least} nodes begin on {socket.gethostname()}",
            given=f"--nodes {nodes.size}",
            cause="the clocks of the machines differ by more than cluster.node_timeout_s "
            f"({nodes.node_timeout_s:g} s), so each takes the others for lost",
            fix=_SYNCHRONISE,
        )


def _write(store: Store, host: str) -> None:
    store.set(CLOCK, json.dumps({"host": host, "time": time.time(), "beat": time.monotonic()}))


def _read(text: bytes) -> tuple[str, float]:
    try:
        said = json.loads(text)
        host = "".join(char for char in str(said["host"])[:100] if char.isprintable())
        return host, float(said["time"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return "the rendezvous", time.time()  # another check refuses a store that is damaged


def _utc(seconds: float) -> str:
    with suppress(OverflowError, ValueError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    return f"{seconds} s since 1970"
