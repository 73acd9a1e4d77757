"""Worlds that compute on CUDA devices."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def test_a_process_on_its_own_gpu_takes_nccl(visits: Callable[..., Any], init: str) -> None:
    kind, facts, said = visits(init, 0, 1, device="auto").answer(60)
    assert kind == "joined", facts
    assert (facts["backend"], facts["device"]) == ("nccl", "cuda:0")
    assert (facts["gathered"], facts["everybody"], facts["broadcast"]) == (["from 0"], [0], 7)
    assert said == []


def test_two_processes_on_one_gpu_take_gloo_and_say_so(visits: Callable[..., Any], init: str) -> None:
    import torch

    if torch.cuda.device_count() > 1:
        pytest.skip("there is a GPU for each process")
    pair = [visits(init, rank, 2, device="cuda") for rank in (0, 1)]
    answers = [visit.answer(60) for visit in pair]
    for kind, facts, _ in answers:
        assert kind == "joined", facts
        assert (facts["backend"], facts["device"]) == ("gloo", "cuda:0")
        assert facts["tensors"] == (0.0, True, 0)
    assert "2 processes share 1 GPU(s)" in answers[0][2][0]
    assert answers[1][2] == []


def test_two_processes_with_a_gpu_each_take_nccl(visits: Callable[..., Any], init: str) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pair = [visits(init, rank, 2) for rank in (0, 1)]
    for rank, (kind, facts, _) in enumerate(visit.answer(60) for visit in pair):
        assert kind == "joined", facts
        assert (facts["backend"], facts["device"]) == ("nccl", f"cuda:{rank}")
        assert facts["everybody"] == [0, 1]
        assert facts["tensors"] == (0.0, True, 0)
