"""Run the probes and the trials of a check, each in new processes, in a scratch folder."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samebits import scratch
from samebits.bench.processes import ask
from samebits.cluster import collectives
from samebits.config.schema import RunConfig
from samebits.errors import LaunchError
from samebits.process_range import ProcessRange
from samebits.replay.compare import first_difference, merge_ranks
from samebits.replay.judge import Finding, Outcome, judge, not_portable, num_portable
from samebits.replay.probe import probe
from samebits.replay.trace import Trace
from samebits.replay.trial import TIMEOUT_S, TIMEOUTS, Trial, run_trial
from samebits.report.format import counted

# Trials of several processes on this machine: the bits of a world do not depend on its device, so one GPU serves all.
REFERENCE = Trial("1 process")
OTHER_HASH = Trial("a process with another PYTHONHASHSEED", is_other_hash=True)

Progress = Callable[[str, int, int], None]  # called with (activity, done, total)


@dataclass(frozen=True)
class Report:
    """The result of a check."""

    findings: list[Finding]  #: The faults; empty if the recipe is exact.
    passed: list[str]  #: What was compared and is equal.
    seconds: float  #: How long it took.

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {
            "exact": not self.findings,
            "ok": self.passed,
            "findings": [asdict(finding) for finding in self.findings],
            "seconds": round(self.seconds, 1),
        }


def check(source: str, overrides: list[str], config: RunConfig, progress: Progress) -> Report:
    """Check a recipe.

    Args:
        progress: Called with (activity, done, total).

    Raises:
        SamebitsError: The recipe cannot be run, or processes cannot be started.
    """
    began = time.monotonic()
    with scratch.scratch_folder(Path(tempfile.gettempdir())) as folder:
        resumed = folder / "run"
        trials = [
            REFERENCE,
            Trial("1 process with 2 workers", workers=2),
            Trial("2 processes", procs=2, is_uneven=True, folder=resumed),
            Trial("3 processes with 2 workers", procs=3, workers=2, is_uneven=True),
            Trial("a stopped and resumed run", folder=resumed, is_resume=True),
        ]
        total = len(trials) + 2
        progress("reading the recipe", 0, total)
        notes = _answers(1, config, probe, source, overrides)[0]
        outcomes: list[Outcome] = []
        operations = notes["operations"]
        if "error" not in notes and operations and operations["refused"]:
            return Report(
                not_portable(operations), [num_portable(operations)], time.monotonic() - began
            )
        if "error" not in notes:
            given = [*TIMEOUTS, *overrides, *notes["settings"]]
            # Another one than this environment's, which the other trials have.
            seed = "1" if os.environ.get("PYTHONHASHSEED", "0") != "1" else "2"
            with in_interpreter(source, given, folder / "answer", seed) as wait:
                for done, trial in enumerate(trials, start=1):
                    progress(trial.name, done, total)
                    answers = _answers(trial.procs, config, run_trial, source, given, trial)
                    outcomes.append(_outcome(trial, answers, outcomes))
                progress(OTHER_HASH.name, total - 1, total)
                outcomes.append(_outcome(OTHER_HASH, [wait()], outcomes))
        findings, equal = judge(notes, outcomes)
    return Report(
        findings,
        [*equal, num_portable(operations)] if operations else equal,
        time.monotonic() - began,
    )


def _answers(
    procs: int, config: RunConfig, entry: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Run an entry in new processes and return what each rank returned."""
    failure = LaunchError(
        f"a trial on {counted(procs, 'process')} failed",
        # The launcher has reported a process that failed, but not one that wrote no answer.
        fix="See the error above. If there is none, train the recipe first: samebits train RECIPE epochs=1",
    )
    return ask(entry, arguments, ProcessRange(procs, procs), config, failure)


def _outcome(trial: Trial, answers: list[Any], before: Sequence[Outcome]) -> Outcome:
    failed = [answer for answer in answers if "error" in answer]
    if failed:
        # A rank that lost another one reports that; the other one has the reason.
        first = min(
            failed,
            key=lambda answer: (
                isinstance(answer["error"], LaunchError) and "lost" in str(answer["error"])
            ),
        )
        return Outcome(trial, None, first["error"], first["line"])
    trace, ranks = merge_ranks([Trace.from_plain(answer) for answer in answers])
    reference = before[0].record if before else None
    found = None if reference is None else first_difference(reference, trace)
    return Outcome(trial, trace, difference=found or ranks)


@contextmanager
def in_interpreter(
    source: str, overrides: list[str], file: Path, seed: str, num_steps: int = 0
) -> Iterator[Callable[[], Any]]:
    """Run a trial of one process in an interpreter of its own, beside the others.

    Args:
        source, overrides, file: The recipe, its settings, and a new file for the answer.
        seed: Its PYTHONHASHSEED.
        num_steps: See `Trial`.

    Yields:
        A function that waits for its answer.
    """
    arguments = json.dumps([source, overrides, str(file), num_steps])
    # -P: without it, -m puts the current folder first on sys.path, where a torch.py of a stranger may lie.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "samebits.replay.trial", arguments],
        env={**os.environ, "PYTHONHASHSEED": seed},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def wait() -> Any:
        with suppress(subprocess.TimeoutExpired):
            process.wait(TIMEOUT_S + num_steps * TIMEOUT_S)
        if not file.is_file():
            code = process.returncode
            end = (
                f"did not end for {TIMEOUT_S} s" if code is None else f"ended with exit code {code}"
            )
            raise LaunchError(
                f"the trial with PYTHONHASHSEED={seed} {end}",
                fix="Train the recipe for an epoch on one process, whose output names the cause.",
            )
        return collectives.decode(file.read_bytes())

    try:
        yield wait
    finally:
        process.kill()
        process.wait()
