"""Starts this machine's processes of a world, through torch's elastic agent, and watches over them.

    launcher ── fork server ── rank 0, rank 1, ...

The launcher alone answers to Ctrl-C and SIGTERM. It stops the ranks; if it is killed itself, they notice and stop.
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

from lockstep.config.process_range import RendezvousConfig
from lockstep.errors import LaunchError, no_shared_memory
from lockstep.launch import forkserver
from lockstep.launch.agent import LOCAL, Agent, LocalRendezvous
from lockstep.launch.nodes import auth
from lockstep.launch.nodes.rendezvous import EndedOnOtherNode, NodeRendezvous
from lockstep.launch.supervisor import StopRequested, Supervisor
from lockstep.launch.worker import run_worker
from lockstep.open_files import is_too_many_files, raise_open_files, too_many_files

AGENT_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")


def launch(
    num_procs: int,
    entry: Callable[..., object],
    args: tuple[Any, ...],
    *,
    least_procs: int | None = None,
    max_restarts: int = 0,
    nodes: RendezvousConfig | None = None,
    stop_timeout_s: float = 30.0,
    log_dir: Path | None = None,
    preload: Sequence[str] = (),
    on_stop: Callable[[], str] = lambda: "stopping",
) -> int:
    """Run `entry(*args)` in `num_procs` processes of this machine until all are done.

    Call `forkserver.prepare(preload)` before torch is imported: it makes the start twice as fast.

    Args:
        num_procs: How many processes.
        entry: A function that can be imported; `env.placement(os.environ)` tells it who it is. May return an exit
            code.
        args: What it gets; must be picklable.
        least_procs: Where no restart is left, go on with those left, down to this many; if left out, never.
        max_restarts: How often all are started again after one has died.
        nodes: The world has processes of other machines too, each started by a launcher like this one.
        stop_timeout_s: How long they may take to stop when they are asked to.
        log_dir: Where to keep what the launcher says (launcher.log).
        preload: Modules that the workers need.
        on_stop: Gives what they do when they are asked to stop, for people.

    Returns:
        The exit code: 0, the first cause's own, 128 + the signal's number after a stop, or what an entry returned.

    Raises:
        LaunchError: The other machines can't be met, or this one has no shared memory or too few open files.
    """
    raise_open_files()
    forkserver.prepare(preload)
    with forkserver.temp_folder() as folder:
        watch = Supervisor(folder, stop_timeout_s, log_dir, on_stop)
        agents: list[Agent] = []
        try:
            with (
                _quiet(),
                _environment(),
                forkserver.without_script(),
                watch.signals(lambda: agents[0].pids() if agents else []),
            ):
                meeting = NodeRendezvous(nodes, watch.raise_if_asked, watch.say) if nodes is not None else None
                key = meeting.key if meeting is not None else auth.key_for_launch()
                spec = WorkerSpec(
                    role="rank",
                    local_world_size=num_procs,
                    rdzv_handler=meeting or LocalRendezvous(),
                    entrypoint=run_worker,
                    args=(entry, args, folder, stop_timeout_s, key),
                    max_restarts=max_restarts,
                    monitor_interval=0.02,
                    local_addr=LOCAL,
                )
                agents.append(Agent(spec, watch, least_procs or num_procs))
                return _run(agents[0], watch, meeting)
        except StopRequested:
            return watch.exit_code(False, {})
        except OSError as error:
            if error.filename is not None:
                raise
            if is_too_many_files(error):
                raise too_many_files() from error
            raise no_shared_memory(error) from error  # a semaphore has no file name
        finally:
            forkserver.keep_tracker_alive()


def _run(agent: Agent, watch: Supervisor, meeting: NodeRendezvous | None) -> int:
    """Run an agent to its end, and let the other nodes know of it."""
    code, text = 1, "a launcher was at fault"
    try:
        result = agent.run()
        code = watch.exit_code(result.is_failed(), result.return_values)
        text = watch.last_word(code)
    except StopRequested:
        # It was waiting for others, who may go on without it.
        code, text = watch.exit_code(False, {}), watch.last_word(1)
        agent.leaves = meeting is not None and not meeting.serves
    except EndedOnOtherNode as ended:
        code, text = ended.code, ended.text
        if text:
            watch.say(text)
    except LaunchError as error:
        code, text = error.exit_code, str(error)
        watch.say(text)
    finally:
        if meeting is not None and agent.leaves:
            meeting.leave()
        elif meeting is not None:
            meeting.end(code, text)
    return code


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs each failure at length, several times; ours is said once, by the watch."""
    names = {*AGENT_LOGGERS, *(name for name in logging.root.manager.loggerDict if name.startswith(AGENT_LOGGERS))}
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


@contextmanager
def _environment() -> Iterator[None]:
    # The agent would take over SIGINT, SIGTERM and SIGHUP, which are the watch's.
    # Each start has a store of its own: in a shared one, addresses of lost processes stay, and half of the restarts
    # fail.
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
