"""The `samebits` command. It imports late, so that --help and wrong settings are answered before torch is imported."""

import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import typer
from typer.main import get_command

from samebits.cli.app import app
from samebits.cli.options import DEBUG_VARIABLE, removed_option
from samebits.cluster import abort
from samebits.errors import ConfigError, LaunchError, SamebitsError, to_json
from samebits.launch.ssh import stop_at_eof
from samebits.launch.subcommand import ERROR_FILE
from samebits.open_files import is_too_many_files, too_many_files

INTERRUPTED = 130  # 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE
_OF_SETTINGS = "Settings are given without dashes: {}"
# What other tools call --procs.
_PROCESSES = ("gpus", "devices", "num_gpus", "ngpus", "nproc", "num_processes", "world")
# Errors of a path that no nearer code has handled.
_OF_PATHS = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
)


def main() -> None:
    """Run the command that this process was started with, and exit."""
    # torch warns about every address without a name and every closed connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # For that warning torch asks the name server at each connection of a store, and its threads wait for the answer:
    # of a server that is down for 2 s, instead of glibc's 10, after which other launchers and ranks count as lost.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal's encoding lacks are printed as escapes, instead of failing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    stop_at_eof()
    # Removed, so that child processes do not overwrite this process's error file.
    error_file = os.environ.pop(ERROR_FILE, None)
    abort.leave(run(sys.argv[1:], error_file))


def run(arguments: Sequence[str], error_file: str | None = None) -> int:
    """Run one command in this process; an error is also written to `error_file` as JSON, for `samebits.train`.

    Returns:
        The exit code: 0; 1 to 6 for an error, by its kind; 130 after Ctrl-C; 141 if standard output was closed. A bug
        is raised.
    """
    try:
        _check_current_folder()
        result = _command()(list(arguments), prog_name="samebits", standalone_mode=False)
        # Here: at Python's exit it would be too late to report a full disk or a closed pipe.
        sys.stdout.flush()
    except SamebitsError as error:
        if error_file is not None:
            with suppress(OSError):  # the caller then has the exit code and the text
                Path(error_file).write_text(json.dumps(to_json(error)), encoding="utf-8")
        _print_error(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort) as stop:
        if isinstance(
            stop.__cause__, EOFError
        ):  # typer takes a file that ends too early for Ctrl-D
            raise stop.__cause__ from None
        return INTERRUPTED
    except BrokenPipeError:
        return _broken_pipe()
    except OSError as error:
        if is_too_many_files(error):
            _print_error(too_many_files())
            return LaunchError.exit_code
        if error.errno in _OF_PATHS and error.filename is not None:
            what = f"can't use {error.filename}"
            fix = "Use another file or folder."
        elif error.errno in (errno.ENOSPC, errno.EIO):
            what = f"can't write {error.filename or 'the output'}"
            fix = "Free disk space."
            _drop(sys.stdout)
        else:
            raise
        _print_error(SamebitsError(f"{what}: {error.strerror}", fix=fix))
        return SamebitsError.exit_code
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer's answer to it
            return _broken_pipe()
        raise
    except Exception as error:
        # A wrong command or option. Recognized by its attributes: typer moves click's classes between versions.
        if not (hasattr(error, "show") and hasattr(error, "exit_code")):
            raise
        option = getattr(error, "option_name", None)
        if option and (removed := removed_option(option, list(arguments))) is not None:
            _print_error(removed)
            return removed.exit_code
        instead = _instead_of(option, list(arguments)) if option else ""
        if instead:
            vars(error)["possibilities"] = (
                None  # those with similar letters, such as --procs for --epochs
            )
        error.show()
        if option:
            print(instead or _OF_SETTINGS.format("epochs=3 optim.lr=0.1"), file=sys.stderr)
        return int(error.exit_code)
    return result if isinstance(result, int) else 0


def _instead_of(option: str, arguments: list[str]) -> str:
    """Return what to write instead of an option of other tools, such as --epochs 3 or --gpus=2; "" if it is none."""
    from samebits.config.load import setting_called
    from samebits.config.schema import RunConfig

    named = (place for place, text in enumerate(arguments) if text.partition("=")[0] == option)
    if (at := next(named, None)) is None:  # a letter of several, such as -rf
        return ""
    value = arguments[at].partition("=")[2] or "".join(arguments[at + 1 : at + 2]) or "N"
    name = option.lstrip("-").replace("-", "_")
    if name in _PROCESSES:
        return f"GPUs are used by one process each: --procs {value}"
    key = setting_called(RunConfig, name)
    return _OF_SETTINGS.format(f"{key}={value}") if key else ""


@cache  # it reads the signatures of all commands
def _command() -> Any:
    return get_command(app)


def _print_error(error: SamebitsError) -> None:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exception(error)
        return
    try:
        if sys.stderr.isatty():
            from samebits.report.console import Console

            Console(sys.stderr, strict=True).error(error)
        else:
            print(error, file=sys.stderr)
    except OSError:
        _drop(sys.stderr)


def _broken_pipe() -> int:
    _drop(sys.stdout)
    return BROKEN_PIPE


def _drop(stream: TextIO) -> None:
    # Otherwise Python flushes the rest again at exit, and prints an error.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams.

    Otherwise the next file that is opened gets the stream's number and receives what is printed, and Python's stream
    is None.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # open() takes the lowest free number, which is this one. Child processes need it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current folder no longer exists", fix="Change to a folder that exists: cd ~"
        ) from None
