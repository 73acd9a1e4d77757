"""What a process of a world reports of gloo's threads; importable by processes that a test launches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lockstep
from lockstep.cluster import collectives
from lockstep.cores import core_ids


def placements() -> Any:
    """Return for each rank the policies and cores of gloo's threads, and the cores of the main thread."""
    with lockstep.world() as world:
        names = {thread: (thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()}
        gloo = [int(thread.name) for thread, name in names.items() if name == "gloo_tcp_loop"]
        policies = [os.sched_getscheduler(each) for each in gloo]
        mine = [policies, [sorted(os.sched_getaffinity(each)) for each in gloo], sorted(core_ids())]
        return collectives.all_gather_object(world, mine)
