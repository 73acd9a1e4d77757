"""`samebits verify`: replay steps of a run and compare them with its record."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samebits import version
from samebits.cli.options import Debug, Json, MachineOverrides, path_option, print_report
from samebits.config.process_range import MAX_PROCS
from samebits.errors import ConfigError

if TYPE_CHECKING:
    from samebits.verify.verdict import Verdict

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/digits-0007.", show_default=False)]
Sample = Annotated[
    str | None,
    typer.Option(
        metavar="5%",
        help="Smallest share of the steps to replay; default: 5%. A hash of the run's record selects them.",
    ),
]
Steps = Annotated[str | None, typer.Option(metavar="A:B", help="Replay the steps from A up to B.")]
All = Annotated[bool, typer.Option("--all", help="Replay every step.")]
Scratch = Annotated[
    bool, typer.Option("--from-scratch", help="Replay every step from the settings, without the run's checkpoints.")
]
Procs = Annotated[int, typer.Option(min=1, max=MAX_PROCS, metavar="N", help="Processes on this machine.")]
Challenge = Annotated[str, typer.Option(metavar="TEXT", help="Your own random text, mixed into the choice of steps.")]
AnySigner = Annotated[bool, typer.Option("--any-signer", help="Accept a model that no key you trust has signed.")]
Code = Annotated[Path | None, path_option("--code", "DIR", "Replay with another checkout of Samebits.")]


def verify(
    run: Run,
    overrides: MachineOverrides = None,
    sample: Sample = None,
    steps: Steps = None,
    every: All = False,
    from_scratch: Scratch = False,
    procs: Procs = 1,
    challenge: Challenge = "",
    code: Code = None,
    any_signer: AnySigner = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Replay steps of a run or published model, and compare the bits.

    Compares samples, loss, gradient norm and weights, bit for bit, and the signature of a published model. Exit code 0:
    verified; 1: something differs.
    """
    choices = {"--sample": sample is not None, "--steps": steps is not None, "--all": every}
    given = [name for name, is_given in {**choices, "--from-scratch": from_scratch}.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} were given together", fix="Give one of them.")
    share = 1.0 if every or from_scratch else _share("5%" if sample is None else sample)
    from samebits.storage.run_path import check_run_path

    check_run_path(run)  # a wrong path is reported before torch is imported
    if code is not None:
        _run_with(code)
    from samebits.inference.hub import as_run
    from samebits.report.console import Console
    from samebits.verify.verify import Request
    from samebits.verify.verify import verify as verify_run

    request = Request(
        run=run,
        overrides=tuple(overrides or ()),
        share=share,
        steps=None if steps is None else _bounds(steps),
        from_scratch=from_scratch,
        challenge=challenge,
        procs=procs,
        any_signer=any_signer,
    )
    with as_run(run) as folder:
        return _report(
            verify_run(replace(request, run=folder), Console(sys.stderr if as_json else sys.stdout)), as_json
        )


def _report(verdict: Verdict, as_json: bool) -> int:
    from samebits.verify.verdict import lines

    if as_json:
        print(verdict.to_json())
    else:
        print_report(lines(verdict))
    return 0 if verdict.is_verified else 1


def _share(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"--sample is {text!r}",
            allowed="above 0% and up to 100%: 5%, 0.05",
            fix="Give a share, such as --sample 5%.",
        )
    return share


def _bounds(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text.strip())
    if match is None:
        raise ConfigError(f"--steps is {text!r}", allowed="two whole numbers: 1:2", fix="Give --steps 1:2.")
    return int(match[1]), int(match[2])


def _run_with(code: Path) -> None:
    """Repeat this command with the package of another checkout, in this process; returns only there."""
    package = code / "src" / "samebits" / "__main__.py"
    if not os.path.isfile(package):
        raise ConfigError(
            f"--code {code} is not a checkout of Samebits: it has no src/samebits/__main__.py",
            fix="Give the folder that contains the package samebits.",
        )
    if Path(version.__file__).resolve().parent == package.resolve().parent:
        return
    environment = {**os.environ, "PYTHONPATH": str(code.resolve() / "src")}
    # -P: otherwise -m puts the current folder first on sys.path, before the other checkout.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "samebits", *sys.argv[1:]], environment)
