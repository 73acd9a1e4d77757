"""Local steps, as the ranks of a rank pool run them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.config.sections import LoaderConfig, OptimConfig
from samebits.config.sync import SyncConfig
from samebits.engine.assemble import make_job
from samebits.engine.job import Job
from samebits.engine.parts import Parts
from samebits.engine.step import run_step
from samebits.parallel.exchange import tree_all_reduce
from samebits.parallel.local_steps.placement import SubWorld, place_sites
from samebits.storage.weights import weights_sha256
from tests.ranks.jobs import InMemory, Seen
from tests.ranks.networks import make
from tests.ranks.runs_in_ranks import NUM_SAMPLES, loss


def open_job(world: World, sync: SyncConfig, optim: dict[str, Any], network: str = "plain") -> Job:
    """Of a network; the plain one has no batch norm and no dropout, so its gradient is that of a whole batch."""
    config = RunConfig(
        recipe="test", epochs=2, global_batch=16, micro_batch=3, device="cpu", sync=sync, optim=OptimConfig(**optim),
        loader=LoaderConfig(num_workers=0),
    )  # fmt: skip
    parts = Parts(model=nn.Identity(), loss=loss, train_data=lambda: InMemory(NUM_SAMPLES),
                  eval_data=lambda: InMemory(21), metric=Seen)  # fmt: skip
    return make_job(config, lambda: replace(parts, model=make(network)), world)


def run(job: Job, num_steps: int | None = None) -> None:
    loader, steps = job.open_loader(num_steps)
    try:
        for step in steps:
            result = run_step(job, step, loader, 7.0 if job.world.is_main else 99.0)
            assert result.is_finite
            assert result.flag == 7.0
    finally:
        loader.close()


def trained_plain(world: World, sync: SyncConfig, optim: dict[str, Any]) -> dict[str, Any]:
    """The weights of a whole run, as numpy arrays."""
    try:
        job = open_job(world, sync, optim)
        run(job)
        return {name: tensor.numpy().copy() for name, tensor in job.model.state_dict().items()}
    finally:
        torch.use_deterministic_algorithms(False)


def messages(world: World, sync: SyncConfig, num_steps: int) -> dict[str, int]:
    """Bytes that this rank sends to the other site, and within its own, in some steps."""
    placement = place_sites(world, sync.sites)
    counts = {"between": 0, "inside": 0}
    post = tree_all_reduce.post

    def counted(here: World, sent: Any) -> Any:
        for each in sent:
            peer = here.ranks[each.peer] if isinstance(here, SubWorld) else each.peer
            if not each.is_receive:
                counts["inside" if peer in placement.own_ranks else "between"] += each.values.nbytes
        return post(here, sent)

    try:
        job = open_job(world, sync, {"lr": 0.05, "momentum": 0.9})
        with patch.object(tree_all_reduce, "post", counted):
            run(job, num_steps)
        return {**counts, "parameter_bytes": sum(each.nbytes for each in job.model.parameters())}
    finally:
        torch.use_deterministic_algorithms(False)


def trained(world: World, sync: SyncConfig, optim: dict[str, Any], network: str, in_chunks: bool) -> Any:
    """The hash of the weights of a whole run, its integer buffers, and the names of the optimizer's state."""
    try:
        job = open_job(world, sync, optim, network)
        with patch.object(tree_all_reduce, "SMALL_BYTES", 0 if in_chunks else tree_all_reduce.SMALL_BYTES):
            run(job)
        buffers = {name: each.tolist() for name, each in job.model.named_buffers() if not each.is_floating_point()}
        return weights_sha256(job.model.state_dict()), buffers, [*job.optimizer.state_dict()["state"]]
    finally:
        torch.use_deterministic_algorithms(False)
