"""The values of a page on one run, for its template: charts, images, times, events and tables."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samebits.plain_file import read_plain
from samebits.provenance.identity import is_free
from samebits.report.chart import NUM_COLORS, ChartLine, Curves, chart
from samebits.report.format import SHARE, counted, metric_name
from samebits.run_views.compare import is_sample, metric_names
from samebits.run_views.history import RunHistory
from samebits.run_views.summary import Event

_MAX_CHARTS = 16
_MAX_RANKS = 16
_MAX_TERMS = 6  # of the loss
_NO_TERMS = (
    "loss", "lr", "grad_norm", "samples_per_s", "seconds", "data_wait", "loss_scale", "overflow_steps", "memory_gb",
    "gpu_use", "mfu",
)  # fmt: skip
# Settings that show what was trained, with all of the model's.
_SHOWN = (
    "data.name", "data.root", "epochs", "max_steps", "global_batch", "micro_batch", "optim.name", "optim.lr",
    "optim.schedule", "precision", "seed",
)  # fmt: skip
Charts = list[dict[str, Any]]


def run_values(run: RunHistory, budget: Budget) -> dict[str, Any]:
    """Return all that `run.html.j2` shows of a run, with images as the budget allows."""
    images, num_left_out = pictures(run.summary.path, budget)
    hashes = {
        "weights, SHA-256": run.summary.weights_sha256,
        "chain of all steps": run.hashes.get("chain", ""),
        "root of the record": run.hashes.get("root", ""),
    }
    settings = run.summary.settings
    return {
        "run": run,
        "curves": _curves(run),
        "pictures": images,
        "num_left_out": num_left_out,
        "parts": time_parts(run),
        "speed": _speed(run),
        "events": event_line(run.events),
        "shown": [name for name in settings if name in _SHOWN or name.startswith("model.")][:24],
        "hashes": {name: value for name, value in hashes.items() if value},
        # Hashes of single samples are for `samebits diff`: no reader compares them.
        "digests": {
            name: value for name, value in {**run.code, **run.data}.items() if not is_sample(name)
        },
        "changed": [name for name in settings if name in run.changed],
        "decisive": [name for name in settings if not is_free(name)],
        "free": [name for name in settings if is_free(name)],
    }


def run_charts(run: RunHistory) -> list[dict[str, Any]]:
    """Return the charts of a run, in the order of its page."""
    return [*_curves(run), *_speed(run)]


def _curves(run: RunHistory) -> Charts:
    curves = run.curves
    end = run.curves.last_epoch
    loss = [
        ChartLine(curves.get("train", "loss"), "training", 0),
        *_lines_of_sets(curves, "loss", "validation"),
    ]
    found = [chart("Loss", "loss", loss, end=end)]
    names = [name for name in metric_names([run]) if name != "loss"]
    names += [
        name for name in curves.names("eval") if name not in (*names, "loss") and "/" not in name
    ]
    # The lines of further validation sets are in the chart of their metric: "night.top1" with "top1".
    own = [name for name in names if name.partition(".")[2] not in (*names, "loss")]
    for name in own[:_MAX_CHARTS]:
        title = f"Validation {metric_name(name)}"
        found.append(chart(title, name, _lines_of_sets(curves, name, metric_name(name)), end=end))
        parts = [each for each in curves.names("eval") if each.startswith(f"{name}/")]
        if 1 < len(parts) <= NUM_COLORS:
            lines = [
                ChartLine(curves.get("eval", part), part.partition("/")[2], index)
                for index, part in enumerate(parts)
            ]
            found.append(chart(f"{title} of each class", name, lines, end=end))
    terms = [name for name in curves.names("train") if name not in _NO_TERMS][:_MAX_TERMS]
    lines = [
        ChartLine(curves.get("train", name), metric_name(name), index)
        for index, name in enumerate(terms)
    ]
    found.append(chart("Terms of the training loss", "loss", lines, end=end))
    for title, name, color in (("Learning rate", "lr", 2), ("Gradient norm", "grad_norm", 3)):
        line = ChartLine(curves.get("train", name), title.lower(), color)
        found.append(chart(title, name, [line], end=end, starts_at_zero=True))
    return [each for each in found if each is not None]


def _lines_of_sets(curves: Curves, metric: str, title: str) -> list[ChartLine]:
    """Return the lines of a metric: on the validation set, and on further ones that have it."""
    sets = [
        name
        for name in curves.names("eval")
        if "/" not in name and name.partition(".")[2] == metric
    ]
    others = [
        ChartLine(curves.get("eval", name), name.partition(".")[0], index)
        for index, name in enumerate(sets[: NUM_COLORS - 2], start=2)
    ]
    return [ChartLine(curves.get("eval", metric), title, 1), *others]


def _speed(run: RunHistory) -> Charts:
    def line(name: str, label: str, color: int, kind: str = "train") -> ChartLine:
        return ChartLine(run.curves.get(kind, name), label, color)

    ranks = list(run.curves.ranks().items())[:_MAX_RANKS]
    lines = [
        ChartLine(curve, f"rank {rank}", index, index >= NUM_COLORS)
        for index, (rank, curve) in enumerate(ranks)
    ]
    lines = lines or [
        line("median_ms", "median", 0, "ranks"),
        line("max_ms", "slowest", 1, "ranks"),
    ]
    use = [line("gpu_use", "GPU busy, rank 0", 5)]
    end = run.curves.last_epoch
    found = [
        chart(title, name, drawn, end=end, starts_at_zero=True)
        for title, name, drawn in (
            ("Samples per second", "samples", [line("samples_per_s", "all ranks", 2)]),
            ("Waiting for data, share of training time", SHARE, [line("data_wait", "rank 0", 4)]),
            ("GPU use and model FLOPs utilization", SHARE, use),
            ("Own work of each rank per step, ms", "ms", lines),
        )
    ]
    return [each for each in found if each is not None]


# Where the time of a run went, and its events on a line.


_MAX_LISTED = 120


def time_parts(run: RunHistory) -> list[tuple[str, float]]:
    """Return the parts of the training time, seconds; nothing for a run without these times."""
    seconds = run.seconds
    training = run.training_s
    if not training:
        return []
    waited = seconds.get("data_wait")
    if waited is None:
        waits = run.curves.get("train", "data_wait")
        waited = training * sum(waits.values) / len(waits) if len(waits) else 0.0
    parts = {"waiting for data": min(waited, training)}
    whole = seconds.get("all", 0.0)
    # Communication is measured since the last start: for a run of several starts, its share of the whole is unknown.
    is_one_start = len([event for event in run.events if event.kind in ("start", "restart")]) <= 1
    if is_one_start and whole >= training:
        parts |= {
            "communication": seconds.get("sending", 0.0),
            "waiting for slower processes": seconds.get("rank_wait", 0.0),
        }
    computing = max(training - sum(parts.values()), 0.0)
    name = (
        "start, evaluation and checkpoints"
        if is_one_start
        else "starts, evaluation, checkpoints, repeated steps"
    )
    other = {name: whole - training} if whole > training else {}
    parts = {"computing": computing, **parts, **other}
    return [(name, value) for name, value in parts.items() if value > 0]


def event_line(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return the events on a line of time, and those that are no evaluations for a table below it."""
    known = [event for event in events if event.at > 0]
    if not known:
        return None
    listed = [event for event in known if event.kind != "evaluation"]
    note = (
        f" The first {len(listed) - _MAX_LISTED:,} events are left out."
        if len(listed) > _MAX_LISTED
        else ""
    )
    num_evaluations = len(known) - len(listed)
    summary = f"{counted(num_evaluations, 'evaluation')}, shown as short lines."
    return {
        "known": known,
        "listed": listed[-_MAX_LISTED:],
        "note": (summary if num_evaluations else "") + note,
    }


# Images of the last evaluation, inside the page.


_TITLES = {
    "train_samples": "Training samples after augmentation",
    "confusion": "Confusion matrix",
    "worst": "Validation samples with the largest loss",
    "people": "Validation images with predictions",
}
_MAX_FILE_BYTES = 32 * 1024 * 1024
_MAX_PIXELS = 40_000_000
_PLAIN_BYTES = 200 * 1024  # a larger file is encoded again
_MAX_SIZE_PX = 1400
_MAX_PICTURES = 12


class Budget:
    """Bytes of images that a page may still take."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Return whether so many bytes are left, and take them."""
        if num_bytes > self.left:
            return False
        self.left -= num_bytes
        return True


def pictures(run: Path, budget: Budget) -> tuple[list[dict[str, Any]], int]:
    """Return the images of a run, and how many are left out.

    Args:
        run, budget: The run folder, and the bytes of images that the page may still take.
    """
    found = []
    num_left_out = 0
    try:
        names = sorted(
            name
            for name in os.listdir(run / "pictures")
            if name.endswith(".png") and name != "curves.png"  # of an earlier version
        )
    except OSError:
        names = []
    for path in [run / "pictures" / name for name in names[:_MAX_PICTURES]]:
        image = _encoded(path)
        if image is None or not budget.take(len(image[0])):
            num_left_out += 1
            continue
        title = _TITLES.get(path.stem, path.stem.replace("_", " ")[:100])
        found.append({"title": title, "source": image[0], "width": image[1], "height": image[2]})
    return found, num_left_out


def _encoded(path: Path) -> tuple[str, int, int] | None:
    """Return a PNG file as a data URI with its width and height; None if it is none."""
    from PIL import Image

    try:
        content = read_plain(path, _MAX_FILE_BYTES)
        kind = "png"
        # By the PNG decoder only, whatever the content claims to be (ADR 28). The size is that of its header, before a
        # decoder takes memory for so many pixels.
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            if image.width * image.height > _MAX_PIXELS:
                return None
            shown: Image.Image = image
            if len(content) > _PLAIN_BYTES:
                shown = image.convert("RGB")
                out = io.BytesIO()
                shown.thumbnail((_MAX_SIZE_PX, 4 * _MAX_SIZE_PX))
                shown.save(out, "WEBP", quality=85)
                content = out.getvalue()
                kind = "webp"
    # Pillow raises SyntaxError for a damaged PNG file.
    except (OSError, ValueError, SyntaxError, TypeError, Image.DecompressionBombError):
        return None
    return (
        f"data:image/{kind};base64,{base64.b64encode(content).decode()}",
        shown.width,
        shown.height,
    )
