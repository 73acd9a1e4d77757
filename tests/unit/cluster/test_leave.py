"""The exit of a process while one of its threads is in a call that never returns."""

import subprocess
import sys

import pytest

from tests.runs import LONG_S, environment

SCRIPT = """
import atexit, threading, time
from samebits.cluster import abort

atexit.register(print, "cleaned up")
print("unflushed", end=" ")
threading.Thread(target=time.sleep, args=(1000,), name={name!r}, daemon=True).start()
abort.leave(4)
"""


@pytest.mark.parametrize("name", ["rendezvous", "another"])
def test_a_thread_in_the_store_changes_nothing_about_the_end(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(name=name)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (4, "unflushed cleaned up\n", "")
