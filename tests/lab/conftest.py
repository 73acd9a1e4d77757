"""A laboratory: hosts, a Slurm and the one hash that every way of starting must give.

`make test-cluster` installs what this needs on Debian and runs it, as root; `make test` leaves it out.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import hosts as network
from tests.cluster.hosts import Host
from tests.lab import slurm as cluster
from tests.lab.slurm import Slurm
from tests.runs import SAMEBITS, environment, samebits, weights

SETTINGS = ("digits", "epochs=1", "report.tensorboard=false")


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Three hosts: n1, n2, n3."""
    if reason := network.why_not():
        pytest.skip(reason)
    with network.hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="session")
def slurm(three: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm whose two nodes are n1 and n2."""
    if reason := cluster.why_not():
        pytest.skip(reason)
    with cluster.slurm(three[:2], tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="session")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights that one process alone gives."""
    folder = tmp_path_factory.mktemp("alone")
    samebits("train", *SETTINGS, "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return weights(folder / "run")


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """`samebits train` of the one job into tmp_path/run, with more arguments."""

    def make(*more: object) -> list[str]:
        return [*SAMEBITS, "train", *SETTINGS, "--run-dir", str(tmp_path / "run"), *map(str, more)]

    return make


@pytest.fixture
def environ() -> dict[str, str]:
    """Variables with which any host finds the checkout."""
    return environment()
