"""Compare the clocks of a run's machines before they train together.

torch's rendezvous stores the time of each machine's last heartbeat by that machine's own clock. If clocks differ by
more than the heartbeat timeout, each machine considers the others lost and trains alone.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import Store

from samebits.cluster.signed import peek
from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError

CLOCK = "samebits/clock"
PERIOD_S = 1.0
# How long a launcher waits for a newer time from a clock that seems wrong.
FRESH_S = 5.0
_SYNCHRONIZE = "Synchronize the clocks (NTP: chronyc tracking, timedatectl), then start again."


def limit_s(node_timeout_s: float) -> float:
    """Return the largest allowed difference to the clock of the launcher that serves the rendezvous, seconds.

    Machines send a heartbeat every quarter of `cluster.node_timeout_s`. With two clocks this far off in opposite
    directions, another quarter remains for delays.

    Args:
        node_timeout_s: The setting `cluster.node_timeout_s`.
    """
    return node_timeout_s / 4


def publish(store: Store, nodes: RendezvousConfig) -> None:
    """Write this clock's time into the store every second. Only the launcher that serves the rendezvous calls this."""
    host = socket.gethostname()
    # At most half of the limit, since the age of a stored time counts as a difference.
    period_s = min(PERIOD_S, limit_s(nodes.node_timeout_s) / 2)
    _write(store, host)

    def run() -> None:
        with suppress(dist.DistError):
            # A connection of its own: calls over one connection wait for each other.
            client = store.clone()
            while True:
                time.sleep(period_s)
                _write(client, host)

    threading.Thread(target=run, name="clock", daemon=True).start()


def check(store: Store, nodes: RendezvousConfig) -> None:
    """Compare this clock with the server's. All launchers but the serving one call this.

    Raises:
        LaunchError: They differ by more than `limit_s`.
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
        # A time that existed before may be old, because the server was busy or suspended.
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
        allowed=f"{limit:g} s, a quarter of cluster.node_timeout_s",
        cause="with larger differences, machines consider each other lost",
        fix=_SYNCHRONIZE,
    )


def check_size(num_nodes: int, nodes: RendezvousConfig) -> None:
    """Verify that a world formed by the rendezvous has enough machines.

    Raises:
        LaunchError: It has fewer than --nodes.
    """
    if num_nodes < nodes.size.least:
        raise LaunchError(
            f"the rendezvous has let {num_nodes} of {nodes.size.least} nodes start on {socket.gethostname()}",
            given=f"--nodes {nodes.size}",
            cause="the clocks of the machines differ by more than cluster.node_timeout_s "
            f"({nodes.node_timeout_s:g} s), so each considers the others lost",
            fix=_SYNCHRONIZE,
        )


def _write(store: Store, host: str) -> None:
    # `beat` makes two texts differ even if the system's clock stands still or is set back.
    store.set(CLOCK, json.dumps({"host": host, "time": time.time(), "beat": time.monotonic()}))


def _read(text: bytes) -> tuple[str, float]:
    try:
        record = json.loads(text)
        host = "".join(char for char in str(record["host"])[:100] if char.isprintable())
        return host, float(record["time"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return "the rendezvous", time.time()  # another check refuses a store that is damaged


def _utc(seconds: float) -> str:
    with suppress(OverflowError, ValueError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    return f"{seconds} s since 1970"
