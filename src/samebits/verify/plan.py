"""What a replay has to do, and what it found: plain data that the launcher and the ranks exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samebits.verify.compare import Difference


@dataclass(frozen=True)
class Plan:
    """What to replay; equal on all ranks.

    Attributes:
        run: The run folder.
        overrides: Settings that differ from the run's and do not change the result, such as data.root.
        segments: (start, stop) of each segment.
        num_steps: Number of steps that the run has done.
        uses_log: Whether to compare each step with `steps.bin`, not only the weights at the end.
        has_content: Whether the log has digests of the samples' values.
        evaluations: Step -> metrics of the run's evaluations.
        weights_sha256: Hash of the final weights; empty if the run is not complete.
        dataset_info_sha256: Digest of what the recipe read from its data; empty if it was not recorded.
    """

    run: Path
    overrides: tuple[str, ...]
    segments: tuple[tuple[int, int], ...]
    num_steps: int
    uses_log: bool = True
    has_content: bool = False
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    weights_sha256: str = ""
    dataset_info_sha256: str = ""


@dataclass
class Replay:
    """The result of a replay.

    Attributes:
        replayed: (start, stop) of each segment that was replayed without a difference.
        differences: The first difference of each other segment, and what the run states wrongly as a whole.
        mismatches: Files of the run that cannot be read or used, one line each.
        notes: What could not be replayed for that reason, one line each.
        environment: The replay's environment: versions, processor and kernels.
        code: Digests of the replay's code.
        data: Digests of the replay's samples.
        seconds: Time of restoring, replaying and comparing, without the start of the processes, in seconds.
    """

    replayed: list[tuple[int, int]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> str:
        """Encode the verdict; `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Replay:
        """Decode what `to_json` wrote."""
        plain = json.loads(text)
        plain["replayed"] = [(int(start), int(stop)) for start, stop in plain["replayed"]]
        plain["differences"] = [Difference(**each) for each in plain["differences"]]
        return cls(**plain)
