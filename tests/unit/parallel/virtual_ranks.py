"""Training on many virtual ranks in one process, by the code that trains on real ones.

Each virtual rank has its own reducer, buckets, buffers and gradients, and runs `run_step` like a process. All share the
memory of the weights, which are equal on all ranks: rank 0 updates them, after its gradient was compared with that of
every other rank. A step with three ranks:

    main thread   run 0         run 1         run 2         deliver()   run 0       run 1 ...     compare gradients
    rank 0        read, forward, backward, send | wait                  add | wait            return
    rank 1                      read, forward ... send | wait                       add | wait
"""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samebits.bits import is_same
from samebits.cluster.world import World, alone, layout_text
from samebits.config.schema import RunConfig
from samebits.cores import core_ids
from samebits.data.loader import Loader
from samebits.data.order import Step
from samebits.engine.build import init_weights, make_job
from samebits.engine.job import MAX_TERMS, Job
from samebits.engine.parts import Parts
from samebits.engine.progress import StepResult
from samebits.engine.step import run_step
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.recoverable import RecoverableReducer
from samebits.storage.weights import weights_sha256
from tests.unit.parallel.virtual_network import Network, SimulatedWorld


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread, and threads that it starts meanwhile, on one core; no effect where there are no masks (macOS).

    For threads that pass control to each other: waking one on another core takes longer.
    """
    before = core_ids()
    if before:
        # Not the first core in all processes.
        os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Simulated:
    """What a simulated run shows."""

    steps: int  #: Number of steps.
    sha256: str  #: The hash of the weights after them.
    gradient_bytes: int  #: Size of the gradient in messages.
    messages: int  #: Most messages that a rank sent in a step.
    num_bytes: int  #: Most bytes that a rank sent in a step.
    rounds: int  #: Most messages that followed each other in a step.
    way: str  #: How ranks exchange gradients in the first world.
    link_messages: int  #: Most messages that a machine sent to others in a step.
    link_bytes: int  #: Most bytes that a machine sent to others in a step.


def simulate(config: RunConfig, build: Callable[[], Parts], worlds: Sequence[tuple[int, ...]], steps: int) -> Simulated:
    """Train for some steps on virtual ranks.

    Args:
        worlds: The number of ranks of each machine. Several worlds take turns, a step each: ranks are lost and join
            between two steps.
        steps: Number of steps; fewer if the run is shorter.
    """
    job = make_job(config, build, alone("cpu"))
    init_weights(job)
    steps = min(steps, job.num_steps)
    ranks = _Ranks(job, max(map(sum, worlds)), steps)
    # For each rank the number of its machine.
    machines = [tuple(number for number, count in enumerate(each) for _ in range(count)) for each in worlds]
    networks = []
    # One rank computes at a time. With several threads for one operation, these need cores of their own.
    with on_one_core() if torch.get_num_threads() == 1 else nullcontext(), closing(ranks):
        for number in range(steps):
            networks.append(ranks.step(number, machines[number % len(machines)]))
    sent = [each for network in networks for each in network.traffic]
    left = [each for network in networks for each in network.links]
    return Simulated(
        steps=steps,
        sha256=weights_sha256(job.model.state_dict()),
        gradient_bytes=sum(4 * bucket.length for bucket in ranks.reducers[0]._sum.buckets),
        messages=max(each.messages for each in sent),
        num_bytes=max(each.num_bytes for each in sent),
        rounds=max(network.rounds for network in networks),
        way=layout_text(machines[0]),
        link_messages=max(each.messages for each in left),
        link_bytes=max(each.num_bytes for each in left),
    )


class _Ranks:
    """All virtual ranks of a run."""

    def __init__(self, job: Job, size: int, num_steps: int) -> None:
        self._num_steps = num_steps
        # Of each rank in each world. An order plans many steps at once: one by one, this takes a third of
        # the time of a step.
        self._orders: dict[tuple[int, tuple[int, ...]], Iterator[Step]] = {}
        is_synchronized = job.config.batch_norm == "sync"
        # Only with synchronized batch norm does a rank wait inside a micro-batch. Its generator is then saved, but
        # those of the host: `LayerSums` seeds them after each wait.
        # A step of all ranks takes long, and torch fills caches in each new thread: threads are kept.
        self._coroutines = (
            Coroutines(lambda: partial(torch.set_rng_state, torch.get_rng_state()), idle_s=600.0)
            if is_synchronized
            else Coroutines(lambda: lambda: None, idle_s=600.0)
        )
        self._loader = Loader(
            job.train_data, lambda: iter(()), job.world.device, channels_last=job.config.channels_last
        )
        self._world = {each.name: getattr(job.world, each.name) for each in fields(World)} | {"backend": "gloo"}
        world = replace(job.world, backend=self._world["backend"])
        models = [job.model, *(_share_weights(job.model) for _ in range(1, size))]
        #: One of each rank.
        self.reducers = [
            RecoverableReducer(model, world, num_extras=MAX_TERMS, synchronized=is_synchronized) for model in models
        ]
        self._parameters = [list(model.parameters()) for model in models]
        self._buffers = [list(model.buffers()) for model in models]
        # Only the first one updates the weights.
        # torch refuses an optimizer without parameters.
        idle = [_Idle([nn.Parameter(torch.empty(0))], {}) for _ in range(1, size)]
        self._jobs = [
            replace(
                job,
                model=model,
                reducer=reducer,
                optimizer=optimizer,
                average=job.average if rank == 0 else None,
            )
            for rank, (model, reducer, optimizer) in enumerate(
                zip(models, self.reducers, [job.optimizer, *idle], strict=True)
            )
        ]

    def close(self) -> None:
        """End the threads."""
        self._coroutines.close()

    def step(self, number: int, machines: tuple[int, ...]) -> Network:
        """Run a step on the first ranks, given their machines; return their network."""
        size = len(machines)
        network = Network(size, lambda: self._coroutines.wait(True), machines)
        results = self._coroutines.run(
            [self._body(number, rank, network) for rank in range(size)], lambda _: network.deliver()
        )
        for rank, result in enumerate(results):
            assert result.is_finite, f"loss or gradient is not finite in step {number}"
            assert all(is_same(*pair) for pair in self._gradients(rank)), f"rank {rank} of {size} has other gradients"
        # Ranks that were not part of this step receive its buffers, as a process that joins does.
        for buffers in self._buffers[size:]:
            for buffer, current in zip(buffers, self._buffers[0], strict=True):
                buffer.copy_(current)
        return network

    def _body(self, number: int, rank: int, network: Network) -> Callable[[], StepResult]:
        job, size = self._jobs[rank], len(network.traffic)
        job.world = SimulatedWorld(
            **self._world | {"rank": rank, "size": size, "machines": network.machines, "network": network}
        )
        self.reducers[rank].move_to(job.world)
        place = rank, network.machines
        if place not in self._orders:
            self._orders[place] = iter(job.order.steps(job.world, start=number, stop=self._num_steps))
        step = next(step for step in self._orders[place] if step.number == number)
        return lambda: run_step(job, step, self._loader)

    def _gradients(self, rank: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Pairs of what rank 0 and another one have: gradients and buffers."""
        for mine, other in zip(self._parameters[0], self._parameters[rank], strict=True):
            yield mine.grad, other.grad
        yield from zip(self._buffers[0], self._buffers[rank], strict=True)


class _Idle(torch.optim.Optimizer):
    """Updates nothing."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


def _share_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model with buffers of its own, and parameters in the same memory."""
    # deepcopy takes what is in the memo for copied already, so the weights' memory stays shared.
    memo = {id(parameter): parameter for parameter in model.parameters()}
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # Another parameter in the same memory, so that each rank has a gradient of its own.
            twin = nn.Parameter(parameter.data, parameter.requires_grad)
            setattr(module, name, twin)
    return copied
