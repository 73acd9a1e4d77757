"""Runs `samebits` and scripts in processes that have imported torch already: forked from one that imports it once.

Each command still has a process of its own, with its own environment, working directory and streams, as a child of the
test's process. What it does not have is a command line of its own in /proc, nor variables that are read when a library
is loaded: `is_possible` tells.
"""

import ctypes
import gc
import inspect
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.warm_forkserver import WaitingProcess, run_and_exit, take_over

ROOT = Path(__file__).resolve().parents[1]
# Read when they are used, so a process may change them after its libraries are loaded.
_READ_LATE = (
    "PYTEST_", "TMPDIR", "XDG_CONFIG_HOME", "SAMEBITS_", "HF_", "TRANSFORMERS_",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_IMPORTED = (
    "torch._dynamo",
    "samebits.cli.main",
    "samebits.launch.start",
    "samebits.launch.worker",
    "samebits.engine.loop",
    "samebits.recipes.catalog",
    "torch.utils.tensorboard",
)
# What `samebits` sets for the fork server of any run with one thread a process.
_FIXED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Commands and scripts that need no copy that waits to become a fork server. A fork takes 30 ms.
_ALONE = ("--help", "config", "export", "predict", "runs", "compare", "report", "trust")
_SCRIPTS_ALONE = ("rank_pool.py", "in_processes.py", "_cases.py")
# Of no use to a process that is forked.
_READ_BY_PYTHON = ("PYTHONSAFEPATH", "PYTHONWARNINGS")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Server:
    """The process that the others are forked from.

    Attributes:
        environ: Its variables.
        pid: Its process id.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)
        # A process whose parent has ended becomes a child of this one, which can then wait for it.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())]
            env = {**self.environ, **_FIXED}
            self.pid = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], cwd=ROOT).pid

    def fork(self, request: Mapping[str, Any], streams: list[int]) -> int:
        """Start a command; return its process id."""
        text = json.dumps(request).encode()
        with self._lock:  # benchmarks start commands in several threads
            self._socket.sendall(len(text).to_bytes(4))
            socket.send_fds(self._socket, [text[:1]], streams)
            self._socket.sendall(text[1:])
            return int.from_bytes(_read(self._socket, 4))


_servers: list[_Server] = []


def popen(args: Sequence[object], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
    """Start `python -m samebits ...` or `python script.py ...`: forked where possible, else like any other process."""
    words = list(map(str, args))
    is_known = words[1:3] == ["-m", "samebits"] or words[1].endswith(".py")
    if is_known and words[0] == sys.executable and is_possible(env):
        return Popen(words[1:], env=env, **options)
    return subprocess.Popen(words, env=env, **options)


def is_possible(environ: Mapping[str, str]) -> bool:
    """Whether a command with these variables can be forked."""
    if sys.platform != "linux" or os.environ.get("SAMEBITS_TESTS_COLD"):
        return False
    return _differ_only_late(_servers[0].environ if _servers else _usual(), environ)


def _usual() -> dict[str, str]:
    from tests import runs

    return runs.environment()


def _differ_only_late(known: Mapping[str, str], environ: Mapping[str, str], ignored: Sequence[str] = ()) -> bool:
    """Whether variables differ at most in those that are read late, and in `ignored` ones."""
    pairs = ({**_FIXED, **known}, {**_FIXED, **environ})
    names = {name for name in {*known, *environ} if pairs[0].get(name) != pairs[1].get(name)}
    return all(name.startswith(_READ_LATE) for name in names.difference(ignored))


class Popen(subprocess.Popen[str]):
    """A process like any other of `subprocess`. `args` are those of `python`: `-m samebits ...` or `script.py ...`."""

    def _execute_child(self, *values: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *values).arguments  # type: ignore[attr-defined]
        if not _servers:
            from tests import guards

            _servers.append(_Server(_usual()))
            guards.KEPT.add(_servers[0].pid)
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        streams = [number if given_fd == -1 else given_fd for number, given_fd in enumerate(streams)]
        request = {name: given[name] for name in ("args", "env", "start_new_session")}
        request["cwd"] = str(given["cwd"] or Path.cwd())
        self.pid = _servers[0].fork(request, streams)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _serve(connection: socket.socket, parent: int) -> dict[str, Any]:
    """Fork a process for each request; returns the request in each of them."""
    while True:
        size = int.from_bytes(_read(connection, 4))
        first, streams, _, _ = socket.recv_fds(connection, 1, 3)
        request: dict[str, Any] = json.loads(first + _read(connection, size - 1))
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            while os.getppid() != parent:  # until the process between has ended
                pass
            connection.sendall(os.getpid().to_bytes(4))
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            return request
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)


def _become(request: dict[str, Any]) -> None:
    """Take over a request's variables, folder and streams."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    if request["start_new_session"]:
        os.setsid()
    take_over(request)
    tempfile.tempdir = None
    sys.argv = request["args"]
    through = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name, errors in ((0, "stdin", "strict"), (1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        buffered = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            buffered, encoding="utf-8", errors=errors, line_buffering=number == 2, write_through=through and number > 0
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main() -> None:
    """Serve requests; in a process that was forked, run the command."""
    connection, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
    del sys.path[0]
    known = dict(os.environ)
    for name in _IMPORTED:
        __import__(name)
    gc.freeze()  # otherwise a collection in a forked process copies all memory
    try:
        request = _serve(connection, parent)
    except EOFError:
        return
    connection.close()
    _become(request)

    is_alone = sys.argv[1:2] == ["samebits"] and sys.argv[2:3] and sys.argv[2] in _ALONE
    if is_alone or sys.argv[0].endswith(_SCRIPTS_ALONE):
        run_and_exit(_run_command)
    fork_server = WaitingProcess(lambda environ: _differ_only_late(known, environ, ignored=_READ_BY_PYTHON))
    run_and_exit(_run_command, fork_server.close)


def _run_command() -> None:
    if sys.argv[0] == "-m":
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
