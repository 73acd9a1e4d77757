"""A whole run, as ranks of a rank pool execute it: loop, checkpoints, evaluation; without console and command."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.config.schema import CheckpointConfig, LoaderConfig, OptimConfig, RunConfig, WatchConfig
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch
from samebits.engine.build import init_weights, make_job
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.parts import Parts
from samebits.errors import SamebitsError
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import weights_sha256
from tests.in_loop import train_alone
from tests.ranks.jobs import InMemory, Seen
from tests.ranks.networks import WithBatchNorm

NUM_SAMPLES = 53
STEPS_PER_EPOCH = 4  # of 16, 16, 16 and 5 samples


class Poisoned(InMemory):
    """Samples of which one is not a number, the first few times that it is read in training."""

    def __init__(self, index: int, times: int, is_raw: bool = False) -> None:
        super().__init__(NUM_SAMPLES)
        self.index, self.times, self.is_raw = index, times, is_raw
        self.is_armed = False  # what is read at the start has to be the same at each reading

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        batch = super().batch(indices, keys)
        if self.is_armed and self.index in indices and self.times > 0:
            self.times -= 1
            batch = replace(batch, inputs=torch.where((batch.indices == self.index).view(-1, 1, 1, 1), torch.nan,
                                                      batch.inputs))  # fmt: skip
        return replace(batch, inputs=batch.inputs.double()) if self.is_raw else batch

    def finish(self, batch: Batch) -> Batch:
        """What a model can't take before it."""
        return replace(batch, inputs=batch.inputs.float())


class Quiet:
    """Replaces reports: records the messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def notify(self, text: object) -> None:
        self.said.append(str(text))

    def start(self, *_: Any) -> None: ...

    def resume(self, *_: Any) -> None: ...

    def step(self, *_: Any) -> None: ...

    def evaluation(self, *_: Any) -> None: ...


def settings(every: str = "3 steps", keep: int = 2, nonfinite: Any = "stop", **more: Any) -> RunConfig:
    """Of a run of two epochs on the network with batch norm."""
    more.setdefault("micro_batch", 3)
    optim = OptimConfig(lr=0.05, momentum=0.9, schedule="cosine", clip_norm=1.0, **more.pop("optim", {}))
    loader = LoaderConfig(num_workers=more.pop("num_workers", 0))
    return RunConfig(
        recipe="test", epochs=2, global_batch=16, eval_batch=20, device="cpu", optim=optim,
        checkpoint=CheckpointConfig(every=every, keep=keep), loader=loader,
        watch=WatchConfig(nonfinite=nonfinite), **more,
    )  # fmt: skip


def loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"cross_entropy": nn.functional.cross_entropy(outputs, batch.targets)}


def carry_out(
    world: World, path: Path, config: RunConfig, resume: str = "auto", stop_at: int = -1, poison: Any = None
) -> Any:
    """Train until the end, or until after step `stop_at`.

    Returns:
        Hash of the weights, progress without times, worlds and fingerprint, whether it is complete, what was said; or
        the error's text.
    """
    folder = RunFolder(path)
    if world.is_main:
        folder.open()
    quiet = Quiet()
    samples = Poisoned(*poison) if poison else InMemory(NUM_SAMPLES)
    parts = Parts(model=nn.Identity(), loss=loss, train_data=lambda: samples, eval_data=lambda: InMemory(21),
                  metric=Seen)  # fmt: skip
    job = make_job(config, lambda: replace(parts, model=WithBatchNorm()), world)
    samples.is_armed = True
    try:
        checkpoints = CheckpointManager(folder, config.checkpoint, world)
        if resume != "never":
            checkpoints.restore(job, resume, quiet.notify)

        def has_stop() -> bool:
            return job.progress.step == stop_at

        is_complete = train_alone(job, checkpoints, quiet, has_stop)
        progress = job.progress.to_json()
        progress["seconds"], progress["worlds"], progress["fingerprint"] = 0, [], {}
        state = dict(job.model.state_dict())
        if job.average is not None:
            state |= {f"average:{name}": tensor for name, tensor in job.average.state.items()}
        return weights_sha256(state), progress, is_complete, quiet.said
    except SamebitsError as error:
        return str(error)
    finally:
        torch.use_deterministic_algorithms(False)
        folder.close()


def worlds_after_restore(world: World, path: Path, config: RunConfig) -> list[int]:
    """The sizes in the progress after a restore from the checkpoint of a world of three."""
    folder = RunFolder(path)
    if world.is_main:
        folder.open()
    parts = Parts(model=nn.Identity(), loss=loss, train_data=lambda: InMemory(NUM_SAMPLES),
                  eval_data=lambda: InMemory(21), metric=Seen)  # fmt: skip
    job = make_job(config, lambda: replace(parts, model=WithBatchNorm()), world)
    try:
        checkpoints = CheckpointManager(folder, config.checkpoint, world)
        job.progress.worlds = [{"size": 3, "from_step": 0}]
        checkpoints.save(job)
        checkpoints.restore(job, "auto", print)
        return [entry["size"] for entry in job.progress.worlds]
    finally:
        torch.use_deterministic_algorithms(False)
        folder.close()


def started(world: World) -> tuple[dict[str, str], float, float]:
    """What a rank has after a recipe's `init_weights` has set all weights to 2: a weight, and its average."""

    def start(model: nn.Module) -> dict[str, str]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
        return {"weights": "two"}

    samples = InMemory(NUM_SAMPLES)
    parts = Parts(model=nn.Identity(), loss=loss, train_data=lambda: samples, eval_data=lambda: samples, metric=Seen,
                  init_weights=start)  # fmt: skip
    try:
        job = make_job(settings(optim={"ema": 0.9}), lambda: replace(parts, model=WithBatchNorm()), world)
        rows = dict(init_weights(job))
        name = next(name for name, _ in job.model.named_parameters())
        return rows, float(job.state()[name].mean()), float(job.final_weights()[name].mean())
    finally:
        torch.use_deterministic_algorithms(False)
