"""What a replay has to do, and what it found: plain data that the launcher and the ranks exchange."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.verify.compare import Difference


@dataclass(frozen=True)
class Plan:
    """What to replay; equal on all ranks."""

    run: Path  #: The run folder.
    overrides: tuple[str, ...]  #: Settings that differ from the run's and do not change the result, such as data.root.
    segments: tuple[tuple[int, int], ...]  #: (start, stop) of each segment.
    num_steps: int  #: Number of steps that the run has done.
    uses_log: bool = True  #: Whether to compare each step with `steps.bin`, not only the weights at the end.
    has_content: bool = False  #: Whether the log has digests of the samples' values.
    #: Step -> metrics of the run's evaluations.
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    weights_sha256: str = ""  #: Hash of the final weights; empty if the run is not complete.
    dataset_info_sha256: str = ""  #: Digest of what the recipe read from its data; empty if it was not recorded.


@dataclass
class Replay:
    """The result of a replay."""

    #: (start, stop) of each segment that was replayed without a difference.
    replayed: list[tuple[int, int]] = field(default_factory=list)
    #: The first difference of each other segment, and what the run states wrongly as a whole.
    differences: list[Difference] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)  #: Files of the run that cannot be read or used, one line each.
    notes: list[str] = field(default_factory=list)  #: What could not be replayed for that reason, one line each.
    #: The replay's environment: versions, processor and kernels.
    environment: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)  #: Digests of the replay's code.
    data: dict[str, str] = field(default_factory=dict)  #: Digests of the replay's samples.
    seconds: float = 0.0  #: Time of restoring, replaying and comparing, without the start of the processes, in seconds.

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Replay":
        """Read a verdict from the plain values of its fields, as they are sent between processes."""
        return cls(**{**plain, "differences": [Difference(**each) for each in plain["differences"]]})
