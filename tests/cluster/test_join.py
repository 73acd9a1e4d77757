"""Processes that join by hand, are stopped while they join, or meet at the store of another program."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import joiner
import pytest
from torch.distributed import TCPStore

from samebits.cluster.address import port_holder
from tests.runs import LONG_S, TINY, environment, own_port, wait_until

Answer = tuple[str, Any, list[str]]


def check_pair(answers: list[Answer]) -> None:
    for rank, (kind, facts, said) in enumerate(answers):
        assert kind == "joined", facts
        assert (facts["rank"], facts["size"], facts["local_rank"]) == (rank, 2, rank)
        assert (facts["num_hosts"], facts["backend"]) == (1, "gloo")
        assert facts["gathered"] == (["from 0", "from 1"] if rank == 0 else None)
        assert facts["everybody"] == [0, 1]
        assert facts["broadcast"] == 7
        assert facts["tensors"] == (0.0, True, 0)
        assert said == []


def test_two_processes_meet_at_a_port(visits: Callable[..., Any], init: str) -> None:
    pair = [visits(init, rank, 2) for rank in (0, 1)]
    check_pair([visit.answer() for visit in pair])


def test_rank_1_may_come_first(visits: Callable[..., Any], init: str) -> None:
    second = visits(init, 1, 2)
    assert not second.answers.poll(0.5)
    first = visits(init, 0, 2)
    check_pair([first.answer(), second.answer()])


def test_two_processes_meet_at_an_ipv6_port(visits: Callable[..., Any]) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    init = f"tcp://[::1]:{own_port()}"
    pair = [visits(init, rank, 2) for rank in (0, 1)]
    check_pair([visit.answer() for visit in pair])


def test_two_processes_meet_by_the_environment(visits: Callable[..., Any]) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(own_port())}
    pair = [visits("env://", environ={**common, "RANK": str(rank)}) for rank in (0, 1)]
    check_pair([visit.answer() for visit in pair])


def test_machines_are_those_of_the_launcher(visits: Callable[..., Any]) -> None:
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(own_port())}
    nodes = ["4", "4", "2"]
    ranks = [
        visits("env://", environ={**common, "RANK": str(rank), "GROUP_RANK": node}) for rank, node in enumerate(nodes)
    ]
    assert [visit.answer()[1]["machines"] for visit in ranks] == [(0, 0, 1)] * 3


def test_a_missing_rank_is_named_and_then_given_up(visits: Callable[..., Any], init: str) -> None:
    second = visits(init, 2, 3)
    first = visits(init, 0, 3, constants={"REPORT_EVERY_S": 0.4}, join_timeout_s=8.0)
    answers = [first.answer(), second.answer()]
    said = next(text for text in answers[0][2] if "2 have joined" in text)
    assert re.match(r"waiting for 3 processes: 2 have joined \(ranks 0 2\), [0-7] s", said)
    assert "missing rank 1. On its machine:" in said
    assert re.search(r"giving up in 0:0[1-8] \(cluster.join_timeout_s\)", said)
    # Rank 0 reports for all.
    assert not any("missing rank" in text for text in answers[1][2])
    for kind, text, _ in answers:
        assert kind == "error"
        assert "gave up waiting for 3 processes: 2 have joined (ranks 0 2)" in text
        assert "LaunchError" in text


def test_a_missing_rank_0_is_named_by_the_others(visits: Callable[..., Any]) -> None:
    agent = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port),
               "TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    constants = {"REPORT_EVERY_S": 0.3, "SLACK_S": 0.0}
    _, text, _ = visits("env://", environ=environ, constants=constants, join_timeout_s=3.0).answer()
    assert "rank 1 waited 3 s for rank 0, which did not join" in text


def test_a_port_without_a_listener_is_reported_and_then_given_up(visits: Callable[..., Any], init: str) -> None:
    visit = visits(init, 1, 2, constants={"REPORT_EVERY_S": 0.3}, join_timeout_s=3.0)
    _, text, said = visit.answer()
    assert f"rank 1 waits for rank 0 at {init}: connection refused" in said[0]
    assert re.search(rf"waited \d+ s for rank 0 at {init}: connection refused", text)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_world_sizes_are_both_named(visits: Callable[..., Any], init: str, order: tuple[int, int]) -> None:
    sizes = {0: 3, 1: 2}
    for visit in [visits(init, rank, sizes[rank]) for rank in order]:
        assert "world sizes differ: rank 0 was started with 3, rank 1 with 2" in visit.error()


def test_two_processes_with_one_rank_are_both_named(visits: Callable[..., Any], init: str) -> None:
    pair = [visits(init, 0, 3), visits(init, 1, 3), visits(init, 1, 3)]
    for visit in pair:
        text = visit.error()
        assert "two processes have rank 1" in text
        assert all(f"pid {other.process.pid}" in text for other in pair[1:])


def test_a_second_rank_0_is_refused_with_the_process_that_has_the_port(visits: Callable[..., Any], init: str) -> None:
    first = visits(init, 0, 2)
    visits(init, 1, 3).error()
    assert "world sizes differ" in first.error()
    again = visits(init, 0, 2)
    holder = f"pid {again.process.pid} "
    wait_until(lambda: port_holder(int(init.rpartition(":")[2])).startswith(holder))
    text = visits(init, 0, 2).error()
    assert f"is in use by {holder}" in text
    assert "second process was started with rank 0" in text


def test_a_port_in_use_is_named(visits: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = visits(f"tcp://127.0.0.1:{port}", 0, 2).error()
    assert f"port {port} is in use by pid {os.getpid()}" in text


def test_a_listener_that_is_no_store_is_named(visits: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        init = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        visit = visits(init, 1, 2, constants={"HANDSHAKE_S": 1.0})
        text = visit.error()
    assert f"something listens at {init}, but it is not rank 0" in text


def test_an_unknown_host_is_named(visits: Callable[..., Any]) -> None:
    text = visits("tcp://no-such-host.invalid:29500", 1, 2, constants={"LOOKUP_S": 0.5}).error()
    assert "host 'no-such-host.invalid' is unknown" in text


def test_rank_0_on_another_machine_than_named_is_refused(visits: Callable[..., Any]) -> None:
    text = visits("tcp://192.0.2.1:29500", 0, 2).error()
    assert "rank 0 must run on 192.0.2.1" in text


def test_a_barrier_names_the_rank_that_did_not_come(visits: Callable[..., Any], init: str) -> None:
    first, _ = (visits(init, rank, 2, scenario=joiner.SKIPS_BARRIER) for rank in (0, 1))
    assert "waited 1 s for 2 processes: rank 1 did not come" in first.error()


def test_a_rank_that_fails_frees_its_peers(visits: Callable[..., Any], init: str) -> None:
    first, second = visits(init, 0, 2), visits(init, 1, 2, scenario=joiner.FAILS)
    assert "made to fail" in second.error()
    kind, text, _ = first.answer()
    assert kind == "error"
    # The root cause is reported elsewhere; a traceback from gloo would only hide it.
    assert text.startswith("launch error: rank 0 (")
    assert "lost another process" in text
    assert len(text.splitlines()) <= 5


# Joins as training does, and prints a line just before it waits.
SCRIPT = """
import sys
from samebits.cli.main import run
from samebits.cluster import abort, rendezvous
wait, reach = rendezvous.Rendezvous.wait, rendezvous.open_store
def tell(function):
    def told(*args):
        print("joining", flush=True)
        return function(*args)
    return told
rendezvous.Rendezvous.wait, rendezvous.open_store = tell(wait), tell(reach)
abort.leave(run(sys.argv[1:]))
"""


def join(tmp_path: Path, init: str, rank: int) -> subprocess.Popen[str]:
    words = ["train", str(TINY), "--run-dir", str(tmp_path / "run"), "--init", init, "--rank", str(rank)]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words, "--world-size", "2"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "joining\n"
    return process


def check_stops(process: subprocess.Popen[str], number: signal.Signals, folder: Path) -> None:
    time.sleep(0.5)
    process.send_signal(number)
    errors = process.communicate(timeout=LONG_S)[1]  # a third of the time that it would wait for the others
    # A shell shows 143 for a process that SIGTERM has ended.
    assert process.returncode in (128 + number, -number)
    assert errors == ""
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        (0, signal.SIGTERM),
        pytest.param(1, signal.SIGINT, marks=pytest.mark.full),
    ],
)
def test_a_process_that_waits_for_the_others_stops_at_once(tmp_path: Path, rank: int, number: signal.Signals) -> None:
    check_stops(join(tmp_path, f"tcp://127.0.0.1:{own_port()}", rank), number, tmp_path)


@pytest.mark.full
def test_ctrl_c_is_heard_where_a_listener_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        init = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        check_stops(join(tmp_path, init, 1), signal.SIGINT, tmp_path)


def test_a_store_of_another_program_is_recognized_before_a_rank_writes_to_it(visits: Callable[..., Any]) -> None:
    theirs = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    theirs.set("torch.rendezvous.x", "state")
    before = sorted(theirs.list_keys())
    text = visits(f"tcp://127.0.0.1:{theirs.port}", 1, 2, constants={"SERVED_S": 0.5}).error()
    assert f"the store at tcp://127.0.0.1:{theirs.port} does not belong to a run of Samebits" in text
    assert sorted(theirs.list_keys()) == before
