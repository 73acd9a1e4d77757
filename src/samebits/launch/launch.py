"""Start the processes of this node, one alone or one of several, and supervise them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from samebits.cluster.env import run_key
from samebits.errors import LaunchError
from samebits.launch import forkserver
from samebits.launch.crew.crew import Crew, Entry
from samebits.launch.crew.recovering_crew import RecoveringCrew
from samebits.launch.crew.recovery import Recovery
from samebits.launch.crew.restarting_crew import RestartingCrew
from samebits.launch.failures import RESUME
from samebits.launch.nodes.auth import new_key
from samebits.launch.nodes.board import EndedOnOtherNode
from samebits.launch.nodes.rendezvous import NodeRendezvous
from samebits.launch.supervisor import StopRequested, Supervisor
from samebits.open_files import is_too_many_files, raise_open_files, too_many_files
from samebits.process_range import RendezvousConfig

# Run one of several machines: join the launchers' store, then supervise this machine's processes.


Work = tuple[Callable[..., object], tuple[Any, ...]]


def run_node(
    nodes: RendezvousConfig, supervisor: Supervisor, work: Work, sizes: tuple[int, int, int], crews: list[Crew],
    recovers_in_step: bool,
) -> int:  # fmt: skip
    """Run a function in the processes of this machine, and return the command's exit code.

    Launchers meet in the store of the one that serves the rendezvous.

    Args:
        work: An importable function, and its arguments.
        sizes: Processes of this machine, the least number of them, and restarts.
        crews: Receives the crew, as the signal handler needs its process ids.
        recovers_in_step: The processes can continue without a lost one. Otherwise each loss restarts all.
    """
    rendezvous = NodeRendezvous(nodes, supervisor.raise_if_stop_requested, supervisor.report)
    code = 1
    text = "a launcher failed"
    crew: RecoveringCrew | RestartingCrew | None = None
    try:
        if recovers_in_step:
            rendezvous.check_folder()
        # Without a launcher that reports them, processes that recover are lost to the others: they end at once.
        stop_s = 0.0 if recovers_in_step else supervisor.stop_timeout_s
        entry = Entry(*work, supervisor.folder, stop_s, rendezvous.key)
        kind = RecoveringCrew if recovers_in_step else RestartingCrew
        crew = kind(entry, supervisor, *sizes, rendezvous)
        crews.append(crew)
        # In the list before it runs: the signal handler finds the processes there.
        code = supervisor.exit_code(*crew.run())
        text = supervisor.end_message(code)
    except StopRequested:
        # It was waiting for other nodes, which may continue without it.
        code = supervisor.exit_code(False, {})
        text = supervisor.end_message(1)
        # The launcher that serves the rendezvous cannot leave: the others would lose their store.
        if crew is not None:
            crew.is_leaving = not rendezvous.serves
    except EndedOnOtherNode as ended:
        code = ended.code
        text = ended.text
        if text:
            supervisor.report(text)
    except LaunchError as error:
        code = error.exit_code
        text = str(error)
        supervisor.report(text)
    except DistError:
        raise LaunchError(
            f"lost the rendezvous at {nodes.endpoint} while joining",
            fix="Start the same command again.",
        ) from None
    finally:
        # Always, whatever has happened: the others wait for a reason or for a missed heartbeat.
        if crew is not None:
            crew.end(code, text)
        elif rendezvous.serves or not recovers_in_step:
            rendezvous.end(code, text)
    return code


# Start the processes of this node, and supervise them.
#
#     launcher ── fork server ── rank 0, rank 1, ...
#
# Only the launcher handles Ctrl-C and SIGTERM. It stops the ranks; if it is killed itself, they detect it and stop.


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
    fix: str = RESUME,
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
        fix: What the user can do after a process was lost.

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
        supervisor.fix = fix
        crews: list[Crew] = []
        try:
            with (
                forkserver.without_script(),
                supervisor.signals(lambda: crews[0].pids() if crews else []),
            ):
                if nodes is not None:
                    return run_node(
                        nodes, supervisor, (entry, args), sizes, crews, recovery.in_step
                    )
                here = Entry(entry, args, folder, stop_timeout_s, run_key(os.environ) or new_key())
                crews.append(Crew(here, supervisor, *sizes, recovery))
                return supervisor.exit_code(*crews[0].run())
        except StopRequested:
            return supervisor.exit_code(False, {})
        except OSError as error:
            if is_too_many_files(error):
                raise too_many_files() from error
            raise
