"""Ranks of `samebits launch`: options, devices, random numbers, their group, and batch norm over them."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from samebits.errors import ConfigError
from samebits.ranks import start
from samebits.ranks.devices import CPU, DealtDevice, deal, mapped
from samebits.ranks.doors import Generators
from tests.runs import python
from tests.unit.ranks.in_ranks import run


def shares(*flags: str) -> list[int]:
    given = start._parser().parse_args([*flags, "train.py", "--as", "9"])
    assert given.arguments == ["--as", "9"]  # the script's own
    return start._shares(given, given.nnodes or (len(given.ranks.split(",")) if given.ranks else 1))


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), [1]),
        (("--as", "8"), [8]),
        (("--nproc-per-node", "4"), [4]),
        (("--nproc_per_node=4",), [4]),
        (("--nnodes", "2", "--nproc-per-node", "3"), [3, 3]),
        (("--nnodes", "2", "--as", "8"), [4, 4]),
        (("--ranks", "6,2", "--node-rank", "1"), [6, 2]),
        (("--as", "5", "--nnodes", "2", "--node-rank", "0"), [3, 2]),
    ],
)
def test_ranks_are_shared_out(flags: tuple[str, ...], found: list[int]) -> None:
    assert shares(*flags) == found


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--as", "8", "--nproc-per-node", "4"), "and --as is 8"),
        (("--as", "8", "--ranks", "6,1", "--node-rank", "0"), "and --as is 8"),
        (("--ranks", "6,2"), "--node-rank is missing"),
        (("--ranks", "6,2", "--node-rank", "2"), "--node-rank is 2"),
        (("--as", "2", "--nnodes", "2", "--node-rank", "-1"), "--node-rank is -1"),
        (("--ranks", "6,x"), "--ranks is '6,x'"),
        (("--ranks", "8,0"), "--ranks is '8,0'"),
        (("--as", "0"), "0 ranks"),
        (("--as", "-2"), "-2 ranks"),
        (("--as", "2", "--nnodes", "3"), "2 ranks on 3 machines"),
        (("--nproc-per-node", "many"), "--nproc-per-node is 'many'"),
        (("--as", "many"), "invalid int value"),
        (("--global-batch", "64"), "unrecognized arguments"),
    ],
)
def test_what_does_not_fit_is_refused(flags: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        shares(*flags)


def test_the_start_says_what_few_cores_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "num_cores", lambda: 2)
    assert start.start_line(8, 8, ()) == (
        "8 ranks on 2 cores, as torchrun with 8 processes; a step takes about 4 times as long as with 8 cores"
    )
    assert start.start_line(1, 1, ()) == "1 rank on 2 cores, as torchrun with 1 process"
    assert start.start_line(8, 8, ("0", "1", "2")) == (
        "8 ranks on 3 GPUs, as torchrun with 8 processes; a step takes about 2.7 times as long as with 8 GPUs"
    )


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
    done = python("-c", script, cwd=tmp_path)
    assert done.stdout == "8 8 0 0\n2.0 5 tensor(5.)\n"


def drawn() -> tuple[float, ...]:
    return float(torch.rand(())), float(np.random.rand()), random.random(), float(np.random.default_rng().random())


def test_two_ranks_and_two_seeds_draw_other_numbers() -> None:
    found = []
    for seed, rank in ((0, 0), (0, 1), (1, 0), (0, 0)):
        Generators(seed, rank)
        found.append(drawn())
    assert found[0] == found[3]
    assert all(len({each[kind] for each in found[:3]}) == 3 for kind in range(3))


def test_an_epoch_gives_its_numbers_whatever_was_drawn_before() -> None:
    generators = Generators(0, 0)
    generators.set_epoch(2)
    direct = drawn()[:3]
    again = Generators(0, 0)
    again.set_epoch(0)
    first = drawn()[:3]
    again.set_epoch(2)
    assert drawn()[:3] == direct != first


def test_the_scripts_own_seed_decides_in_each_epoch() -> None:
    found = []
    for seed in (7, 8, 7):
        generators = Generators(0, 0)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        generators.set_epoch(1)
        found.append(drawn()[:3])
    assert found[0] == found[2]
    assert all(one != other for one, other in zip(found[0], found[1], strict=True))


def test_ranks_that_a_script_gives_one_seed_draw_the_same_as_under_torchrun() -> None:
    found = []
    for rank in (0, 1):
        generators = Generators(0, rank)
        torch.manual_seed(3)
        generators.set_epoch(1)
        found.append(float(torch.rand(())))
    assert found[0] == found[1]


def test_a_generator_with_a_seed_of_its_own_keeps_it() -> None:
    plain = np.random.default_rng(5).random()
    Generators(0, 0)
    assert np.random.default_rng(5).random() == plain


@pytest.mark.timeout(900)
def test_every_call_gives_what_gloo_gives_and_ranks_take_turns(tmp_path: Path) -> None:
    usual = run("group_cases.py", "gloo")
    assert run("group_cases.py", "samebits") == usual
    assert run("group_cases.py", "samebits", tmp_path / "baton") == usual


@pytest.mark.parametrize("case", ["unequal", "cumulative", "empty"])
def test_statistics_and_gradients_are_those_of_the_whole_batch(case: str) -> None:
    for differences in run("batch_norm_cases.py", case):
        assert len(differences) == 7  # output, gradients of x, weight and bias; mean, variance, count
        assert max(differences) < 2e-5
