"""From the records of trials and probes to findings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from samebits.errors import SamebitsError, SampleError, printable
from samebits.plain_file import short_path
from samebits.replay import compare
from samebits.replay.cause import UNKNOWN, Cause, candidates, explain
from samebits.replay.compare import INPUT, ROOT, TraceDifference
from samebits.replay.context import REPLACED, WRITTEN
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

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON."""
        return asdict(self)


def not_portable(operations: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each operation of `listed_operations` that has no portable form."""
    found = []
    for each in operations["refused"]:
        file, _, line = each.get("where", "").partition(": ")[0].rpartition(":")
        found.append(
            Finding(
                each["what"],
                "not portable",
                each["cause"],
                each["fix"],
                file,
                int(line) if line.isdigit() else 0,
            )
        )
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
        slots = Table.grid(padding=(0, 2, 0, 0))
        for name, text in (("cause", cause), ("fix", finding.fix)):
            slots.add_row(Text(name, "bold"), Text(printable(text), overflow="fold"))
        if finding.others:
            slots.add_row(
                Text("or", "bold"), Text(printable("\n".join(finding.others)), overflow="fold")
            )
        rows.add_row(
            Text("  FAIL", "bold red"), Group(Text(printable(finding.what), overflow="fold"), slots)
        )
    return rows


NONDETERMINISTIC = "does not have a deterministic implementation"
SUM = "loss is a sum"
MERGE = "metric merge"
OPERATION = "operation"
ASPECTS = (
    "sample order",
    "samples",
    "forward",
    "loss",
    "gradients",
    "buffers",
    "optimizer",
    "evaluation",
)
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """The result of one trial."""

    trial: Trial  #: The trial.
    record: Trace | None  #: The trace of the whole world; None if it failed.
    error: SamebitsError | None = None  #: The error of the first rank that failed.
    line: tuple[str, int] | None = None  #: Its FILE and LINE in the user's code.
    ranks: TraceDifference | None = None  #: The first difference between the ranks of this world.


def judge(notes: Mapping[str, Any], outcomes: Sequence[Outcome]) -> tuple[list[Finding], list[str]]:
    """Return the faults of a recipe, none if it is exact; and the aspects of a run that were compared and are equal.

    Args:
        outcomes: The results of the trials, the reference first. Empty if the probes failed.

    Raises:
        SamebitsError: The recipe cannot be run at all.
    """
    if (error := notes.get("error")) is not None:
        if NONDETERMINISTIC in str(error):
            return [_operation(str(error), notes.get("line"))], _passed([], compare.SAMPLES)
        raise error
    reference = outcomes[0].error if outcomes else None
    if reference is not None and (
        isinstance(reference, SampleError) or reference.what.startswith(RAISED)
    ):
        raise reference  # one process alone fails, so there is nothing to compare
    merges = _merges(notes)
    first = _first(notes, outcomes)
    stage = None if first is None else first[0].stage
    found = [*_sums(notes["checks"].get("loss", {})), *merges]
    if first is not None and not (
        merges and stage == compare.EVALUATION
    ):  # then it is a consequence
        found.insert(0, _differing(notes, outcomes, *first))
    unlike: dict[tuple[str, str, int], Finding] = {}
    for each in found:
        unlike.setdefault((each.kind, each.file, each.line or len(unlike)), each)
    findings = list(unlike.values())
    return findings, _passed(findings, stage)


def _passed(findings: Sequence[Finding], stage: str | None) -> list[str]:
    """Return the aspects before the stage of the first difference, without those of other findings."""
    order = {
        compare.START: 0, compare.SAMPLES: 1, compare.FORWARD: 2, compare.LOSS: 3, compare.GRADIENTS: 4,
        compare.BUFFERS: 5, compare.WEIGHTS: 6, compare.OPTIMIZER: 6, compare.EVALUATION: 7,
    }  # fmt: skip
    aspects = list(ASPECTS if stage is None else ASPECTS[: order[stage]])
    lost = {SUM: "loss", MERGE: "evaluation"}
    return [
        name for name in aspects if name not in {lost.get(finding.kind) for finding in findings}
    ]


def _differing(
    notes: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    difference: TraceDifference,
    where: str,
    between: str,
) -> Finding:
    """Return a finding for the first difference, from which all later ones may follow; see `_first`."""
    causes = candidates(dict(notes), difference.stage, where)
    best = causes[0] if causes else None
    error = next((outcome for outcome in outcomes if outcome.error is not None), None)
    if best is None and error is not None and error.error is not None:
        return _of_error(error, error.error)
    text, fix = explain(best, difference.stage, where)
    cause = best or Cause(UNKNOWN, "")
    others = [
        f"{each.what} ({short_path(Path(each.file))}:{each.line})"
        for each in causes[1:4]
        if each.file and (each.file, each.line) != (cause.file, cause.line)
    ]
    return Finding(
        _describe(difference, between), cause.kind, text, fix, cause.file, cause.line, others
    )


def _first(
    notes: Mapping[str, Any], outcomes: Sequence[Outcome]
) -> tuple[TraceDifference, str, str] | None:
    """Return the first difference, where it shows (see `causes.candidates`), and between what."""
    checks = notes["checks"]
    own = {each["kind"]: each for each in notes["state"] if each["kind"] in (REPLACED, WRITTEN)}
    for kind, each in own.items():
        name = "a buffer" if kind == REPLACED else "a parameter"
        return (
            TraceDifference(compare.FORWARD, 0, 0, each["path"], kind),
            "again",
            f"{name} is changed by it",
        )
    by_trial = _by_trial(outcomes)
    first = min(by_trial.values(), key=lambda each: each.place, default=None)
    for name in ("training", "validation"):
        stage = compare.SAMPLES if name == "training" else compare.EVALUATION
        if checks.get(f"reread {name}"):
            sample = str(checks[f"reread {name}"][0])
            return (
                TraceDifference(stage, 0, None, sample, name),
                "again",
                "two readings with the same key",
            )
        if checks.get(f"kept {name}") and (first is None or first.place >= (0, 1)):
            return (
                TraceDifference(stage, 0, None, "", name),
                "world",
                "a new dataset and one that was read before",
            )
        if first is not None and first.stage in (compare.START, compare.SAMPLES):
            break
    if first is None or first.stage not in (compare.START, compare.SAMPLES):
        repeat = checks.get("repeat")
        if repeat is not None:
            stage, name, detail = repeat
            return (
                TraceDifference(stage, 0, 0, name, detail),
                "again",
                "two passes of one micro-batch",
            )
    if first is None:
        return None
    showing = [name for name, each in by_trial.items() if each.place <= first.place]
    trials = {outcome.trial.name: outcome.trial for outcome in outcomes}
    return (
        first,
        _where([trials[name] for name in by_trial], outcomes),
        f"{outcomes[0].trial.name} and {showing[0]}",
    )


def _by_trial(outcomes: Sequence[Outcome]) -> dict[str, TraceDifference]:
    """Return the first difference of each trial from the reference."""
    found: dict[str, TraceDifference] = {}
    for outcome in outcomes:
        difference = outcome.ranks
        if (
            outcome.record is not None
            and outcomes[0].record is not None
            and outcome is not outcomes[0]
        ):
            difference = compare.first_difference(outcomes[0].record, outcome.record) or difference
        elif outcome.error is not None:
            difference = TraceDifference(
                _stage_of(outcome.error), 0, None, "", str(outcome.error.what)
            )
        if difference is not None:
            found[outcome.trial.name] = difference
    return found


def _stage_of(error: SamebitsError) -> str:
    """Return the stage of the first thing that differs, from the error of a comparison."""
    given = f"{error.what}\n{error.slots.get('given', '')}"
    for text, stage in (
        ("initial weights", compare.START), ("sample", compare.SAMPLES), ("a trial micro-batch", compare.FORWARD),
        ("buffer", compare.FORWARD), ("metric", compare.EVALUATION), ("evaluated", compare.EVALUATION),
    ):  # fmt: skip
        if text in given:
            return stage
    return compare.START


def _where(differing: Sequence[Trial], outcomes: Sequence[Outcome]) -> str:
    others = [outcome.trial for outcome in outcomes[1:]]
    if all(trial.is_other_hash for trial in differing):
        return "hash"
    if all(trial.is_resume for trial in differing):
        return "resume"
    if all(trial.workers for trial in differing):
        return "worker"
    # A new process of the reference's kind differs too: the interpreter of its own, or the resumed process.
    if len(differing) >= len(others) or any(trial.is_other_hash for trial in differing):
        return "process"
    return "world"


def _describe(difference: TraceDifference, between: str) -> str:
    step = f" at step {difference.step + 1:,}" if difference.step is not None else ""
    name = f"`{difference.name}`" if difference.name else ""
    if difference.detail in (REPLACED, WRITTEN):
        return f"forward of the model {'replaces buffer' if difference.detail == REPLACED else 'writes into'} {name}"
    if difference.stage == compare.SAMPLES:
        which = f" {difference.name}" if difference.name else "s"
        return f"training sample{which} differ{'s' if difference.name else ''} between {between}"
    if difference.stage == compare.FORWARD:
        module = name if difference.name != ROOT else "the model"
        what = f"the input of {module}" if difference.detail == INPUT else f"forward of {module}"
        return f"{what} differs between {between}{step}"
    if difference.stage == compare.EVALUATION:
        if difference.detail == "validation":
            return f"validation sample {difference.name} differs between {between}".replace(
                "  ", " "
            )
        return f"the evaluation's {name} differs between {between}: {difference.detail}"
    nouns = {compare.LOSS: "the loss", compare.GRADIENTS: "the gradient of", compare.BUFFERS: "buffer",
             compare.WEIGHTS: "parameter", compare.OPTIMIZER: "the optimizer's", compare.START: "the"}  # fmt: skip
    return f"{nouns[difference.stage]} {name} differs between {between}{step}"


def _of_error(outcome: Outcome, error: SamebitsError) -> Finding:
    cause = error.slots.get("cause") or error.slots.get("given") or error.what
    file, line = outcome.line or ("", 0)
    what = f"{outcome.trial.name}: {error.what}"
    return Finding(
        what,
        "error",
        " ".join(cause.split()),
        error.slots.get("fix", "Correct the recipe."),
        file,
        line,
    )


def _operation(text: str, line: Any) -> Finding:
    name = text.partition(NONDETERMINISTIC)[0].rpartition(":")[2].strip() or "an operation"
    file, number = line or ("", 0)
    return Finding(
        f"{name} has no deterministic form",
        OPERATION,
        "its result can differ from call to call",
        "Use another operation; torch.use_deterministic_algorithms lists those without a deterministic form.",
        file,
        number,
    )


def _sums(losses: Mapping[str, Sequence[float]]) -> list[Finding]:
    found = []
    for name, (whole, first, second) in losses.items():
        scale = max(abs(whole), abs(first), abs(second))
        # With a tolerance: a mean of halves has other roundings than that of the whole.
        is_mean = math.isclose(
            whole, (first + second) / 2, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * scale
        )
        if scale > 0 and not is_mean and math.isclose(whole, first + second, rel_tol=_TOLERANCE):
            found.append(
                Finding(
                    f"loss term `{name}` is {whole:.6g} for a batch, {first:.6g} and {second:.6g} for its halves",
                    SUM,
                    "the loss is a sum over the samples, so it grows with micro_batch",
                    "Return the mean over the batch's samples (reduction='mean').",
                )
            )
    return found


def _merges(notes: Mapping[str, Any]) -> list[Finding]:
    metric = notes["checks"].get("metric")
    if metric is None:
        return []
    one = metric["results"]["1"]
    for size, other in metric["results"].items():
        # As text: it distinguishes all bits of a float, and NaN is equal to itself.
        if isinstance(other, str):  # the text of an exception
            text = other
        elif other == one:
            continue
        else:
            name = next(name for name in {**one, **other} if one.get(name) != other.get(name))
            text = f"{name} is {one.get(name)} on 1 process, {other.get(name)} on {size}"
        file, line = metric["line"] or ("", 0)
        return [
            Finding(
                f"metric {metric['name']} does not merge: {text}",
                MERGE,
                "merge() does not give what add() over all samples gives",
                "Count integers in add, and add the counts up in merge.",
                file,
                line,
            )
        ]
    return []
