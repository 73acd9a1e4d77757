"""`lockstep scale`: the curve that the tutorials show for 1, 2, 4 and 8 GPUs, for one's own job."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.options import Debug, Overrides, path_of
from lockstep.config.process_range import MAX_PROCS
from lockstep.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

SourceName = Annotated[str, typer.Argument(metavar="SOURCE", help="As for train.", show_default=False)]
Procs = Annotated[str, typer.Option(metavar="1,2,4", help="Numbers of processes on this machine.")]
Compare = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="Any of exact, fast, sync, bf16, compile, bf16-sums, powersgd, ddp (torch's own)."
    ),
]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Steps that count, of each.")]
Out = Annotated[Path, typer.Option(parser=path_of("--out"), metavar="DIR", help="Folder for scale.json and scale.png.")]

# What each name means in settings; ddp trains through torch's own DistributedDataParallel.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "exact": ("mode=exact",),
    "fast": ("mode=fast",),
    "sync": ("batch_norm=sync",),
    "bf16": ("precision=bf16",),
    "compile": ("compile=true",),
    "bf16-sums": ("compress=bf16",),
    "powersgd": ("mode=fast", "compress=powersgd"),
    "ddp": ("mode=fast",),
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
    """Measure how fast a job is on 1, 2, 4 … processes: a table, a picture and a JSON file."""
    from lockstep.config.load import load
    from lockstep.launch import forkserver
    from lockstep.launch.start import PRELOAD
    from lockstep.recipes.catalog import find

    sizes, names = _sizes(procs), _names(compare)
    _check_out(out)
    found = find(source)
    given = list(overrides or [])
    config = load(found.config_class, found.layers, given).config
    for name in names:
        load(found.config_class, found.layers, [*given, *VARIANTS[name]])
    forkserver.prepare([*PRELOAD, "lockstep.scaling.measure"], config.num_threads)
    from lockstep.scaling.table import table

    num_micro_batches = -(-config.global_batch // config.micro_batch)
    figures: dict[str, dict[int, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as work:
        for size in sizes:
            for name in names:
                if name == "ddp" and size > num_micro_batches:
                    print(f"ddp on {size} is left out: a step has no micro-batch for each, only {num_micro_batches}")
                    continue
                answer = Path(work) / f"{name}-{size}.json"
                settings = [*given, *VARIANTS[name]]
                measured = _measured(config, source, settings, name, size, steps, answer)
                figures.setdefault(name, {})[size] = measured
                print(f"{name} on {size}: {measured['samples_per_s']:,.0f} samples/s", flush=True)
    if not figures:
        raise ConfigError("nothing could be measured", fix="fewer processes (--procs), or a smaller micro_batch")
    print()
    print("\n".join(table(figures)))
    _keep(figures, out, found.name)


def _measured(
    config: RunConfig, source: str, settings: list[str], name: str, size: int, steps: int, answer: Path
) -> dict[str, Any]:
    from lockstep.config.process_range import ProcessRange
    from lockstep.launch.start import launch_here
    from lockstep.launch.stopped import raise_if_stopped
    from lockstep.scaling.measure import WARM_STEPS, measure

    arguments = (source, [*settings, "epochs=1000000"], name == "ddp", steps, answer)
    code = launch_here(ProcessRange(size, size), config, measure, arguments)
    raise_if_stopped(code)
    if code or not answer.is_file():
        raise LaunchError(
            f"{name} on {size} process{'es' if size > 1 else ''} could not be measured",
            where=f"after {WARM_STEPS} steps to get warm" if not code else None,
            fix=f"try it alone: {shlex.join(['lockstep', 'train', source, *settings, '--procs', str(size)])}",
        )
    measured: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return measured


def _keep(figures: Mapping[str, Mapping[int, Mapping[str, Any]]], out: Path, job: str) -> None:
    from lockstep.report.chart import draw_lines

    out.mkdir(parents=True, exist_ok=True)
    (out / "scale.json").write_text(json.dumps({"job": job, "variants": figures}, indent=1), encoding="utf-8")
    lines = {
        name: [(float(size), row["samples_per_s"]) for size, row in rows.items()] for name, rows in figures.items()
    }
    first_name, first = next(iter(lines.items()))
    lines["(ideal)"] = [(size, first[0][1] * size / first[0][0]) for size in (0.0, *(size for size, _ in first))]
    draw_lines(
        lines, out / "scale.png", title=f"{job}: speed by processes", x_name="processes", y_name="samples a second"
    )
    print(f"\n{out / 'scale.json'}  {out / 'scale.png'}  (ideal: {first_name} on {first[0][0]:g}, times the processes)")


def _check_out(out: Path) -> None:
    """See that nothing is written over but what this command has written."""
    try:
        is_own = "variants" in json.loads((out / "scale.json").read_bytes())
    except (OSError, ValueError, TypeError):
        is_own = False
    there = [name for name in ("scale.json", "scale.png") if os.path.lexists(out / name)]
    if there and not is_own:
        raise ConfigError(f"--out {out} has another {there[0]} in it", fix="name a new folder")


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 0 < int(part) <= MAX_PROCS for part in parts):
        raise ConfigError(f"--procs is {text!r}", allowed=f"numbers of processes such as 1,2,4, each up to {MAX_PROCS}")
    return sorted({int(part) for part in parts})


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"--compare has {unknown[0]!r}", allowed=", ".join(VARIANTS))
    return names
