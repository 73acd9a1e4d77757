"""Two hosts with a link between them that becomes slow, is cut, and comes back or does not. Linux and root only."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import hosts as network
from tests.cluster.hosts import Host
from tests.faults.faults import SETTINGS, Job
from tests.runs import LONG_S, SAMEBITS, TINY, environment, kill_session, weights


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    if reason := network.why_not():
        pytest.skip(reason)
    with network.hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


def begin(two: list[Host], folder: Path, *more: str) -> list[subprocess.Popen[str]]:
    """A rank on each host, and wait until they train."""
    join = ["--run-dir", str(folder / "run"), "--init", "tcp://n1:29520", "--world-size", "2", "--rank"]
    command = [*SAMEBITS, "train", str(TINY), *SETTINGS, "data.slow_s=0.1", *more, *join]
    started = [host.start(*command, rank, env=environment(), cwd=folder) for rank, host in enumerate(two)]
    Job(folder, started[0]).wait_for_step(4)
    return started


def ended(started: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and words of each."""
    try:
        said = [process.communicate(timeout=LONG_S)[0] for process in started]
    finally:
        for process in started:
            kill_session(process)
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.mark.lab
def test_a_link_that_is_slow_and_then_away_changes_nothing(two: list[Host], undisturbed: str, tmp_path: Path) -> None:
    started = begin(two, tmp_path)
    two[1].slow(1)
    time.sleep(0.5)
    two[1].cut()
    time.sleep(2)
    two[1].restore()
    assert [code for code, _ in ended(started)] == [0, 0]
    two[1].unslow()
    assert weights(tmp_path / "run") == undisturbed


@pytest.mark.full
def test_where_a_link_is_cut_each_side_names_the_lost_one(two: list[Host], tmp_path: Path) -> None:
    started = begin(two, tmp_path, "watch.hang_timeout_s=5")
    two[1].cut()
    try:
        found = ended(started)  # long before a connection over the link would be given up
    finally:
        two[1].restore()
    for rank, (code, said) in enumerate(found):
        other = 1 - rank
        assert code == 4, said
        assert f"rank {other} has given no sign of life" in said
        assert f"{other} (host n{other + 1}, pid " in said
        assert "the network to it is down" in said
