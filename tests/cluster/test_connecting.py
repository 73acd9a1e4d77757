"""A rank that is lost between the rendezvous and the connections of the process group is named, soon."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joiner
import pytest
from torch.distributed import HashStore

from samebits.cluster import connecting
from samebits.cluster.rendezvous import RankInfo
from samebits.errors import LaunchError
from tests import warm_start
from tests.runs import LONG_S, environment, kill_session, own_port, wait_until

STARTER = Path(__file__).with_name("starter.py")
SOON_S = 60.0  # on a busy machine; a group's timeout is 600 s


def check_names(text: str, rank: int, pid: int, reason: str) -> None:
    assert re.search(rf"lost rank {rank} \([^)]*pid {pid}\) before all ranks were connected: {reason}", text), text
    assert "interface" not in text
    assert float(re.search(r"LaunchError, ([\d.]+) s", text)[1]) < SOON_S  # type: ignore[index]


def test_a_rank_that_is_killed_before_it_connects_is_named_by_all(visits: Callable[..., Any], init: str) -> None:
    others = [visits(init, rank, 3) for rank in (0, 1)]
    victim = visits(init, 2, 3, scenario=joiner.DIES_EARLY)
    for visit in others:
        check_names(visit.error(), 2, victim.process.pid, "its process has ended")


def test_rank_0_that_is_killed_before_it_connects_is_named(visits: Callable[..., Any], init: str) -> None:
    victim = visits(init, 0, 2, scenario=joiner.DIES_EARLY)
    check_names(visits(init, 1, 2).error(), 0, victim.process.pid, "its (process has ended|store is lost)")


def test_a_rank_of_another_host_that_is_silent_is_named(visits: Callable[..., Any], init: str) -> None:
    first = visits(init, 0, 2, constants={"SILENT_S": 5.0, "REPORT_EVERY_S": 2.0, "QUIET_S": 0.0})
    victim = visits(init, 1, 2, scenario=joiner.DIES_ELSEWHERE)
    _, text, said = first.answer()
    check_names(text, 1, victim.process.pid, "no sign of life for 5 s")
    assert any("connecting 2 processes: ranks 0 1 have not connected" in line for line in said), said
    assert any(
        f"no sign of life from rank 1 ({socket.gethostname()}, pid {victim.process.pid})" in line for line in said
    ), said


def test_a_rank_that_is_stopped_is_named_when_the_time_is_up(visits: Callable[..., Any], init: str) -> None:
    first = visits(init, 0, 2, scenario=joiner.HURRIES, constants={"QUIET_S": 0.0})
    victim = visits(init, 1, 2, scenario=joiner.STOPS_EARLY)
    text = first.error()
    assert "gave up connecting: ranks 0 1 had not connected after 3 s" in text
    assert f"stopped by SIGSTOP or a debugger: rank 1 ({socket.gethostname()}, pid {victim.process.pid})" in text
    assert "interface" not in text


def test_the_interface_is_blamed_where_all_ranks_are_alive(visits: Callable[..., Any], init: str) -> None:
    pair = [visits(init, rank, 2, scenario=joiner.WRONG_INTERFACE if rank == 0 else "") for rank in (0, 1)]
    for visit in pair:
        text = visit.error()
        assert re.search(r"rank 0 \([^)]*\) joined the rendezvous, but can't connect to the other ranks", text), text
        assert "set GLOO_SOCKET_IFNAME" in text


def test_rank_0_that_ends_while_another_connects_to_its_store_is_named(visits: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        init = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        visit = visits(init, 1, 2)
        server.accept()[0].close()  # it looks whether anybody listens
        held = server.accept()[0]  # and waits for an answer of the store
    assert f"lost rank 0 at {init} while connecting to it" in visit.error()
    held.close()


def test_a_rank_that_leaves_at_once_waits_until_all_are_connected(visits: Callable[..., Any], init: str) -> None:
    pair = [visits(init, 0, 2, scenario=joiner.LEAVES), visits(init, 1, 2, scenario=joiner.LEAVES_LATE)]
    for visit in pair:
        kind, facts, _ = visit.answer()
        assert kind == "joined", facts
        assert facts["seconds"] >= joiner.LATE_S


def test_a_rank_that_never_connects_is_not_waited_for_at_the_end() -> None:
    connecting.wait_for_all(HashStore(), 2, limit_s=0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts launchers: start(scenario, num_procs, *endpoint)."""
    begun: list[subprocess.Popen[str]] = []

    def begin(name: str, scenario: str, num_procs: int, *endpoint: str) -> subprocess.Popen[str]:
        words = [sys.executable, str(STARTER), scenario, str(num_procs), "1", "20", str(tmp_path), *endpoint]
        with (tmp_path / name).open("w") as said:
            begun.append(
                warm_start.popen(words, cwd=tmp_path, env=environment(), stderr=said, start_new_session=True, text=True)
            )
        return begun[-1]

    yield begin
    for process in begun:
        kill_session(process)


def seconds_to_restart(folder: Path) -> float:
    """From the death of a rank to when the ranks have connected again."""
    return float((folder / "started-1-0").read_text().split()[1]) - float((folder / "died").read_text())


def test_a_rank_killed_before_it_connects_restarts(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    launcher = start("a", "killed early", 2)
    assert launcher.wait(LONG_S) == 0, (tmp_path / "a").read_text()
    assert "was killed by signal 9" in (tmp_path / "a").read_text()
    assert "restart 1 of 1" in (tmp_path / "a").read_text()
    assert seconds_to_restart(tmp_path) < SOON_S


@pytest.mark.full
def test_a_node_lost_before_it_connects_may_return(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    port = own_port()
    first = start("a", "node lost early", 1, f"127.0.0.1:{port}")
    wait_until(lambda: is_listening(port))
    second = start("b", "node lost early", 1, f"127.0.0.1:{port}")
    assert second.wait(LONG_S) == -signal.SIGKILL, (tmp_path / "b").read_text()
    third = start("c", "ok", 1, f"127.0.0.1:{port}")
    assert (first.wait(LONG_S), third.wait(LONG_S)) == (0, 0), (tmp_path / "a").read_text()
    assert seconds_to_restart(tmp_path) < SOON_S


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("text", [None, [], 3, {"what": "x", "slots": 3}, "x"])
def test_a_damaged_verdict_is_an_error_with_a_text(text: Any) -> None:
    error, num_lost = connecting.from_json(text)
    assert "damaged" in error.what
    assert num_lost == 1


def test_a_verdict_is_read_as_it_was_written() -> None:
    info = RankInfo(1, 2, "b", 7, "cpu", "gloo", 0)
    error, num_lost = connecting.from_json(connecting.to_json(connecting.lost_rank_error(info, "x"), 2))
    assert (error.what, num_lost) == ("lost rank 1 (b, pid 7) before all ranks were connected: x", 2)
    assert isinstance(error, LaunchError)
    assert "cause" in error.slots
