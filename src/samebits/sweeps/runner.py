"""Train the trials of a sweep in processes of their own, several side by side, until all are done or the user stops.

    sweep ── samebits train --run-dir SWEEP/trial-0001 --resume auto      one world per trial
          └─ samebits train --run-dir SWEEP/trial-0002 --resume auto

Each trial is an ordinary run. It saves and exits if the sweep is stopped or killed, so all progress is in run folders.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from samebits.cluster.signals import StopSignal
from samebits.config import document
from samebits.config.schema import RunConfig
from samebits.cores import core_ids, num_cores, visible_gpus
from samebits.errors import ConfigError, SamebitsError
from samebits.launch.subcommand import SAMEBITS, Subcommand
from samebits.provenance.run_files import RunFiles
from samebits.recipes.trust import check_tracker_files
from samebits.report.format import clock, is_lower_better
from samebits.run_views.summary import RunSummary, read_summary, state_of
from samebits.run_views.values import text
from samebits.sweeps.state_file import Sweep, settings_of, trial_name

# The trials of a sweep in rows, from their run folders.


@dataclass
class TrialRow:
    """A trial in one row."""

    number: int  #: Its number, from 0.
    summary: RunSummary  #: Its run.
    #: The settings in which it differs from others, as they were typed.
    values: dict[str, Any] = field(default_factory=dict)
    chain: str = ""  #: The last link of its record of steps; empty if it is not complete.

    def to_plain(self) -> dict[str, Any]:
        """Return the trial as plain JSON."""
        run = self.summary
        return {
            "trial": run.name,
            "state": run.state,
            "reason": run.reason,
            "settings": self.values,
            "step": run.step,
            "metrics": run.metrics,
            "best": run.best,
            "weights_sha256": run.weights_sha256,
            "chain": self.chain,
            "took_s": run.took_s,
        }


def read_trials(
    folder: Path, sweep: Sweep, reasons: Mapping[str, str] | None = None
) -> list[TrialRow]:
    """Return the trials of a sweep, by number."""
    trials = []
    for number, overrides in enumerate(sweep.trials):
        run = folder / trial_name(number)
        typed = {name: _parsed(value) for name, value in settings_of(overrides).items()}
        if (run / "config.yaml").is_file():
            summary = read_summary(run)
            summary.settings = {**summary.settings, **typed}
        else:
            reason = (reasons or {}).get(run.name, "")
            summary = RunSummary(run, state="failed" if reason else "waiting", reason=reason)
            summary.settings = dict(typed)
        summary.recipe = ""  # that of all trials
        # A SHA-256 has 64 digits; the file may be a stranger's.
        chain = text(RunFiles(run, is_tolerant=True).result.get("chain"))[:64]
        trials.append(TrialRow(number, summary, typed, chain))
    return trials


def ranked(trials: list[TrialRow]) -> list[TrialRow]:
    """Return the trials, best metric first; those without one are last."""
    metric = next((trial.summary.monitor for trial in trials if trial.summary.monitor), "")
    sign = 1.0 if is_lower_better(metric) else -1.0

    def place(trial: TrialRow) -> tuple[bool, float, int]:
        value = trial.summary.metrics.get(metric)
        return value is None, 0.0 if value is None else sign * value, trial.number

    return sorted(trials, key=place)


def _parsed(value: str) -> Any:
    try:
        parsed = document.parse_value(value)
    except ConfigError:
        return value
    return parsed if isinstance(parsed, bool | int | float | str) or parsed is None else value


OUTPUT = "output"  # folder of what the trials print; "logs" would make the sweep's folder look like a run's
_POLL_S = 0.1
_MAX_ATTEMPTS = 4  # of a trial whose processes are killed
_TAIL_BYTES = 4000


@dataclass(frozen=True)
class TrialSlot:
    """A place for one trial at a time."""

    #: The CPU cores that its processes may use; empty: all of this process's.
    cores: frozenset[int] = frozenset()
    gpus: str | None = None  #: Value of CUDA_VISIBLE_DEVICES; None: as for this process.


def make_slots(jobs: int | None, procs: int, config: RunConfig) -> list[TrialSlot]:
    """Divide this machine's cores and GPUs.

    Args:
        jobs: Number of trials side by side; None: as many as there are GPUs, or cores, for their processes.

    Raises:
        ConfigError: There are too few GPUs.
    """
    gpus = visible_gpus() if config.device != "cpu" else []
    if gpus:
        num_slots = jobs or max(1, len(gpus) // procs)
        if num_slots * procs > len(gpus):
            raise ConfigError(
                f"{num_slots} trials of {procs} process{'es' if procs > 1 else ''} need {num_slots * procs} GPUs, and "
                f"this machine has {len(gpus)}",
                fix=f"Set --jobs {max(1, len(gpus) // procs)}, or fewer --procs.",
            )
    else:
        num_slots = jobs or max(1, num_cores() // (procs * config.num_threads))
    cores = sorted(core_ids())
    share = len(cores) // num_slots
    # Without cores of their own, each trial would start DataLoader workers for all cores.
    is_divided = num_slots > 1 and share > 0
    return [
        TrialSlot(
            frozenset(cores[index * share : (index + 1) * share]) if is_divided else frozenset(),
            ",".join(gpus[index * procs : (index + 1) * procs]) if gpus else None,
        )
        for index in range(num_slots)
    ]


@dataclass
class _Active:
    trial: int
    slot: TrialSlot
    command: Subcommand
    output: BinaryIO
    started_at: float = field(default_factory=time.monotonic)
    is_stopping: bool = False

    def stop(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            # It may have ended since the last look.
            with suppress(ProcessLookupError):
                self.command.process.send_signal(signal.SIGTERM)


class Runner:
    """Trains the trials of a sweep."""

    def __init__(
        self,
        folder: Path,
        sweep: Sweep,
        slots: Sequence[TrialSlot],
        procs: int,
        notify: Callable[[str], None],
        show: Callable[[int, int], None],
    ) -> None:
        self._folder = folder
        self._sweep = sweep
        self._procs = procs
        self._free = list(slots)
        self._active = list[_Active]()
        self._notify = notify
        self._show = show
        self._attempts: dict[int, int] = {}
        self._failed: dict[str, str] = {}  # name of the trial -> reason
        self._waiting = [n for n in range(len(sweep.trials)) if not self._is_done(n)]

    def run(self, stop: StopSignal) -> dict[str, str]:
        """Train until no trial is left, or until a stop is requested; the trials then save and exit.

        Returns:
            Why trials failed, by name.
        """
        try:
            while True:
                # A copy, since `_end` removes from the list.
                for active in list(self._active):
                    if stop.requested:
                        active.stop()
                    if active.command.process.poll() is not None:
                        self._end(active, is_stopped=stop.requested)
                is_waiting = False if stop.requested else self._start_ready()
                if not self._active and not is_waiting:
                    return self._failed
                self._show(
                    len(self._active), sum(map(self._is_done, range(len(self._sweep.trials))))
                )
                time.sleep(_POLL_S)
        finally:
            for active in self._active:  # after a bug in this process
                active.stop()
                active.command.process.wait()
                active.output.close()

    def _is_done(self, trial: int) -> bool:
        name = trial_name(trial)
        return name in self._failed or (self._folder / name / "result.json").exists()

    def _start_ready(self) -> bool:
        """Start what can start; return whether a trial waits for a process of an earlier sweep that is still saving."""
        is_waiting = False
        for trial in list(self._waiting) if self._free else ():
            if not self._free:
                break
            if self._is_in_use(trial):
                is_waiting = True
                continue
            self._waiting.remove(trial)
            try:
                self._start(trial)
            except SamebitsError as error:
                self._failed[trial_name(trial)] = error.line
        return is_waiting

    def _is_in_use(self, trial: int) -> bool:
        run = self._folder / trial_name(trial)
        return run.exists() and state_of(run, is_complete=False)[0] == "running"

    def _start(self, trial: int) -> None:
        # The user must trust the trackers of a trial, whose settings `train` would take as typed by the user. They are
        # loaded as `train` loads them: their texts can spell a tracker in many ways.
        check_tracker_files(self._sweep.load(self._sweep.trials[trial]).config.report.trackers, [])
        name = trial_name(trial)
        slot = self._free[0]
        output = self._folder / OUTPUT
        output.mkdir(exist_ok=True)
        error_file = output / f"{name}.json"
        # An error of an earlier attempt must not be taken for one of this attempt.
        error_file.unlink(missing_ok=True)
        # No link: the folder may be a stranger's.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = open(os.open(output / f"{name}.txt", flags, 0o666), "ab")  # noqa: SIM115 - closed by `_end`
        cores = core_ids()
        variables = {"CUDA_VISIBLE_DEVICES": slot.gpus} if slot.gpus is not None else {}
        try:
            if slot.cores:
                os.sched_setaffinity(0, slot.cores)  # inherited by the process that is started
            command = Subcommand(
                train_command(self._sweep, trial, self._folder / name, self._procs),
                error_file,
                output=file,
                variables=variables,
            )
        finally:
            if slot.cores:
                os.sched_setaffinity(0, cores)
        self._attempts[trial] = self._attempts.get(trial, 0) + 1
        self._free.remove(slot)
        self._active.append(_Active(trial, slot, command, file))

    def _end(self, active: _Active, *, is_stopped: bool) -> None:
        self._active.remove(active)
        self._free.append(active.slot)
        active.output.close()
        trial = active.trial
        name = trial_name(active.trial)
        code = active.command.process.returncode
        took = clock(time.monotonic() - active.started_at)
        settings = " ".join(self._sweep.trials[trial])
        # First, also after a stop: the trial may have been complete before the signal came.
        if (self._folder / name / "result.json").exists():
            self._notify(f"{name}  done in {took}  {settings}")
        elif is_stopped or self._is_in_use(trial):
            self._waiting.append(trial)
        # Exit codes above 128 stand for a signal too, as in a shell.
        elif (code < 0 or code >= 128) and self._attempts[trial] < _MAX_ATTEMPTS:
            self._notify(
                f"{name}  was stopped by signal {-code if code < 0 else code - 128}, and is resumed"
            )
            self._waiting.append(trial)
        else:
            error = active.command.error(self._tail(name))
            reason = error.line if error is not None else f"it ended with exit code {code}"
            self._failed[name] = reason
            self._notify(f"{name}  failed: {reason}\n  output: {self._folder / OUTPUT / name}.txt")

    def _tail(self, name: str) -> str:
        """Return the last line that a trial has printed."""
        content = (self._folder / OUTPUT / f"{name}.txt").read_bytes()[-_TAIL_BYTES:]
        # The slice may begin inside a character.
        lines = content.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


def train_command(sweep: Sweep, trial: int, run: Path, procs: int) -> list[str]:
    """Return the command that trains a trial, or resumes it."""
    command = [*SAMEBITS, "train", *sweep.arguments, *sweep.trials[trial]]
    return [*command, "--run-dir", str(run), "--resume", "auto", "--procs", str(procs)]
