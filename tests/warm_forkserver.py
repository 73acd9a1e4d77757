"""Gives a command that was forked with torch a fork server that has imported torch too: see `warm_start`.

Right after it is forked, the command forks once more. That process waits, and becomes the fork server when
multiprocessing would start a new Python for it.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from samebits.launch import cleanup

WAITING = "waiting"  # the name of a process that waits to become a fork server


class WaitingProcess:
    """A copy of this process as it is now, which ends with this one unless it is used.

    Args:
        is_possible: Whether a process with these variables may be forked.
    """

    def __init__(self, is_possible: Callable[[Mapping[str, str]], bool]) -> None:
        self._is_possible = is_possible
        self._socket, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _wait(theirs)
        theirs.close()
        self._start_python = util.spawnv_passfds
        util.spawnv_passfds = self._start

    def close(self) -> None:
        """End the process if it was not used."""
        self._socket.close()
        if self._pid:
            os.waitpid(self._pid, 0)

    def _start(self, path: str, args: Sequence[str], passfds: Sequence[int]) -> int:
        is_fork_server = cleanup.is_fork_server([str(word) for word in args])
        if not self._pid or not is_fork_server or not self._is_possible(os.environ):
            return int(self._start_python(path, args, passfds))
        pid, self._pid = self._pid, 0
        blocked = list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        request = {
            "args": list(map(str, args)), "cwd": os.getcwd(), "env": dict(os.environ), "fds": list(passfds),
            "blocked": blocked,
        }  # fmt: skip
        text = json.dumps(request).encode()
        socket.send_fds(self._socket, [len(text).to_bytes(4)], list(passfds))
        self._socket.sendall(text)
        self._socket.close()
        return pid


def take_over(request: Mapping[str, Any]) -> None:
    """Set the variables and the working directory of a request."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])


def run_and_exit(body: Callable[[], object], close: Callable[[], None] = lambda: None) -> NoReturn:
    """Call a function and end the process as Python would, but without freeing all modules one by one.

    Args:
        body: The function.
        close: Called after it and the exit handlers.
    """
    code = 1
    try:
        body()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(connection: socket.socket) -> None:
    """Become the fork server that is asked for; ends the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _set_name(WAITING)
    size, given, _, _ = socket.recv_fds(connection, 4, 8)
    if not size:
        os._exit(0)
    text = b""
    while len(text) < int.from_bytes(size):
        text += connection.recv(1 << 20)
    request: dict[str, Any] = json.loads(text)
    _set_name("forkserver")
    _become(request, given)
    run_and_exit(lambda: exec(request["args"][-1], {"__name__": "__main__"}))


def _set_name(name: str) -> None:
    # There is no command line of its own by which a test finds it.
    Path("/proc/self/comm").write_text(name)


def _become(request: dict[str, Any], given: list[int]) -> None:
    """Take over a request's variables, folder, signals and files; close all other files."""
    numbers = request["fds"]
    free = max([*given, *numbers]) + 1
    for place, number in enumerate(given):
        os.dup2(number, free + place)
    for place, number in enumerate(numbers):
        os.dup2(free + place, number)
    for number in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, *numbers}:
        with contextlib.suppress(OSError):  # the list's own
            os.close(number)
    take_over(request)
    sys.orig_argv = request["args"]
    sys.modules.pop(cleanup.__name__, None)  # it acts when a fork server imports it
    signal.pthread_sigmask(signal.SIG_SETMASK, set(request["blocked"]))
