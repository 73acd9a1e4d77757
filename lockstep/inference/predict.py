"""Evaluation of a trained model, and its predictions for files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.cluster.env import ALONE, RankAssignment, read_assignment
from lockstep.config.given import as_overrides
from lockstep.config.process_range import ProcessRange, parse_range
from lockstep.errors import ConfigError, DataError, LaunchError
from lockstep.inference.trained_model import TrainedModel
from lockstep.launch import forkserver
from lockstep.launch.start import PRELOAD, join_world, launch_here, rank_assignment
from lockstep.launch.stopped import raise_if_stopped
from lockstep.report.console import Console


def evaluate(
    run: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    procs: int | str | None = None,
    checkpoint: str = "last",
    *,
    preset: str | None = None,
) -> dict[str, float]:
    """Evaluate a model on its validation samples, each once.

    Args:
        run: The run folder, or with `preset` a file of weights.
        overrides: Settings that differ from the run's: `{"data.root": "/other/place"}`, or as on the command line:
            `["data.root=/other/place"]`.
        procs: Processes on this machine.
        checkpoint: "last" for the final weights, "best", or a checkpoint's name.
        preset: The model of a file of weights: a recipe, a preset or a YAML file.

    Returns:
        The metrics by name; empty on ranks other than 0 of a world that another launcher started.

    Raises:
        LockstepError: Any error that the user can fix.
        Stopped: Ctrl-C while several processes run; a subclass of KeyboardInterrupt.
    """
    subject = TrainedModel(Path(run), tuple(as_overrides(overrides)), checkpoint, preset)
    size = _size(procs)
    config = subject.settings()[1]
    here = rank_assignment(procs)
    if here is not None or size.most == 1:
        return _evaluate(subject, None, here or ALONE)
    forkserver.prepare(PRELOAD, config.num_threads)
    with forkserver.temp_folder() as place:
        answer = place / "metrics.json"
        code = launch_here(size, config, _evaluate, (subject, answer))
        raise_if_stopped(code)
        if code:
            raise LaunchError(
                f"evaluation ended with exit code {code}",
                fix="Read the output above, which has the error of the process that failed.",
            )
        metrics: dict[str, float] = json.loads(answer.read_text(encoding="utf-8"))
    return metrics


def _size(procs: int | str | None) -> ProcessRange:
    size = parse_range(str(1 if procs is None else procs), "procs")
    if size.is_elastic:
        raise ConfigError(
            f"procs is {str(procs)!r}",
            allowed="a number from 1: an evaluation does not shrink",
            fix=f"Set procs to a single number, such as {size.most}.",
        )
    return size


def _evaluate(subject: TrainedModel, answer: Path | None, here: RankAssignment | None = None) -> dict[str, float]:
    from lockstep.engine.build import open_data
    from lockstep.engine.evaluate import evaluate as evaluate_model
    from lockstep.watchdog.detector import HangDetector

    found, config = subject.settings()
    console = Console(sys.stderr)
    with join_world(here or read_assignment(os.environ) or ALONE, config) as world:
        parts, model = subject.open(found, config, world)
        samples = open_data(config, parts, train=False)
        # A single process may be the user's own program, which must not be ended.
        watch = HangDetector(world, config.watch.hang_timeout_s, subject.log_dir) if world.size > 1 else nullcontext()
        with watch:
            metrics, _ = evaluate_model(
                model,
                samples,
                world,
                loss=parts.loss,
                infer=parts.infer,
                metric=parts.metric,
                batch_size=config.eval_batch,
                num_workers=config.loader.num_workers,
                channels_last=config.channels_last,
                progress=partial(console.share_done, "evaluating") if world.is_main else None,
            )
        console.close()
        if world.is_main:
            console.say(f"{len(samples):,} samples, each once")
        if answer is not None and world.is_main:
            answer.write_text(json.dumps(metrics), encoding="utf-8")
        return metrics if world.is_main else {}


@dataclass(frozen=True)
class Prediction:
    """The prediction for one file.

    Attributes:
        file: The file.
        prediction: The result of the recipe's `postprocess`; `{"error": text}` if the file can't be read.
        error: The error if the file can't be read.
    """

    file: Path
    prediction: dict[str, Any]
    error: DataError | None = None


def predict(
    run: str | Path,
    files: Sequence[str | Path],
    overrides: Mapping[str, Any] | Sequence[str] = (),
    checkpoint: str = "last",
    *,
    preset: str | None = None,
    keep_errors: bool = False,
) -> list[dict[str, Any]]:
    """Predict on files with a trained model.

    Args:
        run: The run folder, which is all that is needed; or with `preset` a file of weights.
        files: Input files of the recipe, such as images. A folder stands for all files in it.
        overrides: Settings that differ from the run's, as for `evaluate`.
        checkpoint: As for `evaluate`.
        preset: As for `evaluate`.
        keep_errors: Return `{"error": text}` for a file that can't be read, instead of raising.

    Returns:
        For each file, in order, the result of the recipe's `postprocess`.

    Raises:
        ConfigError: The recipe can't predict.
        DataError: A file can't be read.
    """
    answers = []
    for answer in predictions(TrainedModel(Path(run), tuple(as_overrides(overrides)), checkpoint, preset), files):
        if answer.error is not None and not keep_errors:
            raise answer.error
        answers.append(answer.prediction)
    return answers


def predictions(
    subject: TrainedModel,
    files: Sequence[str | Path],
    draw: Path | None = None,
) -> Iterator[Prediction]:
    """Yield the predictions of `predict` one by one.

    Args:
        subject: The model.
        files: Files, and folders of them.
        draw: Target for the drawn predictions: a file for one input, a folder for several.

    Raises:
        ConfigError: The recipe can't predict, or can't draw.
        DataError: There is no such file, or a folder is empty.
    """
    found, config = subject.settings()
    paths = expand(files)
    from lockstep.report.pictures import is_drawing, places_for, save_picture
    from lockstep.storage.run_folder import check_target

    targets = places_for(paths, draw) if draw is not None else {}
    for target in targets.values():
        check_target(target, is_drawing)

    import torch

    from lockstep.cluster.world import alone
    from lockstep.data.samples import one_sample

    parts, model = subject.open(found, config, alone(config.device))
    read, answer, draw_prediction = parts.preprocess, parts.postprocess, parts.draw_prediction
    if read is None or answer is None:
        raise ConfigError(f"recipe {found.name} can't predict", fix="Give its Parts preprocess and postprocess.")
    if draw is not None and draw_prediction is None:
        raise ConfigError(f"recipe {found.name} can't draw its answers", fix="Leave --draw out.")
    device = next(model.parameters()).device
    for path in paths:
        try:
            # One file at a time, so that a prediction does not depend on the other files.
            inputs = one_sample(read(path), device, channels_last=config.channels_last)
            with torch.inference_mode():
                outputs = model(inputs) if parts.infer is None else parts.infer(model, inputs)
            prediction = dict(answer(outputs[0]))
            if draw_prediction is not None and path in targets:
                save_picture(draw_prediction(path, prediction), targets[path])
        except (DataError, OSError) as error:
            fault = (
                error
                if isinstance(error, DataError)
                else DataError(f"{path} can't be read: {error}", fix="Name a file that you can read.")
            )
            yield Prediction(path, {"error": fault.line}, fault)
        else:
            yield Prediction(path, prediction)


def expand(files: Sequence[str | Path]) -> list[Path]:
    """Replace each folder by the files in it and below, sorted by name, without hidden files.

    Raises:
        DataError: A folder is empty.
    """
    paths: list[Path] = []
    for file in map(Path, files):
        if not file.is_dir():
            paths.append(file)  # a missing file is reported when it is read
            continue
        inside = (path for path in file.rglob("*") if path.is_file())
        found = sorted(path for path in inside if not any(part[0] == "." for part in path.relative_to(file).parts))
        if not found:
            raise DataError(f"there are no files in {file}", fix="Name a file, or a folder that contains files.")
        paths += found
    return list(dict.fromkeys(paths))
