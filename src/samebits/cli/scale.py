"""`samebits scale`: throughput of a job on 1, 2, 4 ... processes."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits.cli.options import Debug, Overrides, SourceName, check_results, path_option
from samebits.cores import describe_other_load, num_cores
from samebits.data.division import num_micro_batches
from samebits.errors import ConfigError, LaunchError
from samebits.extras import missing_modules, pip_line
from samebits.process_range import MAX_PROCS

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig
    from samebits.report.console import Console


Procs = Annotated[str, typer.Option(metavar="1,2,4", help="Numbers of processes on this machine.")]
Compare = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Variants: exact, fast, sync, bf16, compile, bf16-sums, ddp (torch's own).",
    ),
]
Steps = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Steps to time per measurement, after 3 warm-up steps."),
]
Out = Annotated[Path, path_option("--out", "DIR", "Folder for scale.json and scale.png.")]

# The settings of each variant; ddp trains through torch's own DistributedDataParallel. Portable arithmetic, which is a
# default of digits, excludes mode=fast and compile.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "exact": ("mode=exact",),
    "fast": ("mode=fast", "kernels=auto"),
    "sync": ("batch_norm=sync",),
    "bf16": ("precision=bf16",),
    "compile": ("compile=true", "kernels=auto"),
    "bf16-sums": ("compress=bf16",),
    "ddp": ("mode=fast", "kernels=auto"),
}


def scale(
    source: SourceName,
    overrides: Overrides = None,
    procs: Procs = "1,2,4",
    compare: Compare = "exact,fast,ddp",
    steps: Steps = 20,
    out: Out = Path("scale"),
    debug: Debug = False,
) -> None:
    """Measure the throughput of a job by number of processes.

    Prints a table, and writes a chart and a JSON file. Takes minutes: each measurement starts new processes.
    """
    from samebits.launch import forkserver
    from samebits.launch.kernels import pin_kernels
    from samebits.recipes.catalog import find

    sizes = _sizes(procs)
    names = _names(compare)
    check_results(out, "scale", "variants")
    found = find(source)
    given = list(overrides or [])
    config = found.load(given).config
    # A combination that is not allowed is refused now, not after minutes of measurements.
    for name in names:
        found.load([*given, *VARIANTS[name]])
    other_load, is_busy = describe_other_load()  # before any process of this command starts
    pin_kernels(config.kernels)
    forkserver.prepare([*forkserver.PRELOAD, "samebits.scaling.measure"], config.num_threads)
    from samebits.report.console import Console
    from samebits.scaling.table import FOOTNOTE, conclusions, table

    console = Console(sys.stdout, strict=True)
    jobs = [(name, size) for size in sizes for name in names]
    console.say(
        f"{len(jobs)} measurement{'s' if len(jobs) > 1 else ''} of {steps} steps, "
        "each in new processes, 10 s or more each"
    )
    if is_busy:
        console.say(f"{other_load}: stop them to get reliable measurements")

    def run(name: str, size: int) -> dict[str, Any]:
        return _measured(config, source, [*given, *VARIANTS[name]], name, size, steps)

    measurements = _measure_all(
        console, jobs, num_micro_batches(config.global_batch, config.micro_batch), run
    )
    if not measurements:
        raise ConfigError(
            "nothing could be measured",
            given=f"--procs {procs} --compare {compare}",
            fix="Use fewer processes (--procs) or a smaller micro_batch.",
        )
    is_on_cpu = any(
        row["device"] == "cpu" for rows in measurements.values() for row in rows.values()
    )
    console.say("")
    console.draw(table(measurements))
    console.say(f"\n{FOOTNOTE}\n")
    console.say("\n".join(conclusions(measurements, num_cores() if is_on_cpu else None)))
    if not is_busy and describe_other_load()[1]:
        console.say(
            "Other programs have started to use this machine: the measurements are not reliable."
        )
    _keep(console, measurements, out, found.name)


def _measure_all(
    console: Console,
    jobs: list[tuple[str, int]],
    num_micro_batches: int,
    run: Callable[[str, int], dict[str, Any]],
) -> dict[str, dict[int, dict[str, Any]]]:
    """Run the measurements, each of a variant on a number of processes, and return them by both."""
    from samebits.report.format import clock

    measurements: dict[str, dict[int, dict[str, Any]]] = {}
    began = time.monotonic()
    with closing(console):
        for done, (name, size) in enumerate(jobs):
            label = f"{name} on {size} process{'es' if size > 1 else ''}"
            if name == "ddp" and size > num_micro_batches:
                console.say(
                    f"{label} is skipped: a step has only {num_micro_batches} micro-batches"
                )
                continue
            console.share_done(f"measuring {label}", done, len(jobs))
            measured = measurements.setdefault(name, {})[size] = run(name, size)
            left_s = (time.monotonic() - began) / (done + 1) * (len(jobs) - done - 1)
            left = f"  {clock(left_s)} left" if left_s else ""
            console.say(f"{label:<26} {measured['samples_per_s']:>9,.0f} samples/s{left}")
    return measurements


def _measured(
    config: RunConfig, source: str, settings: list[str], name: str, size: int, steps: int
) -> dict[str, Any]:
    from samebits.bench.processes import ask
    from samebits.process_range import ProcessRange
    from samebits.scaling.measure import measure

    failure = LaunchError(
        f"{name} on {size} process{'es' if size > 1 else ''} could not be measured",
        fix=f"Run it alone: {shlex.join(['samebits', 'train', source, *settings, '--procs', str(size)])}",
    )
    # So many epochs that the data suffice for any number of steps.
    arguments = (source, [*settings, "epochs=1000000"], name == "ddp", steps)
    measured: dict[str, Any] = ask(measure, arguments, ProcessRange(size, size), config, failure)[0]
    return measured


def _keep(
    console: Console,
    measurements: Mapping[str, Mapping[int, Mapping[str, Any]]],
    out: Path,
    job: str,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "scale.json").write_text(
        json.dumps({"job": job, "variants": measurements}, indent=1), encoding="utf-8"
    )
    lines = {
        name: [(float(size), row["samples_per_s"]) for size, row in rows.items()]
        for name, rows in measurements.items()
    }
    first_name, first = next(iter(lines.items()))
    ideal = f"(linear from {first_name} on {first[0][0]:g})"
    lines[ideal] = [
        (size, first[0][1] * size / first[0][0]) for size in (0.0, *(size for size, _ in first))
    ]
    if missing_modules("trackers"):
        console.say(f"\n{out / 'scale.json'}  (for the chart: {pip_line('trackers')})")
        return
    from samebits.report.chart import draw_lines

    draw_lines(
        lines,
        out / "scale.png",
        title=f"{job}: throughput",
        x_name="processes",
        y_name="samples per second",
    )
    console.say(f"\n{out / 'scale.json'}  {out / 'scale.png'}")


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 0 < int(part) <= MAX_PROCS for part in parts):
        raise ConfigError(
            f"--procs is {text!r}",
            allowed=f"numbers of processes such as 1,2,4, each up to {MAX_PROCS}",
            fix="Set --procs to such numbers, separated by commas.",
        )
    return sorted({int(part) for part in parts})


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ConfigError(
            f"--compare has {unknown[0]!r}",
            allowed=", ".join(VARIANTS),
            fix="Set --compare to some of these names, separated by commas.",
        )
    return names
