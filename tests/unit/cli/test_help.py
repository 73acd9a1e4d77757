"""The help of each command."""

import re

import typer

from samebits.cli.app import app
from samebits.cli.options import Commands


def test_help_names_arguments_and_no_types_of_python() -> None:
    commands = typer.main.get_command(app)
    assert isinstance(commands, Commands)
    every = dict(commands.commands)
    for group in ("data", "find"):
        every |= commands.commands[group].commands
    for name, command in every.items():
        text = command.get_help(command.context_class(command, info_name=name, terminal_width=80))
        assert not re.search(r"<(str|path|int|list)\b", text), text


def test_no_summary_is_cut_at_80_columns() -> None:
    commands = typer.main.get_command(app)
    text = commands.get_help(commands.context_class(commands, info_name="samebits", terminal_width=80))
    assert "..." not in text.partition("Commands:")[2]
