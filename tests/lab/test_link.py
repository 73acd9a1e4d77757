"""The link between two hosts, as `samebits doctor` measures it for `samebits plan --link`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.parallel.exchange.link import parse_link
from tests.cluster.hosts import Host
from tests.runs import SAMEBITS


@pytest.fixture
def slow_pair(three: list[Host]) -> Iterator[list[Host]]:
    """Two hosts that send 100 Mbit/s."""
    for host in three[:2]:
        host.slow(100)
    yield three[:2]
    for host in three[:2]:
        host.unslow()


def test_doctor_measures_the_rate_of_a_slow_link(
    slow_pair: list[Host], environ: dict[str, str], tmp_path: Path
) -> None:
    command = [*SAMEBITS, "doctor", "--json", "--init", "tcp://n1:29535", "--world-size", 2, "--rank"]
    running = [
        host.start(*command, rank, env=environ, cwd=tmp_path, stderr=None) for rank, host in enumerate(slow_pair)
    ]
    said = [process.communicate(timeout=200)[0] for process in running]
    findings = {each["check"]: each["value"] for each in json.loads(said[0])["findings"]}
    link = parse_link(findings["link"].split(" for ")[0], "--link")
    assert link.bits_per_s == pytest.approx(100e6, rel=0.15)
    assert 0 < link.latency_s < 0.05
