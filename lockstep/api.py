"""Training as a function, and a world for a training loop of your own."""

from __future__ import annotations

import json
import locale
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cluster.env import ALONE, read_assignment
from lockstep.config.given import as_overrides, given_path
from lockstep.config.load import load
from lockstep.config.process_range import parse_range
from lockstep.errors import KINDS, LaunchError, LockstepError, from_json
from lockstep.launch.commands import CALLER, ERROR_FILE, LOCKSTEP, import_path
from lockstep.launch.start import resume_from
from lockstep.launch.stopped import Stopped
from lockstep.recipes.catalog import command_arguments, find
from lockstep.recipes.trust import check_tracker_files

if TYPE_CHECKING:
    from lockstep.cluster.world import World


@dataclass(frozen=True)
class Run:
    """A complete run.

    Attributes:
        folder: The run folder.
        metrics: Metrics of the last validation, by name.
        weights_sha256: SHA-256 of the final weights.
        result: The content of `result.json`.
    """

    folder: Path
    metrics: dict[str, float]
    weights_sha256: str
    result: dict[str, Any]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items() if "/" not in name)
        return f"Run({str(self.folder)!r}, {shown}, weights_sha256='{self.weights_sha256[:8]}…')"


def train(
    source: str | Path,
    settings: Mapping[str, Any] | None = None,
    *,
    procs: int | str | None = None,
    run_dir: str | Path | None = None,
    resume: str = "never",
) -> Run:
    """Train as `lockstep train` does. Training runs in processes of its own, so this works in a notebook too.

    Args:
        source: A recipe, a preset, a YAML file or a recipe file.
        settings: Settings by name: `{"epochs": 3, "optim.lr": 0.1}`, or nested.
        procs: Processes on this machine: 4, or "2:4". None: one per GPU, or one per core.
        run_dir: The run folder. None: a new one below runs/.
        resume: "never", "auto", or the folder of a checkpoint.

    Raises:
        LockstepError: The error of the command, with its kind and slots.
        Stopped: The user pressed Ctrl-C, and the run has saved a checkpoint. A kind of KeyboardInterrupt.
    """
    from lockstep.storage.run_folder import RunFolder, drop_empty, new_folder

    # Refused before a folder is made for the run.
    found = find(str(source))
    overrides = as_overrides(settings)
    loaded = load(found.config_class, found.layers, overrides)
    check_tracker_files(loaded.config.report.trackers, overrides)
    if procs is not None:
        parse_range(str(procs), "procs")
    given = None if run_dir is None else given_path(run_dir, "run_dir")
    resume = resume_from(resume, given)
    folder = given or new_folder(found.name)
    command = [*LOCKSTEP, "train", *command_arguments(found, loaded.diff)]
    command += ["--run-dir", str(folder), "--resume", resume]
    if procs is not None:
        command += ["--procs", str(procs)]
    try:
        code, error = _run_command(command)
    finally:
        if given is None:
            drop_empty(folder)
    if error is not None:
        raise error
    if code:
        raise LaunchError(
            f"training was stopped by signal {code - 128} and has saved a checkpoint",
            fix=f'Resume it: lockstep.train({str(source)!r}, run_dir={str(folder)!r}, resume="auto").',
        )
    result = RunFolder(folder).read_json("result.json")
    return Run(folder, result["metrics"], result["weights_sha256"], result)


def _run_command(command: Sequence[str]) -> tuple[int, LockstepError | None]:
    """Run a command of Lockstep.

    Returns:
        Its exit code, and its error. None if it had none, or if a signal stopped it.

    Raises:
        Stopped: The user pressed Ctrl-C; raised after the command has ended.
    """
    is_interrupted = False
    with tempfile.TemporaryDirectory(prefix="lockstep-") as place:
        error_file = Path(place) / "error.json"
        with tempfile.TemporaryFile("w+", encoding=locale.getencoding(), errors="replace") as stderr:
            # In a process group of its own: Ctrl-C then reaches only this process, in a terminal as in a notebook.
            environ = {**os.environ, CALLER: str(os.getpid()), ERROR_FILE: str(error_file), **import_path()}
            child = subprocess.Popen(command, stderr=stderr, process_group=0, env=environ)
            while child.returncode is None:
                try:
                    child.wait()
                except KeyboardInterrupt:
                    is_interrupted = True  # the command saves and ends; a second Ctrl-C ends it at once
                    child.send_signal(signal.SIGINT)
                except BaseException:
                    child.kill()
                    child.wait()
                    raise
            stderr.seek(0)
            text = stderr.read().strip()
        code = child.returncode
        if is_interrupted and code > 128:
            raise Stopped(code)
        error = _read_error(error_file)
        if (error is None and 0 < code < 128) or code < 0:
            error = _error_of(text, code)
        return code, error


def _read_error(path: Path) -> LockstepError | None:
    """Return the error that a command wrote; None if it ended without one, by a bug or by a signal."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _error_of(text: str, code: int) -> LockstepError:
    """Return an error for a command that ended without one: its last output is the only trace."""
    kind = next((kind for kind in KINDS.values() if kind.exit_code == code), LockstepError)
    if text:
        return kind(text.removeprefix(f"{kind.kind}: "))  # it has its own fix
    return kind(f"training ended with exit code {code}", fix="Run the same command in a terminal, and read its output.")


@contextmanager
def world(
    init: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    device: str = "auto",
    backend: str = "auto",
    join_timeout_s: float = 300.0,
    timeout_s: float = 600.0,
) -> Iterator[World]:
    """Join the world of this process, for a training loop of your own.

    Args:
        init: URL of the rendezvous, with `rank` and `world_size`, as for `lockstep train --init`. None: the world
            that torchrun, srun, mpirun or the environment defines, or this process alone.
        rank: Rank of this process, from 0.
        world_size: Number of processes.
        device: auto, cpu or cuda.
        backend: auto, gloo, nccl or mpi.
        join_timeout_s: Longest wait for all processes to join, seconds.
        timeout_s: Longest wait in a collective, seconds.

    Raises:
        LaunchError: The processes cannot join each other, or one is lost.
    """
    from lockstep.cluster.world import join

    here = read_assignment(os.environ, init, rank, world_size) or ALONE
    with join(here, device=device, backend=backend, join_timeout_s=join_timeout_s, timeout_s=timeout_s) as joined:
        yield joined
