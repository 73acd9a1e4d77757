"""A run with local steps, killed and resumed on another number of processes, has one hash and can be verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import TINY, chain, kill_session, records, samebits, start, wait_until, weights

pytestmark = [pytest.mark.timeout(400), pytest.mark.full]
SETTINGS = [TINY, "data.num_samples=201", "sync.every=2", "sync.outer_momentum=0.9", "sync.outer_lr=0.7", "epochs=3",
            "checkpoint.every=1 steps", "checkpoint.keep_every=3 steps", "report.every_steps=1"]  # fmt: skip


def test_a_killed_run_resumed_on_more_processes_has_the_weights_and_records_of_one(tmp_path: Path) -> None:
    whole, run, slow = tmp_path / "whole", tmp_path / "run", tmp_path / "slow"
    samebits("train", *SETTINGS, "--procs", 1, "--run-dir", whole, cwd=tmp_path)
    slow.touch()
    more = ["data.slow_s=0.1", f"data.slow_while={slow}"]
    process = start("train", *SETTINGS, *more, "--procs", 2, "--run-dir", run, cwd=tmp_path)
    try:
        wait_until(lambda: len(records(run, "checkpoint")) > 3)
    finally:
        kill_session(process)
    assert not (run / "result.json").exists()
    slow.unlink()
    samebits("train", "--run-dir", run, "--resume", "auto", "--procs", 3, cwd=tmp_path)
    assert weights(run) == weights(whole)
    assert chain(run) == chain(whole)
    assert "every step of the run" in samebits("verify", run, "--all", "--procs", 2, cwd=tmp_path).stdout
    steps = [record["step"] for record in records(run, "train")]
    assert steps == list(range(1, 16))  # of 9 global batches an epoch, two in a step
