"""Synchronized batch norm and low precision on a GPU."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.runs import TINY, samebits, weights

pytestmark = pytest.mark.gpu


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_micro_batches_equal_torchs_synchronized_batch_norm_of_all_of_them(
    group: None, channels_last: bool, dtype: torch.dtype
) -> None:
    from torch.nn.modules._functions import SyncBatchNorm

    from samebits.cluster.world import alone
    from samebits.data.order import MicroBatch, Order
    from samebits.parallel.reduce import Reducer

    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    inputs = torch.randn(22, 16, 9, 9, device="cuda").mul_(2).add_(1).to(dtype).contiguous(memory_format=layout)
    slopes = torch.randn_like(inputs)
    layer = nn.BatchNorm2d(16).cuda()
    nn.init.uniform_(layer.weight)
    theirs = copy.deepcopy(layer)

    whole = inputs.clone().requires_grad_()
    expected: Tensor = SyncBatchNorm.apply(
        whole, theirs.weight, theirs.bias, theirs.running_mean, theirs.running_var, layer.eps, 0.1, dist.group.WORLD, 1
    )
    (expected.float() * slopes.float()).flatten(1).sum(1).mean().backward()

    here = alone("cuda")
    reducer = Reducer(layer, here, synchronized=True)
    (step,) = Order(22, 22, 6).steps(here, stop=1)
    outputs, gradients = torch.empty_like(inputs), torch.empty_like(inputs)

    def run(micro: MicroBatch) -> None:
        part = inputs[micro.indices].contiguous(memory_format=layout).requires_grad_()
        with reducer.micro_batch(micro):
            found = layer(part)
            outputs[micro.indices] = found.detach()
            reducer.backward((found.float() * slopes[micro.indices].float()).flatten(1).sum(1).mean())
        assert part.grad is not None
        gradients[micro.indices] = part.grad

    reducer.begin(step)
    reducer.run(run)
    reducer.reduce()
    close = 1e-4 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(outputs, expected.detach(), rtol=close, atol=close)
    torch.testing.assert_close(gradients, whole.grad, rtol=close, atol=close * float(whole.grad.abs().max()))
    for one, two in zip(layer.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, two.grad, rtol=close, atol=close * float(two.grad.abs().max()))
    torch.testing.assert_close(layer.running_mean, theirs.running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.running_var, theirs.running_var, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    ["batch_norm=sync", "precision=tf32", "precision=bf16", "precision=fp16", "precision=fp16 batch_norm=sync"],
)
def test_one_hash_for_processes_that_share_a_gpu(tmp_path: Path, settings: str) -> None:
    for num_procs in (1, 2, 3):
        run = tmp_path / str(num_procs)
        samebits("train", TINY, "device=cuda", *settings.split(), "--procs", num_procs, "--run-dir", run, cwd=tmp_path)
    assert weights(tmp_path / "1") == weights(tmp_path / "2") == weights(tmp_path / "3")
