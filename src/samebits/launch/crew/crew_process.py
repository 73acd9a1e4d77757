"""One process of a crew: its environment, its start through the fork server, and how it ended."""

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from samebits.cluster.env import MEMBER, VIEWS
from samebits.cluster.views.membership import mark_path
from samebits.launch.worker import WorkerResult, run_worker

VIEWS_FILE = "views.json"


@dataclass(frozen=True)
class Entry:
    """What the processes run."""

    function: Callable[..., object]  #: An importable function.
    args: tuple[Any, ...]  #: Its arguments.
    folder: Path  #: The launcher's temporary folder.
    stop_timeout_s: float  #: How long a process may continue after the launcher has died, seconds.
    key: str  #: Secret with which the processes sign messages.


@dataclass(frozen=True)
class LocalRanks:
    """Where the processes of one machine stand in the world when they start."""

    local_size: int  #: How many there are on this machine.
    round: int = 0  #: How often all processes were restarted before.
    first_rank: int = 0  #: Rank of the first one. Where members change, only the log's name.
    size: int = 0  #: Of the world; 0: `local_size`.
    address: str = "127.0.0.1"  #: Where rank 0 serves the store.
    port: int = 0  #: Its port; 0: the launcher names the members, and each view has a port of its own.


@dataclass(frozen=True)
class MemberProcess:
    """A process that the launcher has started."""

    number: int  #: Never used again.
    slot: int  #: Its place among the processes of this machine; a replacement has that of the lost process.
    process: BaseProcess  #: The process.
    entry: Entry

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.exitcode is None

    @property
    def is_killed(self) -> bool:
        """Whether a signal has ended it, before it could report an error."""
        return (self.process.exitcode or 0) < 0 and not self.report.exists()

    @property
    def report(self) -> Path:
        """The file in which it reports a failure."""
        return _report_path(self.entry.folder, self.number)

    def has_marked(self, name: str) -> bool:
        """Return whether the member has come that far; see `membership.mark_path`."""
        return mark_path(self.entry.folder, name, self.number).exists()

    def result(self) -> WorkerResult | None:
        """Return how it ended; None if it is running or has failed."""
        if self.process.exitcode != 0:
            return None
        try:
            return WorkerResult(**json.loads(_result_path(self.entry.folder, self.number).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def start_member(entry: Entry, number: int, slot: int, ranks: LocalRanks) -> MemberProcess:
    """Start a process."""
    environment = {
        "RANK": str(ranks.first_rank + slot),
        "LOCAL_RANK": str(slot),
        "WORLD_SIZE": str(ranks.size or ranks.local_size),
        "LOCAL_WORLD_SIZE": str(ranks.local_size),
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": str(ranks.port or 1),
        "TORCHELASTIC_RESTART_COUNT": str(ranks.round),
        "TORCHELASTIC_RUN_ID": "samebits",
    }
    if not ranks.port:
        environment |= {VIEWS: str(entry.folder / VIEWS_FILE), MEMBER: str(number)}
    report = _report_path(entry.folder, number)
    # From the fork server, which has torch loaded: a replacement is ready in a fraction of its import.
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(environment, entry, number, report), name=f"rank-{slot}")
    process.start()
    return MemberProcess(number, slot, process, entry)


def _run(environment: dict[str, str], entry: Entry, number: int, report: Path) -> None:
    os.environ.update(environment)
    result = run_worker(entry.function, entry.args, entry.folder, entry.stop_timeout_s, entry.key, report)
    part = _result_path(entry.folder, number).with_suffix(".part")
    part.write_text(json.dumps(asdict(result)), encoding="utf-8")
    # Renamed when complete, as the launcher may look at any time.
    part.rename(part.with_suffix(".json"))


def _result_path(folder: Path, number: int) -> Path:
    return folder / f"result-{number}.json"


def _report_path(folder: Path, number: int) -> Path:
    return folder / f"failure-{number}.json"
