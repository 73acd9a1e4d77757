"""Jobs of `test_exact_data_worlds.py`: one rank has other data."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from samebits.cluster.world import World
from samebits.errors import DataError
from samebits.own_loop.current import check_same_data
from samebits.own_loop.samples import source_of


class Values:
    """Samples with random noise, and a file of them."""

    def __init__(self, path: Path, count: int) -> None:
        self.files, self.count = [str(path)], count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(3) + index, "name": f"sample {index}"}


def compare(world: World, folder: Path, fault: str, num_workers: int) -> str:
    """Compare the data of ranks of which the last one has other data; the error's text, or none."""
    is_odd = world.rank == world.size - 1
    path = folder / str(world.rank) / "data.bin"
    path.parent.mkdir()
    path.write_bytes(b"x" * (2 if fault == "file" and is_odd else 1))
    data: Any = Values(path, 11 if fault == "count" and is_odd else 12)
    if fault == "split":
        torch.manual_seed(world.rank)  # as if each process drew its own seed
        data = Subset(data, torch.randperm(12)[:9].tolist())
    before = torch.get_rng_state()
    try:
        check_same_data(world, source_of(DataLoader(data, batch_size=2, shuffle=True, num_workers=num_workers)), seed=3)
    except DataError as error:
        return str(error)
    assert torch.equal(torch.get_rng_state(), before)
    return ""
