"""Runs of a sharded model, as the ranks of a rank pool carry them out."""

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.engine.build import init_weights as bring_to_start
from samebits.engine.build import make_job
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.parts import Parts
from samebits.errors import SamebitsError
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import weights_sha256, write_weights
from tests.in_loop import train_alone
from tests.ranks.jobs import InMemory, Seen
from tests.ranks.networks import WithBatchNorm
from tests.ranks.runs_in_ranks import NUM_SAMPLES, Poisoned, Quiet, loss


class Blocks(WithBatchNorm):
    """With parts that are sharded by themselves, rows that don't divide, and a part that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        _, *others = self.layers
        first = nn.Conv2d(3, 8, 3, bias=False)  # before batch norm a bias has noise for a gradient, which adam blows up
        self.layers = nn.Sequential(
            nn.Sequential(first, *others[:4]), *others[4:-1], nn.Sequential(nn.Linear(96, 7), nn.Tanh()),
            nn.Linear(7, 5),
        )  # fmt: skip
        self.layers[-1].bias.requires_grad_(False)


def carry_out(
    world: World, path: Path, config: RunConfig, stop_at: int = -1, poison: Any = None, network: type = Blocks
) -> Any:
    """Train until the end, or until after step `stop_at`.

    Returns:
        Weights on rank 0 (numpy arrays), progress, what was said, and the shapes of what this rank holds of the weights
        and of the optimizer's state; or the error's text.
    """
    folder = RunFolder(path)
    if world.is_main:
        folder.open()
    quiet = Quiet()
    samples = Poisoned(*poison) if poison else InMemory(NUM_SAMPLES)
    parts = Parts(model=nn.Identity(), loss=loss, train_data=lambda: samples, eval_data=lambda: InMemory(21),
                  metric=Seen)  # fmt: skip
    try:
        job = make_job(config, lambda: replace(parts, model=network()), world)
        samples.is_armed = True
        checkpoints = CheckpointManager(folder, config.checkpoint, world)
        checkpoints.restore(job, "auto", quiet.notify)
        train_alone(job, checkpoints, quiet, lambda: job.progress.step == stop_at)
        held = {name: tuple(tensor.shape) for name, tensor in job.state().items()}
        kept = [tuple(value.shape) for entries in job.optimizer.state.values() for value in entries.values()]
        final = job.final_weights()
        if world.is_main:
            write_weights(folder.weights, final)
        is_small = network is not Wide
        weights = {name: tensor.detach().numpy().copy() for name, tensor in final.items() if is_small}
        return weights, job.progress.to_json(), quiet.said, held, kept
    except SamebitsError as error:
        return str(error)
    finally:
        torch.use_deterministic_algorithms(False)
        folder.close()


def hash_of(weights: Any) -> str:
    """Of numpy arrays by name."""
    return weights_sha256({name: torch.from_numpy(array) for name, array in weights.items()})


class Wide(nn.Module):
    """Sixteen million parameters in as many blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.ReLU()) for _ in range(16)]
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 1000), *blocks, nn.Linear(1000, 5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def carry_out_within(world: World, path: Path, config: RunConfig, room_bytes: int) -> Any:
    """As `carry_out` for the wide network, in a process that gets so much memory more than it has, and no more.

    The process must be a new one: what earlier jobs have left free would be room, too. On an error it leaves its group.

    Returns:
        The steps done when it is asked to stop after two, or why it could not.
    """
    carry_out(world, path / "small", config)  # imports, threads and connections count for nothing
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(status["VmData"].split()[0]) + room_bytes, hard))
    try:
        result = carry_out(world, path, config, 2, network=Wide)
        return result if isinstance(result, str) else result[1]["step"]
    except RuntimeError as error:
        text = str(error)
        if world.size > 1:
            dist.destroy_process_group()  # the other one may wait for this one
        return text
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def started(world: World, config: RunConfig) -> Any:
    """The weights and their average, summed up on rank 0, after a recipe's `start` has set all of them to 2."""

    def start(model: nn.Module) -> dict[str, str]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
        return {"weights": "two"}

    samples = InMemory(NUM_SAMPLES)

    def build() -> Parts:
        return Parts(model=Blocks(), loss=loss, train_data=lambda: samples, eval_data=lambda: samples, metric=Seen,
                     init_weights=start)  # fmt: skip

    try:
        job = make_job(config, build, world)
        rows = bring_to_start(job, build)
        average = job.final_weights()
        job.average = None
        return rows, [{float(state["layers.0.0.weight"].mean())} for state in (average, job.final_weights()) if state]
    finally:
        torch.use_deterministic_algorithms(False)
