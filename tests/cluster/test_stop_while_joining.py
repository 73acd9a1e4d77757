"""A process started by hand that waits for the others is stopped at once, without output."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import LONG_S, TINY, environment, own_port

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
        pytest.param(0, signal.SIGINT, marks=pytest.mark.full),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_a_process_that_waits_for_the_others_stops_at_once(tmp_path: Path, rank: int, number: signal.Signals) -> None:
    check_stops(join(tmp_path, f"tcp://127.0.0.1:{own_port()}", rank), number, tmp_path)


@pytest.mark.full
def test_ctrl_c_is_heard_where_a_listener_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        init = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        check_stops(join(tmp_path, init, 1), signal.SIGINT, tmp_path)
