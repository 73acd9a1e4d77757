"""Run a function in processes of this machine, for a command that measures or examines, and return its answers."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samebits.cluster.address import ReservedPort
from samebits.cluster.env import ALONE, read_assignment
from samebits.config.schema import RunConfig
from samebits.errors import LaunchError
from samebits.launch import forkserver, start
from samebits.launch.subcommand import raise_if_stopped
from samebits.process_range import ProcessRange


def reserve_port() -> ReservedPort:
    """Return a port of this machine for processes that start later, not yet reserved."""
    return ReservedPort()


def ask(
    entry: Callable[..., Any],
    arguments: tuple[Any, ...],
    size: ProcessRange,
    config: RunConfig,
    failure: LaunchError,
) -> list[Any]:
    """Run an entry in new processes, and return what each of them returned, by rank.

    Args:
        entry: An importable function. It returns what `codec.encode` takes.
        arguments: Its arguments; must be picklable.
        size: How many processes; of a range, fewer may remain after losses.
        failure: What to raise if a process fails or ends without an answer; the reason is added.

    Raises:
        LaunchError: A process failed, or has not answered.
        Stopped: Ctrl-C was pressed.
        SystemExit: Another signal arrived, such as SIGTERM.
    """
    with forkserver.temp_folder() as folder:
        code = start.launch_here(size, config, _answer, (folder, entry, arguments))
        raise_if_stopped(code)
        from samebits.cluster import collectives

        files = [folder / f"rank-{rank}" for rank in range(size.most)]
        there = [file for file in files if file.is_file()]
        if code or len(there) < size.least or files[0] not in there:
            missing = ", ".join(file.name for file in files if file not in there)
            raise failure.with_slots(
                cause=f"exit code {code}" if code else f"no result of {missing}"
            )
        return [collectives.decode(file.read_bytes()) for file in there]


def ask_here(
    entry: Callable[..., Any],
    arguments: tuple[Any, ...],
    size: ProcessRange,
    config: RunConfig,
    failure: LaunchError,
    preload: Sequence[str] = (),
) -> Any:
    """Run an entry in this process if it is the only one, otherwise as `ask` does; return rank 0's answer.

    Args:
        entry: As for `ask`; here its last argument is ALONE.
        preload: Modules to import once for all processes.
    """
    if size.most == 1:
        return entry(*arguments, ALONE)
    forkserver.prepare([*forkserver.PRELOAD, *preload], config.num_threads)
    return ask(entry, arguments, size, config, failure)[0]


def _answer(folder: Path, entry: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """Call an entry in one process, and write what it returns."""
    from samebits.cluster import collectives

    answer = collectives.encode(entry(*arguments))
    rank = (read_assignment(os.environ) or ALONE).rank
    (folder / f"rank-{rank}").write_bytes(answer)
    return 0
