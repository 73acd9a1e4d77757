"""The result of a verification: what was replayed, what differs, and what can have escaped."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from samebits.config.plain_file import read_plain
from samebits.errors import ConfigError, cannot_read, printable
from samebits.provenance.run_files import RunFiles
from samebits.verify.compare import Difference
from samebits.verify.segments import Segment, describe, escape_probability

_MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Verdict:
    """The result of a verification, of one verifier or merged."""

    root: str  #: The run's root; empty for a run that is not complete.
    num_steps: int  #: Number of steps of the run.
    segments: list[Segment] = field(default_factory=list)  #: All segments that the run was cut into.
    chosen: list[Segment] = field(default_factory=list)  #: The segments that were to be replayed, over all verifiers.
    #: Those of them that were this verifier's part; the same as `chosen` without --part.
    assigned: list[Segment] = field(default_factory=list)
    replayed: list[Segment] = field(default_factory=list)  #: The segments that were replayed without a difference.
    #: The first difference of each other segment, and what the run states wrongly as a whole.
    differences: list[Difference] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)  #: Files of the run that contradict each other.
    changes: list[str] = field(default_factory=list)  #: Code, data or versions that differ from the run's.
    notes: list[str] = field(default_factory=list)  #: What could not be checked.
    seconds: float = 0.0  #: Time of the replayed steps, seconds.
    #: Whether the root determined which segments to replay; otherwise the verifier named the steps.
    is_sample: bool = True
    has_log: bool = True  #: Whether the run has a record of its steps to compare with.

    @property
    def is_verified(self) -> bool:
        """Whether everything that was assigned was replayed, and nothing differs."""
        return not self.differences and not self.mismatches and set(self.assigned) <= set(self.replayed)

    @property
    def is_part(self) -> bool:
        """Whether this is the verdict of one of several verifiers, whose own steps are verified."""
        return self.is_verified and not set(self.chosen) <= set(self.replayed)

    @property
    def share(self) -> float:
        """Fraction of the run's steps that were replayed without a difference."""
        return sum(segment.num_steps for segment in self.replayed) / max(1, self.num_steps)

    def escapes(self, num_changed: int) -> float:
        """Return the probability that changes in `num_changed` segments escape such a choice of segments.

        A sample always has the last segment, so the changes are in others.
        """
        starts = {segment.start for segment in self.replayed}
        total, count = len(self.segments), min(len(starts), len(self.segments))
        if self.is_sample and self.segments and self.segments[-1].start in starts:
            total, count = total - 1, count - 1
        return escape_probability(total, count, num_changed) if total else 0.0

    def to_json(self) -> str:
        """Encode the verdict, for other programs and for `merge`."""
        return json.dumps({**asdict(self), "is_verified": self.is_verified, "share": self.share}, indent=1)


def read_verdict(path: Path) -> Verdict:
    """Read the verdict of another verifier. Raises ConfigError if the file is no verdict."""
    fix = "Give a file that samebits verify --json has written."
    try:
        plain: Any = json.loads(read_plain(path, _MAX_BYTES))
        # They follow from the fields, whatever the file states.
        plain = {name: value for name, value in plain.items() if name not in ("is_verified", "share")}
        return TypeAdapter(Verdict).validate_python(plain)
    except OSError as error:
        raise cannot_read(ConfigError, f"--merge {path}", error, fix) from None
    # Deeply nested JSON ends in a RecursionError.
    except (ValueError, ValidationError, AttributeError, RecursionError):
        raise ConfigError(f"--merge {path} is not a verdict", fix=fix) from None


def merge(verdicts: Sequence[Verdict]) -> Verdict:
    """Merge the verdicts of several verifiers of one run.

    Raises:
        ConfigError: They are of different runs, or of segments that do not fit together.
    """
    first = verdicts[0]
    for other in verdicts[1:]:
        if (other.root, other.num_steps) != (first.root, first.num_steps):
            raise ConfigError(
                "the verdicts are of different runs",
                given=f"roots {first.root[:16] or 'none'} and {other.root[:16] or 'none'}",
                fix="Merge verdicts of one run.",
            )
        if other.segments != first.segments:
            raise ConfigError(
                "the verifiers cut the run into different segments",
                given=f"{len(first.segments)} and {len(other.segments)} segments",
                cause="They had different checkpoints, or one used --from-scratch.",
                fix="Verify with the same checkpoints and options on each machine.",
            )

    def joined(name: str) -> list[Any]:
        return list(dict.fromkeys(each for verdict in verdicts for each in getattr(verdict, name)))

    return Verdict(
        root=first.root,
        num_steps=first.num_steps,
        segments=list(first.segments),
        chosen=sorted(joined("chosen")),
        assigned=sorted(joined("chosen")),
        replayed=sorted(joined("replayed")),
        differences=sorted(joined("differences"), key=lambda each: each.step),
        mismatches=joined("mismatches"),
        changes=joined("changes"),
        notes=joined("notes"),
        seconds=sum(verdict.seconds for verdict in verdicts),
        is_sample=all(verdict.is_sample for verdict in verdicts),
        has_log=all(verdict.has_log for verdict in verdicts),
    )


def check_is_of(verdict: Verdict, run: Path) -> None:
    """Check that a verdict is of the run in a folder.

    Raises:
        ConfigError: It is of another run.
        CheckpointError: The run's statement is damaged.
    """
    if not (files := RunFiles(run)).has_statement:
        return  # not complete: it has no root
    root = files.record.root
    if root != verdict.root:
        raise ConfigError(
            f"the verdicts are not of {run}",
            given=f"root {verdict.root or 'none'}",
            allowed=f"root {root}",
            fix="Name the run that they are of.",
        )


def lines(verdict: Verdict) -> list[str]:
    """Return the lines that report a verdict to the user."""
    failed = [f"  FAIL     {text}" for text in verdict.mismatches]
    for each in verdict.differences:
        what = f"step {each.step:,}: {each.name}"
        failed.append(f"  FAIL     {what} recorded {each.recorded}, replayed {each.replayed}")
    num_steps = sum(segment.num_steps for segment in verdict.replayed)
    compared = "samples, loss, gradient norm and weights" if verdict.has_log else "weights where a segment ends"
    passed = f"  ok       {num_steps:,} of {verdict.num_steps:,} steps: equal {compared}"
    changed = [f"  differs  {text}" for text in verdict.changes]
    notes = [f"  note     {text}" for text in verdict.notes]
    texts = [*([passed] if num_steps else []), *failed, *changed, *notes]
    # Values from a stranger's files are among them.
    return [printable(text).replace("\n", " ")[:500] for text in texts] + _conclusion(verdict)


def _conclusion(verdict: Verdict) -> list[str]:
    if verdict.mismatches or verdict.differences:
        text = "NOT verified: the run's files, or its replay, differ from its record"
        if verdict.differences and verdict.changes:
            text += "\n           code, data or hardware differ from the run's, which may be the cause"
        return [f"result     {text}"]
    missing = sorted(set(verdict.chosen) - set(verdict.replayed))
    if not verdict.is_verified:
        return [f"result     incomplete: {describe(missing)} were not replayed"]
    if verdict.is_part:
        return [
            f"verified   this part; {describe(missing)} are left to others",
            "           merge the parts: samebits verify RUN --merge FILE --merge FILE, each the output of --json",
        ]
    if verdict.share >= 1:
        return ["verified   every step of the run"]
    if not (verdict.is_sample and set(verdict.replayed) <= set(verdict.segments)):  # nothing was chosen at random
        return [f"verified   {describe(verdict.replayed)}: {verdict.share:.1%} of the steps"]
    few = max(2, len(verdict.segments) // 10)
    return [
        f"verified   {verdict.share:.1%} of the steps, {len(verdict.replayed)} of {len(verdict.segments)} segments",
        f"           a change in 1 segment is missed with probability {verdict.escapes(1):.2f}, "
        f"in {few} segments {verdict.escapes(few):.2f}",
    ]
