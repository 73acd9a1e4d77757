"""torch's elastic agent, extended by failure analysis, worlds that shrink and grow, and agreed stops.

The agent polls its workers every 20 ms. Each poll decides between four outcomes:

    run() ─ _rendezvous ─ start workers ─┬─ _monitor_workers ── all done ── wait until rank 0 has written the result
              ^                          │        │
              │                          │        ├─ a stop signal: workers save and exit; the node leaves, or all stop
              │                          │        ├─ a worker failed: restart all workers, shrink, leave, or give up
              └────── _restart_workers ──┘        └─ a node joined or left: workers save, then restart in a new round

After a failure, workers resume from the newest checkpoint. Where nothing failed (a node leaves or joins) they save
before they stop, so no step is lost. tests/house/private_names.toml lists the private names of torch used here.
"""

from __future__ import annotations

import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs

from samebits.errors import LaunchError
from samebits.launch.failures import RootCause
from samebits.launch.nodes.rendezvous import NodeRendezvous
from samebits.launch.supervisor import Supervisor, send_signal
from samebits.launch.worker import report_path

# How long to wait for a node to announce why its workers stopped.
STOP_REASON_S = 3.0


class Agent(LocalElasticAgent):
    """An elastic agent, which starts and restarts this node's workers.

    Args:
        spec: What to run; `local_world_size` shrinks when processes are lost for good.
        supervisor: Receives stop signals and analyzes failures.
        min_procs: Give up with fewer workers than this.
    """

    def __init__(self, spec: WorkerSpec, supervisor: Supervisor, min_procs: int) -> None:
        super().__init__(
            spec,
            DefaultLogsSpecs(str(supervisor.folder)),
            start_method="forkserver",
        )
        self.supervisor = supervisor
        self.is_leaving = False
        assert isinstance(spec.rdzv_handler, NodeRendezvous)
        self._handler = self._node_rendezvous = spec.rdzv_handler
        self._min_procs = min_procs
        self._max_restarts = spec.max_restarts
        self._num_restarts = 0
        self._members: frozenset[Any] = frozenset()
        # Set while a restart was caused by a loss elsewhere: it counts only if no node was lost.
        self._is_uncounted = False
        self._has_announced = False
        self._logs_before: list[int] = []

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [process.pid for process in self._processes().values() if process.pid is not None]

    def _processes(self) -> dict[int, BaseProcess]:
        # torch's agent reports only one failed process; the exit codes of all are in its process context.
        started = getattr(self._pcontext, "_pc", None)
        if started is None:
            return {}
        ranks = [worker.global_rank for worker in self.get_worker_group().workers]
        return dict(zip(ranks, started.processes, strict=False))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                break
            except dist.DistStoreError:
                # A node was lost between joining and the assignment of ranks: repeat with the remaining nodes.
                self.supervisor.raise_if_stop_requested()
                if self._node_rendezvous is None:
                    raise
        if self._node_rendezvous is not None:
            before, self._members = self._members, self._node_rendezvous.members
            if self._is_uncounted and before == self._members:
                self._count_restart()
            if before and before != self._members:
                size, num_nodes = worker_group.workers[0].world_size, len(self._members)
                gone, new = before - self._members, self._members - before
                self.supervisor.report(
                    f"continuing with {_count(size, 'process', 'es')} on {_count(num_nodes, 'node')}"
                    + (f"; lost or left: {self._node_rendezvous.names(gone)}" if gone else "")
                    + (f"; new: {self._node_rendezvous.names(new)}" if new else "")
                )
        # Workers open their logs once they have joined the world.
        self._logs_before = self._log_times(worker_group)
        # Only now is it known whether a node was lost: the members of the round before and of this one differ.
        self._is_uncounted = self._has_announced = False
        # The agent passes (max_restarts - remaining restarts) to its workers as the restart count. This makes it the
        # round's number, which is equal on all nodes, whatever was lost on each.
        worker_group.spec.max_restarts = self._remaining_restarts + self._handler.round

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        supervisor, rendezvous, processes = self.supervisor, self._node_rendezvous, self._processes()
        has_ended = any(process.exitcode is not None for process in processes.values())
        is_undisturbed = not has_ended and supervisor.stop is None
        # Once workers train, their connections report a loss: a silent launcher alone does not disturb them.
        if rendezvous and rendezvous.lost and is_undisturbed and self._log_times(worker_group) == self._logs_before:
            return self._continue_without(rendezvous, worker_group)
        # Workers that have stopped for a pause exit in order, which `poll` would take for a failure.
        if has_ended and supervisor.stop is None and rendezvous is not None and rendezvous.is_pause():
            return self._restart_in_new_round(worker_group)
        if supervisor.stop is not None and not self._has_announced:
            self._has_announced = True
            self._prepare_to_leave()
        # A worker that completes waits for the others, so an exit before that is a failure.
        has_ended = any(process.exitcode is not None for process in processes.values())
        if has_ended:
            supervisor.find_cause(
                processes, {rank: report_path(supervisor.folder, rank, self._handler.round) for rank in processes}
            )
        else:
            supervisor.forward_stop(processes)
        if supervisor.stop is not None or (supervisor.cause is not None and not supervisor.cause.may_pass):
            # torch's agent restarts while this is above 0, and neither
            # a stop nor a wrong setting is cured by a restart.
            self._remaining_restarts = 0
        elif supervisor.cause is not None:
            self._plan_restart(supervisor.cause, worker_group.spec)
        if not has_ended and not self._have_all_returned():
            # A worker may be lost from here on: torch's agent would restart without a report of the cause.
            return RunResult(WorkerState.HEALTHY)
        # torch's agent decides on a restart by _remaining_restarts, which the lines above have set.
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED and supervisor.stop is None and rendezvous is not None:
            done = list(result.return_values.values())
            if not any(one.code for one in done):
                return self._wait_for_rank_0(worker_group, rendezvous, result)
            if not any(one.was_stop_requested for one in done):
                return self._find_stop_reason(worker_group, rendezvous, result)
        return result

    def _have_all_returned(self) -> bool:
        # A worker that has returned waits until torch's agent has read the values of all.
        return not any(values.empty() for values in getattr(self._pcontext, "_ret_vals", {}).values())

    def _wait_for_rank_0(self, worker_group: WorkerGroup, rendezvous: NodeRendezvous, result: RunResult) -> RunResult:
        """Wait until rank 0 has written the result, which completes the run; restart if rank 0 is lost before."""
        # Twice the time after which a silent node counts as lost, so that a lost node of rank 0 is noticed by then.
        end = time.monotonic() + 2 * rendezvous.nodes.node_timeout_s
        while worker_group.group_rank != 0 and self.supervisor.stop is None and not rendezvous.is_over():
            is_lost = time.monotonic() > end
            if rendezvous.is_pause() or rendezvous.num_nodes_waiting() > 0 or (is_lost and self._waits_for_nodes):
                return self._restart_in_new_round(worker_group)
            if is_lost:
                break
            time.sleep(0.1)
        return result

    def _find_stop_reason(self, worker_group: WorkerGroup, rendezvous: NodeRendezvous, result: RunResult) -> RunResult:
        """Find out why all workers have saved and stopped: another node received a stop signal."""
        end = time.monotonic() + STOP_REASON_S
        while time.monotonic() < end and not rendezvous.is_over():
            if rendezvous.is_pause():
                return self._restart_in_new_round(worker_group)
            time.sleep(0.1)
        if rendezvous.is_over() or not self._waits_for_nodes:
            return result
        self.supervisor.report("the launcher of another node was killed, and its processes have stopped")
        return self._restart_in_new_round(worker_group)

    def _continue_without(self, rendezvous: NodeRendezvous, worker_group: WorkerGroup) -> RunResult:
        """Start a new round: a node is lost for which the workers of the others wait."""
        text = f"{rendezvous.names(rendezvous.lost)} was lost while its processes joined"
        if not self._waits_for_nodes:
            fix = "Start the same command on all machines again, with --resume auto."
            raise LaunchError(text, fix=f"{fix} --max-restarts 3 or --nodes MIN:MAX would wait or continue.")
        self.supervisor.report(text)
        super()._restart_workers(worker_group)
        return RunResult(WorkerState.HEALTHY)

    def _log_times(self, worker_group: WorkerGroup) -> list[int]:
        log = self.supervisor.log
        paths = [log.with_name(f"rank-{worker.global_rank}.log") for worker in worker_group.workers] if log else []
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]

    def _restart_in_new_round(self, worker_group: WorkerGroup) -> RunResult:
        self._restart_workers(worker_group)
        return RunResult(WorkerState.HEALTHY)

    @property
    def _waits_for_nodes(self) -> bool:
        """Whether the run continues, or waits, after a node is lost."""
        return self._node_rendezvous is not None and (
            self._node_rendezvous.nodes.size.is_elastic or self._max_restarts > 0
        )

    def _plan_restart(self, cause: RootCause, spec: WorkerSpec) -> None:
        """Choose how to continue after a failure. Restarts are counted per node, without losses of other nodes."""
        if cause.is_elsewhere and self._waits_for_nodes:
            self._is_uncounted = True
            self._remaining_restarts += 1
        elif self._remaining_restarts > 0:
            self._report_restart()
        elif spec.local_world_size > self._min_procs:
            self.supervisor.report(
                f"continuing with {_count(spec.local_world_size - 1, 'process', 'es')} "
                f"instead of {spec.local_world_size}"
            )
            # torch's agent reads the size at the next rendezvous. One restart, for the smaller world.
            spec.local_world_size -= 1
            self._remaining_restarts = 1
        elif self._can_leave():
            self.is_leaving = True
            self.supervisor.report("no restart is left: this node leaves, and the others continue")

    def _report_restart(self) -> None:
        self._num_restarts += 1
        self.supervisor.report(f"restart {self._num_restarts} of {self._max_restarts}")

    def _count_restart(self) -> None:
        """Count a restart caused by a failed process of another node; no node was lost."""
        if self._remaining_restarts == 0:
            raise LaunchError(
                "a process of another node was lost, and no restart is left",
                given=f"--max-restarts {self._max_restarts}",
                fix="Resume with --resume auto, or set a higher --max-restarts.",
            )
        self._report_restart()
        self._remaining_restarts -= 1

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # Nothing has failed and some workers run: torch's agent calls this when a node waits to join.
        if self.supervisor.cause is None and any(process.is_alive() for process in self._processes().values()):
            self._save_and_stop_workers(worker_group)
            self.supervisor.clear_stop_request()
        self.supervisor.cause = None
        super()._restart_workers(worker_group)

    def _save_and_stop_workers(self, worker_group: WorkerGroup) -> None:
        """Let all workers save and stop: a node joins or leaves, nothing has failed, and a new world follows."""
        assert self._node_rendezvous is not None
        if not self._node_rendezvous.is_pause():
            self.supervisor.report("another node has joined: saving, then continuing in a larger world")
            self._node_rendezvous.announce("comes")
        end = time.monotonic() + self.supervisor.stop_timeout_s
        self.supervisor.request_stop(self.pids())
        # torch's own poll, without failure analysis: an exit is expected here.
        while time.monotonic() < end and self.supervisor.stop is None:
            if super()._monitor_workers(worker_group).state != WorkerState.HEALTHY:
                return
            time.sleep(0.02)
        # torch's agent would otherwise send SIGTERM again, and wait once more for as long.
        send_signal(self.pids(), signal.SIGKILL)

    def _prepare_to_leave(self) -> None:
        """Announce that this node leaves, if enough others remain. Ctrl-C stops all nodes instead."""
        if self._node_rendezvous is not None and self.supervisor.stop != signal.SIGINT and self._can_leave():
            self.is_leaving = True
            self._node_rendezvous.announce("leaves")

    def _can_leave(self) -> bool:
        rendezvous = self._node_rendezvous
        return rendezvous is not None and not rendezvous.serves and len(self._members) > rendezvous.nodes.size.least

    def _exit_barrier(self) -> None:
        """Do nothing: `_wait_for_rank_0` has waited already."""

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        # torch's implementation resolves the host's full name, which may take a name server's timeout.
        return Event(f"{source.value}.{state}", source)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"
