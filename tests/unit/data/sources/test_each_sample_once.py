"""Every source gives each sample once an epoch, in one order and with one set of random numbers at any world size."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.division import PADDED
from samebits.data.loader import Loader, requests_of
from samebits.data.order import Order
from samebits.data.samples import DatasetSamples, Samples
from samebits.own_loop.samples import CollatedSamples
from tests.unit.data.sources.source_files import SOURCES, collate
from tests.unit.data.test_order import Seat

CPU = torch.device("cpu")


# (step, micro-batch) -> the samples as read: their indices and values
Seen = dict[tuple[int, int], tuple[list[int], list[float]]]


def read(samples: Samples, order: Order, world: int, start: int, stop: int, num_workers: int = 0) -> Seen:
    """Read the steps [start, stop) on all ranks of a world. No micro-batch counts on two ranks."""
    seen: Seen = {}
    for rank in range(world):
        steps = list(order.steps(Seat(rank, world), start=start, stop=stop))
        loader = Loader(samples, lambda steps=steps: requests_of(steps), CPU, num_workers=num_workers)
        try:
            for step in steps:
                for micro_batch in step.micro_batches:
                    batch = loader.batch(micro_batch.indices, micro_batch.keys)
                    inputs, targets = batch.inputs if batch.targets is None else (batch.inputs, batch.targets)
                    assert targets.tolist() == micro_batch.indices.tolist()
                    if micro_batch.weight > 0:  # not a repetition of a padded division
                        place = (step.number, micro_batch.index)
                        assert place not in seen
                        seen[place] = (targets.tolist(), inputs.tolist())
        finally:
            loader.close()
    return seen


def epoch_of(seen: Seen, order: Order, epoch: int) -> list[int]:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    return [index for (step, _), (indices, _) in seen.items() if step in steps for index in indices]


def opened(
    kind: str, folder: str, num_samples: int, num_files: int, form: Callable[..., Samples] = DatasetSamples
) -> Samples:
    return form(SOURCES[kind](Path(folder), num_samples, num_files), collate)


# How recipes read, and how `samebits.exact` reads a DataLoader that shuffles or not.
FORMS: dict[str, tuple[Callable[..., Order], Callable[..., Samples]]] = {
    "recipe": (Order, DatasetSamples),
    "exact": (partial(Order, division=PADDED), CollatedSamples),
    "exact, not shuffled": (partial(Order, division=PADDED, is_shuffled=False), CollatedSamples),
}


@pytest.mark.parametrize("kind", SOURCES)
@settings(max_examples=12)
@given(
    num_samples=st.integers(1, 40),
    num_files=st.integers(1, 5),
    global_batch=st.integers(1, 17),
    micro_batch=st.integers(1, 9),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    form=st.sampled_from(list(FORMS)),
    data=st.data(),
)
def test_each_sample_comes_once_an_epoch_at_any_world_size_and_after_any_resume(
    kind: str,
    num_samples: int,
    num_files: int,
    global_batch: int,
    micro_batch: int,
    worlds: tuple[int, int],
    form: str,
    data: st.DataObject,
) -> None:
    order = FORMS[form][0](num_samples, global_batch, micro_batch, seed=3)
    stop = 2 * order.steps_per_epoch
    at = data.draw(st.integers(0, stop), label="resumed at")
    with TemporaryDirectory() as folder:
        samples = opened(kind, folder, num_samples, num_files, FORMS[form][1])
        assert len(samples) == num_samples
        alone = read(samples, order, 1, 0, stop)
        for epoch in (0, 1):
            assert sorted(epoch_of(alone, order, epoch)) == list(range(num_samples))
        resumed = read(samples, order, worlds[0], 0, at) | read(samples, order, worlds[1], at, stop)
        assert resumed == alone


@pytest.fixture(params=[pytest.param(kind, marks=[] if kind == "tar" else pytest.mark.full) for kind in SOURCES])
def samples(request: pytest.FixtureRequest, tmp_path: Path) -> Samples:
    return opened(request.param, str(tmp_path), 23, 3)


def test_workers_read_the_same_samples_as_the_rank_itself(samples: Samples) -> None:
    order = Order(23, 7, 3, seed=1)
    stop = 2 * order.steps_per_epoch
    usual = read(samples, order, 1, 0, stop)
    # The files are open in this process by now, and both workers inherit them.
    assert read(samples, order, 1, 0, stop, num_workers=2) == usual
    assert read(samples, order, 3, 2, stop, num_workers=2) == {place: usual[place] for place in usual if place[0] >= 2}


def test_random_numbers_belong_to_the_sample_and_the_epoch(samples: Samples) -> None:
    small, large = Order(23, 6, 2, seed=1), Order(23, 12, 12, seed=1)

    def values(order: Order) -> list[dict[int, float]]:
        seen = read(samples, order, 1, 0, 2 * order.steps_per_epoch)
        epochs: list[dict[int, float]] = [{}, {}]
        for (step, _), (indices, numbers) in seen.items():
            epochs[step // order.steps_per_epoch] |= dict(zip(indices, numbers, strict=True))
        return epochs

    first, second = values(small)
    assert values(large) == [first, second]
    assert all(first[index] != second[index] for index in range(23))


def test_the_sources_differ_only_in_their_form(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for kind in SOURCES:
        folder = tmp_path / kind
        folder.mkdir()
        found[kind] = read(opened(kind, str(folder), 11, 2), Order(11, 4, 2), 2, 0, 3)
    assert all(each == found["torch"] for each in found.values())
