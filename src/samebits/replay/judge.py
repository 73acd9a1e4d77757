"""From the traces of trials and the notes of probes to findings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from samebits.errors import SamebitsError, SampleError, printable
from samebits.frames import Line
from samebits.plain_file import short_path
from samebits.replay.cause import ERROR, UNKNOWN, explain
from samebits.replay.compare import (
    BUFFERS,
    EVALUATION,
    FORWARD,
    GRADIENTS,
    INPUT,
    LOSS,
    OPTIMIZER,
    ROOT,
    SAMPLES,
    STAGES,
    START,
    WEIGHTS,
    TraceDifference,
)
from samebits.replay.sources import Suspect
from samebits.replay.trace import Trace
from samebits.replay.trial import RAISED, Trial

# Findings of a check: what differs, its cause, and what to do.


@dataclass(frozen=True)
class Finding:
    """One fault of a recipe."""

    what: str  #: What differs, where: "forward of `encoder.noise` differs between 1 and 2 processes at step 1".
    kind: str  #: A word for the cause, for programs: "generator", "clock", "loss is a sum".
    cause: str  #: Why, for the user.
    fix: str  #: What to do, an imperative sentence.
    file: str = ""  #: The user's source file; empty if it is not known.
    line: int = 0  #: The line in it.
    #: Other lines that may have a part in it, each "FILE:LINE what".
    others: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        """FILE:LINE, or an empty text."""
        return f"{short_path(Path(self.file))}:{self.line}" if self.file else ""


def not_portable(operations: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each operation of `listed_operations` that has no portable form."""
    found = []
    for each in operations["refused"]:
        file, _, line = each.get("where", "").partition(": ")[0].rpartition(":")
        place = (file, int(line)) if line.isdigit() else (file, 0)
        found.append(Finding(each["what"], "not portable", each["cause"], each["fix"], *place))
    return found


def num_portable(operations: Mapping[str, Any]) -> str:
    """Return the number of portable operations, for the report."""
    return f"{operations['portable']} portable operations"


def table(passed: Sequence[str], findings: Sequence[Finding]) -> Table:
    """Lay the results out for the console."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    if passed:
        rows.add_row(Text("  ok", "green"), ", ".join(passed))
    for finding in findings:
        cause = f"{finding.cause} ({finding.place})" if finding.place else finding.cause
        for name, style, text in (
            ("FAIL", "bold red", finding.what),
            ("cause", "bold", cause),
            ("fix", "bold", finding.fix),
            ("or", "bold", "\n".join(finding.others)),
        ):
            if text:
                rows.add_row(Text(f"  {name}", style), Text(printable(text), overflow="fold"))
    return rows


NONDETERMINISTIC = "does not have a deterministic implementation"
SUM = "loss is a sum"
OPERATION = "operation"
# What is compared, and the stage of a difference in it.
ASPECTS = {
    "sample order": START,
    "samples": SAMPLES,
    "forward": FORWARD,
    "loss": LOSS,
    "gradients": GRADIENTS,
    "buffers": BUFFERS,
    "optimizer": OPTIMIZER,
    "evaluation": EVALUATION,
}
_STAGES = (ERROR, *STAGES, EVALUATION)
_TOLERANCE = 1e-3
_NOUNS = {
    START: "the",
    SAMPLES: "training sample",
    FORWARD: "forward of",
    LOSS: "the loss",
    GRADIENTS: "the gradient of",
    BUFFERS: "buffer",
    WEIGHTS: "parameter",
    OPTIMIZER: "the optimizer's",
    EVALUATION: "the evaluation's",
}


@dataclass(frozen=True)
class Outcome:
    """The result of one trial."""

    trial: Trial  #: The trial.
    record: Trace | None  #: The trace of the whole world; None if it failed.
    error: SamebitsError | None = None  #: The error of the first rank that failed.
    line: Line | None = None  #: Its line in the user's code.
    #: The first difference from the reference, or between the ranks of this world.
    difference: TraceDifference | None = None


def judge(notes: Mapping[str, Any], outcomes: Sequence[Outcome]) -> tuple[list[Finding], list[str]]:
    """Return the faults of a recipe, none if it is exact; and the aspects of a run that were compared and are equal.

    Args:
        notes: What the probes have found; see `probe`.
        outcomes: The results of the trials, the reference first. Empty if the probes failed.

    Raises:
        SamebitsError: The recipe cannot be run at all.
    """
    error = notes.get("error")
    if error is not None and NONDETERMINISTIC in str(error):
        return [_operation(str(error), notes.get("line"))], _passed(SAMPLES)
    reference = outcomes[0].error if outcomes else None
    if isinstance(reference, SampleError) or RAISED in str(reference):
        error = reference  # one process alone fails, so there is nothing to compare
    if error is not None:
        raise error
    sums = _sums(notes["losses"])
    stage, findings = _first(notes, outcomes)
    passed = list(ASPECTS) if stage is None else _passed(stage)
    return findings + sums, [name for name in passed if not (sums and name == "loss")]


def _passed(stage: str) -> list[str]:
    """Return the aspects before the stage of the first difference."""
    return [name for name in ASPECTS if _STAGES.index(ASPECTS[name]) < _STAGES.index(stage)]


def _first(
    notes: Mapping[str, Any], outcomes: Sequence[Outcome]
) -> tuple[str | None, list[Finding]]:
    """Return the stage of the first difference, and a finding for it. Later differences may follow from it."""
    seen = []
    failed = []
    for outcome in outcomes:
        if outcome.difference is not None:
            seen.append((outcome.difference, f"{outcomes[0].trial.name} and {outcome.trial.name}"))
        elif outcome.error is not None:
            failed.append((outcome, outcome.error))
    for stage, name in notes["again"]:
        step = None if stage == EVALUATION else 0
        difference = TraceDifference(stage, step, None, name)
        seen.append((difference, "two computations in one process"))
    if seen:
        first, between = min(seen, key=lambda each: each[0].place)
        stage = first.stage
        what = _describe(first, between)
    elif failed:
        stage = ERROR
        what = f"{failed[0][0].trial.name}: {failed[0][1].what}"
    else:
        return None, []
    causes, cause, fix = explain(notes, stage, _where(outcomes))
    if stage == ERROR and (failed[0][0].line or not causes):
        return stage, [_of_error(what, *failed[0])]
    best, *others = causes or [Suspect(UNKNOWN, "")]
    lines = [
        f"{each.what} ({short_path(Path(each.file))}:{each.line})"
        for each in others[:3]
        if each.file and (each.file, each.line) != (best.file, best.line)
    ]
    return stage, [Finding(what, best.kind, cause, fix, best.file, best.line, lines)]


def _where(outcomes: Sequence[Outcome]) -> str:
    """Return which trials differ or fail; see `explain`."""
    differing = [each.trial for each in outcomes if each.error or each.difference]
    for where, name in (("hash", "is_other_hash"), ("resume", "is_resume"), ("worker", "workers")):
        if all(getattr(trial, name) for trial in differing):
            return where
    # If the interpreter of its own differs too, a new process is enough.
    return "process" if any(trial.is_other_hash for trial in differing) else "world"


def _describe(difference: TraceDifference, between: str) -> str:
    noun = "the input of" if difference.detail == INPUT else _NOUNS[difference.stage]
    is_model = difference.stage == FORWARD and difference.name == ROOT
    name = "the model" if is_model else f"`{difference.name}`"
    step = "" if difference.step is None else f" at step {difference.step + 1:,}"
    if difference.stage == EVALUATION and difference.detail:
        step = f": {difference.detail}"
    return f"{noun} {name} differs between {between}{step}"


def _of_error(what: str, outcome: Outcome, error: SamebitsError) -> Finding:
    cause = error.slots.get("cause") or error.slots.get("given") or error.what
    fix = error.slots.get("fix", "Correct the recipe.")
    return Finding(what, ERROR, " ".join(cause.split()), fix, *outcome.line or ("", 0))


def _operation(text: str, line: Line | None) -> Finding:
    name = text.partition(NONDETERMINISTIC)[0].rpartition(":")[2].strip() or "an operation"
    return Finding(
        f"{name} has no deterministic form",
        OPERATION,
        "its result can differ from call to call",
        "Use another operation; torch.use_deterministic_algorithms lists those without a deterministic form.",
        *line or ("", 0),
    )


def _sums(losses: Mapping[str, Sequence[float]]) -> list[Finding]:
    """Return a finding for each term of the loss that is a sum over the samples."""
    return [
        Finding(
            f"loss term `{name}` is {whole:.6g} for a batch, {first:.6g} and {second:.6g} for its halves",
            SUM,
            "the loss is a sum over the samples, so it grows with micro_batch",
            "Return the mean over the batch's samples (reduction='mean').",
        )
        for name, (whole, first, second) in losses.items()
        # With a tolerance: the halves have other roundings than the whole.
        if whole and math.isfinite(whole)
        if math.isclose(whole, first + second, rel_tol=_TOLERANCE)
    ]
