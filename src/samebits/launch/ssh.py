"""Run one command on several machines through ssh, forward their output, and stop all of them on Ctrl-C.

    this terminal ── ssh a ── samebits train … --nodes 2 --rdzv-endpoint a:29400
                  └─ ssh b ── samebits train … --nodes 2 --rdzv-endpoint a:29400

A remote command stops when its standard input ends: after Ctrl-C or kill -9 here, or a lost connection. Nothing here
imports torch.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import FrameType

from samebits.cluster.env import KEY, run_key
from samebits.cluster.signals import STOP_SIGNALS, handled
from samebits.errors import ConfigError, LaunchError

# Set on the remote machines: stop when standard input ends.
STOP_AT_EOF = "SAMEBITS_STOP_AT_EOF"
# Other variables to pass on: a shell started by ssh does not have a terminal's environment.
PASSED = (
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "NO_COLOR",
    "COLUMNS",
    "SAMEBITS_DEBUG",
)
PASSED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
# ssh's own exit code for a connection that could not be made or was lost.
SSH_FAILED = 255


@dataclass(frozen=True)
class RemoteHost:
    """One of the machines."""

    name: str  #: Name for ssh: HOST or USER@HOST.
    procs: int | None  #: Number of processes on it; None: chosen there.

    @property
    def host(self) -> str:
        """Return the host name without the user."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[RemoteHost]:
    """Parse `a,b:4,me@c`. Raises ConfigError if a name or number is invalid, or a machine is listed twice."""
    machines = []
    for part in text.split(","):
        name, colon, count = part.strip().partition(":")
        if (
            not name.strip("@")
            or name.startswith("-")
            or (colon and (not count.isdigit() or int(count) < 1))
        ):
            raise ConfigError(
                f"--hosts has {part!r}",
                given=f"--hosts {text}",
                allowed="HOST or HOST:PROCESSES",
                fix="Separate the machines by commas: --hosts a,b:4",
            )
        machines.append(RemoteHost(name, int(count) if colon else None))
    names = [machine.host for machine in machines]
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise ConfigError(
            f"--hosts lists {duplicates[0]} twice",
            fix=f"List it once, with its processes: {duplicates[0]}:2",
        )
    return machines


def run_on_hosts(
    machines: Sequence[RemoteHost],
    command: Callable[[int, RemoteHost], Sequence[str]],
) -> int:
    """Run a command on each machine, in the same folder as here, until all have ended.

    Args:
        machines: The machines. The first one's output is unchanged; the others' lines start with the machine's name.
        command: (number, machine) -> command to run there, with this interpreter's path.

    Returns:
        The exit code: 128 + the signal's number if it was stopped from here, else the first that is not 0.

    Raises:
        LaunchError: ssh is not installed.
    """
    running: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []
    first_failure: list[int] = []
    reader_gone: list[bool] = []
    lock = threading.Lock()
    # Sent through standard input: every user of a machine can read command lines.
    key = run_key(os.environ) or os.urandom(32).hex()

    def follow(machine: RemoteHost, process: subprocess.Popen[bytes], is_first: bool) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with lock:
                if not reader_gone:
                    try:
                        sys.stdout.buffer.write(
                            line if is_first else f"[{machine.name}] ".encode() + line
                        )
                        sys.stdout.buffer.flush()
                    except (OSError, ValueError):
                        # `| head`: as with a run on this machine, a closed pipe does not stop the run.
                        reader_gone.append(True)
                        _drop_stdout()
        code = process.wait()
        if code and not stopped:
            first_failure.append(code)
            if code == SSH_FAILED:
                print(
                    f"{machine.name}: ssh could not connect, or lost the connection; the others are stopped",
                    file=sys.stderr,
                )
                for other in running:
                    _let_go(other)

    try:
        for number, machine in enumerate(machines):
            running.append(_start(machine, command(number, machine), key))
    except FileNotFoundError:
        raise LaunchError(
            "--hosts needs the command ssh, which was not found",
            given=f"--hosts {','.join(machine.name for machine in machines)}",
            fix="Install an ssh client (Debian: apt install openssh-client).",
        ) from None
    followers = [
        threading.Thread(
            target=follow, args=(machine, process, number == 0), name=f"ssh {machine.name}"
        )
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
    """On a remote machine: stop this process once its standard input ends, if `run_on_hosts` started it."""
    # `pop`: a command that the run starts must not stop at the end of its own input.
    if os.environ.pop(STOP_AT_EOF, "") != "1":
        return
    line = b""
    with suppress(OSError):
        # Byte by byte: a buffered read would take what comes after the line.
        while len(line) < 1024 and (byte := os.read(0, 1)) not in (b"", b"\n"):
            line += byte
    if line:
        os.environ[KEY] = line.decode(errors="replace")

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stop-at-eof", daemon=True).start()


def _start(machine: RemoteHost, command: Sequence[str], key: str) -> subprocess.Popen[bytes]:
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name.startswith(PASSED_PREFIXES)
    }
    variables = [
        f"{name}={value}"
        for name, value in {**passed, STOP_AT_EOF: "1", "PYTHONUNBUFFERED": "1"}.items()
    ]
    # One line of shell: change to this folder, or print that it does not exist, and exec the command.
    remote = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*variables, *command])}"
    options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    process = subprocess.Popen(
        ["ssh", *options, machine.name, remote],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # This process handles Ctrl-C: the machines see the end of their input, and have time to save.
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(OSError):  # it has ended already, with its own error
        process.stdin.write(f"{key}\n".encode())
        process.stdin.flush()
    return process


def _drop_stdout() -> None:
    """Redirect the remaining output, and what Python flushes on exit, to /dev/null."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _let_go(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


def _signals(
    running: Sequence[subprocess.Popen[bytes]], stopped: list[int]
) -> AbstractContextManager[None]:
    """Return a context: the first signal in it stops all machines, a second one kills the connections at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        again = bool(stopped)
        stopped.append(number)
        if not again:
            # `os.write`, since `print` may have been interrupted in the middle of its own lock.
            os.write(
                2,
                b"\nstopping all machines; a training run saves first; press Ctrl-C again to exit at once\n",
            )
        for process in running:
            _let_go(process)
            if again:
                process.kill()

    return handled(STOP_SIGNALS, handle)
