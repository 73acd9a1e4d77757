"""`samebits.launch`: a function in several processes of this machine, called from a script or a notebook's cell.

    notebook ── samebits call ── launcher ── rank 0, rank 1, ...
                                             each unpickles the function and calls it

Function and arguments are pickled by cloudpickle, which sends what `__main__` defines by value. Unpickling runs code,
so only a file of the parent process is read: its SHA-256 is in a variable that the parent has set for its child.
"""

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from samebits.cluster.env import read_assignment
from samebits.config.process_range import parse_range
from samebits.errors import ConfigError
from samebits.launch.commands import CALL_SHA256, SAMEBITS
from samebits.launch.stopped import raise_if_stopped
from samebits.launch.subcommand import run_subcommand

# Imported once, in the fork server.
PRELOAD = ["torch._dynamo", "samebits.cli.main", "samebits.cluster.world", "samebits.launch.worker", __name__]


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
        raise ConfigError(f"a {type(function).__name__} cannot be launched", allowed="a function", fix="Give one.")
    parse_range(str(procs), "procs")
    with tempfile.TemporaryDirectory(prefix="samebits-") as place:  # of mode 0700
        call, result = Path(place, "call"), Path(place, "result")
        name = getattr(function, "__name__", type(function).__name__)
        content = _pickled((function, args, str(result)), f"{name} or its arguments")
        call.write_bytes(content)
        command = [*SAMEBITS, "call", str(call), "--procs", str(procs), "--threads", str(num_threads)]
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
        raise ConfigError(f"{path} was not written by samebits.launch", fix="Call samebits.launch(function, procs=2).")
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
        Path(target).write_bytes(_pickled(result, f"the {type(result).__name__} that the function returned"))


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
