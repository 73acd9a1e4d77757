"""`samebits diff`: what differs between two runs."""

from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.options import Debug, Json, MachineOverrides, json_text, line_text, path_option, print_report

RunA = Annotated[Path, typer.Argument(metavar="A", help="A run folder.", show_default=False)]
RunB = Annotated[Path, typer.Argument(metavar="B", help="Another run folder.", show_default=False)]
RecipeA = Annotated[
    Path | None, path_option("--recipe-a", "FILE", "Replay A with this recipe file, which is executed.")
]
RecipeB = Annotated[
    Path | None, path_option("--recipe-b", "FILE", "Replay B with this recipe file, which is executed.")
]
NoReplay = Annotated[bool, typer.Option("--no-replay", help="Compare files only; run no recipe.")]


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
    from samebits.diff.diff import diff_runs, lines

    found = diff_runs(a, b, tuple(overrides or ()), (recipe_a, recipe_b), is_replayed=not no_replay)
    if as_json:
        print(json_text(found.to_plain()))
    else:
        print_report(map(line_text, lines(found)))
    return 0 if found.is_equal else 1
