"""The crew of one of several machines: its launcher starts and ends its own processes; one launcher names the views.

    each launcher   its processes ── state ──> board ── newest view ──> views.json, which its processes read
    the leader      states ── a member is missing: next view, urgent ──> board
                           ── a replacement is ready: next view

The launcher of the lowest node names the first view. When the leader's node is lost, the launcher of the lowest
remaining node takes its place. Each view is created once, from the members of the one before, so there is one order of
views. A group that is not in the newest one misses a member, and cannot complete another step. The board is in the
store of one launcher: without that one, the run ends, and resumes from a checkpoint.

SIGTERM is the notice that a machine goes. It leaves if enough others stay and it does not serve the store; otherwise,
and after Ctrl-C, the run stops and saves.
"""

import signal
import time
from dataclasses import replace

from torch.distributed import TCPStore

from samebits.cluster.store import serve_store
from samebits.cluster.timeout import wait_until
from samebits.cluster.views.membership import View, broken_mark, write_view
from samebits.errors import LaunchError
from samebits.launch.crew.crew import (
    POLL_S,
    VIEWS_FILE,
    Entry,
    LocalRanks,
    MemberProcess,
    pids_of,
)
from samebits.launch.crew.node_crew import NodeCrew
from samebits.launch.crew.recovery import STOPPED_S, Recovery
from samebits.launch.nodes.board import MemberState, NodeState
from samebits.launch.nodes.rendezvous import (
    FIX,
    LINGER_S,
    NodeRendezvous,
    gave_up_waiting,
    too_few_nodes,
)
from samebits.launch.supervisor import Supervisor, send_signal
from samebits.launch.worker import WorkerResult

# Numbers of a node's processes: NODE * NUMBERS, and those after it.
NUMBERS = 1_000_000
# How long a machine with a notice trains on, and looks whether others have one.
NOTICE_S = 1.0
LEAVING = "this machine leaves the run if the others stay"


class RecoveringCrew(NodeCrew[View]):
    """The processes of one machine of several: `max_restarts` are replaced; it leaves with less than `min_procs`."""

    def __init__(
        self, entry: Entry, supervisor: Supervisor, num_procs: int, min_procs: int, max_restarts: int,
        rendezvous: NodeRendezvous,
    ) -> None:  # fmt: skip
        super().__init__(
            entry,
            supervisor,
            num_procs,
            min_procs,
            max_restarts,
            Recovery(True, STOPPED_S),
            rendezvous,
            View,
        )
        self._proposed: tuple[View, TCPStore] | None = (
            None  # the last view that this launcher named
        )
        self._num_started = self._board.node * NUMBERS
        self._planned = range(self._num_started, self._num_started + num_procs)
        self._done_numbers: set[int] = set()
        self._ended_numbers: set[int] = set()
        self._members_before: set[int] = set()
        self._states: dict[int, NodeState] = {}
        self._is_stopping = self._is_complete = False
        self._noticed_at = 0.0
        self._lost_leader: int | None = None  # the last one that was reported as lost
        stops = supervisor.on_stop
        supervisor.on_stop = lambda: LEAVING if self._may_leave() else stops()

    def run(self) -> tuple[bool, dict[int, WorkerResult]]:
        """Run until all processes of this machine are done, or the run has failed; see `Crew.run`.

        Raises:
            EndedOnOtherNode: Another node has ended the run.
            LaunchError: The run cannot continue, for a reason that is not on this machine alone.
        """
        try:
            while True:
                time.sleep(POLL_S)
                is_failed = not self._supervise()
                self._publish()
                if is_failed:
                    return True, self._done
                self._states = self._board.states()
                self._follow()
                if self._obey() or not (
                    self._processes or (self._supervisor.stop is None and not self._view.is_last)
                ):
                    self._is_complete = True
                    return False, self._done
                self._check_board()
                self._lead()
        finally:
            self._kill_all()
            self._stores = []

    def end(self, code: int, text: str) -> None:
        """Leave the other nodes, or end the run on all of them with an exit code and a text."""
        board = self._board
        done: dict[int, MemberState] = dict.fromkeys(self._done_numbers, "done")
        last = replace(self._status(), members=done, has_ended=bool(done), has_left=not done)

        def others() -> list[NodeState]:
            states = board.states().items()
            return [state for node, state in states if node != board.node and not state.has_ended]

        if not self._is_complete and not self.is_leaving:
            self._rendezvous.end(code, text, lambda: not others())
            board.leave()
            return
        board.publish(last)
        if self._rendezvous.serves:
            # Without the store the others could not complete the run, or save.
            wait_until(
                lambda: all("member" not in state.members.values() for state in others()),
                self._supervisor.stop_timeout_s + LINGER_S,
                POLL_S,
            )
            self._rendezvous.end(code, text, lambda: not others())
        board.leave(last)

    def _check_board(self) -> None:
        """Raise the reason for which the others have ended the run, or the loss of the store."""
        if self._board.ended is not None and self._board.ended.code:
            raise self._board.ended
        if not self._view.is_last and (reason := self._board.lost_store()):
            raise self._rendezvous.lost_store(reason)

    def _ranks(self) -> LocalRanks:
        node = self._board.node
        num_procs = self._num_procs
        return LocalRanks(
            num_procs, 0, node * num_procs, max(self._nodes.size.most, node + 1) * num_procs
        )

    def _status(self) -> NodeState:
        states: dict[int, MemberState] = dict.fromkeys(self._done_numbers, "done")
        if self._view.number < 0:
            states |= dict.fromkeys(self._planned, "planned")
        for member in self._processes.values():
            # As `_supervise` has seen it: one that ends before the next poll is not lost yet, it may be done.
            if member.number not in self._ended_numbers:
                marks: tuple[MemberState, ...] = ("member", "ready")
                states[member.number] = next(
                    (mark for mark in marks if member.has_marked(mark)), "started"
                )
        is_leaving = self._supervisor.stop is not None and not self._is_stopping
        is_broken = any(
            member.has_marked(broken_mark(self._view)) for member in self._processes.values()
        )
        broken = self._view.number if is_broken else -1
        return replace(
            self._state,
            members=states,
            is_stopping=self._is_stopping,
            is_leaving=is_leaving,
            broken=broken,
        )

    def _publish(self) -> None:
        self._board.publish(self._status())

    def _supervise(self) -> bool:
        """React to what happens to the processes of this machine; return whether it stays in the run."""
        running = self._running()
        if self._is_stopping:
            self._supervisor.forward_stop(pids_of(running))
        self._kill_stopped(running)
        dropped = self._members_before - {*self._view.members}
        send_signal(pids_of(each for each in running if each.number in dropped), signal.SIGKILL)
        ended = [member for member in self._processes.values() if not member.is_running]
        self._ended_numbers |= {member.number for member in ended}
        return self._handle(ended)

    def _note_done(self, member: MemberProcess) -> None:
        self._done_numbers.add(member.number)

    def _is_loss(self, member: MemberProcess, has_weights: bool) -> bool:
        return member.number not in self._planned and not has_weights

    def _restart(self) -> bool:
        self._find_cause()
        return False

    def _lose(self, lost: list[MemberProcess]) -> bool:
        return all(self._replace(member) for member in lost)

    def _replace(self, member: MemberProcess) -> bool:
        del self._processes[member.slot]
        self._publish()  # before anything that takes time, since the survivors wait for it
        is_stopping = self._supervisor.stop is not None
        if not is_stopping or member.is_killed:
            self._supervisor.report(self._why(member))
        if is_stopping or self._start_replacement(member):
            return True
        if len(self._processes) >= self._min_procs:
            return True
        self._leave_if(not self._rendezvous.serves)
        return self._fail(member)

    def _obey(self) -> bool:
        """React to a stop signal: stop the run with all others, or return True to leave them."""
        if self._supervisor.stop is None or self._is_stopping:
            return False
        self._noticed_at = self._noticed_at or time.monotonic()
        self._is_stopping = not self._may_leave()
        self.is_leaving = not self._is_stopping and time.monotonic() - self._noticed_at > NOTICE_S
        if self._is_stopping and self._supervisor.stop != signal.SIGINT:
            serves = self._rendezvous.serves
            why = "the others meet at this machine" if serves else "too few machines stay"
            self._supervisor.report(f"{why}: the run stops")
        if self.is_leaving:
            self._supervisor.report("this machine has left the run, and the others continue")
        return self.is_leaving

    def _may_leave(self) -> bool:
        if self._rendezvous.serves or self._supervisor.stop == signal.SIGINT:
            return False
        if self._view.number < 0 or self._view.is_last:
            return False
        others = [state for node, state in self._states.items() if node != self._board.node]
        # Of the present view: a lost node may not be silent long enough for this launcher.
        staying = [
            each
            for each in others
            if any(each.members.get(number) == "member" for number in self._view.members)
            and not each.is_leaving
        ]
        return len(staying) >= self._nodes.size.least and not any(
            state.is_stopping for state in others
        )

    def _follow(self) -> None:
        """Pass the newest view on to the processes of this machine, and start them once the first one is named."""
        is_last = any("done" in state.members.values() for state in self._states.values())
        newest = self._board.view or self._view
        if newest.number != self._view.number or is_last != self._view.is_last:
            self._adopt(replace(newest, is_last=is_last))

    def _adopt(self, view: View) -> None:
        is_first = self._view.number < 0 <= view.number
        if is_first and not {*self._planned} & {*view.members}:
            # this machine joins a run that has begun: all its processes are replacements
            self._planned = range(0)
        if view.node != self._board.node:
            self._stores = []
        elif self._proposed is not None and view.number > self._view.number:
            store = self._proposed[1]
            is_urgent = view.urgent == view.number
            self._stores = [store] if is_urgent else [*self._stores[-1:], store]
        # A slow launcher may have missed views.
        for each in self._board.views[max(self._view.number, 0) : view.number + 1]:
            self._members_before |= {*each.members}
        self._view = view
        write_view(self._entry.folder / VIEWS_FILE, view)
        if is_first and self._supervisor.stop is None:
            for slot in range(self._num_procs):
                self._start(slot, self._ranks())

    def _lead(self) -> None:
        """Name the next view, if that is for this launcher to do and something has changed."""
        if self._proposed is not None and self._proposed[0].number > self._view.number:
            return  # it will be there in a moment, or another launcher's in its place
        if self._view.number < 0:
            self._begin_first()
            return
        states = {
            number: state
            for each in self._states.values()
            for number, state in each.members.items()
        }
        if self._view.is_last or not self._leads():
            return
        survivors = [number for number in self._view.members if number in states]
        if len(survivors) < len(self._view.members):
            if self._may_continue(survivors, states):
                self._begin(survivors, is_urgent=True)
            return
        ready = [
            n for n, state in states.items() if state == "ready" and n not in self._members_before
        ]
        is_stopping = any(state.is_stopping for state in self._states.values())
        if (ready and not is_stopping) or self._view.node != self._board.node:
            self._begin([*survivors, *ready], is_urgent=False)

    def _leads(self) -> bool:
        leader = self._states.get(self._view.node)
        if self._view.node == self._board.node or (leader is not None and not leader.has_ended):
            return self._view.node == self._board.node
        members = {*self._view.members}
        remaining = [node for node, state in self._states.items() if members & state.members.keys()]
        if (
            min(remaining or self._states, default=-1) != self._board.node
        ):  # with no member left, it names the end
            return False
        if (
            self._lost_leader != self._view.node
        ):  # asked at each look, also while nothing can be done
            self._lost_leader = self._view.node
            self._supervisor.report(
                f"node {self._view.node} is lost: node {self._board.node} names the members from now on"
            )
        return True

    def _may_continue(self, survivors: list[int], states: dict[int, MemberState]) -> bool:
        """Return whether the survivors form the next view now, and raise an error if they cannot."""
        num_nodes = len({number // NUMBERS for number in survivors})
        size = self._nodes.size
        lost = {number // NUMBERS for number in self._view.members} - self._states.keys()
        if lost and num_nodes < size.least:
            # Nothing can be done without them, so they have as long as any silent node.
            if not all(self._board.has_timed_out(node) for node in lost):
                return False
            raise too_few_nodes(num_nodes, size, lost)
        found = {states[number] for number in survivors}
        if "member" not in found or not found <= {"ready", "member"}:
            raise LaunchError("a process was lost before all others had built the run", fix=FIX)
        return True

    def _begin_first(self) -> None:
        # One that has just come has not reported yet which processes it will start.
        joined = {node: state for node, state in self._states.items() if state.members}
        is_enough = self._is_enough(len(joined))
        if len(joined) < self._nodes.size.least:
            if time.monotonic() - self._began > self._nodes.join_timeout_s:
                refusal = self._rendezvous.refusal()
                raise gave_up_waiting(self._nodes, f"{len(joined)} have joined", refusal)
        elif min(joined) == self._board.node and is_enough:
            self._begin(
                sorted(n for state in joined.values() for n in state.members),
                is_urgent=True,
            )

    def _begin(self, numbers: list[int], *, is_urgent: bool) -> None:
        number = self._view.number + 1
        address = self._state.address
        store = serve_store(address, 0, address, 60.0, "the launcher")
        urgent = number if is_urgent else self._view.urgent
        mine = View(number, store.port, tuple(numbers), urgent, False, address, self._board.node)
        self._proposed = mine, store
        self._board.begin(mine)
