"""The same command on several machines, from one of them through ssh: their words come back, and Ctrl-C ends all.

    this terminal ── ssh a ── lockstep train … --nodes 2 --rdzv-endpoint a:29400
                  └─ ssh b ── lockstep train … --nodes 2 --rdzv-endpoint a:29400

A command over there stops when its standard input ends: by Ctrl-C here, by a kill -9 here, or by a connection that is
lost. Nothing here imports torch.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from lockstep.cluster.env import KEY, run_key
from lockstep.errors import ConfigError, LaunchError

# Set over there: stop when standard input ends.
STOP_AT_EOF = "LOCKSTEP_STOP_AT_EOF"
# What else goes along: the environment of a shell by ssh is not that of a terminal.
PASSED = ("PYTHONPATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NO_COLOR", "COLUMNS", "LOCKSTEP_DEBUG")
PASSED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
# ssh's own exit code for a connection that could not be made or was lost.
SSH_FAILED = 255


@dataclass(frozen=True)
class RemoteHost:
    """One of the machines.

    Attributes:
        name: As ssh knows it: HOST or USER@HOST.
        procs: Processes on it; None: as many as suit it.
    """

    name: str
    procs: int | None

    @property
    def host(self) -> str:
        """Its name for the network, without the user."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[RemoteHost]:
    """Read `a,b:4,me@c`.

    Raises:
        ConfigError: A name or a number is missing, or a machine stands there twice.
    """
    machines = []
    for part in text.split(","):
        name, colon, count = part.strip().partition(":")
        if not name.strip("@") or name.startswith("-") or (colon and (not count.isdigit() or int(count) < 1)):
            raise ConfigError(f"--hosts has {part!r}", given=f"--hosts {text}", allowed="HOST or HOST:PROCESSES")
        machines.append(RemoteHost(name, int(count) if colon else None))
    names = [machine.host for machine in machines]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"--hosts names {twice[0]} twice", fix=f"give its processes as a number: {twice[0]}:2")
    return machines


def run_on_hosts(
    machines: Sequence[RemoteHost], command: Callable[[int, RemoteHost], Sequence[str]], report: Callable[[str], None]
) -> int:
    """Run a command on each machine, in the same folder as here, until all have ended.

    Args:
        machines: Where; the first one's words come as they are, the others' with their name before each line.
        command: (number, machine) -> what to run there, with this interpreter's path.
        say: Gets what is to be said of a machine that can't be reached.

    Returns:
        The exit code: 128 + the signal's number if it was stopped from here, else the first one that is not 0.

    Raises:
        LaunchError: There is no ssh.
    """
    running: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []
    first_failure: list[int] = []
    reader_gone: list[bool] = []
    lock = threading.Lock()
    # Through standard input: a command line can be read by every user of a machine.
    key = run_key(os.environ) or os.urandom(32).hex()

    def follow(machine: RemoteHost, process: subprocess.Popen[bytes], is_first: bool) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with lock:
                if not reader_gone:
                    try:
                        sys.stdout.buffer.write(line if is_first else f"[{machine.name}] ".encode() + line)
                        sys.stdout.buffer.flush()
                    except (OSError, ValueError):
                        # `| head`: as with a run on this machine, a reader that goes away does not stop the run.
                        reader_gone.append(True)
                        _drop_stdout()
        code = process.wait()
        if code and not stopped:
            first_failure.append(code)
            if code == SSH_FAILED:
                report(f"{machine.name}: ssh could not connect, or lost the connection; the others are stopped")
                for other in running:
                    _let_go(other)

    try:
        for number, machine in enumerate(machines):
            running.append(_start(machine, command(number, machine)))
            _send_key(running[-1], key)
    except FileNotFoundError:
        raise LaunchError("--hosts needs ssh, and there is none here", fix="install an ssh client") from None
    followers = [
        threading.Thread(target=follow, args=(machine, process, number == 0), name=f"ssh {machine.name}")
        for number, (machine, process) in enumerate(zip(machines, running, strict=True))
    ]
    with _signals(running, stopped):
        for thread in followers:
            thread.start()
        for thread in followers:
            thread.join()
    if stopped:
        return 128 + stopped[0]
    return first_failure[0] if first_failure else 0


def stop_at_eof() -> None:
    """Over there: ask this process to stop once its standard input ends, if it was started by `run_on_hosts`."""
    if os.environ.pop(STOP_AT_EOF, "") != "1":
        return
    if key := _first_line():
        os.environ[KEY] = key

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stop-at-eof", daemon=True).start()


def _start(machine: RemoteHost, words: Sequence[str]) -> subprocess.Popen[bytes]:
    passed = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}
    variables = [f"{name}={value}" for name, value in {**passed, STOP_AT_EOF: "1", "PYTHONUNBUFFERED": "1"}.items()]
    # One line of shell: change to this folder, or say that it is not there, and become the command.
    there = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*variables, *words])}"
    return subprocess.Popen(
        [
            "ssh",
            "-o",
            "BatchMode=yes",
            "-o",
            "ServerAliveInterval=5",
            "-o",
            "ServerAliveCountMax=3",
            machine.name,
            there,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us: the machines get the end of their input, and time to save
    )


def _send_key(process: subprocess.Popen[bytes], key: str) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # it has ended already, and says why
        process.stdin.write(f"{key}\n".encode())
        process.stdin.flush()


def _first_line() -> str:
    """What standard input begins with, read without taking more from it."""
    line = b""
    with suppress(OSError):
        while len(line) < 1024 and (byte := os.read(0, 1)) not in (b"", b"\n"):
            line += byte
    return line.decode(errors="replace")


def _drop_stdout() -> None:
    """Send what is still to be printed, and what Python flushes at its end, to nowhere."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _let_go(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


@contextmanager
def _signals(running: Sequence[subprocess.Popen[bytes]], stopped: list[int]) -> Iterator[None]:
    """While it is open, a signal stops all machines; a second one doesn't wait for them."""

    def handle(number: int, frame: FrameType | None) -> None:
        again = bool(stopped)
        stopped.append(number)
        if not again:
            os.write(2, b"\nstopping all machines; a run that trains saves first; once more to end at once\n")
        for process in running:
            _let_go(process)
            if again:
                process.kill()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
