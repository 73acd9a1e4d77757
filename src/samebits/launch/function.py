"""`samebits.launch`: a function in several processes of this machine, called from a script or a notebook's cell.

    notebook ── samebits call ── launcher ── rank 0, rank 1, ...
                                             each imports the function and calls it

The function arrives as text or by the name of its module, its arguments and its result as JSON; nothing is pickled
(docs/adr/0045). `main_source` describes which functions of a notebook can be sent.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

from samebits.cluster.env import read_assignment
from samebits.config.process_range import parse_range
from samebits.errors import ConfigError
from samebits.launch.commands import SAMEBITS
from samebits.launch.main_source import check_function, is_main, is_plain, module_text
from samebits.launch.stopped import raise_if_stopped
from samebits.launch.subcommand import run_subcommand

# Imported once, in the fork server.
PRELOAD = ["torch._dynamo", "samebits.cli.main", "samebits.cluster.world", "samebits.launch.worker", __name__]


def launch(function: Callable[..., Any], *args: Any, procs: int | str, num_threads: int = 1) -> Any:
    """Run a function in several processes of this machine, and wait for them. Works in a notebook's cell.

    In the function, `samebits.world()` joins the processes; torch's `init_process_group()` does too. A function of a
    cell or of the main script is sent as text, with the functions, classes, imports and plain values that it uses. It
    cannot use other objects of the notebook, such as a model: make them in the function.

    Args:
        function: The function. Each process calls it with `args`.
        *args: None, numbers, texts, paths, and lists, tuples and dicts of them.
        procs: Number of processes: 2, or "2:4" to continue with fewer after losses.
        num_threads: CPU threads of each process.

    Returns:
        What the function returned on rank 0: a value of the same kinds. Tuples become lists.

    Raises:
        ConfigError: The function uses an object that cannot be sent, or an argument is none of these kinds.
        SamebitsError: A process failed.
        Stopped: The user pressed Ctrl-C. A kind of KeyboardInterrupt.
    """
    check_function(function, "the function to launch")
    parse_range(str(procs), "procs")
    function = cast(FunctionType, function)
    args = tuple(os.fspath(value) if isinstance(value, os.PathLike) else value for value in args)
    for value in args:
        if not is_plain(value):
            raise ConfigError(
                f"an argument of {function.__name__} is a {type(value).__name__}, which other processes do not have",
                allowed="None, numbers, texts, paths, and lists, tuples and dicts of them",
                fix=f"Make it inside {function.__name__}.",
            )
    with tempfile.TemporaryDirectory(prefix="samebits-") as place:
        folder = Path(place)
        call = {
            "name": function.__name__,
            "args": args,
            "module": function.__module__,
            "result": str(folder / "result"),
        }
        if is_main(function):
            (folder / "cells.py").write_text(module_text(function), encoding="utf-8")
            call["module"] = str(folder / "cells.py")
        (folder / "call.json").write_text(json.dumps(call), encoding="utf-8")
        command = [*SAMEBITS, "call", str(folder / "call.json"), "--procs", str(procs), "--threads", str(num_threads)]
        code, error = run_subcommand(command)
        if error is not None:
            raise error
        raise_if_stopped(code)
        return json.loads((folder / "result").read_text(encoding="utf-8"))


def call_in_worker(text: str, load_file: Callable[[Path, None], ModuleType]) -> None:
    """Call the function as one of the launched processes; rank 0 writes its result.

    Args:
        text: The JSON that `launch` wrote.
        load_file: Imports a file.

    Raises:
        ConfigError: The result cannot be sent.
    """
    call = json.loads(text)
    is_file = call["module"].endswith(".py")
    module = load_file(Path(call["module"]), None) if is_file else import_module(call["module"])
    result = getattr(module, call["name"])(*call["args"])
    here = read_assignment(os.environ)
    if here is not None and here.rank != 0:
        return
    if not is_plain(result):
        raise ConfigError(
            f"{call['name']} returned a {type(result).__name__}, which cannot be sent to the process that launched it",
            allowed="None, numbers, texts, and lists, tuples and dicts of them",
            fix="Return such values, and save others to a file.",
        )
    Path(call["result"]).write_text(json.dumps(result), encoding="utf-8")
