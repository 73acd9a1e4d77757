"""Start the processes of this node, and supervise them.

    launcher ── fork server ── rank 0, rank 1, ...

Only the launcher handles Ctrl-C and SIGTERM. It stops the ranks; if it is killed itself, they detect it and stop.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samebits.cluster.env import run_key
from samebits.config.process_range import RendezvousConfig
from samebits.launch import forkserver
from samebits.launch.crew.crew import Crew
from samebits.launch.crew.crew_process import Entry
from samebits.launch.crew.recovery import Recovery
from samebits.launch.crew.run_node import run_node
from samebits.launch.nodes.auth import new_key
from samebits.launch.supervisor import StopRequested, Supervisor
from samebits.open_files import is_too_many_files, raise_open_files, too_many_files


def launch(
    num_procs: int,
    entry: Callable[..., object],
    args: tuple[Any, ...],
    *,
    min_procs: int | None = None,
    max_restarts: int = 0,
    nodes: RendezvousConfig | None = None,
    stop_timeout_s: float = 30.0,
    log_dir: Path | None = None,
    preload: Sequence[str] = (),
    on_stop: Callable[[], str] = lambda: "stopping",
    recovery: Recovery | None = None,
) -> int:
    """Run `entry(*args)` in `num_procs` processes of this node until all are done.

    Call `forkserver.prepare(preload)` before torch is imported: this halves the start-up time.

    Args:
        entry: An importable function; `env.read_assignment(os.environ)` returns its rank. May return an exit code.
        args: Its arguments; must be picklable.
        min_procs: When no restart is left, continue with the remaining processes, down to this many; None: never.
        max_restarts: How often all processes are restarted after one has died.
        nodes: The other nodes of the world, each with a launcher of its own; None: this node only.
        stop_timeout_s: How long the processes may take to stop after a signal.
        log_dir: Folder of launcher.log, a copy of what the launcher prints.
        on_stop: Returns what the processes do after a signal, for the user.
        recovery: Whether the entry can continue without a lost process; None: it cannot.

    Returns:
        The exit code: 0, that of the root cause, 128 + the signal's number after a stop, or an entry's return value.

    Raises:
        LaunchError: The rendezvous failed, or this node has too few open files.
    """
    recovery = recovery or Recovery()
    raise_open_files()
    forkserver.prepare(preload)
    sizes = (num_procs, min_procs or num_procs, max_restarts)
    with forkserver.temp_folder() as folder:
        supervisor = Supervisor(folder, stop_timeout_s, log_dir, on_stop)
        crews: list[Crew] = []
        try:
            with forkserver.without_script(), supervisor.signals(lambda: crews[0].pids() if crews else []):
                if nodes is not None:
                    return run_node(nodes, supervisor, (entry, args), sizes, crews, recovery.in_step)
                here = Entry(entry, args, folder, stop_timeout_s, run_key(os.environ) or new_key())
                crews.append(Crew(here, supervisor, *sizes, recovery))
                return supervisor.exit_code(*crews[0].run())
        except StopRequested:
            return supervisor.exit_code(False, {})
        except OSError as error:
            if is_too_many_files(error):
                raise too_many_files() from error
            raise
