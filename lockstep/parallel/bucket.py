"""Some of a model's gradients in one flat tensor, summed over the process's own micro-batches in tree order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.parallel.tree import Node, are_siblings, push

ALIGNMENT = 16  # float32 values in 64 bytes: a view then starts where a tensor of its own would


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's values fill its memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def round_up(number: int, multiple: int) -> int:
    """The next multiple at or above a number."""
    return -(-number // multiple) * multiple


def group(parameters: Sequence[nn.Parameter], max_bytes: int) -> list[list[nn.Parameter]]:
    """Cut float32 parameters, in order, into groups of at most so many bytes, or of one."""
    groups: list[list[nn.Parameter]] = [[]]
    num_bytes = 0
    for parameter in parameters:
        if groups[-1] and num_bytes + 4 * parameter.numel() > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(parameter)
        num_bytes += 4 * parameter.numel()
    return groups


class Flat:
    """One copy of a bucket: a flat tensor and its views in the parameters' shapes."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        self.values = torch.zeros(bucket.length, dtype=dtype, device=bucket.device)
        self.views = [
            self.values.as_strided(parameter.shape, parameter.stride(), offset)
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
        ]
        self.tail = self.values[bucket.tail_start : bucket.tail_start + bucket.tail_length]


class Leaf:
    """A micro-batch's gradients in a bucket, while they come in.

    Attributes:
        index: The micro-batch's place in the step.
        flat: Where they are: a copy of their own, or the sum that they join.
        is_joining: Whether it is such a sum.
        missing: Places of the parameters whose gradient it does not have (yet).
    """

    def __init__(self, index: int, flat: Flat, is_joining: bool, num_parameters: int) -> None:
        self.index, self.flat, self.is_joining = index, flat, is_joining
        self.missing = set(range(num_parameters))
        self.is_over = False

    def put_tail(self, tail: Tensor) -> None:
        """Add what stands behind the gradients, (tail_length,)."""
        if self.is_joining:
            self.flat.tail.add_(tail)
        else:
            self.flat.tail.copy_(tail)


class Bucket:
    """Gradients of some parameters, and behind them a tail for what else a step sums.

    Args:
        parameters: Float32, on one device.
        tail_length: Values behind the gradients.
        num_chunks: The length is rounded up so that it can be cut into this many equal, aligned parts.
        exact: Sum in tree order; otherwise in the order of arrival, with fewer copies.
        device: Where the sums are.
        dtype: What gradients are rounded to, and every sum of them again: then what is sent is half as long, and
            nothing is rounded by being sent. Only for buckets without a tail.

    Attributes:
        nodes: This process's part of the tree, each node with its sum.
        result: The sum over all ranks in float32, once there is one.
        next_leaf: The micro-batch that the row of nodes goes on with.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        tail_length: int,
        num_chunks: int,
        exact: bool,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.parameters = list(parameters)
        self.device, self.dtype, self.exact = device, dtype, exact
        self.offsets: list[int] = []
        end = 0
        for parameter in self.parameters:
            self.offsets.append(end)
            end = round_up(end + parameter.numel(), ALIGNMENT)
        self.tail_start, self.tail_length = end, tail_length
        self.length = round_up(end + tail_length, ALIGNMENT * num_chunks)
        self.nodes: list[tuple[Node, Flat]] = []
        self.result: Flat | None = None
        self.next_leaf = 0
        self._free: list[Flat] = []
        self._whole = Flat(self, torch.float32) if dtype != torch.float32 else None
        self._scratch: list[Tensor] = []
        self._num_lent = 0
        self._waiting: dict[int, Leaf] = {}

    def flat(self) -> Flat:
        """A copy that nobody uses, with any values in it."""
        return self._free.pop() if self._free else Flat(self, self.dtype)

    def borrow(self, *, on_host: bool = False) -> Tensor:
        """Room for what another rank sends, (length,), until the step's sum is settled."""
        device = torch.device("cpu") if on_host else self.device
        if self._num_lent == len(self._scratch):
            self._scratch.append(torch.empty(self.length, dtype=self.dtype, device=device))
        self._num_lent += 1
        return self._scratch[self._num_lent - 1]

    def settle(self, result: Flat) -> None:
        """Take the sum over all ranks; all other copies of the step are free again."""
        self._free.extend(flat for _, flat in self.nodes if flat is not result)
        if self._whole is not None:
            self._whole.values.copy_(result.values)
            self._free.append(result)
            result = self._whole
        self.nodes, self.result, self._num_lent = [], result, 0

    def begin_step(self, first_leaf: int) -> None:
        """Forget the last step's sums; this process's micro-batches begin with `first_leaf`."""
        self._free.extend(flat for _, flat in self.nodes)
        if self.result is not None and self.result is not self._whole:
            self._free.append(self.result)
        self.nodes, self.result, self._num_lent = [], None, 0
        self.next_leaf, self._waiting = first_leaf, {}

    def begin_leaf(self, index: int, num_leaves: int) -> Leaf:
        """Make room for a micro-batch's gradients: a copy of their own, or a sum that they are the next to join."""
        is_joining = bool(self.nodes) and (
            not self.exact or are_siblings(self.nodes[-1][0], (index, index + 1), num_leaves)
        )
        flat = self.nodes[-1][1] if is_joining else self.flat()
        return Leaf(index, flat, is_joining, len(self.parameters))

    def take(self, leaf: Leaf, place: int, factor: float = 1.0) -> None:
        """Move a parameter's gradient, times a factor, into a leaf."""
        parameter = self.parameters[place]
        if place not in leaf.missing:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got its gradient twice in one micro-batch: "
                "run backward once, and use torch.utils.checkpoint with use_reentrant=False"
            )
        assert parameter.grad is not None
        if self.dtype != torch.float32:
            # Rounded before it joins a sum: whether it does depends on the world.
            rounded = parameter.grad.mul(factor).to(self.dtype)
            view = leaf.flat.views[place]
            view.add_(rounded) if leaf.is_joining else view.copy_(rounded)
        elif leaf.is_joining:
            leaf.flat.views[place].add_(parameter.grad, alpha=factor)
        elif factor == 1.0:
            leaf.flat.views[place].copy_(parameter.grad)
        else:
            torch.mul(parameter.grad, factor, out=leaf.flat.views[place])
        parameter.grad = None
        leaf.missing.remove(place)

    def end_leaf(self, leaf: Leaf, num_leaves: int) -> None:
        """Put a leaf into the tree, as soon as those before it are there, and merge what is complete."""
        if not leaf.is_joining:
            for place in leaf.missing:
                leaf.flat.views[place].zero_()
        leaf.is_over = True
        self._waiting[leaf.index] = leaf
        while self.next_leaf in self._waiting:
            ready = self._waiting.pop(self.next_leaf)
            first = self.next_leaf
            self.next_leaf += 1
            if ready.is_joining:
                (first, _), _ = self.nodes.pop()
            push(self.nodes, (first, self.next_leaf), ready.flat, num_leaves, self._merge)
        if not self.exact and len(self.nodes) > 1:
            ((first, _), flat), *others = self.nodes
            for _, other in others:
                flat = self._merge(flat, other)
            self.nodes = [((first, self.next_leaf), flat)]

    def _merge(self, left: Flat, right: Flat) -> Flat:
        left.values.add_(right.values)
        self._free.append(right)
        return left
