"""The state of a run, sent from one rank to others that have an older one or none: raw bytes, no disk and no pickle."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.cluster import collectives
from samebits.cluster.views.waits import wait_for_peers
from samebits.cluster.world import World
from samebits.engine.checkpoints.saving import pack_job
from samebits.engine.job import Job
from samebits.engine.progress import Progress, StepResult
from samebits.optim.build import load_state
from samebits.parallel.agreement import Agreement
from samebits.storage import checkpoint
from samebits.storage.weights import load_into

SENDING = "sending the run's state"


@dataclass(frozen=True)
class Received:
    """A run's state, complete, before it replaces this rank's own."""

    tensors: dict[str, Tensor]  #: Weights, optimizer state and moving average, of any shape, by name.
    plain: dict[str, Any]  #: All other state of a checkpoint.
    last: tuple[int, StepResult] | None  #: Number and result of the last step that was applied.


def send_or_receive(job: Job, world: World, agreement: Agreement) -> Received | None:
    """Send this rank's state, unchanged, if it is the agreement's source; return that state on its receivers."""
    if not agreement.receivers:
        return None
    is_source, is_receiver = world.rank == agreement.source, world.rank in agreement.receivers
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {}
    if is_source:
        tensors, plain = pack_job(job)
        last = (job.last_result[0], asdict(job.last_result[1])) if job.last_result is not None else None
        shapes = [(name, [*tensor.shape], tensor.dtype) for name, tensor in tensors.items()]
        header = {"plain": plain, "last": last, "shapes": shapes}
    # Before the tensors, since receivers must allocate; on all ranks, since a broadcast is collective.
    header = collectives.broadcast_object(world, header, src=agreement.source)
    if is_receiver:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in header["shapes"]}
    if is_source or is_receiver:
        peers = agreement.receivers if is_source else (agreement.source,)
        call = dist.isend if is_source else dist.irecv
        # In the order of the header on both sides: messages of one pair of ranks arrive in order.
        buffers = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
        with world.activity.waiting(SENDING):
            # All messages are posted before the first wait, so several receivers are served at the same time.
            works = [call(buffer, peer) for peer in peers for buffer in buffers if buffer.numel()]
            wait_for_peers(world.membership, lambda: [work.wait() for work in works if work is not None])
    if not is_receiver:
        return None
    last = header["last"]
    return Received(tensors, header["plain"], None if last is None else (last[0], StepResult(**last[1])))


def load(job: Job, received: Received, *, is_new: bool) -> None:
    """Replace a rank's state by the one that it received.

    Args:
        job: The run; model, optimizer, moving average and progress change.
        is_new: This rank has no progress of its own. Otherwise only what a step changes is replaced: the step is
            counted and reported afterwards.
    """
    origin = Path("the state of another rank")
    restored = checkpoint.unpack(received.tensors, received.plain)
    load_into(job.model, restored.weights, origin)
    load_state(job.optimizer, restored.optimizer)
    if job.average is not None:
        job.average.reset(restored.average or restored.weights)
    progress = Progress.from_json(restored.state, origin)
    if is_new:
        job.progress = progress
        job.progress.chain = ""  # rank 0's
    for name in ("loss_scale", "scale_age", "num_overflows"):
        setattr(job.progress, name, getattr(progress, name))
    job.last_result = received.last
