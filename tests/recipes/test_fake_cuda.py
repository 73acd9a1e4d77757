"""Each recipe's forward pass and loss on tensors of a GPU that have shapes only: all of them are on one device.

Tensors of fake mode know their device, so an operation on tensors of two devices fails as on a GPU. The backward pass
needs a GPU.
"""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from samebits.cluster.world import alone
from samebits.data.samples import Batch
from samebits.engine.build import make_job
from samebits.engine.job import Job
from tests.lab import portable_runs
from tests.ranks.recipes_in_ranks import build_small

pytestmark = pytest.mark.full
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    portable_runs.make_data(folder)
    return folder


def on_gpu(model: nn.Module) -> nn.Module:
    """Copy a model, as shapes on a GPU; to be called in fake mode."""

    def moved(tensor: Tensor) -> Tensor:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    return copy.deepcopy(model, {id(each): moved(each) for each in [*model.parameters(), *model.buffers()]})


def first_batch(job: Job) -> Batch:
    loader, steps = job.open_loader(1)
    micro_batch = next(steps).micro_batches[0]
    batch = loader.batch(micro_batch.indices, micro_batch.keys)
    job.close()
    return batch


@pytest.mark.parametrize("recipe", portable_runs.RECIPES)
def test_forward_and_loss_stay_on_one_device(recipe: str, data: Path) -> None:
    config = portable_runs.config_of(recipe, data, "auto")
    model = portable_runs.tiny_vit if recipe == "vit" else None
    job = make_job(config, lambda: build_small(config, model), alone("cpu"))
    batch = first_batch(job)
    # Without cuDNN, whose LSTM asks the driver.
    with torch.backends.cudnn.flags(enabled=False), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shapes = replace(
            batch,
            inputs=tree_map_only(Tensor, lambda each: mode.from_tensor(each).to(GPU), batch.inputs),
            targets=tree_map_only(Tensor, lambda each: mode.from_tensor(each).to(GPU), batch.targets),
        )
        outputs = on_gpu(job.model)(shapes.inputs)
        terms = job.parts.loss(outputs, shapes)
        assert {each.device for each in terms.values()} == {torch.device("cuda:0")}
        assert all(each.requires_grad for each in terms.values())


class Scaled(nn.Linear):
    """Multiplies by a constant that does not move with the model."""

    constant = torch.ones(2)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.constant


def test_a_constant_on_the_cpu_is_found() -> None:
    model = Scaled(3, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        moved = on_gpu(model)
        with pytest.raises(RuntimeError, match="same device"):
            moved(torch.empty(4, 3, device=GPU))
