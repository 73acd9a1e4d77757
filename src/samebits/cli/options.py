"""Arguments that several commands share."""

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperGroup

from samebits.config.given import given_path
from samebits.errors import ConfigError, printable
from samebits.process_range import MAX_PROCS

DEBUG_VARIABLE = "SAMEBITS_DEBUG"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
_LABEL = 11  # columns of the labels in reports


def _switch_on_debug(value: bool) -> None:
    if value:
        os.environ[DEBUG_VARIABLE] = "1"  # inherited by child processes


def argument(metavar: str, help: str) -> Any:
    """Return an argument: what stands for it in the help, and its meaning."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def option(metavar: str, help: str, *names: str, **limits: float) -> Any:
    """Return an option with a value.

    Args:
        metavar, help: What stands for its value in the help, and its meaning.
        names: Its names, if they are not that of the parameter.
        limits: min and max of a number.
    """
    return typer.Option(*names, metavar=metavar, help=help, **limits)  # type: ignore[arg-type]


def flag(name: str, help: str) -> Any:
    """Return an option without a value, such as --all."""
    return typer.Option(name, help=help)


def path_option(name: str, metavar: str, help: str) -> Any:
    """Return an option that is a path.

    Args:
        name, metavar, help: Its name, such as --out, what stands for its value in the help, and its meaning.
    """
    return typer.Option(name, parser=path_of(name), metavar=metavar, help=help)


def path_of(option: str) -> Callable[[str], Path]:
    """Return the parser of an option that is a path, for typer."""

    def read(text: str) -> Path:
        return given_path(text, option)

    return read


def json_text(value: object) -> str:
    """Return JSON for standard output. Control characters and characters that its encoding lacks are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value)
    return text if printable(text) == text else json.dumps(value)


def table_columns() -> int:
    """Return the width for tables: that of the terminal or of the variable COLUMNS, else 80."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, 40), 400)


def print_report(lines: Iterable[str]) -> None:
    """Print the lines of a report. A terminal gets them wrapped between words, below the text after their label."""
    is_wrapped = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns
    for line in lines:
        wrapped = textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * _LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        )
        print("\n".join(wrapped) if is_wrapped else line)


class Commands(TyperGroup):
    """A group of commands whose help names arguments by their metavar alone, without Python's types."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for parameter in [each for command in self.commands.values() for each in command.params]:
            if isinstance(parameter, TyperArgument):
                # "KEY=VALUE <list[str]>": newer versions of typer append it, and have no option against it.
                parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands below the headings of their groups."""
        groups: dict[str, list[tuple[str, str]]] = {}
        width = max(map(len, self.commands), default=0)
        for name, command in self.commands.items():
            if not command.hidden:
                group = getattr(command, "rich_help_panel", None)
                text = command.get_short_help_str(formatter.width - width - 6)
                groups.setdefault(group or "Commands", []).append((name.ljust(width), text))
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows)


Procs = Annotated[
    int | None,
    option("N", "Processes on this machine; default: 1.", min=1, max=MAX_PROCS),
]
AnySigner = Annotated[
    bool, flag("--any-signer", "Accept a model that no key you trust has signed.")
]
Overrides = Annotated[
    list[str] | None,
    argument("KEY=VALUE", "Settings, such as epochs=3 optim.lr=0.1."),
]
MachineOverrides = Annotated[
    list[str] | None,
    argument("KEY=VALUE", "Settings for this machine, such as data.root=DIR loader.num_workers=2."),
]
Json = Annotated[bool, flag("--json", "Print JSON.")]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", callback=_switch_on_debug, help="Show the traceback of an error.", is_eager=True
    ),
]
# Old launchers add it to the command; torchrun sets a variable too.
LocalRank = Annotated[int | None, typer.Option("--local-rank", "--local_rank", hidden=True)]
# A recipe, preset or file with the settings to train with.
SourceName = Annotated[str, argument("SOURCE", "As for train.")]
Run = Annotated[
    Path,
    argument("RUN", "A run folder, such as runs/digits-0007."),
]
RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", parser=path_of("RUN"), help="A run folder.", show_default=False),
]
# A trained model: run folder or file, the preset of a file, and the weights to take.
Model = Annotated[
    Path,
    argument("RUN", "A run folder, such as runs/digits-0007; or a file of weights (.pth ...)."),
]
Preset = Annotated[
    str | None,
    option("NAME", "For a file of weights: the recipe, preset or YAML file of its model."),
]
Checkpoint = Annotated[
    str,
    option("WHICH", "last: the final weights; best; or a checkpoint's name such as step-000230."),
]
# A world that the user starts process by process.
Init = Annotated[
    str | None,
    option(
        "URL", "Join other processes at tcp://HOST:PORT or env://, with --rank and --world-size."
    ),
]
Rank = Annotated[int | None, option("R", "Rank of this process, from 0.")]
WorldSize = Annotated[int | None, option("W", "Number of processes in all.")]


# Options that torchrun's own launch, or `--rdzv-endpoint`, has made superfluous.
_REMOVED = ("--node-rank", "--master", "--master-addr", "--master-port")


def removed_option(option: str, arguments: Sequence[str]) -> ConfigError | None:
    """Return the error for an option that was removed, with the line to use instead; None for another option."""
    if option not in _REMOVED or arguments[:1] != ["train"]:
        return None
    from samebits.launch.start import DEFAULT_PORT

    given: dict[str, str] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if name in _REMOVED:
            given[name] = value if has_value else next(words, "")
        else:
            rest.append(word)
    host = given.get("--master") or given.get("--master-addr") or "HOST"
    if host.count(":") > 1 and "[" not in host:
        host = f"[{host}]"
    if not host.rpartition("]")[2].count(":"):
        host += f":{given.get('--master-port') or DEFAULT_PORT}"
    if not any(word.partition("=")[0] == "--rdzv-endpoint" for word in rest):
        rest += ["--rdzv-endpoint", host]
    line = shlex.join(["samebits", *rest])
    return ConfigError(
        f"{option} is not an option any more: the launchers number the machines",
        fix=f"Type the same line on all machines: {line}",
    )
