"""Signals while the launcher starts its fork server: the launcher answers to them, and only the launcher."""

import sys

import pytest

from tests.runs import python

SCRIPT = """
import os, re, signal, sys, time
from multiprocessing import forkserver as server, resource_tracker
from pathlib import Path
from samebits.launch import forkserver

got = []
signals = forkserver.STOP_SIGNALS
for number in signals:
    signal.signal(number, lambda number, frame: got.append(number))
start = server.ensure_running


def start_while_signals_come():
    for number in signals:
        os.kill(os.getpid(), number)
    assert not got, "a handler ran in the middle of the start"
    start()
    for number in signals:  # to the new process too, as a terminal does
        os.kill(server._forkserver._forkserver_pid, number)


def mask(pid, name):
    return int(re.search(name + r":\\s+(\\S+)", Path(f"/proc/{pid}/status").read_text())[1], 16)


server.ensure_running = start_while_signals_come
forkserver.prepare([])
assert sorted(got) == sorted(signals), got
wanted = sum(1 << (number - 1) for number in signals)
pid = server._forkserver._forkserver_pid
end = time.monotonic() + 60
while mask(pid, "SigIgn") & wanted != wanted or mask(pid, "SigBlk") & wanted:
    assert time.monotonic() < end, (hex(mask(pid, "SigIgn")), hex(mask(pid, "SigBlk")))
    time.sleep(0.02)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what a process blocks and ignores is read from /proc")
def test_no_signal_is_lost_while_the_fork_server_starts() -> None:
    python("-c", SCRIPT)
