"""The outer step of local SGD and DiLoCo: sites train on their own, then the mean of their changes updates the weights.

    all ranks     start: weights, buffers and optimizer state, equal everywhere
    each site     start -> local step -> local step ... -> change = start - weights         (messages within the site)
    leaders       changes of all sites, summed in the tree of `tree.py` with a leaf for each site     (over long links)
    each group    its leader sends the sum to its other ranks
    all ranks     outer optimizer: start - outer_lr * (momentum and) mean change

Nothing of a site survives an outer step: the sites' optimizer state is averaged or reset, and batch norm's running
statistics are averaged. So all ranks are equal after each outer step, and a process can train any number of sites, one
after another, in the memory of one.

Sources: S. Stich, Local SGD converges fast and communicates little (2019); A. Douillard et al., DiLoCo (2023), for the
outer optimizer; J. Wang et al., SlowMo (2020), for the strategies of `sync.inner_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.cluster.world import World
from samebits.config.sync import SyncConfig
from samebits.data.order import Step
from samebits.errors import CheckpointError
from samebits.parallel.bucket import Bucket
from samebits.parallel.exchange.halving import make_all_reduce
from samebits.parallel.local_steps.order import OuterStep
from samebits.parallel.local_steps.placement import place_sites, sub_world
from samebits.parallel.local_steps.site_state import SiteState
from samebits.parallel.recoverable import RecoverableReducer
from samebits.parallel.tree import Node, rank_nodes

OUTER = "outer_momentum"  # its name among a parameter's entries in the checkpoint's optimizer state
LocalStep = Callable[[Step], tuple[Sequence[float], bool]]
_TAG = 1 << 12  # behind the tags of the gradient's buckets


@dataclass(frozen=True)
class OuterResult:
    """The result of an outer step, equal on all ranks.

    Attributes:
        extras: Loss terms, each the mean over the step's samples at the weights of their local steps.
        norm: 2-norm of the mean change. It and `extras` are nan if a local step was not finite.
        flag: The flag that rank 0 sent.
        is_finite: Whether all local steps and the mean change were finite. If not, the step changed nothing.
    """

    extras: list[float]
    norm: float
    flag: float
    is_finite: bool


class OuterAverage:
    """Runs the local steps of this rank's sites, averages all sites, and updates the weights.

    Making one lets the reducer sum over the ranks of this rank's sites only.

    Args:
        model: The model, on its device.
        optimizer: The optimizer of the local steps.
        state_names: The names of the optimizer's tensors for each trained parameter, of any shape.
        reducer: Sums the gradients of a local step.
        world: All ranks.
        config: Number of sites and settings of the outer optimizer.
        num_extras: Number of loss terms.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        state_names: Sequence[tuple[Tensor, tuple[str, ...]]],
        reducer: RecoverableReducer,
        world: World,
        config: SyncConfig,
        num_extras: int,
    ) -> None:
        self._world, self._placement = world, place_sites(world, config.sites)
        self._site_world = sub_world(world, self._placement.own_ranks)
        is_leader = self._site_world.rank == 0
        self._leaders = sub_world(world, self._placement.leaders) if is_leader else None
        reducer.move_to(self._site_world)
        self._state = SiteState(model, optimizer, state_names if config.inner_state == "average" else ())
        self._optimizer, self._num_sites = optimizer, config.sites
        self._parameters = self._state.parameters
        momentum = config.outer_momentum
        self.outer = torch.optim.SGD(
            self._parameters, lr=config.outer_lr, momentum=momentum, nesterov=momentum > 0, fused=True
        )
        # Behind the tensors: rank 0's flag, the number of sites that failed, and the loss terms.
        self._num_head = 2 + num_extras
        self._bucket = Bucket(
            self._state.templates, self._num_head + self._state.tail_length, 1, True, self._parameters[0].device
        )
        self._failed: list[Tensor] | None = None

    def run(self, step: OuterStep, flag: Callable[[], float], local_step: LocalStep) -> OuterResult:
        """Run an outer step. Called on all ranks.

        Args:
            step: Its plan.
            flag: Called after the local steps; rank 0's value is sent to all ranks.
            local_step: Runs a local step of a site, and returns its loss terms and whether it was finite.
        """
        self._failed = None
        self._state.store()
        self._bucket.start_step(self._placement.own_sites.start)
        for site, local_steps in step.sites:
            if site > self._placement.own_sites.start:
                self._state.restore()
            sums = [0.0] * (self._num_head - 2)
            for local in local_steps:
                if self._failed is not None or not local.num_micro_batches:
                    continue
                extras, is_finite = local_step(local)
                share = local.num_samples / step.num_samples
                sums = [total + share * value for total, value in zip(sums, extras, strict=True)]
                if not is_finite:
                    self._failed = self._state.copy()
            self._add(site, sums)
        activity = self._world.activity
        activity.begin_step(step.number, self._world.device)
        activity.end_work(0)
        self._exchange(flag())
        activity.end_wait()
        return self._update()

    def _add(self, site: int, sums: Sequence[float]) -> None:
        """Enter a site's change into the tree, on the leader of its group."""
        if self._leaders is None:
            return
        leaf = self._bucket.start_leaf(site, self._num_sites, is_alone=True)
        self._state.write_change(leaf.flat.views)
        head = torch.tensor([0.0, float(self._failed is not None), *sums]).to(self._bucket.device)
        leaf.put_tail(torch.cat([head, self._state.tail()]))
        leaf.missing.clear()
        self._bucket.end_leaf(leaf, self._num_sites)

    def _exchange(self, flag: float) -> None:
        bucket = self._bucket
        if self._leaders is not None:
            if self._world.rank == 0:
                bucket.nodes[0][1].tail[0] = flag  # 0 at all other sites
            self._all_reduce(self._leaders, rank_nodes(self._placement.sites, self._num_sites))
        if self._site_world.size > 1:
            # The leader has the whole sum, and the others nothing of it.
            whole: Node = (0, self._num_sites)
            if bucket.result is not None:
                bucket.nodes, bucket.result = [(whole, bucket.result)], None
            self._all_reduce(self._site_world, [[whole], *([] for _ in range(self._site_world.size - 1))])

    def _all_reduce(self, world: World, nodes: list[list[Node]]) -> None:
        exchange = make_all_reduce(self._bucket, world, nodes, _TAG)
        exchange.start()
        exchange.middle()
        exchange.finish()

    def _update(self) -> OuterResult:
        """Update the weights on all ranks, or set them back if a value is not finite."""
        result = self._bucket.result
        assert result is not None
        result.values[: self._bucket.tail_start].div_(self._num_sites)
        changes = result.views[: len(self._parameters)]
        norm = torch.stack(torch._foreach_norm(changes)).norm().view(1)
        numbers = torch.cat([norm, result.tail[: self._num_head]]).tolist()
        norm, flag, num_failed, *extras = numbers
        is_finite = num_failed == 0 and math.isfinite(norm) and all(map(math.isfinite, extras))
        if num_failed:  # a rank stops at its first failure, so how much was summed depends on the world
            norm, extras = math.nan, [math.nan] * len(extras)
        self._state.restore()
        if is_finite:
            for parameter, change in zip(self._parameters, changes, strict=True):
                parameter.grad = change
            self.outer.step()
            self._state.read_mean(result.views, result.tail[self._num_head :], self._num_sites)
        for parameter in self._parameters:
            parameter.grad = None
        return OuterResult(extras, norm, flag, is_finite)

    @contextmanager
    def at_failure(self) -> Iterator[bool]:
        """Return to the weights before the local step that was not finite, for as long as the context is open.

        Yields:
            Whether it was a step of this rank. If not, nothing is changed.
        """
        if self._failed is None:
            yield False
            return
        self._state.load(self._failed)
        try:
            yield True
        finally:
            self._state.restore()

    def pack(self, optimizer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state_dict with the outer momentum, for a checkpoint."""
        state = {index: dict(entries) for index, entries in optimizer["state"].items()}
        for index, parameter in enumerate(self._in_order()):
            buffer = self.outer.state[parameter].get("momentum_buffer") if parameter in self.outer.state else None
            if buffer is not None:
                state.setdefault(index, {})[OUTER] = buffer
        return {**optimizer, "state": state}

    def unpack(self, optimizer: Mapping[str, Any]) -> dict[str, Any]:
        """Take the outer momentum out of a checkpoint's state_dict, and return the optimizer's own.

        Raises:
            CheckpointError: A tensor has another shape than its parameter.
        """
        parameters, state = self._in_order(), dict[int, dict[str, Any]]()
        self.outer.state.clear()
        for index, entries in optimizer["state"].items():
            own = {name: value for name, value in entries.items() if name != OUTER}
            if own or OUTER not in entries:
                state[index] = own
            if OUTER in entries:
                parameter, buffer = parameters[index] if 0 <= index < len(parameters) else None, entries[OUTER]
                if parameter is None or not isinstance(buffer, Tensor) or buffer.shape != parameter.shape:
                    raise CheckpointError(
                        f"the checkpoint belongs to a different model: {OUTER} of parameter {index} has another shape",
                        fix="Resume with the settings of the run that wrote it.",
                    )
                # In the memory layout of the parameter: fused kernels ignore strides.
                kept = torch.empty_like(parameter, requires_grad=False).copy_(buffer)
                self.outer.state[parameter]["momentum_buffer"] = kept
        return {**optimizer, "state": state}

    def _in_order(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
