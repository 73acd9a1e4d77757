"""Functions and commands of this package in processes of their own, and their errors."""

import hashlib
import json
import locale
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from samebits.cluster.env import read_assignment
from samebits.cluster.signals import STOP_SIGNALS, when_parent_dies
from samebits.errors import KINDS, ConfigError, SamebitsError, from_json
from samebits.process_range import parse_range

# Command line and environment with which this package starts itself. Nothing here imports torch.


# Set by `samebits.train` for the command that it starts: its own process id, and where to write an error as JSON.
CALLER = "SAMEBITS_CALLER"
ERROR_FILE = "SAMEBITS_ERROR_FILE"
CALL_SHA256 = "SAMEBITS_CALL_SHA256"  # of the function that `samebits.launch` has pickled
# -P: without it, -m puts the current folder first on sys.path, where a torch.py of a stranger may lie.
SAMEBITS = (sys.executable, "-P", "-m", "samebits")


def import_path() -> dict[str, str]:
    """Return a PYTHONPATH that lets a recipe import modules beside the script or notebook that called `train`."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    folder = os.path.dirname(os.path.abspath(script)) if script else ""
    if hasattr(main, "get_ipython"):  # a notebook's kernel imports from the current folder
        # An empty entry stands for the current folder, wherever the other process is started.
        here = os.getcwd()
        folder = here if "" in sys.path or here in sys.path else ""
    elif folder not in sys.path:
        folder = ""
    if not folder:
        return {}
    before = os.environ.get("PYTHONPATH")
    # Behind the user's own entries, so that these win as they do here.
    return {"PYTHONPATH": f"{before}{os.pathsep}{folder}" if before else folder}


# Exit of a function whose processes were stopped by Ctrl-C or another signal.


class Stopped(SystemExit, KeyboardInterrupt):
    """Ctrl-C, raised after the processes have ended. A script that does not catch it exits without a traceback."""


def raise_if_stopped(code: int) -> None:
    """Raise the exit that matches a signal which ended the launched processes.

    Raises:
        Stopped: Ctrl-C.
        SystemExit: Another signal, such as SIGTERM.
    """
    if code - 128 in STOP_SIGNALS:
        raise (Stopped if code - 128 == signal.SIGINT else SystemExit)(code)


# Run a command of Samebits for a function of its Python interface, and returns its error.


def run_subcommand(
    command: Sequence[str], variables: Mapping[str, str] | None = None
) -> tuple[int, SamebitsError | None]:
    """Run a command of Samebits in a process of its own; return its exit code, and its error if it had one.

    The command saves and exits if this process ends before it.

    Raises:
        Stopped: The user pressed Ctrl-C; raised after the command has ended.
    """
    is_interrupted = False
    with tempfile.TemporaryDirectory(prefix="samebits-") as place:
        error_file = Path(place) / "error.json"
        # A file and not a pipe: the command writes as much as it likes while this process only waits.
        with tempfile.TemporaryFile(
            "w+", encoding=locale.getencoding(), errors="replace"
        ) as stderr:
            # In a process group of its own: Ctrl-C then reaches only this process, in a terminal as in a notebook.
            child = subprocess.Popen(
                command,
                stderr=stderr,
                process_group=0,
                env={
                    **os.environ,
                    **(variables or {}),
                    CALLER: str(os.getpid()),
                    ERROR_FILE: str(error_file),
                    **import_path(),
                },
            )
            while child.returncode is None:
                # Again after each signal: `wait` is interrupted, and the command still has to save.
                try:
                    child.wait()
                except KeyboardInterrupt:
                    is_interrupted = (
                        True  # the command saves and ends; a second Ctrl-C ends it at once
                    )
                    child.send_signal(signal.SIGINT)
                # This process is about to fail, and its command must not stay behind.
                except BaseException:
                    child.kill()
                    child.wait()
                    raise
            stderr.seek(0)
            text = stderr.read().strip()
        code = child.returncode
        if is_interrupted and code > 128:
            raise Stopped(code)
        return code, _error_of(code, error_file, text)


def _error_of(code: int, error_file: Path, text: str) -> SamebitsError | None:
    """Return the error of a command that has ended; None if it had none, or if a signal stopped it."""
    try:
        error = from_json(json.loads(error_file.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # it ended without one, by a bug or by a signal
        error = None
    if code >= 0 and (error is not None or not 0 < code < 128):
        return error
    kind = next((kind for kind in KINDS.values() if kind.exit_code == code), SamebitsError)
    if text:  # its last output is the only trace, and has its own fix
        return kind(text.removeprefix(f"{kind.kind}: "))
    fix = "Run the same command in a terminal, and read its output."
    return kind(f"training ended with exit code {code}", fix=fix)


def end_with_caller() -> None:
    """Save and exit once the process that called a function of `samebits` is gone, if it started this command.

    A notebook's kernel is killed when it is restarted, and would leave its training behind.
    """
    caller = os.environ.pop(CALLER, None)
    # Compared with the parent: the variable may be inherited from a command that had another caller.
    if caller is not None and int(caller) == os.getppid():
        when_parent_dies(lambda: os.kill(os.getpid(), signal.SIGTERM))


# `samebits.launch`: a function in several processes of this machine, called from a script or a notebook's cell.
#
#     notebook ── samebits call ── launcher ── rank 0, rank 1, ...
#                                              each unpickles the function and calls it
#
# Function and arguments are pickled by cloudpickle, which sends what `__main__` defines by value. Unpickling runs code,
# so only a file of the parent process is read: its SHA-256 is in a variable that the parent has set for its child.


# Imported once, in the fork server.
PRELOAD = [
    "torch._dynamo",
    "samebits.cli.main",
    "samebits.cluster.world",
    "samebits.launch.worker",
    __name__,
]


def launch(function: Callable[..., Any], *args: Any, procs: int | str, num_threads: int = 1) -> Any:
    """Run a function in several processes of this machine, and wait for them. Works in a notebook's cell.

    In the function, `samebits.world()` joins the processes; torch's `init_process_group()` does too. Function and
    arguments are copied with cloudpickle: what a cell or the main script defines is sent by value, what a module
    defines is imported.

    Args:
        function: The function. Each process calls it with `args`.
        *args: Its arguments.
        procs: Number of processes: 2, or "2:4" to continue with fewer after losses.
        num_threads: CPU threads of each process.

    Returns:
        What the function returned on rank 0.

    Raises:
        ConfigError: The function, an argument or the result cannot be pickled.
        SamebitsError: A process failed.
        Stopped: The user pressed Ctrl-C. A kind of KeyboardInterrupt.
    """
    if not callable(function):
        raise ConfigError(
            f"a {type(function).__name__} cannot be launched", allowed="a function", fix="Give one."
        )
    parse_range(str(procs), "procs")
    with tempfile.TemporaryDirectory(prefix="samebits-") as place:  # of mode 0700
        call = Path(place, "call")
        result = Path(place, "result")
        name = getattr(function, "__name__", type(function).__name__)
        content = _pickled((function, args, str(result)), f"{name} or its arguments")
        call.write_bytes(content)
        command = [
            *SAMEBITS,
            "call",
            str(call),
            "--procs",
            str(procs),
            "--threads",
            str(num_threads),
        ]
        code, error = run_subcommand(command, {CALL_SHA256: hashlib.sha256(content).hexdigest()})
        if error is not None:
            raise error
        raise_if_stopped(code)
        # From a folder of mode 0700, written by a process that this one has started.
        return pickle.loads(result.read_bytes())


def read_call(path: Path) -> bytes:
    """Return the pickle that the parent of this process has written.

    Raises:
        ConfigError: This command was not started by `samebits.launch`, or the file is another one.
    """
    content = path.read_bytes()
    # `pop`: processes that the function starts must not accept this call as theirs.
    if hashlib.sha256(content).hexdigest() != os.environ.pop(CALL_SHA256, None):
        raise ConfigError(
            f"{path} was not written by samebits.launch",
            fix="Call samebits.launch(function, procs=2).",
        )
    return content


def call_in_worker(content: bytes) -> None:
    """Call the function, from the pickle of `launch`, as one of its processes; rank 0 writes the result.

    Raises:
        ConfigError: The result cannot be pickled.
    """
    function, args, target = pickle.loads(content)
    result = function(*args)
    here = read_assignment(os.environ)
    if here is None or here.rank == 0:
        Path(target).write_bytes(
            _pickled(result, f"the {type(result).__name__} that the function returned")
        )


def _pickled(value: Any, what: str) -> bytes:
    try:
        # cloudpickle, since pickle cannot send what a cell or the main script defines.
        content: bytes = cloudpickle.dumps(value)
    except Exception as error:  # whatever an object's own reduction raises
        raise ConfigError(
            f"{what} cannot be sent to another process",
            cause=f"{type(error).__name__}: {error}",
            fix="Make such objects inside the function, and save what it returns to a file.",
        ) from error
    return content
