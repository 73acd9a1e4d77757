"""A launcher as a program of its own, for the tests: starter.py DEED NUM_PROCS MAX_RESTARTS STOP_TIMEOUT_S FOLDER.

With ENDPOINT as a sixth word it is one of two nodes that meet there.
"""

import sys
from pathlib import Path

import scenarios

if __name__ == "__main__":
    from samebits.launch import forkserver

    forkserver.prepare(["samebits.launch.worker", "samebits.cluster.world", "samebits.cluster.collectives"])
    from samebits.launch.crew.recovery import STOPPED_S, Recovery
    from samebits.launch.launch import launch
    from samebits.process_range import ProcessRange, RendezvousConfig

    scenario, num_procs, max_restarts, stop_timeout_s, folder, *endpoint = sys.argv[1:]
    nodes = (
        RendezvousConfig(ProcessRange(2, 2), endpoint[0], "test", 100.0, 0.5, 6.0, folder=Path(folder))
        if endpoint
        else None
    )
    code = launch(
        int(num_procs), scenarios.work, (scenario, Path(folder)), max_restarts=int(max_restarts), nodes=nodes,
        stop_timeout_s=float(stop_timeout_s), log_dir=Path(folder) / "logs",
        on_stop=lambda: "finishing the step and saving",
        recovery=Recovery(True, STOPPED_S) if scenario == "stopped at the end" else None,
    )  # fmt: skip
    sys.exit(code)
