"""A sample does not depend on which process reads it, when, or after which other sample."""

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import v2

from samebits.cluster.world import alone
from samebits.data.keyed import IntArray, KeyArray, keys
from samebits.data.loader import Loader, requests_of
from samebits.data.order import Order
from samebits.data.samples import Batch, DatasetSamples, Samples
from samebits.errors import ConfigError, DataError, SampleError
from samebits.storage.run_folder import RunFolder

CPU = torch.device("cpu")


class Pictures:
    """A map-style dataset with random transforms of all kinds."""

    def __init__(self) -> None:
        self.pictures = torch.arange(40 * 3 * 12 * 12, dtype=torch.float32).view(40, 3, 12, 12) / 20_000
        self.change = v2.Compose(
            [
                v2.RandomCrop(12, padding=2),
                v2.RandomHorizontalFlip(),
                v2.RandomRotation(20),
                v2.ColorJitter(0.3, 0.3, 0.3),
                v2.RandomErasing(p=0.5),
            ]
        )

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.change(self.pictures[index]) + random.random() + np.random.random()
        return picture.float(), index % 10


class Backwards:
    """A data set that breaks its promise to keep the order."""

    def __len__(self) -> int:
        return 4

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        return Batch(torch.zeros(len(indices)), None, torch.from_numpy(indices[::-1].copy()))


class Threads:
    """A data set whose bits tell the number of threads, as those of a long sum may."""

    def __len__(self) -> int:
        return 4

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        return Batch(torch.tensor(torch.get_num_threads()), None, torch.from_numpy(indices))


class Collecting:
    """A data set that lets a worker collect garbage, as a long epoch does."""

    def __len__(self) -> int:
        return 4

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        gc.collect()
        return Batch(torch.zeros(len(indices)), None, torch.from_numpy(indices))


class WithThreads:
    """An object of a library whose end waits for threads: after a fork they are missing, and the process aborts."""

    def __init__(self) -> None:
        self.pid, self.itself = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            os.abort()


class Damaged:
    """A data set with a file that can't be read."""

    def __len__(self) -> int:
        return 4

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        raise DataError(f"sample {indices[0]} is cut off", where="x.gz")


def read(samples: Samples, indices: list[int], seed: int = 0) -> dict[int, Tensor]:
    array = np.array(indices)
    batch = samples.batch(array, keys(seed, 0, array))
    return dict(zip(indices, batch.inputs, strict=True))


@settings(max_examples=10, deadline=None)
@given(shuffled=st.permutations(range(12)), cut=st.integers(1, 11), noise=st.integers(0, 2**30))
def test_a_sample_is_the_same_in_any_order_and_company(shuffled: list[int], cut: int, noise: int) -> None:
    samples = DatasetSamples(Pictures())
    usual = read(samples, list(range(12)))
    torch.manual_seed(noise)
    random.seed(noise)
    other = read(samples, shuffled[:cut]) | read(samples, shuffled[cut:])
    assert all(torch.equal(usual[index], other[index]) for index in range(12))


def test_a_sample_is_another_one_in_the_next_epoch() -> None:
    samples, indices = DatasetSamples(Pictures()), np.arange(12)
    first, second = (samples.batch(indices, keys(0, epoch, indices)).inputs for epoch in (0, 1))
    assert not any(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_reading_samples_draws_nothing_from_the_callers_generators() -> None:
    before = torch.get_rng_state(), random.getstate()
    read(DatasetSamples(Pictures()), [1, 2, 3])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def batches(num_workers: int, start: int = 0, **options: Any) -> list[Batch]:
    order, place = Order(40, 11, 4, seed=5), alone("cpu")
    samples = DatasetSamples(Pictures())
    stop = 2 * order.steps_per_epoch
    loader = Loader(
        samples,
        lambda: requests_of(order.steps(place, start=start, stop=stop)),
        CPU,
        num_workers=num_workers,
        **options,
    )
    read = [
        loader.batch(micro.indices, micro.keys)
        for step in order.steps(place, start=start, stop=stop)
        for micro in step.micro_batches
    ]
    loader.close()
    return read


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_read_the_same_batches(num_workers: int) -> None:
    without, with_workers = batches(0), batches(num_workers, prefetch=3)
    for one, two in zip(without, with_workers, strict=True):
        assert torch.equal(one.inputs, two.inputs)
        assert torch.equal(one.targets, two.targets)
        assert torch.equal(one.indices, two.indices)


def test_reading_from_the_middle_of_a_run_gives_the_batches_of_the_whole_run() -> None:
    later = batches(2, start=5)
    whole = batches(0)[-len(later) :]
    assert all(torch.equal(one.inputs, two.inputs) for one, two in zip(whole, later, strict=True))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_first_samples_are_kept_as_they_were_read_and_change_no_batch(num_workers: int) -> None:
    order, place = Order(40, 11, 4, seed=5), alone("cpu")
    loader = Loader(
        DatasetSamples(Pictures()), lambda: requests_of(order.steps(place, stop=8)), CPU, num_workers=num_workers
    )
    loader.num_to_keep = 6
    micro_batches = [micro for step in order.steps(place, start=0, stop=8) for micro in step.micro_batches]
    read = [loader.batch(micro.indices, micro.keys) for micro in micro_batches]
    loader.close()
    assert [len(batch) for batch in loader.kept] == [4, 2]
    assert torch.equal(
        torch.cat([batch.inputs for batch in loader.kept]), torch.cat([read[0].inputs, read[1].inputs])[:6]
    )
    usual = batches(0)
    assert all(torch.equal(one.inputs, two.inputs) for one, two in zip(read, usual, strict=False))


def test_pictures_are_laid_out_channels_last_where_asked() -> None:
    usual, last = batches(0)[0].inputs, batches(0, channels_last=True)[0].inputs
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(usual, last)


def test_a_dataset_that_changes_the_order_is_caught() -> None:
    indices = np.arange(4)
    loader = Loader(Backwards(), lambda: iter([]), CPU)
    with pytest.raises(ConfigError, match="returned other samples than the requested ones"):
        loader.batch(indices, keys(0, 0, indices))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_dataset_comes_as_it_is_from_any_process(num_workers: int) -> None:
    indices = np.arange(2)
    request = (indices, keys(0, 0, indices))
    loader = Loader(Damaged(), lambda: iter([request]), CPU, num_workers=num_workers)
    with pytest.raises(DataError) as caught:
        loader.batch(*request)
    assert str(caught.value) == "data error: sample 0 is cut off\n  where  x.gz"
    loader.close()


class Raises:
    """A map-style dataset with a sample that raises an exception of Python."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise OSError(f"cannot read img_{index}.png")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_the_dataset_names_the_sample_and_keeps_its_traceback(num_workers: int) -> None:
    request = (np.arange(2), keys(0, 0, np.arange(2)))
    loader = Loader(DatasetSamples(Raises()), lambda: iter([request]), CPU, num_workers=num_workers)
    with pytest.raises(SampleError) as caught:
        loader.batch(*request)
    assert caught.value.what == "sample 0 of Raises raised OSError: cannot read img_0.png"
    assert caught.value.slots["where"].endswith(", in __getitem__")
    shown = "".join(traceback.format_exception(caught.value))
    assert "in read_items" in shown
    assert 'raise OSError(f"cannot read img_{index}.png")' in shown
    loader.close()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "Too many open files"), MemoryError(), RuntimeError("DataLoader worker (pid 7) is killed")],
)
def test_a_fault_of_the_machine_is_not_blamed_on_the_dataset(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Raises, index: int) -> None:
        raise error

    monkeypatch.setattr(Raises, "__getitem__", fail)
    with pytest.raises(type(error)) as caught:
        read(DatasetSamples(Raises()), [0])
    assert caught.value is error


def test_workers_read_the_same_bits_where_the_rank_has_more_threads_than_one() -> None:
    request = (np.arange(1), keys(0, 0, np.arange(1)))
    torch.set_num_threads(2)
    torch.rand(100_000).exp()  # OpenMP's threads are there before the workers are forked
    loaders = [Loader(Threads(), lambda: iter([request]), CPU, num_workers=number) for number in (0, 2)]
    here, worker = (loader.batch(*request).inputs for loader in loaders)
    loaders[1].close()
    assert torch.get_num_threads() == 2
    assert torch.equal(here, worker)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("is_in_use", [False, True])
def test_workers_leave_objects_of_the_rank_alone(num_workers: int, is_in_use: bool) -> None:
    order = Order(4, 4, 2)
    gc.disable()
    try:
        made = [WithThreads()]
        if not is_in_use:
            made.clear()  # garbage, which this process has not collected yet
        loader = Loader(
            Collecting(), lambda: requests_of(order.steps(alone("cpu"), stop=3)), CPU, num_workers=num_workers
        )
        try:
            for step in order.steps(alone("cpu"), stop=3):
                for micro_batch in step.micro_batches:
                    loader.batch(micro_batch.indices, micro_batch.keys)
        finally:
            loader.close()
    finally:
        gc.enable()


def test_workers_end_when_their_rank_is_killed_so_that_its_run_folder_is_free_at_once(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from pathlib import Path
            import numpy as np, torch
            from samebits.data.keyed import keys
            from samebits.data.loader import Loader
            from samebits.data.samples import Batch
            from samebits.storage.run_folder import RunFolder

            class Endless:
                def __len__(self): return 10
                def batch(self, indices, keys): return Batch(torch.zeros(1), None, torch.from_numpy(indices))

            folder = RunFolder(Path(sys.argv[1]))
            folder.open()
            indices = np.arange(1)
            request = (indices, keys(0, 0, indices))
            loader = Loader(Endless(), lambda: iter([request] * 10), torch.device("cpu"), num_workers=2)
            loader.batch(*request)
            print("reading", flush=True)
            time.sleep(60)
            """
        )
    )
    rank = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert rank.stdout.readline() == "reading\n"
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    rank.stdout.close()
    # Waits for what the rank has left, and no longer than that takes.
    folder = RunFolder(tmp_path / "run")
    folder.open()
    folder.close()
