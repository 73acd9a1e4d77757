"""The backend follows from the roll, and is the same for every process."""

from dataclasses import replace

import pytest

from samebits.cluster.rendezvous import RankInfo, ranks_text
from samebits.cluster.world import alone, choose_backend
from samebits.errors import LaunchError


def infos(hosts: str, device: str = "cuda", backend: str = "auto", num_gpus: int = 2) -> list[RankInfo]:
    return [RankInfo(rank, len(hosts), host, 100 + rank, device, backend, num_gpus) for rank, host in enumerate(hosts)]


def test_cpu_takes_gloo_and_cuda_takes_nccl() -> None:
    assert choose_backend(infos("aabb", device="cpu", num_gpus=0)) == ("gloo", "")
    assert choose_backend(infos("aabb")) == ("nccl", "")


def test_processes_that_share_a_gpu_take_gloo_and_say_so() -> None:
    backend, warning = choose_backend(infos("aaab"))
    assert backend == "gloo"
    assert "3 processes share 2 GPU(s) on a" in warning


def changed(ranks: list[RankInfo], **more: str) -> list[RankInfo]:
    return [ranks[0], replace(ranks[1], **more), *ranks[2:]]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (infos("aaab", backend="nccl"), "share 2 GPU"),
        (infos("ab", device="cpu", backend="nccl", num_gpus=0), "device is cpu"),
        (changed(infos("aab"), device="cpu"), "cuda on ranks 0 2, cpu on rank 1"),
        (changed(infos("ab", device="cpu"), backend="gloo"), "backend"),
    ],
    ids=["nccl on a shared GPU", "nccl without a GPU", "different devices", "different backends"],
)
def test_what_cannot_be_is_refused(ranks: list[RankInfo], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        choose_backend(ranks)


def test_ranks_are_listed_up_to_sixteen() -> None:
    assert ranks_text([2]) == "rank 2"
    assert ranks_text([0, 1, 3]) == "ranks 0 1 3"
    assert ranks_text(range(20)).endswith("15 and 4 more")


def test_a_process_that_is_alone_has_no_group() -> None:
    import torch.distributed as dist

    world = alone("cpu")
    assert (world.rank, world.size, world.is_main, world.device.type) == (0, 1, True, "cpu")
    assert not dist.is_initialized()


def test_a_device_that_is_not_there_is_named() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(LaunchError, match="no CUDA device"):
        alone("cuda")
