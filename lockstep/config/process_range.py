"""How many processes or machines there may be: `4`, or `2:4` for two to four. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import ConfigError

MAX_PROCS = 4096  # on one machine: more could be neither started nor stopped
MAX_NODES = 65536


@dataclass(frozen=True)
class ProcessRange:
    """From `least` to `most`, both included.

    Attributes:
        least: Fewer are not enough.
        most: As many as are wished for.
    """

    least: int
    most: int

    @property
    def is_elastic(self) -> bool:
        """Whether it may change."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.is_elastic else str(self.most)


@dataclass(frozen=True)
class RendezvousConfig:
    """How many nodes a world may have, and where they meet.

    Attributes:
        size: How many.
        endpoint: HOST:PORT; a launcher on HOST serves the store there.
        run_id: Keeps runs apart that meet at one place.
        join_timeout_s: How long to wait until enough nodes have come.
        last_call_s: How long a world with enough of them waits for more.
        node_timeout_s: A node that is silent for so long is taken to be lost.
        rank: Of this machine, where people have given each its own; node rank 0 is on HOST. None: they number
            themselves.
        folder: The run's, where the launchers find their key; None: only LOCKSTEP_KEY can give them one.
        has_own_id: The user has given the run id; otherwise it follows from the folder's name.
        shared: What all launchers of the run must have in common.
    """

    size: ProcessRange
    endpoint: str
    run_id: str
    join_timeout_s: float
    last_call_s: float
    node_timeout_s: float
    rank: int | None = None
    folder: Path | None = None
    has_own_id: bool = False
    shared: Mapping[str, str] = field(default_factory=dict)


def parse_range(text: str, option: str, limit: int = MAX_PROCS) -> ProcessRange:
    """Read `4` or `2:4`.

    Args:
        text: What was given.
        option: For what, to name in an error.
        limit: More there can't be.

    Raises:
        ConfigError: It is neither, the range is empty, or it is more than there can be.
    """
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text.strip())
    least = int(match[1]) if match else 0
    most = int(match[2] or match[1]) if match else 0
    if not 1 <= least <= most <= limit:
        raise ConfigError(
            f"{option} is {text!r}",
            allowed=f"a number from 1 to {limit}, or MIN:MAX such as 2:4",
            fix=f"Set {option} to a number in this range.",
        )
    return ProcessRange(least, most)
