"""The weights of a run folder, verified before use."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samebits.errors import CheckpointError
from samebits.storage.checkpoint import AVERAGE, BEST, file_of, name_of, newest, steps
from samebits.storage.checkpoint_reader import Opened, open_checkpoint
from samebits.storage.manifest import WEIGHTS, read_json, read_state, run_of
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import check_fits, file_limits, read, weights_sha256


def weights_of(run: Path, which: str, model: nn.Module | None = None) -> tuple[Path, dict[str, Tensor]]:
    """Read a run's weights that fit a model: the final ones ("last"), the best checkpoint's ("best"), or a named one.

    If the run keeps a moving average, its values are returned. Before the end of the run, "last" is the newest
    checkpoint that is whole.

    Returns:
        The file or checkpoint folder, and the tensors by name, in the shapes of the unsharded model.

    Raises:
        CheckpointError: The checkpoint does not exist or is damaged, or the final weights belong to another run.
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
        raise CheckpointError(
            f"{run} has no weights and no whole checkpoint{' yet' * (not bad)}",
            cause="\n".join(bad),
            fix=f"Run samebits train --run-dir {run} --resume auto.",
        )
    path = _path_of(run, which)
    return path, _of_checkpoint(open_one(path), model)


def identity_of(run: Path, which: str) -> tuple[Path, Mapping[str, Any]]:
    """Read the checkpoint's folder and identity from a run as in `weights_of`; the identity is empty without any."""
    folder = run / "checkpoints"
    paths = [folder / name_of(step) for step in reversed(steps(folder))] if which == "last" else [_path_of(run, which)]
    for path in paths:
        try:
            return path, run_of(read_state(path))
        except CheckpointError:
            continue  # if this checkpoint was requested, reading its weights reports the error
    return folder, {}


def is_as_recorded(run: Path) -> bool:
    """Return whether a run's final weights and its result are whole and match."""
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
            raise CheckpointError(
                f"{folder / BEST} was altered: its step is {step!r}", fix="Give a checkpoint by name: step-000100."
            )
        which = name_of(step)
    if not (folder / which).is_dir():
        names = ["last", "best", *map(name_of, steps(folder))]
        raise CheckpointError(
            f"{run} has no checkpoint {which}", allowed=", ".join(names), fix="Give one of these names."
        )
    return folder / which


def _of_checkpoint(opened: Opened, model: nn.Module | None) -> dict[str, Tensor]:
    """Read the moving average of a checkpoint, or else its weights, and no other tensor."""
    names = {name.removeprefix(AVERAGE): name for name in opened.shapes if name.startswith(AVERAGE)}
    names = names or {name: name for name in opened.shapes if file_of(name) == WEIGHTS}
    if model is not None:
        # Compared on the meta device, so that a checkpoint of another model is refused before its values are read.
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
            given=f"sha256 {found}",
            allowed=f"sha256 {recorded}, recorded in {run / 'result.json'}",
            cause="The file was damaged, or belongs to another run.",
            fix=f"Run samebits train --run-dir {run} --resume auto, which writes it again from the last checkpoint;\n"
            f"or open the file as it is: {path} --preset {run / 'config.yaml'}",
        )
    return state
