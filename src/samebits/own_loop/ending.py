"""How an iteration over an exact loader ends, and how a script with one ends.

An iteration that is left inside a step, or that trains nothing, gives another result in each world, and torch's loops
would not notice. A generator that is left can raise no error, so the error waits in the loop until the script uses the
model, the loader or another one, or until the script ends.
"""

import atexit
import json
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Protocol

from torch.optim import Optimizer

from samebits.cluster.env import error_file
from samebits.errors import SamebitsError, TrainError
from samebits.frames import callers, user_level
from samebits.own_loop.guard import fault
from samebits.own_loop.session import ExactLoop
from samebits.own_loop.text import ends_by_count


class Iteration:
    """One iteration over the loader.

    Attributes:
        num_read: Bodies so far.
        is_whole: Whether the loader has no batch more.
    """

    def __init__(self, loop: ExactLoop, start: int, stop: int, restore: Callable[[], None]) -> None:
        self._loop = loop
        self._start = start
        self._stop = stop
        self._restore = restore
        self.num_read = 0
        self.is_whole = False
        loop.habits.begin_pass()

    def end(self) -> bool:
        """Judge the iteration, and set the loop's position.

        Returns:
            Whether the next iteration is that of the next epoch.

        Raises:
            TrainError: It was whole and has trained nothing.
        """
        loop = self._loop
        if self.num_read == 0:
            return self.is_whole  # a resume at the end of an epoch
        # GeneratorExit: Python raises it in a generator that is left, which is no error of the script.
        if sys.exc_info()[0] not in (None, GeneratorExit) or has_failed():
            return True  # an error that is raised to the script already
        if loop.observer is not None and loop.observer.is_over:
            return True  # left by the observer, and closed later: a generator around it outlives the exception
        if loop.habits.has_trained:
            if not self.is_whole:
                self._keep(self._fault())
            return True
        loop.step = self._start
        loop.habits.undo_pass()
        self._restore()
        if self.num_read == 1 and not self.is_whole:
            if loop.is_main:
                warnings.warn(
                    "a batch was read from the exact loader and nothing was trained: the position stays. Each rank has "
                    "read another batch; for a value that training depends on, use the DataLoader given to exact().",
                    stacklevel=2,
                )
            return False
        wrong = fault("nothing", num=self.num_read, step=self._start)
        if self.is_whole:
            raise wrong
        self._keep(wrong)
        return False

    def _keep(self, wrong: TrainError | None) -> None:
        if wrong is not None:
            self._loop.habits.fault = wrong
            _FAULTS.append((self._loop, wrong))  # the script may drop the loader before it ends

    def _fault(self) -> TrainError | None:
        """Return what is wrong with leaving the loop here, after training; None: nothing."""
        loop = self._loop
        body = self._loop.place()
        counts = loop.habits.has_counted_steps
        if body is not None and not loop.has_acted:
            return fault("inside", num=self.num_read, step=loop.step, all=body[1], run=body[0])
        # One that looks at the step for its log may end by another number.
        if loop.step < self._stop and (not counts or ends_by_count(callers(sys._getframe()))):
            return fault("within", num=self.num_read, step=loop.step, stop=self._stop)
        return None


# Settings of torch's optimizers that keep a state from step to step, where they are not 0.
_OF_STATE = ("momentum", "betas", "alpha", "rho", "etas", "beta2_decay")


def check_start(loop: ExactLoop, is_positioned: bool) -> None:
    """Check that the state which an iteration begins with is that of its step, which the script may have set."""
    # By its settings, since SGD without momentum never has a state.
    new = [
        type(each).__name__
        for each in loop.unchecked
        if (
            not each.state and any(map(each.defaults.get, _OF_STATE))
            if isinstance(each, Optimizer)
            else getattr(each, "last_epoch", None) == 0
        )
    ]
    loop.unchecked = []
    if loop.step:
        if new and loop.is_main:
            warnings.warn(
                f"the loop continues after {loop.step:,} steps, and {new[0]} begins anew: the weights will not be "
                "those of a run without a stop. Save its state_dict() in the checkpoint, and load it before the loop.",
                stacklevel=user_level(sys._getframe()),
            )
    elif not is_positioned and (what := loop.find_loaded()):
        raise fault("start", what=what)


def has_failed() -> bool:
    """Return whether an error has ended the script already."""
    # Python 3.12 has last_exc, and keeps last_type
    return getattr(sys, "last_type", None) is not None


class _Loader(Protocol):
    loop: ExactLoop

    def end_pass(self) -> None: ...


# Weak: a loader that the script has dropped has been judged, and its fault is kept below.
_LOADERS: weakref.WeakSet[_Loader] = weakref.WeakSet()
_FAULTS: list[tuple[ExactLoop, TrainError]] = []
_is_launched = False


def leave_errors_to_launcher() -> None:
    """Let this process report no error itself: `samebits launch` prints that of the rank that failed first, once."""
    global _is_launched
    _is_launched = True


@cache
def report_errors() -> None:
    """Let errors for users end the script without a traceback, and a wrong end with an error. Once in a process."""
    if _is_launched:
        return
    atexit.register(_check_end)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        named: SamebitsError | None
        if isinstance(error, SamebitsError) and not os.environ.get("SAMEBITS_DEBUG"):
            named = error
        elif isinstance(error, KeyboardInterrupt) and _LOADERS:
            print("stopped by Ctrl-C", file=sys.stderr, flush=True)
            return
        else:
            # Whatever hook was there: notebooks and debuggers have their own.
            before(kind, error, trace)
            named = named_error(error)
        if named is not None:
            _report(named, is_main=all(loader.loop.is_main for loader in _LOADERS))

    sys.excepthook = hook


# What an error of torch means in a script with an exact loader: a part of its text, and the name of the fault.
_MEANINGS = (
    ("does not require grad", "no gradient of the loss"),
    ("implicitly created only for scalar outputs", "many losses"),
    ("No space left on device", "disk"),
    ("PytorchStreamWriter failed", "disk"),
    ("by peer", "peer"),
    ("op.preamble.length", "peer"),
)


def named_error(error: BaseException) -> TrainError | None:
    """Return what an error of torch or of the system means, in a script with an exact loader; None if unknown."""
    if not (isinstance(error, RuntimeError | OSError) and _LOADERS):
        return None
    return next((fault(name) for text, name in _MEANINGS if text in str(error)), None)


def watch_end(loader: _Loader) -> None:
    """Let the script end with an error if the last iteration over a loader is left in the wrong place."""
    _LOADERS.add(loader)


def _report(error: SamebitsError, *, is_main: bool = True) -> None:
    """Print an error on rank 0, and once at the end: torchrun's report shows the file of the rank that failed first."""
    file = error_file(os.environ)
    if file:
        try:
            with open(file, "w", encoding="utf-8") as out:
                json.dump({"message": f"\n{error}", "timestamp": str(int(time.time()))}, out)
        except OSError:
            file = ""
    if is_main or not file:
        print(error, file=sys.stderr, flush=True)


def fault_at_end() -> TrainError | None:
    """Return what is wrong with how the script has left its last iteration, when it ends; None: nothing."""
    for loader in list(_LOADERS):
        try:
            if loader.loop.observer is None:
                loader.end_pass()  # an iterator that is still alive has not judged its iteration
        except TrainError:
            continue  # a pass that was whole has raised it to the script
    return next(
        (wrong for loop, wrong in _FAULTS if loop.habits.fault is wrong and loop.observer is None),
        None,
    )


def _check_end() -> None:
    if not has_failed() and (wrong := fault_at_end()) is not None:
        _report(wrong, is_main=all(loop.is_main for loop, _ in _FAULTS))
        sys.stdout.flush()
        # The only way to another exit code from here.
        os._exit(1)
