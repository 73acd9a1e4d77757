"""The sections of a page on one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samebits.provenance.same_run import is_free
from samebits.report.format import duration, metric_name, metric_value
from samebits.run_views.compare import metric_names, plain_text
from samebits.run_views.curves import Curves
from samebits.run_views.history import RunHistory, read_confusion
from samebits.run_views.page.chart import NUM_COLORS, ChartLine, chart
from samebits.run_views.page.markup import Child, Markup, element, section, table
from samebits.run_views.page.pictures import Budget, matrix, pictures
from samebits.run_views.page.timeline import event_line, time_bar

_MAX_CHARTS = 16
_MAX_RANKS = 16
_MAX_TERMS = 6  # of the loss
_NO_TERMS = (
    "loss", "lr", "grad_norm", "samples_per_s", "seconds", "data_wait", "loss_scale", "overflow_steps", "memory_gb",
    "gpu_use", "mfu",
)  # fmt: skip
Row = tuple[Child, ...]


class ChartSet:
    """Collects the data of all charts of a page, in their order.

    Attributes:
        data: What `page.js` reads.
        end: Epoch at the right end of the next charts.
    """

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []
        self.end = 0.0

    def add(self, title: str, name: str, lines: Sequence[ChartLine], *, starts_at_zero: bool = False) -> Markup | None:
        """Return a chart; see `chart`.

        Args:
            title: Its title.
            name: Name of the values.
            lines: The lines.
            starts_at_zero: Whether the y axis starts at 0.
        """
        made = chart(title, name, lines, end=self.end, starts_at_zero=starts_at_zero)
        if made is None:
            return None
        self.data.append(made[1])
        return made[0]


def run_sections(run: RunHistory, charts: ChartSet, budget: Budget) -> list[Markup | None]:
    """Return all sections on a run.

    Args:
        run: The run.
        charts: Collects the data of the charts.
        budget: Bytes of images that the page may still take.
    """
    confusion = read_confusion(run.summary.path)
    charts.end = run.curves.last_step[1]
    return [
        tiles(run),
        *(element("p", {"class": "soft"}, f"Note: {note}.") for note in run.notes),
        section("Training and evaluation", _grid(_curves(run, charts))),
        section("Images", pictures(run.summary.path, budget, has_matrix=confusion is not None)),
        section("Confusion matrix of the last evaluation", matrix(confusion) if confusion else None),
        section("Where the time went", time_bar(run)),
        section("Speed", _grid(_speed(run, charts))),
        section("Starts, faults and restarts", event_line(run.events)),
        element(
            "div",
            {"class": "two"},
            section("What was trained", _trained(run)),
            section("Environment", _environment(run)),
        ),
        section("Hashes and provenance", _provenance(run)),
        section("Settings", _settings(run)),
    ]


def tiles(run: RunHistory) -> Markup:
    """Return the values that matter most."""
    summary = run.summary
    values: list[tuple[str, Child]] = []
    if summary.monitor in summary.metrics:
        name = metric_name(summary.monitor)
        values.append((f"validation {name}", metric_value(summary.monitor, summary.metrics[summary.monitor])))
        if summary.best is not None:
            values.append((f"best {name}", metric_value(summary.monitor, summary.best)))
    steps = (
        f"{summary.step:,}"
        if summary.state == "done" or not summary.num_steps
        else f"{summary.step:,} / {summary.num_steps:,}"
    )
    values.append(("steps", steps))
    if summary.took_s is not None:
        values.append(("took" if summary.state == "done" else "training time", duration(summary.took_s)))
    if run.speed is not None:
        values.append(("samples/s", f"{run.speed:,.0f}"))
    if summary.procs:
        values.append(("processes", f"{summary.procs:,}"))
    if summary.weights_sha256:
        values.append(("weights, SHA-256", element("code", None, summary.weights_sha256[:8])))
    boxes = [
        element("div", {"class": "tile"}, element("b", None, value), element("span", None, name))
        for name, value in values
    ]
    reason = (
        element("p", None, element("b", {"class": "state failed"}, "Failed: "), summary.reason)
        if summary.reason
        else None
    )
    return element("div", None, element("div", {"class": "tiles"}, boxes), reason)


def _grid(drawn: Sequence[Markup | None]) -> Markup | None:
    found = [each for each in drawn if each is not None]
    return element("div", {"class": "charts"}, found) if found else None


def _curves(run: RunHistory, charts: ChartSet) -> list[Markup | None]:
    curves = run.curves
    found = [
        charts.add(
            "Loss",
            "loss",
            [ChartLine(curves.get("train", "loss"), "training", 0), *_lines_of_sets(curves, "loss", "validation")],
        )
    ]
    names = [name for name in metric_names([run]) if name != "loss"]
    names += [name for name in curves.names("eval") if name not in (*names, "loss") and "/" not in name]
    # The lines of further validation sets are in the chart of their metric: "night.top1" with "top1".
    own = [name for name in names if name.partition(".")[2] not in (*names, "loss")]
    for name in own[:_MAX_CHARTS]:
        found.append(
            charts.add(f"Validation {metric_name(name)}", name, _lines_of_sets(curves, name, metric_name(name)))
        )
        parts = [each for each in curves.names("eval") if each.startswith(f"{name}/")]
        if 1 < len(parts) <= NUM_COLORS:
            lines = [
                ChartLine(curves.get("eval", part), part.partition("/")[2], index) for index, part in enumerate(parts)
            ]
            found.append(charts.add(f"Validation {metric_name(name)} of each class", name, lines))
    terms = [name for name in curves.names("train") if name not in _NO_TERMS][:_MAX_TERMS]
    if terms:
        lines = [ChartLine(curves.get("train", name), metric_name(name), index) for index, name in enumerate(terms)]
        found.append(charts.add("Terms of the training loss", "loss", lines))
    found.append(
        charts.add(
            "Learning rate", "lr", [ChartLine(curves.get("train", "lr"), "learning rate", 2)], starts_at_zero=True
        )
    )
    found.append(
        charts.add(
            "Gradient norm",
            "grad_norm",
            [ChartLine(curves.get("train", "grad_norm"), "gradient norm", 3)],
            starts_at_zero=True,
        )
    )
    return found


def _lines_of_sets(curves: Curves, metric: str, title: str) -> list[ChartLine]:
    """Return the lines of a metric: on the validation set, and on further ones that have it."""
    sets = [name for name in curves.names("eval") if "/" not in name and name.partition(".")[2] == metric]
    others = [
        ChartLine(curves.get("eval", name), name.partition(".")[0], index)
        for index, name in enumerate(sets[: NUM_COLORS - 2], start=2)
    ]
    return [ChartLine(curves.get("eval", metric), title, 1), *others]


def _speed(run: RunHistory, charts: ChartSet) -> list[Markup | None]:
    curves = run.curves
    ranks = list(curves.ranks().items())[:_MAX_RANKS]
    lines = [ChartLine(curve, f"rank {rank}", index, index >= NUM_COLORS) for index, (rank, curve) in enumerate(ranks)]
    if not lines:
        lines = [
            ChartLine(curves.get("ranks", "median_ms"), "median", 0),
            ChartLine(curves.get("ranks", "max_ms"), "slowest", 1),
        ]
    return [
        charts.add(
            "Samples per second",
            "samples",
            [ChartLine(curves.get("train", "samples_per_s"), "all ranks", 2)],
            starts_at_zero=True,
        ),
        charts.add(
            "Waiting for data, share of training time",
            "recall",
            [ChartLine(curves.get("train", "data_wait"), "rank 0", 4)],
            starts_at_zero=True,
        ),
        charts.add(
            "GPU use and model FLOPs utilization",
            "recall",
            [
                ChartLine(curves.get("train", "gpu_use"), "GPU busy, rank 0", 5),
                ChartLine(curves.get("train", "mfu"), "MFU, all ranks", 6),
            ],
            starts_at_zero=True,
        ),
        charts.add("Own work of each rank per step, ms", "ms", lines, starts_at_zero=True),
    ]


def _trained(run: RunHistory) -> Markup:
    settings = run.summary.settings
    get = {name: plain_text(value) for name, value in settings.items()}.get
    data = [plain_text(value) for name, value in settings.items() if name in ("data.name", "data.root") and value]
    model = [
        f"{name.partition('.')[2]} {plain_text(value)}" for name, value in settings.items() if name.startswith("model.")
    ]
    rows: list[Row] = [
        ("recipe", run.summary.recipe),
        ("data", ", ".join(data)),
        ("classes", f"{len(run.classes)}: {', '.join(run.classes[:30])}" if run.classes else ""),
        ("model", ", ".join(model[:12])),
        ("epochs", get("epochs", "")),
        ("global batch", f"{get('global_batch', '')}, in micro-batches of {get('micro_batch', '')}"),
        (
            "optimizer",
            f"{get('optim.name', '')}, learning rate {get('optim.lr', '')}, schedule {get('optim.schedule', '')}",
        ),
        ("mode", f"{get('mode', '')}, {get('precision', '')}, seed {get('seed', '')}"),
        ("samples trained", f"{run.num_samples:,}" if run.num_samples else ""),
        ("skipped steps", f"{run.skipped:,}, not finite" if run.skipped else ""),
        ("command", element("code", None, run.command) if run.command else ""),
    ]
    return table([row for row in rows if row[1] and "  " not in str(row[1])])


def _environment(run: RunHistory) -> Markup | None:
    worlds = ", then ".join(
        f"{size:,} process{'es' if size != 1 else ''} from step {start:,}" for size, start in run.worlds
    )
    rows: list[Row] = [("world", worlds)] if worlds else []
    rows += [(name, value) for name, value in run.environment.items() if value]
    return table(rows) if rows else None


def _provenance(run: RunHistory) -> Markup | None:
    hashes = {
        "weights, SHA-256": run.summary.weights_sha256,
        "chain of all steps": run.hashes.get("chain", ""),
        "root of the record": run.hashes.get("root", ""),
    }
    rows: list[Row] = [(name, element("code", None, value)) for name, value in hashes.items() if value]
    digests: list[Row] = [(name, element("code", None, value)) for name, value in {**run.code, **run.data}.items()]
    if not rows and not digests:
        return None
    note = element(
        "p",
        {"class": "soft"},
        "These values were read from the run folder and not checked. ",
        element("code", None, "samebits verify RUN"),
        " replays steps of the run and compares them.",
    )
    folded = _folded(f"{len(digests)} digests of code and data", table(digests)) if digests else None
    return element("div", None, note, table(rows) if rows else None, folded)


def _settings(run: RunHistory) -> Markup | None:
    changed, settings = set(run.changed), run.summary.settings
    if not settings:
        return None

    def rows(names: Sequence[str]) -> list[Row]:
        return [
            (name, element("span", {"class": "changed" if name in changed else None}, plain_text(settings[name])))
            for name in names
        ]

    own = [name for name in settings if name in changed]
    decisive = [name for name in settings if not is_free(name)]
    free = [name for name in settings if is_free(name)]
    return element(
        "div",
        None,
        table(rows(own), ("differ from the preset", ""), "mono")
        if own
        else element("p", None, "All settings are those of the preset."),
        _folded(f"All {len(decisive)} settings that determine the result", table(rows(decisive), kind="mono")),
        _folded(f"{len(free)} settings that do not", table(rows(free), kind="mono")),
    )


def _folded(title: str, content: Markup) -> Markup:
    return element("details", None, element("summary", None, title), content)
