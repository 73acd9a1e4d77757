"""The result of a verification: what was replayed, what differs, and what can have escaped."""

import json
from dataclasses import asdict, dataclass, field

from samebits.errors import printable
from samebits.verify.compare import Difference
from samebits.verify.segments import Segment, describe, escape_probability


@dataclass(frozen=True)
class Verdict:
    """The result of a verification."""

    root: str  #: The run's root; empty for a run that is not complete.
    num_steps: int  #: Number of steps of the run.
    segments: list[Segment] = field(default_factory=list)  #: All segments that the run was cut into.
    chosen: list[Segment] = field(default_factory=list)  #: The segments that were to be replayed.
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
        """Whether everything that was chosen was replayed, and nothing differs."""
        return not self.differences and not self.mismatches and set(self.chosen) <= set(self.replayed)

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
        """Encode the verdict, for other programs."""
        return json.dumps({**asdict(self), "is_verified": self.is_verified, "share": self.share}, indent=1)


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
    if not verdict.is_verified:
        missing = sorted(set(verdict.chosen) - set(verdict.replayed))
        return [f"result     incomplete: {describe(missing)} were not replayed"]
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
