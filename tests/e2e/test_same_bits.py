"""One hash, whatever the number of processes, loader workers, stops and resumes."""

import gzip
from pathlib import Path

import pytest

from tests.runs import TINY, chain, records, result, samebits, weights


@pytest.mark.parametrize(
    "num_procs",
    [3, pytest.param(8, marks=pytest.mark.full), *(pytest.param(size, marks=pytest.mark.lab) for size in (2, 4))],
)
def test_batch_norm_and_dropout_give_one_hash_at_any_world_size(tiny: Path, tmp_path: Path, num_procs: int) -> None:
    samebits("train", TINY, "--procs", num_procs, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert weights(tmp_path / "run") == weights(tiny)
    assert result(tmp_path / "run")["metrics"] == result(tiny)["metrics"]
    # The chain of all steps, and the root of settings, code, data, checkpoints, metrics and weights.
    assert chain(tmp_path / "run") == chain(tiny)
    assert result(tmp_path / "run")["root"] == result(tiny)["root"]
    assert [(world["size"], world["from_step"]) for world in result(tmp_path / "run")["worlds"]] == [(num_procs, 0)]


@pytest.mark.full
def test_loader_workers_change_nothing(tiny: Path, tmp_path: Path) -> None:
    samebits("train", TINY, "loader.num_workers=2", "--procs", 2, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert weights(tmp_path / "run") == weights(tiny)


def test_every_sample_is_counted(tiny: Path) -> None:
    assert result(tiny)["samples"] == 2 * 101
    assert result(tiny)["steps"] == 2 * 5
    assert [record["step"] for record in records(tiny, "eval")] == [5, 10]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An epoch of digits in one process."""
    folder = tmp_path_factory.mktemp("digits")
    samebits("train", "digits", "epochs=1", "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return folder / "run"


@pytest.mark.lab
@pytest.mark.parametrize("num_procs", [2, 3, 4, 8])
def test_digits_gives_one_hash(digits: Path, tmp_path: Path, num_procs: int) -> None:
    samebits("train", "digits", "epochs=1", "--procs", num_procs, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert weights(tmp_path / "run") == weights(digits)


@pytest.fixture(scope="module")
def some_mnist(mnist_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 1,003 training and 211 test pictures of MNIST, plain."""
    folder = tmp_path_factory.mktemp("mnist")
    for part, count in (("train", 1003), ("t10k", 211)):
        for kind, head, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            name = f"{part}-{kind}-ubyte"
            content = gzip.decompress((mnist_folder / f"{name}.gz").read_bytes())
            content = content[:4] + count.to_bytes(4, "big") + content[8 : head + count * size]
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("preset", [pytest.param("mnist", marks=pytest.mark.lab), "mnist/tutorial"])
def test_mnist_with_dropout_gives_one_hash(some_mnist: Path, tmp_path: Path, preset: str) -> None:
    settings = [f"data.root={some_mnist}", "epochs=1", "micro_batch=16", "global_batch=128"]
    runs = {n: tmp_path / f"run-{n}" for n in (1, 3)}
    for num_procs, folder in runs.items():
        samebits("train", preset, *settings, "--procs", num_procs, "--run-dir", folder, cwd=tmp_path)
    assert len({weights(folder) for folder in runs.values()}) == 1
