"""Start the processes of this node through torch's elastic agent, and supervise them.

    launcher ── fork server ── rank 0, rank 1, ...

Only the launcher handles Ctrl-C and SIGTERM. It stops the ranks; if it is killed itself, they detect it and stop.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec

from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError, no_shared_memory
from samebits.launch import forkserver
from samebits.launch.agent import Agent
from samebits.launch.crew.crew import LOCAL, Crew
from samebits.launch.crew.crew_process import Entry
from samebits.launch.crew.run_node import run_node
from samebits.launch.nodes import auth
from samebits.launch.nodes.rendezvous import EndedOnOtherNode, NodeRendezvous
from samebits.launch.supervisor import StopRequested, Supervisor
from samebits.launch.worker import run_worker
from samebits.open_files import is_too_many_files, raise_open_files, too_many_files

AGENT_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")


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
    recovers_in_step: bool = False,
) -> int:
    """Run `entry(*args)` in `num_procs` processes of this node until all are done.

    Call `forkserver.prepare(preload)` before torch is imported: this halves the start-up time.

    Args:
        num_procs: How many processes.
        entry: An importable function; `env.read_assignment(os.environ)` returns its rank. May return an exit code.
        args: Its arguments; must be picklable.
        min_procs: When no restart is left, continue with the remaining processes, down to this many; None: never.
        max_restarts: How often all processes are restarted after one has died.
        nodes: The other nodes of the world, each with a launcher of its own; None: this node only.
        stop_timeout_s: How long the processes may take to stop after a signal.
        log_dir: Folder of launcher.log, a copy of what the launcher prints.
        preload: Modules that the workers import.
        on_stop: Returns what the processes do after a signal, for the user.
        recovers_in_step: The entry can continue without a lost process (`samebits.launch.crew`).

    Returns:
        The exit code: 0, that of the root cause, 128 + the signal's number after a stop, or an entry's return value.

    Raises:
        LaunchError: The rendezvous failed, or this node has no shared memory or too few open files.
    """
    raise_open_files()
    forkserver.prepare(preload)
    with forkserver.temp_folder() as folder:
        supervisor = Supervisor(folder, stop_timeout_s, log_dir, on_stop)
        agents: list[Agent | Crew] = []
        sizes = (num_procs, min_procs or num_procs, max_restarts)
        try:
            with (
                _quiet(),
                _environment(),
                forkserver.without_script(),
                supervisor.signals(lambda: agents[0].pids() if agents else []),
            ):
                if nodes is None:
                    entry_here = Entry(entry, args, folder, stop_timeout_s, auth.key_for_launch())
                    crew = Crew(entry_here, supervisor, *sizes, keeps=recovers_in_step)
                    agents.append(crew)
                    return supervisor.exit_code(*crew.run())
                if recovers_in_step:
                    return run_node(nodes, supervisor, entry, args, sizes, agents)
                rendezvous = NodeRendezvous(nodes, supervisor.raise_if_stop_requested, supervisor.report)
                spec = WorkerSpec(
                    role="rank",
                    local_world_size=num_procs,
                    rdzv_handler=rendezvous,
                    entrypoint=run_worker,
                    args=(entry, args, folder, stop_timeout_s, rendezvous.key),
                    max_restarts=max_restarts,
                    monitor_interval=0.02,
                    local_addr=LOCAL,
                )
                agent = Agent(spec, supervisor, min_procs or num_procs)
                agents.append(agent)
                return _run(agent, supervisor, rendezvous)
        except StopRequested:
            return supervisor.exit_code(False, {})
        except OSError as error:
            if error.filename is not None:
                raise
            if is_too_many_files(error):
                raise too_many_files() from error
            raise no_shared_memory(error) from error  # a semaphore has no file name
        finally:
            forkserver.keep_tracker_alive()


def _run(agent: Agent, supervisor: Supervisor, rendezvous: NodeRendezvous | None) -> int:
    """Run an agent to its end, and report the end to the other nodes."""
    code, text = 1, "a launcher failed"
    try:
        result = agent.run()
        code = supervisor.exit_code(result.is_failed(), result.return_values)
        text = supervisor.end_message(code)
    except StopRequested:
        # It was waiting for other nodes, which may continue without it.
        code, text = supervisor.exit_code(False, {}), supervisor.end_message(1)
        # The launcher that serves the rendezvous cannot leave: the others would lose their store.
        agent.is_leaving = rendezvous is not None and not rendezvous.serves
    except EndedOnOtherNode as ended:
        code, text = ended.code, ended.text
        if text:
            supervisor.report(text)
    except LaunchError as error:
        code, text = error.exit_code, str(error)
        supervisor.report(text)
    finally:
        # Always, whatever has happened: the others wait for a reason or for a missed heartbeat.
        if rendezvous is not None and agent.is_leaving:
            rendezvous.leave()
        elif rendezvous is not None:
            rendezvous.end(code, text)
    return code


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs each failure at length, several times; the launcher reports it once."""
    names = {*AGENT_LOGGERS, *(name for name in logging.root.manager.loggerDict if name.startswith(AGENT_LOGGERS))}
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        # Above CRITICAL, the highest level that torch uses.
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


@contextmanager
def _environment() -> Iterator[None]:
    # The agent would take over SIGINT, SIGTERM and SIGHUP, which the launcher handles.
    # Each start has a store of its own: a shared one keeps addresses of lost processes, and half of the restarts fail.
    added = {"TORCHELASTIC_SIGNALS_TO_HANDLE": signal.SIGQUIT.name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
