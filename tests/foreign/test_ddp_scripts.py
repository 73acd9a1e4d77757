"""Scripts for torch's DistributedDataParallel, in the style of public examples, become exact by a few changed lines."""

import signal
from pathlib import Path

import pytest

from tests.foreign.cases import cases
from tests.foreign.forms import names
from tests.foreign.scripts import KILL_AT, Starter


def test_a_script_has_one_hash_at_one_and_two_processes(starter: Starter, tmp_path: Path) -> None:
    hashes = {starter.run("ddp_text", "exact", procs, tmp_path / f"{procs}.pt").sha256 for procs in (1, 2)}
    assert len(hashes) == 1


@pytest.mark.parametrize("name", cases(names("ddp")))
def test_every_script_has_one_hash_in_any_world_and_after_a_kill(starter: Starter, tmp_path: Path, name: str) -> None:
    hashes = {procs: starter.run(name, "exact", procs, tmp_path / f"{procs}.pt").sha256 for procs in (1, 4)}
    assert len(set(hashes.values())) == 1, hashes
    checkpoint = tmp_path / "killed.pt"
    killed = starter.run(name, "exact", 3, checkpoint, kill_at=KILL_AT[name])
    assert killed.codes[-1] == -signal.SIGKILL
    assert checkpoint.exists()
    assert starter.run(name, "exact", 2, checkpoint).sha256 == hashes[1]


@pytest.mark.full
def test_the_usual_form_has_another_hash_at_each_number_of_processes(starter: Starter, tmp_path: Path) -> None:
    one, two = (starter.run("ddp_text", "usual", procs, tmp_path / f"{procs}.pt").sha256 for procs in (1, 2))
    assert one != two
