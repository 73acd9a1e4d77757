"""`samebits check`, `gate`, `verify`, `diff` and `debug`: steps that are computed again and compared."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from samebits import version
from samebits.cli.options import (
    AnySigner,
    Debug,
    Json,
    MachineOverrides,
    Overrides,
    Run,
    argument,
    flag,
    json_text,
    option,
    path_option,
    print_report,
)
from samebits.errors import ConfigError, one_line
from samebits.process_range import MAX_PROCS

# `samebits check`: is my own recipe exact?


RecipeOrScript = Annotated[str, argument("SOURCE", "A recipe, or a script.")]
Ranks = Annotated[
    int | None,
    option("N", "Run an unmodified script as N ranks: launch --as N.", "--as", min=1),
]
NOT_EXACT = 1  # the exit code


def check(
    source: RecipeOrScript,
    overrides: Overrides = None,
    as_json: Json = False,
    ranks: Ranks = None,
    debug: Debug = False,
) -> int:
    """Check that a recipe or script is exact on 1, 2 and 3 processes.

    Exact means equal bits; a script is one that calls samebits.exact. Names the cause if it is not. Takes about a
    minute for a small model, and writes nothing. The exit code is 1 if the recipe or script is not exact. What follows
    a script are its arguments: samebits check train.py -- --epochs 1. With --as N, an unmodified script is checked: as
    N ranks of one launcher, of the same again, and of two launchers.
    """
    from samebits.launch import forkserver
    from samebits.own_loop.text import is_script
    from samebits.recipes.catalog import find
    from samebits.report.console import Console
    from samebits.report.format import clock

    _write_nothing()
    given = overrides or []
    with closing(Console(sys.stderr if as_json else sys.stdout, strict=True)) as console:
        if is_script(source, ranks):
            from samebits.replay.check_script import check_script

            where = "on 1, 2 and 3 processes" if ranks is None else f"as {ranks} ranks"
            what = f"{source} {where}, 6 steps each"
            report = check_script(source, given, console.share_done, ranks)
        else:
            config = find(source).load(given).config
            config.check_inputs()
            forkserver.prepare([*forkserver.PRELOAD, "samebits.replay.probe"], config.num_threads)
            from samebits.replay import check as recipe_check

            what = "1, 2 and 3 processes, 0 and 2 workers, a resume, 6 steps each"
            report = recipe_check.check(source, given, config, console.share_done)
        if as_json:
            print(json.dumps(report.to_json()))
        else:
            from samebits.replay.judge import table

            console.say(f"check    {what}  {clock(report.seconds)}")
            console.draw(table(report.passed, report.findings))
    return NOT_EXACT if report.findings else 0


def _write_nothing() -> None:
    """Let no process write a __pycache__ beside the source: neither this one, nor those that it starts."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


# `samebits gate`: did this change alter the training?


NumSteps = Annotated[int | None, option("N", "Steps to train; default: 20.", "--steps", min=1)]
Update = Annotated[bool, flag("--update", "Accept a change: write the file again.")]
Within = Annotated[
    float | None,
    option(
        "1e-6",
        "Compare losses, gradient norms and metrics with this relative tolerance, not bits.",
        min=0.0,
    ),
]
GateFile = Annotated[
    Path | None,
    path_option("--file", "FILE", "The file; default: train.gate.json beside train.py."),
]


def gate(
    source: RecipeOrScript,
    overrides: Overrides = None,
    steps: NumSteps = None,
    update: Update = False,
    within: Within = None,
    file: GateFile = None,
    ranks: Ranks = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Find out whether a change of the code has changed the training.

    The first call trains some steps on one process, and writes a small file to commit. Later calls train them again,
    and name the first step, module and operation that differ. What follows a script are its arguments. With --as N, an
    unmodified script trains as N ranks.

    Exit code 0: same bits; 1: they differ; 2: they cannot be compared here.
    """
    from samebits.own_loop.text import is_script
    from samebits.replay.gate import GateSource, default_file, lines, recorded_ranks
    from samebits.replay.gate import gate as run_gate
    from samebits.report.console import Console
    from samebits.report.format import clock

    _write_nothing()
    file = file or default_file(source)
    ranks = ranks or recorded_ranks(file)
    if is_script(source, ranks):
        ranks = ranks or 0
    began = time.monotonic()
    with closing(Console(sys.stderr, strict=True)) as console:
        found = run_gate(
            GateSource(source, overrides or [], ranks),
            file,
            steps,
            is_update=update,
            within=within,
            show=console.share_done,
        )
    if as_json:
        print(json_text(found.to_json()))
    elif found.is_written:
        print_report([f"wrote      {found.file}, {found.num_steps} steps: commit it"])
    elif found.difference is None:
        kind = "same bits" if within is None else f"losses and norms within {within:g}"
        print_report([f"{found.num_steps} steps, {kind}  {clock(time.monotonic() - began)}"])
    else:
        result = "result     training has changed; to accept it, add --update"
        print_report([*lines(found.difference), result])
    return 0 if found.difference is None else 1


# `samebits verify`: replay steps of a run and compare them with its record.


Sample = Annotated[
    str | None,
    option(
        "5%",
        "Smallest share of the steps to replay; default: 5%. A hash of the run's record selects them.",
    ),
]
Steps = Annotated[str | None, option("A:B", "Replay the steps from A up to B.")]
All = Annotated[bool, flag("--all", "Replay every step.")]
Scratch = Annotated[
    bool,
    flag("--from-scratch", "Replay every step from the settings, without the run's checkpoints."),
]
Procs = Annotated[int, option("N", "Processes on this machine.", min=1, max=MAX_PROCS)]
Challenge = Annotated[str, option("TEXT", "Your own random text, mixed into the choice of steps.")]
Code = Annotated[
    Path | None, path_option("--code", "DIR", "Replay with another checkout of Samebits.")
]


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
    choices = {
        "--sample": sample is not None,
        "--steps": steps is not None,
        "--all": every,
        "--from-scratch": from_scratch,
    }
    given = [name for name, is_given in choices.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} were given together", fix="Give one of them.")
    share = 1.0 if every or from_scratch else _share("5%" if sample is None else sample)
    from samebits.storage.run_folder import check_run_path

    check_run_path(run)  # a wrong path is reported before torch is imported
    if code is not None:
        _run_with(code)
    from samebits.inference.hub import as_run
    from samebits.replay.verify import Request, lines
    from samebits.replay.verify import verify as verify_run
    from samebits.report.console import Console

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
        verdict = verify_run(
            replace(request, run=folder), Console(sys.stderr if as_json else sys.stdout)
        )
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
        raise ConfigError(
            f"--steps is {text!r}", allowed="two whole numbers: 1:2", fix="Give --steps 1:2."
        )
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


# `samebits diff`: what differs between two runs.


RunA = Annotated[Path, argument("A", "A run folder.")]
RunB = Annotated[Path, argument("B", "Another run folder.")]
RecipeA = Annotated[
    Path | None,
    path_option("--recipe-a", "FILE", "Replay A with this recipe file, which is executed."),
]
RecipeB = Annotated[
    Path | None,
    path_option("--recipe-b", "FILE", "Replay B with this recipe file, which is executed."),
]
NoReplay = Annotated[bool, flag("--no-replay", "Compare files only; run no recipe.")]


def diff(
    a: RunA,
    b: RunB,
    overrides: MachineOverrides = None,
    recipe_a: RecipeA = None,
    recipe_b: RecipeB = None,
    no_replay: NoReplay = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Compare two runs: find the first step and value that differ.

    Settings, code, data and versions are compared too.

    Exit code 0: both runs did the same training; 1: they did not.
    """
    from samebits.replay.diff import diff_runs, lines

    found = diff_runs(a, b, tuple(overrides or ()), (recipe_a, recipe_b), is_replayed=not no_replay)
    if as_json:
        print(json_text(found.to_plain()))
    else:
        print_report(map(one_line, lines(found)))
    return 0 if found.is_equal else 1


# `samebits debug`: a step of a past run again.


AtStep = Annotated[int | None, option("N", "The step, counted from 0.", "--step")]
When = Annotated[
    str,
    option(
        "EXPR",
        "The first step of the record with this: nonfinite, or 'loss > 3'; of loss, norm, lr, step.",
    ),
]
OfSample = Annotated[
    int | None,
    option("I", "The first step that reads this training sample.", "--sample"),
]
Print = Annotated[
    list[str] | None,
    option("EXPR", "Print this instead of opening a prompt; may be given again.", "--print"),
]


def debug(
    run: Run,
    overrides: MachineOverrides = None,
    step: AtStep = None,
    when: When = "",
    sample: OfSample = None,
    print_: Print = None,
    debug: Debug = False,
) -> int:
    """Go back to a step of a run: replay it, and look at its batch, activations and gradients.

    Opens a prompt with model, batch, loss, gradients, activations, optimizer, record, step() and back(). Nothing is
    written. Examples: --print 'gradients.norms()', --when 'loss > 3'
    """
    if step is None and sample is None and not when:
        raise ConfigError("no step was given", fix="Give --step, --when or --sample.")
    from samebits.replay.debug import evaluated, prompt, session

    with session(
        run,
        overrides or [],
        lambda line: print(one_line(line), file=sys.stderr, flush=True),
        step=step,
        when=when,
        sample=sample,
    ) as opened:
        for expression in print_ or []:
            print(evaluated(expression, opened.names))
        if not print_:
            prompt(opened)
    return 0
