"""Arguments that several commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lockstep.config.given import given_path
from lockstep.errors import printable

DEBUG_VARIABLE = "LOCKSTEP_DEBUG"


def _switch_on_debug(value: bool) -> None:
    if value:
        os.environ[DEBUG_VARIABLE] = "1"  # the processes that we start read it too


def path_of(option: str) -> Callable[[str], Path]:
    """How an option's path is read: typer takes it as `parser`."""

    def read(text: str) -> Path:
        return given_path(text, option)

    return read


def json_text(value: object) -> str:
    """JSON for standard output; with escapes where its encoding lacks a character or a terminal would obey one."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value)
    return text if printable(text) == text else json.dumps(value)


def line_text(text: str) -> str:
    """A text from a file or its name, as one line of standard output that does nothing to a terminal."""
    return printable(text).replace("\n", "\\n")


Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="Settings, such as epochs=3 optim.lr=0.1.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[
    bool, typer.Option("--debug", callback=_switch_on_debug, help="Show the traceback of an error.", is_eager=True)
]
# What old launchers add to the command; torchrun gives it as a variable too.
LocalRank = Annotated[int | None, typer.Option("--local-rank", "--local_rank", hidden=True)]
