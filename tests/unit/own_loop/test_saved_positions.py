"""The position of a run in the files of `torch.save`, also in files of strangers."""

import io
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from samebits.own_loop.patched.records import ENTRY, read_record, save_with_record


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of torch.save."""
    torch.save({"a": torch.ones(2)}, tmp_path / "c.pt")
    return tmp_path / "c.pt"


def test_a_position_is_read_again_and_torch_loads_the_file(saved: Path) -> None:
    assert read_record(saved) is None
    save_with_record(partial(torch.save, {"a": torch.ones(2)}), saved, {"step": 7, "seed": 1})
    assert read_record(saved) == {"step": 7, "seed": 1}
    assert torch.equal(torch.load(saved, weights_only=True)["a"], torch.ones(2))
    first = saved.read_bytes()
    save_with_record(partial(torch.save, {"a": torch.ones(2)}), saved, {"step": 7, "seed": 1})
    assert saved.read_bytes() == first
    assert list(saved.parent.iterdir()) == [saved]


def test_a_position_is_in_an_open_file_too() -> None:
    file = io.BytesIO()
    save_with_record(partial(torch.save, {"a": torch.ones(2)}), file, {"step": 7, "seed": 1})
    file.seek(0)
    assert read_record(file) == {"step": 7, "seed": 1}
    assert torch.equal(torch.load(file, weights_only=True)["a"], torch.ones(2))


@pytest.mark.parametrize(
    "entry",
    [b"no JSON", b"[" * 4000, b"\xff", b'{"step": 1.5}', b'{"seed": 1}', b'{"step": 1}' + b" " * 100_000_000],
    ids=["text", "nested", "bytes", "a fraction", "no step", "a bomb"],
)
def test_an_entry_of_a_stranger_is_no_position(saved: Path, entry: bytes) -> None:
    with zipfile.ZipFile(saved, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"c/{ENTRY}", entry)
    assert saved.stat().st_size < 200_000
    assert read_record(saved) is None
    assert torch.equal(torch.load(saved, weights_only=True)["a"], torch.ones(2))
