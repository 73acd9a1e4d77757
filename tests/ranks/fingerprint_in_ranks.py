"""Jobs of `test_start_worlds.py`: one rank has other code, data or kernels."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch
from samebits.engine.build import make_job
from samebits.engine.parts import Parts
from samebits.errors import SamebitsError
from samebits.provenance import fingerprint
from tests.ranks.jobs import InMemory, Seen
from tests.ranks.networks import WithBatchNorm
from tests.ranks.runs_in_ranks import loss, settings

NUM_SAMPLES = 8  # all of them are read


class ByProcess(InMemory):
    """Samples that depend on the process which reads them."""

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        batch = super().batch(indices, keys)
        return replace(batch, inputs=batch.inputs + os.getpid() % 977)


class ScaledByProcess(WithBatchNorm):
    """A network that depends on the process which runs it."""

    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs) * (1 + os.getpid() % 977)


def begin(world: World, folder: Path, fault: str) -> str:
    """Make a job where the last rank differs; the error's text, or an empty one."""
    is_odd = world.rank == world.size - 1
    here = folder / str(world.rank)
    here.mkdir(parents=True, exist_ok=True)
    (here / "recipe.py").write_text(f"version = {world.rank if fault == 'recipe' else 0}\n")
    config = settings().model_copy(update={"recipe": "recipe.py"})
    data = ByProcess(NUM_SAMPLES) if fault == "all samples" else InMemory(NUM_SAMPLES)
    if fault == "sample" and is_odd:
        data.inputs[5] += 1
    model = ScaledByProcess if fault == "model" else WithBatchNorm
    parts = Parts(model=torch.nn.Identity(), loss=loss, train_data=lambda: data, eval_data=lambda: data, metric=Seen)
    capability = "SVE512" if fault == "processor" and is_odd else torch.backends.cpu.get_cpu_capability()
    before = Path.cwd()
    os.chdir(here)  # the same path leads to another file, as on another machine
    try:
        variables = {"MKL_CBWR": "COMPATIBLE"} if fault == "MKL" and is_odd else {}
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.object(fingerprint.torch.backends.cpu, "get_cpu_capability", return_value=capability),
        ):
            make_job(config, lambda: replace(parts, model=model()), world)
            return ""
    except SamebitsError as error:
        return str(error)
    finally:
        os.chdir(before)
        torch.use_deterministic_algorithms(False)


def begin_counted(world: World, folder: Path, fault: str) -> int:
    """Make a job, as above; how often this rank received the values of all ranks."""
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathered:
        begin(world, folder, fault)
    return gathered.call_count


def compared(world: World, odd: int) -> tuple[bool, bool, bool]:
    """Whether all ranks have equal values: all do, and one rank does not. Whether one of them is odd."""
    mine = {"name": world.rank == odd, "weights": torch.ones(3)}
    return (
        collectives.are_equal(world, (1.5, None, b"x")),
        collectives.are_equal(world, mine),
        collectives.any_rank(world, world.rank == odd),
    )
