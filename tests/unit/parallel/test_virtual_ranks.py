"""Virtual ranks train like real ones, up to 1,024 of them, and what each sends is counted."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from samebits.engine.build import find_dataset_info
from samebits.recipes.catalog import find
from tests.runs import TINY, samebits, weights
from tests.unit.parallel.virtual_ranks import Simulated, simulate

SMALL = ["global_batch=40", "micro_batch=1"]
World = tuple[int, ...]


def simulated(settings: Sequence[str], *runs: World | list[World], steps: int) -> list[Simulated]:
    """A run for each of these: a world, as the number of ranks of each machine, or worlds that take turns."""
    found = find(str(TINY))
    config = found.load(list(settings)).config
    torch.set_num_threads(config.num_threads)
    dataset_info = find_dataset_info(found, config)
    return [
        simulate(config, lambda: found.build(config, dataset_info), run if isinstance(run, list) else [run], steps)
        for run in runs
    ]


def hashes(runs: Sequence[Simulated]) -> set[str]:
    return {run.sha256 for run in runs}


def turns(*sizes: int) -> list[World]:
    return [(size,) for size in sizes]


def test_virtual_ranks_end_in_the_weights_of_a_run(tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", [*SMALL, "max_steps=3"]
    samebits("train", TINY, *settings, "--procs", 1, "--run-dir", folder, cwd=tmp_path)
    runs = simulated(settings, *turns(1, 2, 5, 33), turns(40, 17, 1), (50,), steps=9)
    assert {run.steps for run in runs} == {3}
    assert hashes(runs) == {weights(folder)}


def test_synchronized_batch_norm_of_virtual_ranks_has_the_weights_of_a_run(tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", [*SMALL, "batch_norm=sync", "max_steps=3"]
    samebits("train", TINY, *settings, "--procs", 1, "--run-dir", folder, cwd=tmp_path)
    runs = simulated(settings, *turns(1, 3, 20), turns(40, 17, 1), steps=3)
    assert hashes(runs) == {weights(folder)}


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [(*range(1, 18), 24, 31, 32, 33, 48, 63, 64), pytest.param(range(18, 64), marks=pytest.mark.lab)]
)
def test_every_number_of_ranks_up_to_64_has_one_hash(sizes: Sequence[int]) -> None:
    settings = ["global_batch=70", "micro_batch=1", "batch_norm=sync"]
    assert len(hashes(simulated(settings, *turns(1, *sizes), steps=1))) == 1


def test_what_a_rank_sends_is_counted() -> None:
    alone, two, many = simulated(["global_batch=32", "micro_batch=1"], (1,), (2,), (32,), steps=1)
    assert (alone.messages, alone.num_bytes, alone.rounds) == (0, 0, 0)
    assert (two.messages, two.num_bytes, two.rounds) == (1, two.gradient_bytes, 1)
    assert (many.messages, many.rounds) == (10, 10)
    ring = 2 * many.gradient_bytes * 31 / 32
    assert ring <= many.num_bytes <= 1.01 * ring


def test_what_leaves_a_machine_is_counted() -> None:
    alone, two, three = simulated(["global_batch=24", "micro_batch=1"], (1,), (2, 2), (3, 1), steps=1)
    assert hashes([two, three]) == {alone.sha256}
    assert (alone.link_messages, alone.link_bytes) == (0, 0)
    assert two.way.startswith("in two levels: 2 machines with 2 ranks each; a machine sends 1.00 of the gradient")
    for run in (two, three):
        assert run.link_bytes >= run.gradient_bytes
        assert run.link_messages > 0


@pytest.mark.lab
def test_1024_ranks_and_ranks_that_come_and_go_have_one_hash() -> None:
    settings = ["data.num_samples=1030", "global_batch=1024", "micro_batch=1"]
    *_, most = runs = simulated(settings, *turns(1, 127, 256, 1000, 1024), steps=1)
    assert len(hashes(runs)) == 1
    assert most.messages <= most.rounds == 20  # of its 1,024 chunks some are empty
    assert len(hashes(simulated(settings, (1,), turns(1024, 1000, 64), steps=3))) == 1
