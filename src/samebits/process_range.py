"""Numbers of processes or machines: `4`, or `2:4` for two to four. This module does not import torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samebits.errors import ConfigError

MAX_PROCS = 4096  # on one machine: more cannot be started or stopped reliably
MAX_NODES = 65536


@dataclass(frozen=True)
class ProcessRange:
    """A number of processes or machines, from `least` to `most` inclusive."""

    least: int  #: The minimum.
    most: int  #: The maximum.

    @property
    def is_elastic(self) -> bool:
        """Whether the number may change during a run."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.is_elastic else str(self.most)


@dataclass(frozen=True)
class RendezvousConfig:
    """Parameters of the rendezvous of several nodes."""

    size: ProcessRange  #: Number of nodes.
    endpoint: str  #: HOST:PORT. The launcher on HOST serves the store there.
    run_id: str  #: Distinguishes runs that use the same endpoint.
    join_timeout_s: float  #: Timeout until the minimum number of nodes has joined, seconds.
    last_call_s: float  #: How long a world with enough nodes waits for more, seconds.
    node_timeout_s: float  #: A node without a heartbeat for this long counts as lost, seconds.
    folder: Path  #: The run folder, from which the launchers read their key unless it is in SAMEBITS_KEY.
    #: This node's rank, if the user gave each node one; node rank 0 is on HOST. None: assigned automatically.
    rank: int | None = None
    has_own_id: bool = (
        False  #: Whether the user set the run id. If not, it is derived from the folder's name.
    )
    #: Values that must be equal for all launchers of the run, by name.
    shared: Mapping[str, str] = field(default_factory=dict)


def parse_range(text: str, option: str, limit: int = MAX_PROCS) -> ProcessRange:
    """Parse `4` or `2:4`, the value of an option, up to a limit.

    Raises:
        ConfigError: The text has neither form, the range is empty, or it exceeds the limit.
    """
    # At most nine digits: int() refuses numbers of thousands of digits with an error of its own.
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
