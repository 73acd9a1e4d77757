"""Small networks on random images, as jobs of the engine, and processes to run them: what several benchmarks share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
from torch import Tensor, nn

from samebits.cluster.env import ALONE, RankAssignment, read_assignment
from samebits.cluster.world import World, add_group
from samebits.config.schema import RunConfig
from samebits.data.samples import Batch, DatasetSamples
from samebits.engine.build import make_job
from samebits.engine.job import Job
from samebits.engine.parts import Parts
from samebits.metrics.classification import Accuracy
from samebits.recipes.mnist.recipe import Cnn

SHAPES = {  # channels, pixels
    "cnn": (1, 28), "digits": (1, 8), "mnist": (1, 28), "resnet18-64": (3, 64),
    "resnet18-128": (3, 128), "vit-64": (3, 64), "resnet50-64": (3, 64), "resnet101-32": (3, 32),
}  # fmt: skip
MICRO_BATCH = 16


def network(name: str) -> nn.Module:
    """Return a network of SHAPES, for 10 classes."""
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
        )  # fmt: skip
    if name in ("digits", "mnist"):
        return Cnn(width=16, dropout=0.1)
    if name == "vit-64":
        return torchvision.models.VisionTransformer(64, 8, 6, 3, 192, 768, num_classes=10)
    return getattr(torchvision.models, name.partition("-")[0])(num_classes=10)  # type: ignore[no-any-return]


def images_for(name: str, count: int) -> Tensor:
    """Return random images for a network, (count, channels, pixels, pixels)."""
    channels, size = SHAPES[name]
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))


def loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Return the cross-entropy of (N, 10) logits."""
    return {"cross_entropy": nn.functional.cross_entropy(outputs, batch.targets)}


def job_of(
    name: str,
    world: World,
    *,
    num_samples: int,
    global_batch: int,
    micro_batch: int = MICRO_BATCH,
    epochs: int = 10**6,
    **settings: Any,
) -> Job:
    """Return a job that trains a network on random images, on the CPU."""
    samples = DatasetSamples([(image, index % 10) for index, image in enumerate(images_for(name, num_samples))])
    config = RunConfig(
        recipe="bench", epochs=epochs, global_batch=global_batch, micro_batch=micro_batch, device="cpu", **settings
    )

    def build() -> Parts:
        return Parts(
            model=network(name), loss=loss, train_data=lambda: samples, eval_data=lambda: samples,
            metric=lambda: Accuracy(10),
        )  # fmt: skip

    return make_job(config, build, world)


def rest_text(load: tuple[str, bool], *loads: tuple[str, bool]) -> str:
    """Return "at rest" if `describe_other_load` has measured each time that other programs use little."""
    busy = [text or "the load is unknown" for text, is_notable in (load, *loads) if is_notable or not text]
    return f"not at rest: {busy[0]}" if busy else "at rest"


def free_port() -> int:
    """Return a TCP port of this machine that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def spawn(work: Callable[..., None], num_procs: int, *arguments: Any) -> None:
    """Call `work(rank, *arguments)` in new processes, which find each other and have one thread each."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_procs)}
    mp.spawn(_entered, (work, arguments), nprocs=num_procs)


def _entered(rank: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    work(rank, *arguments)


@contextmanager
def plain_world(rank: int, num_procs: int) -> Iterator[World]:
    """Join a world without a store of Samebits, for parts of it beside torch's DDP."""
    dist.init_process_group("gloo", rank=rank, world_size=num_procs)
    add_group()
    yield World(rank, num_procs, rank, torch.device("cpu"), "gloo", "here", None, ALONE)
    dist.barrier()
    dist.destroy_process_group()


def assignment() -> RankAssignment:
    """Return which process of a world this one is."""
    here = read_assignment(os.environ)
    assert here is not None
    return here
