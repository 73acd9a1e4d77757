"""Run the user's code in a process of its own: quietly, with fresh generators, and with errors as values."""

import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from samebits.config.load import short_path
from samebits.errors import ConfigError, SamebitsError
from samebits.frames import is_user

Record = dict[str, Any]

RAISED = "the recipe raised"  # the start of the error for an exception in the user's code


def shuffle_generators() -> None:
    """Seed numpy's and Python's global generators from entropy, as in a fresh interpreter.

    The fork server has imported numpy, so its children would all start from the same state.
    """
    np.random.seed()
    random.seed()


@contextmanager
def quiet() -> Iterator[None]:
    """Discard what a recipe prints: it would appear once for each process of each trial."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def guarded(run: Callable[[], Record]) -> Record:
    """Call a function that runs the user's code; an error becomes `{"error": ...}` with its line."""
    try:
        return run()
    except SamebitsError as error:
        return {"error": error, "line": user_line_of(error)}
    except Exception as error:  # a bug in the recipe
        if os.environ.get("SAMEBITS_DEBUG") == "1":
            # The stream of before `quiet`, which discards standard error.
            traceback.print_exception(error, file=sys.__stderr__)
        line = user_line_of(error)
        found = ConfigError(
            f"{RAISED} {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}",
            where=f"{short_path(Path(line[0]))}:{line[1]}" if line else None,
            fix="Correct the recipe. SAMEBITS_DEBUG=1 shows the traceback.",
        )
        return {"error": found, "line": line}


def user_line_of(error: BaseException) -> list[Any] | None:
    """Return file and line of the user's innermost frame of an error, if it has one."""
    # Errors that were raised `from` another one: the user's frame may be in the first of them.
    chain: BaseException | None = error
    while chain is not None:
        lines = [[each.filename, each.lineno] for each in traceback.extract_tb(chain.__traceback__)]
        if users := [line for line in lines if is_user(str(line[0]))]:
            return users[-1]
        chain = chain.__cause__
    return None
