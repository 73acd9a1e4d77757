"""Evaluate a trained model on its validation set, and predict for files."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from samebits.bench.processes import ask_here
from samebits.cluster.env import RankAssignment
from samebits.config.given import as_overrides
from samebits.errors import ConfigError, DataError, LaunchError
from samebits.inference.trained_model import TrainedModel, describe_places
from samebits.launch.start import rank_assignment
from samebits.process_range import ProcessRange, parse_range
from samebits.report.console import Console


def evaluate(
    run: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    procs: int | str | None = None,
    checkpoint: str = "last",
    *,
    preset: str | None = None,
) -> dict[str, float]:
    """Evaluate a trained model on its validation set, each sample once.

    Args:
        run: A run folder, or with `preset` a file of weights from elsewhere.
        overrides: Settings that differ from the run's, as a mapping, `{"data.root": "/other/data"}`, or as on the
            command line, `["data.root=/other/data"]`.
        procs: Number of processes on this machine.
        checkpoint: "last" for the final weights, "best", or a checkpoint's name.
        preset: For a file of weights: the recipe, preset or YAML file of its model.

    Returns:
        The metrics by name. Empty on ranks other than 0 of a world that another launcher started.

    Raises:
        SamebitsError: A setting, the weights or the data are wrong, or a process failed.
        Stopped: Ctrl-C was pressed while several processes ran. A subclass of KeyboardInterrupt.
    """
    trained = TrainedModel(Path(run), tuple(as_overrides(overrides)), checkpoint, preset)
    size = _size(procs)
    config = trained.settings()[1]
    trained.check_unused()
    here = rank_assignment(procs)
    if here is not None:
        return _evaluate(trained, here)

    fix = "Read the output above, which has the error of the process that failed."
    failure = LaunchError("the evaluation failed", fix=fix)
    metrics: dict[str, float] = ask_here(_evaluate, (trained,), size, config, failure)
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


def _evaluate(trained: TrainedModel, here: RankAssignment | None = None) -> dict[str, float]:
    """Evaluate in one process of a world; return the metrics on rank 0."""
    from samebits.bench.bench import joined
    from samebits.engine.build import open_data, open_eval_sets
    from samebits.engine.evaluate import evaluate as evaluate_model
    from samebits.engine.evaluate import options_of
    from samebits.metrics.eval_sets import with_set
    from samebits.watchdog.detector import HangDetector

    found, config = trained.settings()
    console = Console(sys.stderr)
    with joined(config, here) as world:
        parts, model = trained.open(found, config, world)
        sets = {"": open_data(config, parts, train=False), **open_eval_sets(config, parts)}
        # A hang detector ends its process. A single process may be the user's own program, so it has none.
        watch = (
            HangDetector(world, config.watch.hang_timeout_s, trained.log_dir)
            if world.size > 1
            else nullcontext()
        )
        metrics = dict[str, float]()
        options = options_of(parts, config)
        with watch:
            for name, samples in sets.items():
                progress = (
                    partial(console.share_done, f"evaluating {name}".strip())
                    if world.is_main
                    else None
                )
                found_metrics, _ = evaluate_model(
                    model, samples, world, **options, progress=progress
                )
                metrics |= with_set(name, found_metrics)
        console.close()
        if world.is_main:
            sizes = [
                f"{len(samples):,} samples{f' of {name}' if name else ''}"
                for name, samples in sets.items()
            ]
            place = describe_places(config)
            console.say(f"{', '.join(sizes)}, each once{f', from {place}' if place else ''}")
            if order := parts.describe.get(
                "classes"
            ):  # weights of another program may have another order
                console.say(f"classes: {order}")
        return metrics if world.is_main else {}


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for one file."""

    file: Path  #: The file.
    #: The result of the recipe's `postprocess`; `{"error": text}` if the file cannot be read.
    prediction: dict[str, Any]
    error: DataError | None = None  #: Why the file cannot be read.


def predict(
    run: str | Path,
    files: Sequence[str | Path],
    overrides: Mapping[str, Any] | Sequence[str] = (),
    checkpoint: str = "last",
    *,
    preset: str | None = None,
    keep_errors: bool = False,
) -> list[dict[str, Any]]:
    """Run a trained model on files.

    Args:
        run: A run folder, or with `preset` a file of weights from elsewhere.
        files: Input files that the recipe can read, such as images. A folder stands for all files in it.
        overrides: Settings that differ from the run's, as for `evaluate`.
        checkpoint: As for `evaluate`.
        preset: As for `evaluate`.
        keep_errors: Return `{"error": text}` for a file that cannot be read, instead of raising.

    Returns:
        The result of the recipe's `postprocess` for each file, in order.

    Raises:
        ConfigError: The recipe cannot predict.
        DataError: A file cannot be read.
    """
    results = []
    for result in predictions(
        TrainedModel(Path(run), tuple(as_overrides(overrides)), checkpoint, preset), files
    ):
        if result.error is not None and not keep_errors:
            raise result.error
        results.append(result.prediction)
    return results


def predictions(
    trained: TrainedModel,
    files: Sequence[str | Path],
    draw: Path | None = None,
) -> Iterator[Prediction]:
    """Yield the prediction for one file after another.

    Args:
        draw: Where to draw the predictions: a file for a single input, a folder for several.

    Yields:
        One `Prediction` per file, in order. A file that cannot be read has an error.

    Raises:
        ConfigError: The recipe cannot predict, or cannot draw.
        DataError: A folder is empty.
    """
    found, config = trained.settings()
    trained.check_unused()
    paths = expand(files)
    if not any(map(os.path.lexists, paths)):  # a wrong path is reported before torch is imported
        for path in paths:
            missing = DataError(f"there is no file {path}", fix="Check the path.")
            yield Prediction(path, {"error": missing.line}, missing)
        return
    from samebits.report.pictures import is_drawing, places_for, save_picture
    from samebits.storage.run_folder import check_target

    targets = places_for(paths, draw) if draw is not None else {}
    for target in targets.values():
        check_target(target, is_drawing)

    import torch

    from samebits.cluster.world import alone
    from samebits.data.samples import one_sample

    # The program runs between two predictions, and portable arithmetic would be its arithmetic too.
    config = config.model_copy(update={"kernels": "auto"})
    parts, model = trained.open(found, config, alone(config.device))
    preprocess = parts.preprocess
    postprocess = parts.postprocess
    draw_prediction = parts.draw_prediction
    if preprocess is None or postprocess is None:
        raise ConfigError(
            f"recipe {found.name} can't predict", fix="Give its Parts preprocess and postprocess."
        )
    if draw is not None and draw_prediction is None:
        raise ConfigError(f"recipe {found.name} can't draw its answers", fix="Leave --draw out.")
    device = next(model.parameters()).device
    for path in paths:
        try:
            # A batch of one: a prediction then does not depend on the other files.
            inputs = one_sample(preprocess(path), device, channels_last=config.channels_last)
            with torch.inference_mode():
                outputs = model(inputs) if parts.infer is None else parts.infer(model, inputs)
            prediction = dict(postprocess(outputs[0]))
            if draw_prediction is not None and path in targets:
                save_picture(draw_prediction(path, prediction), targets[path])
        except (DataError, OSError) as error:
            fault = (
                error
                if isinstance(error, DataError)
                else DataError(
                    f"{path} can't be read: {error}", fix="Name a file that you can read."
                )
            )
            yield Prediction(path, {"error": fault.line}, fault)
        else:
            yield Prediction(path, prediction)


def expand(files: Sequence[str | Path]) -> list[Path]:
    """Replace each folder by the files in it and its subfolders, sorted by path, without hidden files.

    Returns:
        The files, each once.

    Raises:
        DataError: A folder is empty.
    """
    paths: list[Path] = []
    for file in map(Path, files):
        if not file.is_dir():
            paths.append(file)  # `predictions` reports a missing file
            continue
        inside = (path for path in file.rglob("*") if path.is_file())
        found = sorted(
            path
            for path in inside
            if not any(part[0] == "." for part in path.relative_to(file).parts)
        )
        if not found:
            raise DataError(
                f"there are no files in {file}", fix="Name a file, or a folder that contains files."
            )
        paths += found
    return list(dict.fromkeys(paths))
