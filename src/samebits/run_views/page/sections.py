"""The values of a page on one run, for its template."""

from typing import Any

from samebits.provenance.same_run import is_free
from samebits.report.format import SHARE, duration, metric_name, metric_value
from samebits.run_views.compare import is_sample, metric_names
from samebits.run_views.files import plain_text
from samebits.run_views.history import Curves, RunHistory, read_confusion
from samebits.run_views.page.chart import (
    NUM_COLORS,
    Budget,
    ChartLine,
    chart,
    event_line,
    matrix,
    pictures,
    time_parts,
)
from samebits.run_views.table import step_text

_MAX_CHARTS = 16
_MAX_RANKS = 16
_MAX_TERMS = 6  # of the loss
_NO_TERMS = (
    "loss", "lr", "grad_norm", "samples_per_s", "seconds", "data_wait", "loss_scale", "overflow_steps", "memory_gb",
    "gpu_use", "mfu",
)  # fmt: skip
Charts = list[dict[str, Any]]


def run_values(run: RunHistory, budget: Budget) -> dict[str, Any]:
    """Return all that `run.html.j2` shows of a run, with images as the budget allows."""
    confusion = read_confusion(run.summary.path)
    images, num_left_out = pictures(run.summary.path, budget, has_matrix=confusion is not None)
    hashes = {
        "weights, SHA-256": run.summary.weights_sha256,
        "chain of all steps": run.hashes.get("chain", ""),
        "root of the record": run.hashes.get("root", ""),
    }
    worlds = ", then ".join(
        f"{size:,} process{'es' if size != 1 else ''} from step {start:,}"
        for size, start in run.worlds
    )
    settings = run.summary.settings
    return {
        "run": run,
        "tiles": _tiles(run),
        "curves": _curves(run),
        "pictures": images,
        "num_left_out": num_left_out,
        "matrix": matrix(confusion) if confusion else None,
        "parts": time_parts(run),
        "speed": _speed(run),
        "events": event_line(run.events),
        "trained": _trained(run),
        "environment": [
            (name, value) for name, value in [("world", worlds), *run.environment.items()] if value
        ],
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


def _tiles(run: RunHistory) -> list[tuple[str, str]]:
    summary = run.summary
    values: list[tuple[str, str]] = []
    if summary.monitor in summary.metrics:
        name = metric_name(summary.monitor)
        values.append(
            (f"validation {name}", metric_value(summary.monitor, summary.metrics[summary.monitor]))
        )
        if summary.best is not None:
            values.append((f"best {name}", metric_value(summary.monitor, summary.best)))
    values.append(("steps", step_text(summary).replace("/", " / ")))
    if summary.took_s is not None:
        values.append(
            ("took" if summary.state == "done" else "training time", duration(summary.took_s))
        )
    if run.speed is not None:
        values.append(("samples/s", f"{run.speed:,.0f}"))
    if summary.procs:
        values.append(("processes", f"{summary.procs:,}"))
    return values


def _curves(run: RunHistory) -> Charts:
    curves = run.curves
    end = run.curves.last_step[1]
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
    use = [line("gpu_use", "GPU busy, rank 0", 5), line("mfu", "MFU, all ranks", 6)]
    end = run.curves.last_step[1]
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


def _trained(run: RunHistory) -> list[tuple[str, str]]:
    settings = run.summary.settings
    get = {name: plain_text(value) for name, value in settings.items()}.get
    data = [
        plain_text(value)
        for name, value in settings.items()
        if name in ("data.name", "data.root") and value
    ]
    model = [
        f"{name.partition('.')[2]} {plain_text(value)}"
        for name, value in settings.items()
        if name.startswith("model.")
    ]
    rows = [
        ("recipe", run.summary.recipe),
        ("data", ", ".join(data)),
        ("classes", f"{len(run.classes)}: {', '.join(run.classes[:30])}" if run.classes else ""),
        ("model", ", ".join(model[:12])),
        ("epochs", get("epochs", "")),
        (
            "global batch",
            f"{get('global_batch', '')}, in micro-batches of {get('micro_batch', '')}",
        ),
        (
            "optimizer",
            f"{get('optim.name', '')}, learning rate {get('optim.lr', '')}, schedule {get('optim.schedule', '')}",
        ),
        ("precision", f"{get('precision', '')}, seed {get('seed', '')}"),
        ("samples trained", f"{run.num_samples:,}" if run.num_samples else ""),
        ("skipped steps", f"{run.skipped:,}, not finite" if run.skipped else ""),
    ]
    return [row for row in rows if row[1] and "  " not in row[1]]
