"""torch's elastic agent, with our watch between its looks, and with worlds that shrink and grow.

Processes that are started anew go on from the newest checkpoint. Where nothing has failed (a machine leaves or has
come) they save before they stop, so that no step is lost.
"""

from __future__ import annotations

import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.cluster.address import ReservedPort
from lockstep.errors import LaunchError
from lockstep.launch.failures import RootCause
from lockstep.launch.nodes.rendezvous import NodeRendezvous
from lockstep.launch.supervisor import Supervisor, send_signal

LOCAL = "127.0.0.1"
# How long a node that was told to stop may take to say so.
STOP_REASON_S = 3.0


class LocalRendezvous(RendezvousHandler):
    """A rendezvous of one agent: nobody to wait for, no host names to look up, and a new port for every start."""

    def __init__(self) -> None:
        self.round = -1
        self._port = ReservedPort()

    def get_backend(self) -> str:
        """Its name, for torch's records."""
        return "local"

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin the next world."""
        self.round += 1
        # Rank 0 serves the workers' own store, not the agent: they can then finish and save when it is killed.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOCAL, self._port.renew(LOCAL)))

    def is_closed(self) -> bool:
        """Never: it ends with the agent."""
        return False

    def set_closed(self) -> None:
        """Nobody else is to be told."""

    def num_nodes_waiting(self) -> int:
        """Nobody else comes."""
        return 0

    def get_run_id(self) -> str:
        """Its name, for torch's records."""
        return "lockstep"

    def shutdown(self) -> bool:
        """Nothing else is open than the port."""
        self._port.close()
        return True


class Agent(LocalElasticAgent):
    """Starts this machine's processes, and starts them again.

    Args:
        spec: What to run; its `local_world_size` shrinks where processes are lost for good.
        watch: Knows of stops, and why processes have died.
        min_procs: With fewer processes than this it gives up.
    """

    def __init__(self, spec: WorkerSpec, supervisor: Supervisor, min_procs: int) -> None:
        super().__init__(
            spec,
            DefaultLogsSpecs(str(supervisor.folder)),
            start_method="forkserver",
        )
        self.supervisor = supervisor
        self.is_leaving = False
        assert isinstance(spec.rdzv_handler, LocalRendezvous | NodeRendezvous)
        self._handler = spec.rdzv_handler
        self._node_rendezvous = self._handler if isinstance(self._handler, NodeRendezvous) else None
        self._min_procs = min_procs
        self._max_restarts = spec.max_restarts
        self._num_restarts = 0
        self._members: frozenset[Any] = frozenset()
        # Started again because of a loss elsewhere: it counts only if no node was lost.
        self._is_uncounted = False
        self._has_announced = False

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.pid for process in self._processes().values() if process.pid is not None]

    def _processes(self) -> dict[int, BaseProcess]:
        # The agent says only which process failed, and one at that; who died of what is in its process context.
        started = getattr(self._pcontext, "_pc", None)
        if started is None:
            return {}
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return dict(zip(ranks, started.processes, strict=False))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                break
            except dist.DistStoreError:
                # A node was lost between its joining and the numbering of ranks. Again, with those left.
                self.supervisor.raise_if_stop_requested()
                if self._node_rendezvous is None:
                    raise
        if self._node_rendezvous is not None:
            before, self._members = self._members, self._node_rendezvous.members
            if self._is_uncounted and before == self._members:
                self._count_restart()
            if before and before != self._members:
                size, num_nodes = worker_group.workers[0].world_size, len(self._members)
                self.supervisor.report(f"going on with {_count(size, 'process', 'es')} on {_count(num_nodes, 'node')}")
        self._is_uncounted = self._has_announced = False
        # What the agent tells its workers as the restart count is the difference to this: which world of the run it
        # is, the same on all nodes, whatever was lost where.
        worker_group.spec.max_restarts = self._remaining_restarts + self._handler.round

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        supervisor, rendezvous, processes = self.supervisor, self._node_rendezvous, self._processes()
        has_ended = any(process.exitcode is not None for process in processes.values())
        if has_ended and supervisor.stop is None and rendezvous is not None and rendezvous.is_pause():
            return self._restart_in_new_round(worker_group)
        if supervisor.stop is not None and not self._has_announced:
            self._has_announced = True
            self._prepare_to_leave()
        supervisor.poll(processes, self._handler.round)
        if supervisor.stop is not None or (supervisor.cause is not None and not supervisor.cause.may_pass):
            self._remaining_restarts = 0
        elif supervisor.cause is not None:
            self._plan_restart(supervisor.cause, worker_group.spec)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED and supervisor.stop is None and rendezvous is not None:
            done = list(result.return_values.values())
            if not any(one.code for one in done):
                return self._wait_for_rank_0(worker_group, rendezvous, result)
            if not any(one.was_stop_requested for one in done):
                return self._find_stop_reason(worker_group, rendezvous, result)
        return result

    def _wait_for_rank_0(self, worker_group: WorkerGroup, rendezvous: NodeRendezvous, result: RunResult) -> RunResult:
        """The run is complete when rank 0 has written the result; where it is lost before, that is to be done again."""
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
        """All processes have saved and stopped, as one on another node was told to."""
        end = time.monotonic() + STOP_REASON_S
        while time.monotonic() < end and not rendezvous.is_over():
            if rendezvous.is_pause():
                return self._restart_in_new_round(worker_group)
            time.sleep(0.1)
        if rendezvous.is_over() or not self._waits_for_nodes:
            return result
        self.supervisor.report("the launcher of another node was killed, and its processes have stopped")
        return self._restart_in_new_round(worker_group)

    def _restart_in_new_round(self, worker_group: WorkerGroup) -> RunResult:
        self._restart_workers(worker_group)
        return RunResult(WorkerState.HEALTHY)

    @property
    def _waits_for_nodes(self) -> bool:
        """Whether the run goes on, or waits, where a node is lost."""
        return self._node_rendezvous is not None and (
            self._node_rendezvous.nodes.size.is_elastic or self._max_restarts > 0
        )

    def _plan_restart(self, cause: RootCause, spec: WorkerSpec) -> None:
        """Restarts are counted for processes of this machine; a lost node is not one of them."""
        if cause.is_elsewhere and self._waits_for_nodes:
            self._is_uncounted = True
            self._remaining_restarts += 1
        elif self._remaining_restarts > 0:
            self._report_restart()
        elif spec.local_world_size > self._min_procs:
            self.supervisor.report(
                f"going on with {_count(spec.local_world_size - 1, 'process', 'es')} instead of {spec.local_world_size}"
            )
            spec.local_world_size -= 1
            self._remaining_restarts = 1
        elif self._can_leave():
            self.is_leaving = True
            self.supervisor.report("no restart is left here: this node leaves, and the others go on")

    def _report_restart(self) -> None:
        self._num_restarts += 1
        self.supervisor.report(f"restart {self._num_restarts} of {self._max_restarts}")

    def _count_restart(self) -> None:
        """No node was lost, so another one started its processes again, and that counts here too."""
        if self._remaining_restarts == 0:
            raise LaunchError(
                "a process of another node was lost, and no restart is left",
                given=f"--max-restarts {self._max_restarts}",
                fix="go on with --resume auto",
            )
        self._report_restart()
        self._remaining_restarts -= 1

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # Nothing has failed, and some still run: torch's agent comes here when a node waits to join.
        if self.supervisor.cause is None and any(process.is_alive() for process in self._processes().values()):
            self._save_and_stop_workers(worker_group)
            self.supervisor.clear_stop_request()
        self.supervisor.cause = None
        super()._restart_workers(worker_group)

    def _save_and_stop_workers(self, worker_group: WorkerGroup) -> None:
        """Somebody has come or goes, and nothing has failed: all save and stop, to go on in another world."""
        assert self._node_rendezvous is not None
        if not self._node_rendezvous.is_pause():
            self.supervisor.report("another node has come: saving, to go on together")
            self._node_rendezvous.announce("comes")
        end = time.monotonic() + self.supervisor.stop_timeout_s
        self.supervisor.request_stop(self.pids())
        while time.monotonic() < end and self.supervisor.stop is None:
            if super()._monitor_workers(worker_group).state != WorkerState.HEALTHY:
                return
            time.sleep(0.02)
        # torch's agent would ask them once more, and wait as long again.
        send_signal(self.pids(), signal.SIGKILL)

    def _prepare_to_leave(self) -> None:
        """A node that is told to stop leaves, where enough others are left; Ctrl-C stops all of them."""
        if self._node_rendezvous is not None and self.supervisor.stop != signal.SIGINT and self._can_leave():
            self.is_leaving = True
            self._node_rendezvous.announce("leaves")

    def _can_leave(self) -> bool:
        rendezvous = self._node_rendezvous
        return rendezvous is not None and not rendezvous.serves and len(self._members) > rendezvous.nodes.size.least

    def _exit_barrier(self) -> None:
        """What torch's agent waits for here, we have waited for already."""

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        # The agent's own asks for the host's full name, which may take a name server's timeout; nobody reads events.
        return Event(f"{source.value}.{state}", source)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"
