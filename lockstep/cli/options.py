"""Arguments that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lockstep.config.given import given_path

DEBUG_VARIABLE = "LOCKSTEP_DEBUG"


def _switch_on_debug(value: bool) -> None:
    if value:
        os.environ[DEBUG_VARIABLE] = "1"  # the processes that we start read it too


def path_of(option: str) -> Callable[[str], Path]:
    """How an option's path is read: typer takes it as `parser`."""

    def read(text: str) -> Path:
        return given_path(text, option)

    return read


Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="Settings, such as epochs=3 optim.lr=0.1.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[
    bool, typer.Option("--debug", callback=_switch_on_debug, help="Show the traceback of an error.", is_eager=True)
]
# What old launchers add to the command; torchrun gives it as a variable too.
LocalRank = Annotated[int | None, typer.Option("--local-rank", "--local_rank", hidden=True)]
