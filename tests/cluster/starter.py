"""A launcher as a program of its own, for the tests: starter.py DEED NUM_PROCS MAX_RESTARTS STOP_TIMEOUT_S FOLDER.

With ENDPOINT as a sixth word it is one of two nodes that meet there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import scenarios


def kill_after_a_poll(started: Path) -> None:
    """Let rank 1 be killed between the supervisor's poll and that of torch's agent."""
    from samebits.launch.supervisor import Processes, Supervisor

    poll = Supervisor.poll

    def poll_and_kill(self: Supervisor, processes: Processes, restart: int) -> bool:
        has_ended = poll(self, processes, restart)
        if restart == 0 and started.exists() and processes[1].is_alive():
            processes[1].kill()
            processes[1].join(60)
        return has_ended

    Supervisor.poll = poll_and_kill  # type: ignore[method-assign]


if __name__ == "__main__":
    from samebits.launch import forkserver

    forkserver.prepare(["samebits.launch.worker", "samebits.cluster.world", "samebits.cluster.collectives"])
    from samebits.config.process_range import ProcessRange, RendezvousConfig
    from samebits.launch.launch import launch

    scenario, num_procs, max_restarts, stop_timeout_s, folder, *endpoint = sys.argv[1:]
    nodes = (
        RendezvousConfig(ProcessRange(2, 2), endpoint[0], "test", 100.0, 0.5, 6.0, folder=Path(folder))
        if endpoint
        else None
    )
    if scenario == "killed after a poll":
        kill_after_a_poll(Path(folder) / "started-0-1")
    code = launch(
        int(num_procs),
        scenarios.work,
        (scenario, Path(folder)),
        max_restarts=int(max_restarts),
        nodes=nodes,
        stop_timeout_s=float(stop_timeout_s),
        log_dir=Path(folder) / "logs",
        on_stop=lambda: "finishing the step and saving",
        recovers_in_step=scenario == "stopped at the end",
    )
    sys.exit(code)
