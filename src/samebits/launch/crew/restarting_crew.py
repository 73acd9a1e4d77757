"""The crew of one of several machines whose views have only new members: each loss, and each change, restarts all.

    wait ── the leader begins a view ── processes run ─┬─ a process fails here: find the cause, end the view
     ^                                                 ├─ the view has ended elsewhere: end it here too
     │                                                 ├─ "pause": a node leaves or has joined: save, end the view
     └─────────────────────────────────────────────────┴─ all are done: wait until rank 0's node is, which ends the run

The leader is the launcher of the lowest node that is not lost. It begins the next view once all nodes of the present
one have ended it or are lost. After a failure, processes resume from the newest checkpoint. Where nothing has failed
they save before they stop, so no step is lost.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from samebits.cluster.timeout import REPORT_EVERY_S
from samebits.errors import LaunchError
from samebits.launch.crew.crew import POLL_S, Entry, LocalRanks, pids_of
from samebits.launch.crew.node_crew import NodeCrew
from samebits.launch.crew.recovery import Recovery
from samebits.launch.nodes.board import (
    NodeState,
    NodeView,
    check_node_rank,
    missing_node_ranks,
    next_view,
)
from samebits.launch.nodes.rendezvous import (
    NodeRendezvous,
    Wait,
    describe_wait,
    describe_world,
    gave_up_waiting,
)
from samebits.launch.supervisor import GRACE_S, Supervisor, send_signal
from samebits.launch.worker import WorkerResult

# How long to wait for a node to announce why its processes stopped.
STOP_REASON_S = 3.0


class RestartingCrew(NodeCrew[NodeView]):
    """The processes of one machine of several: all restart `max_restarts` times, then fewer, down to `min_procs`."""

    def __init__(
        self, entry: Entry, supervisor: Supervisor, num_procs: int, min_procs: int, max_restarts: int,
        rendezvous: NodeRendezvous,
    ) -> None:  # fmt: skip
        super().__init__(
            entry, supervisor, num_procs, min_procs, max_restarts, Recovery(), rendezvous, NodeView
        )
        # Whether the run continues, or waits, after a node is lost.
        self._waits_for_nodes = self._nodes.size.is_elastic or max_restarts > 0
        self._here: NodeView | None = None  # the view whose processes run; None between two views
        self._last_nodes: set[int] = set()  # nodes of the last view that this one was in
        self._next_report_s = REPORT_EVERY_S
        # When it was first seen that: processes shall save; others have ended the view; its processes have completed.
        self._saving_since = self._ended_since = self._complete_since = 0.0
        # Set while a restart was caused by a loss elsewhere: it counts only if no node was lost.
        self._is_uncounted = False
        self._logs = list[Path]()
        self._logs_before = list[int]()

    def run(self) -> tuple[bool, dict[int, WorkerResult]]:
        """Run until the run is complete, or over for this machine; see `Crew.run`.

        Raises:
            EndedOnOtherNode, StopRequested: Another node has ended the run; a signal has ended a wait for others.
            LaunchError: Too few nodes have joined, or the store is lost.
        """
        try:
            while (is_failed := self._poll()) is None:
                time.sleep(POLL_S)
            return is_failed, self._done
        finally:
            self._kill_all()
            self._port.close()

    def end(self, code: int, text: str) -> None:
        """Leave the other nodes, or end the run on all of them with an exit code and a text."""
        if self.is_leaving:
            self._board.leave()
        else:
            store = self._rendezvous.store
            num_nodes = len(self._board.states())
            self._acknowledge()
            self._rendezvous.end(code, text, lambda: store.count("acknowledged") >= num_nodes)

    def _acknowledge(self) -> None:
        self._rendezvous.query(lambda: self._rendezvous.store.store.add("acknowledged", 1))

    def _poll(self) -> bool | None:
        """Do what is due; return whether the run has failed if it is over for this machine, else None."""
        states = self._board.states()
        supervisor = self._supervisor
        view = self._here
        if view is None:
            supervisor.raise_if_stop_requested()
            self._wait(states)
            self._lead(states)
            return None
        running = pids_of(self._running())
        supervisor.forward_stop(running)
        if supervisor.stop is not None and self._state.pause != view.number and self._may_leave():
            self.is_leaving = True
            self._publish(pause=view.number)
        is_pause = supervisor.stop is None and self._board.is_pause(view.number)
        if is_pause:
            self._let_save(running)
        for member in [*self._processes.values()]:
            if (result := member.result()) is not None:
                self._done[member.slot] = result
                del self._processes[member.slot]
        if any(not member.is_running for member in self._processes.values()):
            # Processes that stop for a pause exit one after the other, which looks like a loss to the rest.
            return self._end_view() if is_pause else self._react(view)
        if not self._processes:
            return self._end_view() if is_pause else self._finish(view, states)
        self._watch_others(view, states)
        self._lead(states)
        return None

    def _wait(self, states: Mapping[int, NodeState]) -> None:
        """Enter the next view once it has begun; meanwhile report what this node waits for."""
        board = self._board
        view = self._board.view
        nodes = self._nodes
        if board.ended is not None:
            self._acknowledge()
            raise board.ended
        if reason := board.lost_store():
            raise self._rendezvous.lost_store(reason)
        if view is not None and view.number >= self._state.ready:
            mine = [
                first
                for node, first, num in view.members
                if node == board.node and num == self._num_procs
            ]
            if mine and view.number == self._state.ready:
                self._enter(view, mine[0])
                return
            self._publish(ready=view.number + 1)  # it has begun without this node
        check_node_rank(self._state, states)
        missing = missing_node_ranks(states, nodes.size.most)
        if (waited_s := time.monotonic() - self._began) > nodes.join_timeout_s:
            given = missing or f"{len(states)} have joined"
            raise gave_up_waiting(nodes, given, self._rendezvous.refusal())
        if waited_s >= self._next_report_s:
            # Doubled up to a minute: a machine may be missing for hours, and its log should stay short.
            self._next_report_s += min(self._next_report_s, 60.0)
            wait: Wait = (
                "first" if view is None else "others" if board.node in view.nodes else "turn"
            )
            shown = {*states} if view is None else view.nodes & states.keys()
            what = describe_wait(nodes, len(shown), board.names(shown), wait, waited_s)
            lines = [what, missing, self._rendezvous.refusal()]
            self._supervisor.report("\n  ".join(filter(None, lines)))

    def _enter(self, view: NodeView, first_rank: int) -> None:
        before = self._last_nodes
        self._last_nodes = view.nodes
        if self._is_uncounted and before == self._last_nodes:
            self._count_restart()
        if before and before != self._last_nodes:
            gone, new = (
                self._board.names(nodes) for nodes in (before - view.nodes, view.nodes - before)
            )
            self._supervisor.report(describe_world(view.size, len(view.members), gone, new))
        self._here = view
        self._is_uncounted = False
        self._saving_since = self._ended_since = self._complete_since = 0.0
        log = self._supervisor.log
        slots = range(self._num_procs)
        self._logs = (
            [log.with_name(f"rank-{first_rank + slot}.log") for slot in slots] if log else []
        )
        self._logs_before = self._log_times()
        place = LocalRanks(
            self._num_procs, view.number, first_rank, view.size, view.address, view.port
        )
        for slot in slots:
            self._start(slot, place)

    def _end_view(self) -> bool | None:
        """End this machine's processes, to wait for the next view; return None, as the run is not over (`_poll`)."""
        assert self._here is not None
        self._kill_all()
        self._processes = {}
        self._done = {}
        self._supervisor.cause = None
        self._supervisor.clear_stop_request()
        self._began = time.monotonic()
        self._next_report_s = REPORT_EVERY_S
        number = self._here.number + 1
        self._here = None
        # A new port for each view: a store with addresses of lost processes would stop half of the restarts.
        self._publish(ready=number, num_procs=self._num_procs, port=self._port.renew(""))
        return None

    def _publish(self, **changes: int) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]  # mypy takes the int for each field's
        self._board.publish(self._state)

    def _react(self, view: NodeView) -> bool | None:
        """React to a process that has failed."""
        self._find_cause()
        if (
            self._supervisor.stop is not None
            or (cause := self._supervisor.cause) is None
            or not cause.may_pass
        ):
            return True
        # Restarts are counted per node, without losses of other nodes.
        if cause.is_elsewhere and self._waits_for_nodes:
            self._is_uncounted = True
        elif not self._plan_restart():
            self._leave_if(self._may_leave())
            return True
        return self._end_view()

    def _count_restart(self) -> None:
        """Count a restart caused by a failed process of another node; no node was lost."""
        if self._num_restarts >= self._max_restarts:
            raise LaunchError(
                "a process of another node was lost, and no restart is left",
                given=f"--max-restarts {self._max_restarts}",
                fix="Resume with --resume auto, or set a higher --max-restarts.",
            )
        self._plan_restart()

    def _may_leave(self) -> bool:
        # Ctrl-C stops all nodes. The launcher that serves the store cannot leave: the others would lose it.
        is_ctrl_c = self._supervisor.stop == signal.SIGINT
        return (
            not is_ctrl_c
            and not self._rendezvous.serves
            and len(self._last_nodes) > self._nodes.size.least
        )

    def _let_save(self, pids: Sequence[int]) -> None:
        if not self._saving_since:
            self._saving_since = time.monotonic()
            self._supervisor.request_stop(pids)
        elif time.monotonic() - self._saving_since > self._supervisor.stop_timeout_s:
            send_signal(pids, signal.SIGKILL)

    def _finish(self, view: NodeView, states: Mapping[int, NodeState]) -> bool | None:
        """All processes of this machine have completed their work, or have saved and stopped."""
        results = self._done.values()
        first = view.members[0][0]
        is_complete = not any(result.code for result in results)
        is_own_stop = not is_complete and any(result.was_stop_requested for result in results)
        if self._supervisor.stop is not None or self._board.ended is not None or is_own_stop:
            return False
        self._complete_since = self._complete_since or time.monotonic()
        if is_complete:  # rank 0 has written the result then, which completes the run
            self._publish(done=view.number)
            if first not in states:
                return self._end_view() if self._waits_for_nodes else False
            if states[first].done == view.number:
                return False
        # They stopped because another node did. It announces why, unless its launcher was killed.
        elif time.monotonic() - self._complete_since > STOP_REASON_S:
            if not self._waits_for_nodes:
                return False
            self._supervisor.report(
                "the launcher of another node was killed, and its processes have stopped"
            )
            return self._end_view()
        return self._end_view() if self._has_ended_elsewhere(view, states) else None

    def _has_ended_elsewhere(self, view: NodeView, states: Mapping[int, NodeState]) -> bool:
        return any(states[node].ready > view.number for node in view.nodes & states.keys())

    def _watch_others(self, view: NodeView, states: Mapping[int, NodeState]) -> None:
        """End the view some time after others have: processes that wait for them would wait for long."""
        ended = self._board.ended
        if not self._has_ended_elsewhere(view, states) and (ended is None or not ended.code):
            return
        self._ended_since = self._ended_since or time.monotonic()
        # Mostly they fail by themselves within this time, and report what they have seen.
        if time.monotonic() - self._ended_since > 2 * GRACE_S:
            self._is_uncounted = True
            self._end_view()

    def _lead(self, states: Mapping[int, NodeState]) -> None:
        """Begin the next view, or ask for the end of the present one, if that is for this launcher to do."""
        view = self._board.view
        size = self._nodes.size
        if min(states) != self._board.node or self.is_leaving:
            return
        number, members = (view.number + 1, view.nodes) if view is not None else (0, set())
        ready = {node for node, state in states.items() if state.ready >= number}
        live = members & states.keys()
        if live - ready:
            if live & ready or self._here is None or self._supervisor.stop is not None:
                return  # the view is ending
            if ready and len(live) < size.most and self._state.pause != self._here.number:
                self._supervisor.report(
                    "another node has joined: saving, then continuing in a larger world"
                )
                self._publish(pause=self._here.number)
            # Once processes train, their connections report a loss: a silent launcher alone does not disturb them.
            elif members - live and self._log_times() == self._logs_before:
                self._continue_without(members - live)
            return
        if self._is_enough(len(ready)) or (view is not None and len(ready) >= size.least):
            self._board.begin(
                next_view(number, [states[node] for node in ready], members, size.most)
            )

    def _continue_without(self, lost: set[int]) -> None:
        """End the view: a node is lost for which the processes of the others wait."""
        text = f"{self._board.names(lost)} was lost while its processes joined"
        if not self._waits_for_nodes:
            fix = "Start the same command on all machines again, with --resume auto."
            raise LaunchError(
                text, fix=f"{fix} --max-restarts 3 or --nodes MIN:MAX would wait or continue."
            )
        self._supervisor.report(text)
        self._end_view()

    def _log_times(self) -> list[int]:
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in self._logs]
