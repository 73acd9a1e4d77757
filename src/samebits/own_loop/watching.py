"""The hang detector in a script that Samebits has not started: on inside of exact loops, and paused elsewhere."""

from __future__ import annotations

import atexit
import secrets
import tempfile
from pathlib import Path

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.watchdog.detector import HangDetector

_DETECTORS: dict[int, HangDetector] = {}  # by the identity of the world's activity


def watch(world: World, timeout_s: float | None) -> None:
    """Find a rank that hangs in the body of a loop, until the process ends. Called on all ranks.

    Between loops a script may do anything for any time, on some ranks only. The detector is paused there.

    Args:
        world: The ranks.
        timeout_s: How long all ranks may make no progress, seconds; None: do not watch.
    """
    if world.size == 1 or timeout_s is None or id(world.activity) in _DETECTORS:
        return
    world.activity.is_paused = True
    # One folder for all ranks of a machine. It is made when there is something to write.
    name = collectives.broadcast_object(world, f"samebits-stacks-{secrets.token_hex(4)}")
    detector = HangDetector(world, timeout_s, Path(tempfile.gettempdir()) / name, "hang_timeout_s")
    _DETECTORS[id(world.activity)] = detector.__enter__()
    # The script has no block that ends. A thread in the store's client must not meet the interpreter's end.
    atexit.register(detector.__exit__, None, None, None)
