"""GPUs of a script with more ranks than GPUs, on devices that are not there."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samebits.ranks.devices import CPU, DealtDevice, deal, mapped
from tests.runs import environment


@pytest.mark.parametrize(
    ("num_ranks", "gpus", "dealt"),
    [(8, "0", "00000000"), (8, "012", "00011122"), (4, "0123", "0123"), (3, "01", "001"), (2, "0123", "02")],
)
def test_neighbors_share_a_gpu(num_ranks: int, gpus: str, dealt: str) -> None:
    assert "".join(deal(rank, num_ranks, list(gpus)) for rank in range(num_ranks)) == dealt


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("cuda:5", "cuda:0"),
        ("cuda", "cuda:0"),
        ("cpu", "cpu"),
        (5, 0),
        (True, True),
        (torch.device("cuda", 5), torch.device("cuda", 0)),
        (torch.device("cpu"), torch.device("cpu")),
        (None, None),
    ],
)
def test_a_gpu_stands_for_the_only_one(given: object, found: object) -> None:
    assert mapped(given) == found
    assert type(mapped(given)) is type(found)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("cuda", "cpu"),
        ("cuda:5", "cpu"),
        (5, "cpu"),
        (True, True),
        (torch.device("cuda", 5), torch.device("cpu")),
        ("meta", "meta"),
        (None, None),
    ],
)
def test_the_cpu_stands_for_a_gpu(given: object, found: object) -> None:
    assert mapped(given, CPU) == found
    assert type(mapped(given, CPU)) is type(found)


def test_tensors_and_modules_that_are_moved_to_a_gpu_stay_where_they_are() -> None:
    x = torch.ones(2)
    with DealtDevice(CPU):
        assert x.cuda() is x
        assert x.cuda(5, non_blocking=True) is x
        assert x.pin_memory() is x
        assert x.to("cuda:5", non_blocking=True) is x
        assert x.to(5) is x
        assert torch.zeros(5, device="cuda").shape == (5,)
        assert torch.nn.Linear(2, 3).cuda(1).to(torch.device("cuda")).weight.device == torch.device("cpu")


def test_calls_that_name_a_gpu_reach_the_only_one_and_sizes_stay() -> None:
    called: list[tuple[object, object]] = []

    def to(*args: object, **kwargs: object) -> None:
        called.append((args, kwargs))

    def randint(*args: object, **kwargs: object) -> None:
        called.append((args, kwargs))

    mode, x = DealtDevice(), torch.ones(1)
    mode.__torch_function__(to, (), (x, 5), {})
    mode.__torch_function__(to, (), (x, "cuda:5"), {"non_blocking": True})
    mode.__torch_function__(randint, (), (5, (3,)), {"device": "cuda:5"})
    assert called == [
        ((x, 0), {}),
        ((x, "cuda:0"), {"non_blocking": True}),
        ((5, (3,)), {"device": "cuda:0"}),
    ]


def test_a_script_sees_a_gpu_for_each_rank(tmp_path: Path) -> None:
    script = """
import torch, torch.cuda, torch.nn.parallel.distributed as ddp
from samebits.ranks.devices import use_dealt_device
torch.save(torch.ones(2), "x.pt")
use_dealt_device(8)
index = ddp._get_device_index
print(torch.cuda.device_count(), torch.accelerator.device_count(), index(5, True), index(torch.device("cuda:5")))
print(torch.load("x.pt", map_location={"cuda:5": "cpu"}).sum().item(), torch.zeros(5, 3).shape[0], torch.eye(5).sum())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "8 8 0 0\n2.0 5 tensor(5.)\n"
