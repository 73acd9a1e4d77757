"""Train the parts of a sweep in processes of their own, several side by side, until all are done or the user stops.

    sweep ── samebits train --run-dir SWEEP/trial-0001 --resume auto      one world per trial
          └─ samebits train --run-dir SWEEP/trial-0002 --resume auto

Each trial is an ordinary run. It saves and exits if the sweep is stopped or killed, so all progress is in run folders.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from samebits.cluster.signals import StopSignal
from samebits.cores import core_ids
from samebits.data.micro_batches import num_micro_batches
from samebits.errors import SamebitsError
from samebits.launch.commands import SAMEBITS
from samebits.launch.subcommand import Subcommand
from samebits.report.format import clock
from samebits.run_views.state import state_of
from samebits.sweeps.agenda import Agenda
from samebits.sweeps.prefixes import Part
from samebits.sweeps.slots import Slot, combined
from samebits.sweeps.state_file import Sweep

OUTPUT = "output"  # folder of what the trials print; "logs" would make the sweep's folder look like a run's
_POLL_S = 0.1
_JUDGE_S = 1.0  # between looks at the evaluations of the trials
_MAX_ATTEMPTS = 4  # of a part whose processes are killed
_TAIL_BYTES = 4000
# A prefix trains no one's whole run: it never ends early, and is no run for a tracker.
_OF_PREFIX = ("stop_early.patience=null", "report.trackers=[]")


@dataclass
class _Active:
    part: Part
    slots: list[Slot]
    command: Subcommand
    output: BinaryIO
    started_at: float = field(default_factory=time.monotonic)
    is_stopping: bool = False

    def stop(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            with suppress(ProcessLookupError):
                self.command.process.send_signal(signal.SIGTERM)


class Runner:
    """Trains the parts of a sweep.

    Args:
        folder: The folder of the sweep.
        sweep: The sweep.
        slots: Places for trials.
        procs: Processes of each trial.
        hand_over: Fills the folder of a part with the state of its donor.
        notify: Reports a line.
        show: Shows how many parts are being trained, and how many trials have ended.
    """

    def __init__(
        self,
        folder: Path,
        sweep: Sweep,
        slots: Sequence[Slot],
        procs: int,
        hand_over: Callable[[Part], str],
        notify: Callable[[str], None],
        show: Callable[[int, int], None] = lambda active, done: None,
    ) -> None:
        self._folder, self._sweep, self._procs = folder, sweep, procs
        self._free, self._active = list(slots), list[_Active]()
        self._hand_over, self._notify, self._show = hand_over, notify, show
        self._attempts: dict[str, int] = {}

    def run(self, agenda: Agenda, stop: StopSignal) -> None:
        """Train until no part is left, or until a stop is requested; the parts then save and exit.

        Args:
            agenda: The parts.
            stop: Set by a signal.
        """
        judged_at = 0.0
        try:
            while True:
                is_time = time.monotonic() - judged_at > _JUDGE_S
                judged_at = time.monotonic() if is_time else judged_at
                for active in list(self._active):
                    if stop.requested or (is_time and agenda.is_pruned(active.part)):
                        active.stop()
                    if active.command.process.poll() is not None:
                        self._end(active, agenda, is_stopped=stop.requested)
                is_waiting = False if stop.requested else self._start_ready(agenda)
                if not self._active and not is_waiting:
                    return
                self._show(len(self._active), agenda.num_done)
                time.sleep(_POLL_S)
        finally:
            for active in self._active:  # after a bug in this process
                active.stop()
                active.command.process.wait()
                active.output.close()

    def _start_ready(self, agenda: Agenda) -> bool:
        """Start what can start; return whether a part waits for a process of an earlier sweep that is still saving."""
        if not self._free:
            return False
        is_waiting = False
        for part in agenda.candidates():
            if self._is_in_use(part):
                is_waiting = True
                continue
            try:
                self._start(part, agenda)
                agenda.started(part)
            except SamebitsError as error:
                agenda.failed(part, error.line)
            if not self._free:  # before the next one: a search chooses its settings when it is asked
                break
        return is_waiting

    def _is_in_use(self, part: Part) -> bool:
        run = self._folder / part.name
        return run.exists() and state_of(run, is_complete=False)[0] == "running"

    def _start(self, part: Part, agenda: Agenda) -> None:
        run = self._folder / part.name
        is_new = not (run / "config.yaml").exists()
        if is_new and part.donor is not None and (text := self._hand_over(part)):
            self._notify(text)
        output = self._folder / OUTPUT
        output.mkdir(exist_ok=True)
        error_file = output / f"{part.name}.json"
        error_file.unlink(missing_ok=True)
        slots = [self._free.pop(0) for _ in range(self._num_slots(part, agenda))]
        slot = combined(slots)
        # No link: the folder may be a stranger's.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = open(os.open(output / f"{part.name}.txt", flags, 0o666), "ab")  # noqa: SIM115 - closed by `_end`
        cores = core_ids()
        variables = {"CUDA_VISIBLE_DEVICES": slot.gpus} if slot.gpus is not None else {}
        try:
            if slot.cores:
                os.sched_setaffinity(0, slot.cores)  # inherited by the process that is started
            command = Subcommand(
                train_command(self._sweep, part, run, self._procs * len(slots)),
                error_file,
                output=file,
                variables=variables,
            )
        finally:
            if slot.cores:
                os.sched_setaffinity(0, cores)
        self._attempts[part.name] = self._attempts.get(part.name, 0) + 1
        self._active.append(_Active(part, slots, command, file))

    def _num_slots(self, part: Part, agenda: Agenda) -> int:
        """Return how many slots a part takes: a prefix takes those that no other part needs, as others wait for it."""
        if not part.is_prefix:
            return 1
        config = self._sweep.load(self._sweep.trials[part.trial]).config
        # Processes without a micro-batch would only wait in each step.
        most = num_micro_batches(config.global_batch, config.micro_batch) // self._procs
        num_ready = sum(1 for _ in agenda.candidates())
        return max(1, min(most, len(self._free) // num_ready))

    def _end(self, active: _Active, agenda: Agenda, *, is_stopped: bool) -> None:
        self._active.remove(active)
        self._free.extend(active.slots)
        active.output.close()
        part, code = active.part, active.command.process.returncode
        took = clock(time.monotonic() - active.started_at)
        is_complete = (self._folder / part.name / "result.json").exists()
        if is_complete or (code == 0 and part.is_prefix):
            agenda.ended(part)
            what = (
                f"the first {part.stop_after:,} steps, for several trials" if part.is_prefix else self._settings(part)
            )
            self._notify(f"{part.name}  done in {took}  {what}")
        elif agenda.is_pruned(part):
            agenda.ended(part)
            self._notify(f"{part.name}  pruned after {took}  {self._settings(part)}")
        elif is_stopped or self._is_in_use(part):
            agenda.interrupted(part)
        elif (code < 0 or code >= 128) and self._attempts[part.name] < _MAX_ATTEMPTS:
            self._notify(f"{part.name}  was stopped by signal {-code if code < 0 else code - 128}, and is resumed")
            agenda.interrupted(part)
        else:
            error = active.command.error(self._tail(part))
            reason = error.line if error is not None else f"it ended with exit code {code}"
            agenda.failed(part, reason)
            self._notify(f"{part.name}  failed: {reason}\n  output: {self._folder / OUTPUT / part.name}.txt")

    def _settings(self, part: Part) -> str:
        return " ".join(self._sweep.trials[part.trial])

    def _tail(self, part: Part) -> str:
        """Return the last line that a part has printed."""
        content = (self._folder / OUTPUT / f"{part.name}.txt").read_bytes()[-_TAIL_BYTES:]
        lines = content.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


def train_command(sweep: Sweep, part: Part, run: Path, procs: int) -> list[str]:
    """Return the command that trains a part, or resumes it.

    Args:
        sweep: The sweep.
        part: The part.
        run: Its run folder.
        procs: Number of processes.
    """
    command = [*SAMEBITS, "train", *sweep.arguments, *arguments_of(sweep, part)]
    return [*command, "--run-dir", str(run), "--resume", "auto", "--procs", str(procs)]


def arguments_of(sweep: Sweep, part: Part) -> list[str]:
    """Return the arguments of `samebits train` in which a part differs from others.

    Args:
        sweep: The sweep.
        part: The part.
    """
    own = sweep.trials[part.trial]
    return own if part.stop_after is None else [*own, *_OF_PREFIX, "--stop-after", str(part.stop_after)]
