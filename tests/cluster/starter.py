"""A launcher as a program of its own, for the tests: starter.py DEED NUM_PROCS MAX_RESTARTS STOP_TIMEOUT_S FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import deeds

if __name__ == "__main__":
    from lockstep.cluster import forkserver

    forkserver.prepare(["lockstep.cluster.worker", "lockstep.cluster.world", "lockstep.cluster.collect"])
    from lockstep.cluster.launch import launch

    deed, num_procs, max_restarts, stop_timeout_s, folder = sys.argv[1:]
    code = launch(
        int(num_procs),
        deeds.work,
        (deed, Path(folder)),
        max_restarts=int(max_restarts),
        stop_timeout_s=float(stop_timeout_s),
        log_dir=Path(folder) / "logs",
        on_stop=lambda: "finishing the step and saving",
    )
    sys.exit(code)
