"""Which of several failed processes is the root cause, and its error text."""

from __future__ import annotations

import signal

from samebits.cluster.connecting import is_lost_peer
from samebits.errors import DataError
from samebits.launch.failures import ErrorReport, ProcessFailure, explain, root_cause


def report(time: float, *, consequence: bool = False, ours: bool = False, text: str = "text") -> ErrorReport:
    return ErrorReport(time, text, 3 if ours else 1, ours, consequence, not ours)


def test_the_earliest_error_is_the_cause() -> None:
    late, early = ProcessFailure(0, 10, 1, report(2.0)), ProcessFailure(1, 11, 1, report(1.0))
    assert root_cause([late, early]) is early


def test_a_lost_connection_is_not_the_cause_even_if_it_is_earlier() -> None:
    lost, cause = ProcessFailure(0, 10, 1, report(1.0, consequence=True)), ProcessFailure(1, 11, 1, report(2.0))
    assert root_cause([lost, cause]) is cause


def test_a_killed_process_is_the_cause_of_its_peers_errors() -> None:
    killed = ProcessFailure(2, 12, -signal.SIGKILL, None)
    peers = [ProcessFailure(0, 10, 1, report(1.0)), ProcessFailure(1, 11, 1, report(1.1, consequence=True))]
    assert root_cause([*peers, killed]) is killed


def test_what_the_launcher_killed_itself_is_never_the_cause() -> None:
    ours = ProcessFailure(0, 10, -signal.SIGKILL, None, killed_by_launcher=True)
    cause = ProcessFailure(1, 11, 1, report(5.0, consequence=True))
    assert root_cause([ours, cause]) is cause


def test_a_process_that_had_reported_its_error_when_the_launcher_killed_it_is_the_cause() -> None:
    cause = ProcessFailure(0, 10, -signal.SIGKILL, report(5.0), killed_by_launcher=True)
    lost = ProcessFailure(1, 11, 1, report(6.0, consequence=True))
    assert root_cause([lost, cause]) is cause


def test_an_abort_counts_less_than_an_error() -> None:
    aborted, cause = ProcessFailure(0, 10, -signal.SIGABRT, None), ProcessFailure(1, 11, 1, report(5.0))
    assert root_cause([aborted, cause]) is cause


def test_an_error_for_users_is_shown_unchanged() -> None:
    cause = explain(ProcessFailure(1, 11, 3, report(1.0, ours=True, text="data error: x\n  where  y")), "a")
    assert (cause.text, cause.exit_code, cause.may_pass) == ("data error: x\n  where  y", 3, False)


def test_any_other_error_is_shown_with_its_rank_and_traceback() -> None:
    cause = explain(ProcessFailure(1, 11, 1, report(1.0, text="Traceback: oops")), "a")
    assert "rank 1 (host a, pid 11) failed" in cause.text
    assert "Traceback: oops" in cause.text
    assert cause.exit_code == 1


def test_a_kill_is_shown_with_the_kernels_message() -> None:
    cause = explain(ProcessFailure(1, 11, -9, None), "a", "out of memory: the kernel's log names pid 11")
    assert "rank 1 (host a, pid 11) was killed by signal 9 (SIGKILL)" in cause.text
    assert "out of memory" in cause.text
    assert (cause.exit_code, cause.may_pass) == (4, True)


def test_a_bus_error_points_at_shared_memory() -> None:
    assert "/dev/shm" in explain(ProcessFailure(0, 10, -signal.SIGBUS, None), "a").text


def test_an_end_without_a_message_is_a_failure_even_with_exit_code_0() -> None:
    cause = explain(ProcessFailure(0, 10, 0, None), "a")
    assert "without an error message" in cause.text
    assert cause.exit_code == 4


def test_a_closed_connection_is_a_lost_peer_and_a_fault_in_the_data_is_not() -> None:
    assert is_lost_peer(RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711"))
    assert not is_lost_peer(BrokenPipeError(32, "Broken pipe"))
    assert not is_lost_peer(DataError("a Gloo file is cut off"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
