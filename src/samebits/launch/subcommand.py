"""Run a command of Samebits for a function of its Python interface, and returns its error."""

import json
import locale
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from samebits.cluster.signals import when_parent_dies
from samebits.errors import KINDS, SamebitsError, from_json
from samebits.launch.commands import CALLER, ERROR_FILE, import_path
from samebits.launch.stopped import Stopped


class Subcommand:
    """A command of Samebits in a process of its own, which saves and exits if this process ends before it.

    Args:
        error_file: Where it writes its error, as JSON.
        output: Receives standard output and standard error; None: standard output is this process's.
        stderr: Receives standard error instead; needed without `output`.
    """

    def __init__(
        self,
        command: Sequence[str],
        error_file: Path,
        *,
        output: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._error_file = error_file
        # In a process group of its own: Ctrl-C then reaches only this process, in a terminal as in a notebook.
        #: The process.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if output is not None else None,
            stdout=output,
            stderr=output if stderr is None else stderr,
            process_group=0,
            env={
                **os.environ,
                **(variables or {}),
                CALLER: str(os.getpid()),
                ERROR_FILE: str(error_file),
                **import_path(),
            },
        )

    def error(self, text: str) -> SamebitsError | None:
        """Return the error of a command that has ended; None if it had none, or if a signal stopped it."""
        code = self.process.returncode
        try:
            error = from_json(json.loads(self._error_file.read_text(encoding="utf-8")))
        except (OSError, ValueError):  # it ended without one, by a bug or by a signal
            error = None
        if code >= 0 and (error is not None or not 0 < code < 128):
            return error
        kind = next((kind for kind in KINDS.values() if kind.exit_code == code), SamebitsError)
        if text:  # its last output is the only trace, and has its own fix
            return kind(text.removeprefix(f"{kind.kind}: "))
        fix = "Run the same command in a terminal, and read its output."
        return kind(f"training ended with exit code {code}", fix=fix)


def run_subcommand(
    command: Sequence[str], variables: Mapping[str, str] | None = None
) -> tuple[int, SamebitsError | None]:
    """Run a command of Samebits in a process of its own; return its exit code, and its error if it wrote one.

    Raises:
        Stopped: The user pressed Ctrl-C; raised after the command has ended.
    """
    is_interrupted = False
    with tempfile.TemporaryDirectory(prefix="samebits-") as place:
        # A file and not a pipe: the command writes as much as it likes while this process only waits.
        with tempfile.TemporaryFile("w+", encoding=locale.getencoding(), errors="replace") as stderr:
            started = Subcommand(command, Path(place) / "error.json", stderr=stderr, variables=variables)
            child = started.process
            while child.returncode is None:
                # Again after each signal: `wait` is interrupted, and the command still has to save.
                try:
                    child.wait()
                except KeyboardInterrupt:
                    is_interrupted = True  # the command saves and ends; a second Ctrl-C ends it at once
                    child.send_signal(signal.SIGINT)
                # This process is about to fail, and its command must not stay behind.
                except BaseException:
                    child.kill()
                    child.wait()
                    raise
            stderr.seek(0)
            text = stderr.read().strip()
        code = child.returncode
        if is_interrupted and code > 128:
            raise Stopped(code)
        return code, started.error(text)


def end_with_caller() -> None:
    """Save and exit once the process that called a function of `samebits` is gone, if it started this command.

    A notebook's kernel is killed when it is restarted, and would leave its training behind.
    """
    caller = os.environ.pop(CALLER, None)
    # Compared with the parent: the variable may be inherited from a command that had another caller.
    if caller is not None and int(caller) == os.getppid():
        when_parent_dies(lambda: os.kill(os.getpid(), signal.SIGTERM))
