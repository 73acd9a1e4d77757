"""The first signal requests a stop, a later one ends the process, also beside a call that never returns."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from samebits.cluster.signals import StopSignal
from tests.runs import LONG_S, python


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_requests_a_stop(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMEBITS_LAUNCHED", raising=False)
    heard: list[str] = []
    with StopSignal(patience_s=1000, on_stop=heard.append) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.exit_code == 128 + number
        # The same signal from another sender, a moment later.
        os.kill(os.getpid(), number)
    assert heard == [number.name]


def test_earlier_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_is_ignored_stays_so(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMEBITS_LAUNCHED", raising=False)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), number)
        assert not stop.requested
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_under_our_launcher_workers_do_not_handle_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_LAUNCHED", "1")
    before = signal.getsignal(signal.SIGINT)
    with StopSignal():
        assert signal.getsignal(signal.SIGINT) == before


def test_in_a_thread_no_stop_is_requested() -> None:
    seen: list[bool] = []

    def work() -> None:
        with StopSignal() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_second_signal_later_ends_the_process_at_once() -> None:
    code = (
        "import os, time\nfrom samebits.cluster.signals import StopSignal\n"
        "def say(text): os.write(1, (text + '\\n').encode())\n"
        "with StopSignal(patience_s=0.2, on_stop=say):\n    say('ready')\n    time.sleep(200)\n    time.sleep(200)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
        time.sleep(0.4)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(LONG_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


SCRIPT = """
import atexit, threading, time
from datetime import timedelta
from samebits.cluster import abort
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=1000))
started = threading.Event()

def wait():
    started.set()
    store.get("never written")

def exchange():
    while True:
        store.set("state", "1")
        started.set()

atexit.register(print, "cleaned up")
print("unflushed", end=" ")
threading.Thread(target={work}, name="{name}", daemon=True).start()
started.wait()
abort.leave(4)
"""


@pytest.mark.parametrize(("work", "name"), [("wait", "rendezvous"), ("wait", "another"), ("exchange", "board")])
def test_a_thread_in_the_store_changes_nothing_about_the_end(work: str, name: str) -> None:
    done = python("-c", SCRIPT.format(work=work, name=name), code=4)
    assert (done.stdout, done.stderr) == ("unflushed cleaned up\n", "")
