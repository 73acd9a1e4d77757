"""Honest runs in worlds of any size, killed and resumed, are verified in any world; their chains are equal."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.cluster.world import World
from samebits.data.division import Alone
from samebits.data.loader import Loader
from samebits.data.order import Order, Step
from samebits.data.samples import Batch
from samebits.engine.job import Job
from samebits.engine.output.recorder import digest_of_step, sample_ids
from samebits.engine.progress import StepFlags, StepResult
from samebits.engine.step import run_step
from samebits.provenance.record import OVERFLOW, StepLog, read_steps
from samebits.replay.segments import Segment
from samebits.replay.verify import Verdict, lines
from tests.ranks.rank_pool import RankPool
from tests.runs import chain, result
from tests.verify_trials.cheats import Changed
from tests.verify_trials.honest import honest_trial
from tests.verify_trials.runs import NUM_STEPS, prepare_process, train_in, train_until, verdict_in, verify_in

NAN_AT = 9  # the first step of the third segment, but one


@pytest.fixture(autouse=True)
def _trusted() -> None:
    prepare_process()


def trained(pool: RankPool, size: int, folder: Path, *options: str, stop_at: int = NUM_STEPS) -> Path:
    pool.run(size, train_until, folder, options, stop_at, "auto")
    return folder


def verified_by(pool: RankPool, size: int, folder: Path, **request: Any) -> Verdict:
    return verdict_in(pool.run(size, verify_in, folder, request)[0])


def log_of(folder: Path) -> StepLog:
    return read_steps(folder / "steps.bin")


@pytest.mark.parametrize("number", [5, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 20, 21))])
def test_an_honest_run_is_verified_whatever_happened_to_it(pool: RankPool, tmp_path: Path, number: int) -> None:
    verdict, how = honest_trial(pool, tmp_path / "run", number)
    assert verdict.is_verified, f"{how}\n{lines(verdict)}"
    assert [text.partition(":")[0] for text in verdict.notes] == ["not compared"]


def test_chains_of_sample_values_are_equal_in_all_worlds(pool: RankPool, tmp_path: Path) -> None:
    runs = [trained(pool, size, tmp_path / f"run-{size}", "record.content=true") for size in (1, 2, 3)]
    assert len({chain(run) for run in runs}) == 1
    assert len({result(run)["root"] for run in runs}) == 1
    log = log_of(runs[0])
    assert all(any(record.content) for step in range(NUM_STEPS) if (record := log.get(step)))
    assert verified_by(pool, 2, runs[0], steps=(0, 8)).is_verified


def test_a_run_resumed_elsewhere_has_the_records_of_its_first_steps(pool: RankPool, tmp_path: Path) -> None:
    first = trained(pool, 2, tmp_path / "first", stop_at=10)
    whole = trained(pool, 1, tmp_path / "whole")
    other = tmp_path / "other"
    pool.run(1, train_until, other, (), NUM_STEPS, str(first / "checkpoints" / "step-000008"))
    assert chain(other) == chain(whole)
    assert log_of(other).is_whole
    assert verified_by(pool, 1, other).is_verified


@pytest.mark.full
def test_an_earlier_checkpoint_repeats_the_records_after_it(pool: RankPool, tmp_path: Path) -> None:
    run = trained(pool, 1, tmp_path / "run", stop_at=14)
    expected = chain(trained(pool, 2, tmp_path / "whole"))
    for step in ("000012", "000008"):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    assert log_of(run).stop == 14
    trained(pool, 2, run)
    assert chain(run) == expected
    assert verified_by(pool, 1, run, share=0.3).is_verified


def test_lost_records_are_noted_and_the_weights_are_still_verified(pool: RankPool, tmp_path: Path) -> None:
    run = trained(pool, 1, tmp_path / "run", stop_at=9)
    os.unlink(run / "steps.bin")
    trained(pool, 2, run)
    assert log_of(run).first_step == 8
    verdict = verified_by(pool, 1, run)
    assert verdict.is_verified
    assert "the record of steps starts at step 8: earlier steps can't be compared" in verdict.notes


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_all_ranks_go_on_without_a_damaged_checkpoint(pool: RankPool, tmp_path: Path, size: int) -> None:
    run = trained(pool, 1, tmp_path / "run")
    weights = run / "checkpoints" / "step-000008" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    verdict = verified_by(pool, size, run, steps=(8, 20))
    assert ["checkpoints/step-000008/weights.safetensors is truncated" in text for text in verdict.mismatches] == [True]
    assert verdict.replayed == [Segment(12, 16), Segment(16, 20)]
    assert verified_by(pool, size, run).share == 1.0


def nan_once(world: World, folder: Path, options: tuple[str, ...]) -> int:
    """Train on values that are not numbers when a step runs for the first time."""
    left = [1]

    def change(batch: Batch) -> Batch:
        return replace(batch, inputs=batch.inputs * torch.nan)

    def cheat(job: Job, step: Step, loader: Loader, flags: Callable[[], StepFlags]) -> StepResult:
        if step.number == NAN_AT and left[0]:
            left[0] = 0
            return run_step(job, step, Changed(loader, change), flags)  # type: ignore[arg-type]
        return run_step(job, step, loader, flags)

    return train_in(world, folder, options, cheat)


@pytest.mark.full
def test_a_rollback_repeats_records_and_gives_the_chain_of_an_undisturbed_run(pool: RankPool, tmp_path: Path) -> None:
    whole = trained(pool, 1, tmp_path / "whole")
    run = tmp_path / "run"
    assert pool.run(2, nan_once, run, ("watch.nonfinite=rollback",)) == [0, 0]
    assert chain(run) == chain(whole)
    assert verified_by(pool, 1, run).is_verified


@pytest.mark.full
def test_a_skipped_step_is_recorded_and_verified(pool: RankPool, tmp_path: Path) -> None:
    options = ("data.bad_sample=13", "watch.nonfinite=skip")
    runs = [trained(pool, size, tmp_path / f"run-{size}", *options) for size in (1, 2)]
    assert len({chain(run) for run in runs}) == 1
    skipped = result(runs[0])["skipped_steps"]
    assert len(skipped) == 4  # once an epoch
    assert log_of(runs[0]).skipped() == skipped
    assert verified_by(pool, 2, runs[0]).is_verified


def test_overflows_of_fp16_are_recorded_and_verified(pool: RankPool, tmp_path: Path) -> None:
    run = trained(pool, 2, tmp_path / "run", "precision=fp16", "checkpoint.keep_every=1 steps")
    log = log_of(run)
    overflows = [step for step in range(NUM_STEPS) if (found := log.get(step)) and found.outcome == OVERFLOW]
    assert len(overflows) == result(run)["overflow_steps"]
    assert verified_by(pool, 1, run, share=0.5).is_verified


@pytest.mark.parametrize(("num_samples", "global_batch"), [(101, 24), (7, 24), (10_000, 5000), (64, 16)])
def test_sample_ids_are_those_of_the_steps_from_any_start(num_samples: int, global_batch: int) -> None:
    order = Order(num_samples, global_batch, 4, seed=3)
    stop = 3 * order.steps_per_epoch
    for start in (0, 1, stop // 2):
        expected = [digest_of_step(step) for step in order.steps(Alone(), start=start, stop=stop)]
        assert list(sample_ids(order, start, stop)) == expected
