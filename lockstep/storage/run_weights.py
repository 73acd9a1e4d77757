"""The weights of a run folder, verified before they are used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.storage.checkpoint import AVERAGE, BEST, file_of, name_of, newest, run_of, steps
from lockstep.storage.checkpoint_reader import Opened, open_checkpoint
from lockstep.storage.manifest import WEIGHTS, read_json, read_state
from lockstep.storage.run_folder import RunFolder
from lockstep.storage.weights import check_fits, file_limits, read, weights_sha256


def weights_of(run: Path, which: str, model: nn.Module | None = None) -> tuple[Path, dict[str, Tensor]]:
    """The weights of a run folder: the final ones ("last"), those of its best checkpoint ("best"), or of one by name.

    Where the run keeps an average of its weights, that is meant. Before its end, "last" is the newest whole checkpoint.

    Args:
        run: The run folder.
        which: "last", "best", or a checkpoint's name.
        model: What is read must fit it. That is compared before any tensor is read into memory.

    Raises:
        CheckpointError: There is no such checkpoint, it is not whole, or the final weights are not those of this run.
    """
    folder, limits = run / "checkpoints", file_limits(model) if model is not None else None

    def open_one(path: Path) -> Opened:
        return open_checkpoint(path, limits)

    if which == "last":
        if os.path.lexists(run / WEIGHTS):
            return run / WEIGHTS, _final(run, model)
        bad = []
        for path, one in newest(folder, open_one):
            if not isinstance(one, CheckpointError):
                return path, _of_checkpoint(one, model)
            bad.append(one.what)
        raise CheckpointError(f"{run} has no weights and no whole checkpoint{' yet' * (not bad)}", found="\n".join(bad))
    path = _path_of(run, which)
    return path, _of_checkpoint(open_one(path), model)


def identity_of(run: Path, which: str) -> tuple[Path, Mapping[str, Any]]:
    """A checkpoint of a run and what it keeps of the run's identity; empty where there is no whole checkpoint.

    Args:
        run: The run folder.
        which: As for `weights_of`; for "last" the newest whole checkpoint.
    """
    folder = run / "checkpoints"
    places = [folder / name_of(step) for step in reversed(steps(folder))] if which == "last" else [_path_of(run, which)]
    for path in places:
        try:
            return path, run_of(read_state(path))
        except CheckpointError:
            continue  # where it is the one asked for, reading its weights names the fault
    return folder, {}


def is_as_recorded(run: Path) -> bool:
    """Whether a run's final weights and its result are whole and belong together."""
    try:
        _final(run, None)
    except CheckpointError:
        return False
    return True


def _path_of(run: Path, which: str) -> Path:
    folder = run / "checkpoints"
    if which == "best":
        step = read_json(folder / BEST).get("step")
        if not isinstance(step, int):
            raise CheckpointError(f"{folder / BEST} was altered: its step is {step!r}", fix="name a checkpoint")
        which = name_of(step)
    if not (folder / which).is_dir():
        there = ["last", "best", *map(name_of, steps(folder))]
        raise CheckpointError(f"{run} has no checkpoint {which}", allowed=", ".join(there))
    return folder / which


def _of_checkpoint(opened: Opened, model: nn.Module | None) -> dict[str, Tensor]:
    """The average that a checkpoint keeps, or else its weights; nothing else of it is read into memory."""
    names = {name.removeprefix(AVERAGE): name for name in opened.shapes if name.startswith(AVERAGE)}
    names = names or {name: name for name in opened.shapes if file_of(name) == WEIGHTS}
    if model is not None:
        shapes = {name: opened.shapes[full] for name, full in names.items()}
        metas = {name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in shapes.items()}
        check_fits(model, metas, opened.path)
    return {name: opened.tensor(full) for name, full in names.items()}


def _final(run: Path, model: nn.Module | None) -> dict[str, Tensor]:
    path = run / WEIGHTS
    recorded = RunFolder(run).read_json("result.json").get("weights_sha256")
    state = read(path, model)
    found = weights_sha256(state)
    if found != recorded:
        raise CheckpointError(
            f"{path} does not hold the weights that this run ended with",
            recorded=f"{recorded} in {run / 'result.json'}",
            found=found,
            cause="the file was damaged, or is of another run",
            fix=f"lockstep train --run-dir {run} --resume auto writes it again from the last checkpoint;\n"
            f"to use the file as it is: {path} --preset {run / 'config.yaml'}",
        )
    return state
