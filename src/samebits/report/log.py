"""A log file for each rank."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from samebits.errors import cannot_write

# A notice while a run starts: importing torch, rendezvous and opening the data take seconds.


QUIET_S = 3.0


@contextmanager
def notice_if_slow(
    text: str, is_over: Callable[[], bool] = lambda: False, quiet_s: float = QUIET_S
) -> Iterator[None]:
    """Print a line, unless it is empty, if the block takes longer than `quiet_s`, in seconds."""

    def say() -> None:
        if text and not is_over():
            # A full disk or a closed pipe: the command itself reports it.
            with suppress(OSError, ValueError):
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()

    timer = threading.Timer(quiet_s, say)
    # An error must be able to end the process while the timer waits.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # Joined, so that the line never appears behind the output of what follows.
        timer.join()


LOGGER = logging.getLogger("samebits")

_FORM = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def log_path(run_folder: Path, rank: int) -> Path:
    """Return the path of a rank's log file in a run folder."""
    return run_folder / "logs" / f"rank-{rank}.log"


@contextmanager
def rank_log(run_folder: Path, rank: int) -> Iterator[logging.Logger]:
    """Write log records, Python warnings and an error that ends the block to this rank's file.

    A resumed run appends to the same file. The logging configuration is restored at the end.

    Raises:
        CheckpointError: The file can't be opened.
    """
    path = log_path(run_folder, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # the launcher checks its modification time
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from None
    handler.setFormatter(logging.Formatter(_FORM))
    loggers = [LOGGER, logging.getLogger("py.warnings")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        # Otherwise a program that uses this library would print the records on its console as well.
        logger.propagate = False
    logging.captureWarnings(True)
    try:
        yield LOGGER
    # BaseException: KeyboardInterrupt and SystemExit end a rank too, and its log is the only place that shows it.
    except BaseException:
        kind = sys.exc_info()[0]
        LOGGER.exception("ended by %s", kind.__name__ if kind else "an error")
        raise
    finally:
        # Restored also after an error: the logging configuration belongs to the program that uses this library.
        logging.captureWarnings(False)
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
        handler.close()
