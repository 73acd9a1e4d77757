"""The help of each command."""

from __future__ import annotations

import re

import typer

from lockstep.cli.app import app
from lockstep.cli.options import Commands


def test_help_names_arguments_and_no_types_of_python() -> None:
    commands = typer.main.get_command(app)
    assert isinstance(commands, Commands)
    data = commands.commands["data"]
    assert isinstance(data, Commands)
    for name, command in {**commands.commands, **data.commands}.items():
        text = command.get_help(command.context_class(command, info_name=name, terminal_width=80))
        assert not re.search(r"<(str|path|int|list)\b", text), text
