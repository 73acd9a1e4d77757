"""Gradient buckets: gradients of several parameters in one flat tensor, summed over a process's micro-batches.

A bucket's memory, with offsets aligned to 64 bytes, and equal chunks for the all-reduce:

    | grad of p0 |..| grad of p1 |.| grad of p2 | tail | padding |        tail: loss terms, flags, buffer changes
    |        chunk 0       |        chunk 1     |    chunk 2     |        one for each rank

The life of a bucket in one step of a process with micro-batches 4, 5 and 6 of 8:

    start_step([4, 5, 6])  nodes: []
    start_leaf(4)          a new copy: leaf 4 has no sibling on its left in this process
      take x parameters    backward's hooks copy each gradient into the leaf
    end_leaf(4)            nodes: [(4,5)]
    start_leaf(5)          joins the copy of (4,5), its sibling: gradients are added in place, which saves a copy
    end_leaf(5)            nodes: [(4,6)]
    start_leaf(6), end_leaf(6)   nodes: [(4,6), (6,7)]
    TreeAllReduce sends these nodes, and calls settle(result)

When synchronized batch norm runs micro-batches by turns, leaves can end out of order, and enter the tree in order. Leaf
5 then joins the copy of leaf 4 before leaf 4 has ended. Of the two gradients of a parameter, the second one is added to
the first: a + b has the bits of b + a.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from samebits.parallel.tree import Node, are_siblings, push

# float32 values in 64 bytes, torch's own alignment: kernels then take the same path for a view and a tensor.
ALIGNMENT = 16


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor of any shape fills its memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple at or above a number."""
    return -(-number // multiple) * multiple


TAIL = -1  # in `Flat.written`
NO_LEAF = 1 << 62  # after the last one
# values of a gradient: a further pass over its memory costs more than a call of its own
_LARGE = 1 << 14


class Flat:
    """One copy of a bucket."""

    def __init__(self, bucket: "Bucket") -> None:
        self.values = torch.zeros(bucket.length, device=bucket.device)  #: (length,) flat tensor.
        #: Views of it in the parameters' shapes and strides.
        self.views = [self.values.as_strided(*place) for place in bucket.places]
        #: (tail_length,) view of the values behind the gradients.
        self.tail = self.values[bucket.tail_start : bucket.tail_start + bucket.tail_length]
        #: Indices of the parameters whose views have values of this step, and TAIL where the tail has.
        self.written: set[int] = set()


class Leaf:
    """A micro-batch's gradients in a bucket, in memory of their own or, if joining, of the sibling."""

    def __init__(self, index: int, flat: Flat, is_joining: bool, num_parameters: int) -> None:
        self.index = index
        self.flat = flat
        self.is_joining = is_joining
        #: Indices of the parameters without a gradient so far.
        self.missing = set(range(num_parameters))
        #: Gradients that `Bucket.add_given` has still to add, by index of the parameter.
        self.given: dict[int, Tensor] = {}
        self.is_done = False  #: Whether the leaf has ended.

    def put_tail(self, tail: Tensor) -> None:
        """Add or copy the values behind the gradients, (tail_length,)."""
        if TAIL in self.flat.written:
            self.flat.tail.add_(tail)
        else:
            self.flat.tail.copy_(tail)
            self.flat.written.add(TAIL)


class Bucket:
    """Gradients of several parameters, and behind them a tail for other values that a step sums.

    Args:
        parameters: Float32 and dense, on one device: the view of one with gaps would reach into the next one.
        num_chunks: The length is rounded up to a multiple of this many equal, aligned chunks.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        tail_length: int,
        num_chunks: int,
        device: torch.device,
    ) -> None:
        self.parameters = list(parameters)
        self.device = device
        #: Shape, strides and start of each gradient: in its own strides, so that a channels-last weight has a
        #: channels-last gradient, and at a multiple of 64 bytes.
        self.places: list[tuple[torch.Size, tuple[int, ...], int]] = []
        self.tail_start = 0
        for each in self.parameters:
            self.places.append((each.shape, each.stride(), self.tail_start))
            self.tail_start = round_up(self.tail_start + each.numel(), ALIGNMENT)
        self.tail_length = tail_length
        self.length = round_up(self.tail_start + tail_length, ALIGNMENT * num_chunks)
        #: This process's nodes of the tree, each with its sum.
        self.nodes: list[tuple[Node, Flat]] = []
        self.result: Flat | None = None  #: Sum over all ranks, after `settle`.
        #: Whether `take` waits for `add_given`. On a GPU the starts of kernels would take longer than they do.
        self.moves_together = device.type == "cuda"
        self.next_leaf = 0  #: Index of the next micro-batch to enter the tree.
        self._free: list[Flat] = []
        self._scratch: list[Tensor] = []
        self._num_lent = 0
        self._waiting: dict[int, Leaf] = {}
        self._open: list[Leaf] = []
        self._later: Iterator[int] = iter(())  # those after it

    def flat(self) -> Flat:
        """Return an unused copy of the bucket. Its values are undefined."""
        flat = self._free.pop() if self._free else Flat(self)
        flat.written = set()
        return flat

    def borrow(self, length: int, *, on_host: bool = False) -> Tensor:
        """Return a buffer, (length,), for another rank's message, valid until `settle`.

        `on_host`: on the CPU, the same for all calls.
        """
        number = self._num_lent
        self._num_lent = self._num_lent + 1
        if number == len(self._scratch) or self._scratch[number].numel() < length:
            device = torch.device("cpu") if on_host else self.device
            # Steps and worlds of another size need another length.
            self._scratch[number : number + 1] = [torch.empty(length, device=device)]
        return self._scratch[number][:length]

    def settle(self, result: Flat) -> None:
        """Set `result` to the sum over all ranks, and free all other copies of the step."""
        self._free.extend(flat for _, flat in self.nodes if flat is not result)
        self.nodes = []
        self.result = result
        self._num_lent = 0

    @property
    def is_complete(self) -> bool:
        """Whether all micro-batches of this process have entered the tree."""
        return self.next_leaf == NO_LEAF

    def start_step(self, leaves: Sequence[int], kept: Sequence[Node] = ()) -> None:
        """Drop the last step's sums. `leaves`: this process's micro-batches, in the order of the tree."""
        nodes = self.nodes
        self.nodes = []
        for node, flat in nodes:
            if node in kept:
                self.nodes.append((node, flat))
            else:
                self._free.append(flat)
        # Not earlier: until here the parameters' `grad` are views of the result.
        if self.result is not None:
            self._free.append(self.result)
        self.result = None
        self._num_lent = 0
        self._later = iter(leaves)
        self._waiting = {}
        self._open = []
        self.next_leaf = next(self._later, NO_LEAF)

    def start_leaf(self, index: int, num_leaves: int) -> Leaf:
        """Return a leaf for a micro-batch's gradients."""
        # Adding into the left sibling does what the merge in `push` would do, to the same bits, without a copy.
        left = [
            ((leaf.index, leaf.index + 1), leaf.flat) for leaf in self._open[-1:]
        ] or self.nodes[-1:]
        is_joining = any(are_siblings(node, (index, index + 1), num_leaves) for node, _ in left)
        leaf = Leaf(
            index, left[0][1] if is_joining else self.flat(), is_joining, len(self.parameters)
        )
        self._open.append(leaf)
        return leaf

    def take(self, leaf: Leaf, index: int, factor: float = 1.0) -> None:
        """Move a parameter's gradient, times `factor`, a power of two, into a leaf, and set its `grad` to None.

        Raises:
            RuntimeError: The leaf already has this gradient.
        """
        parameter = self._first_gradient(leaf, index)
        assert parameter.grad is not None
        if self.moves_together:
            leaf.given[index] = parameter.grad
        else:
            is_added = index in leaf.flat.written
            leaf.flat.written.add(index)
            view = leaf.flat.views[index]
            values = parameter.grad
            if is_added:
                # Rounded before it is added: whether a leaf joins its sibling depends on the world, its bits must not.
                # A factor in `add_` would be multiplied and added with one rounding, which tiny products show.
                view.add_(values if factor == 1.0 else values * factor)
            elif factor == 1.0:
                view.copy_(values)
            else:
                torch.mul(values, factor, out=view)
        # Otherwise the next micro-batch's backward would add to this gradient.
        parameter.grad = None

    def give(self, leaf: Leaf, index: int, weight: float) -> None:
        """Take a parameter's gradient, times the micro-batch's weight, at the latest in `add_given`.

        Raises:
            RuntimeError: The leaf already has this gradient.
        """
        gradient = self._first_gradient(leaf, index).grad
        assert gradient is not None
        if leaf.is_joining or gradient.numel() < _LARGE:
            leaf.given[index] = gradient  # to add small ones together costs half
        else:
            leaf.flat.written.add(index)
            torch.mul(gradient, weight, out=leaf.flat.views[index])

    def add_given(self, leaf: Leaf, weight: float) -> None:
        """Multiply the gradients that wait in a leaf by the micro-batch's weight, and add or copy them into it."""
        # One call for all gradients of a leaf: the calls of single ones take longer than the sums.
        for is_added in (False, True):
            chosen = [index for index in leaf.given if (index in leaf.flat.written) == is_added]
            if not chosen:
                continue
            views = [leaf.flat.views[index] for index in chosen]
            values = [leaf.given.pop(index) for index in chosen]
            if weight != 1.0:
                # Rounded before it is added: whether a leaf joins its sibling depends on the world, its bits must not.
                values = list(torch._foreach_mul(values, weight))
            (torch._foreach_add_ if is_added else torch._foreach_copy_)(views, values)
            leaf.flat.written.update(chosen)

    def _first_gradient(self, leaf: Leaf, index: int) -> nn.Parameter:
        parameter = self.parameters[index]
        if index not in leaf.missing:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got its gradient twice in one micro-batch: "
                "call backward once, and use torch.utils.checkpoint with use_reentrant=False"
            )
        leaf.missing.remove(index)
        return parameter

    def fill_missing(self, leaf: Leaf) -> None:
        """Let the gradients that a micro-batch does not have be zero: its memory still has those of an earlier step."""
        for index in leaf.missing:
            if index in leaf.flat.written:
                leaf.flat.views[index].add_(0.0)  # as the sum of two nodes would: -0 becomes 0
            else:
                leaf.flat.views[index].zero_()
        leaf.flat.written |= leaf.missing

    def end_leaf(self, leaf: Leaf, num_leaves: int) -> None:
        """Enter a leaf into the tree, after all leaves before it, and merge siblings."""
        self.fill_missing(leaf)
        leaf.is_done = True
        self._open.remove(leaf)
        self._waiting[leaf.index] = leaf
        while self.next_leaf in self._waiting:
            if any(each.flat is self._waiting[self.next_leaf].flat for each in self._open):
                return  # half of its sibling's gradients are added: no node is ever half a sum
            ready = self._waiting.pop(self.next_leaf)
            first = self.next_leaf
            self.next_leaf = next(self._later, NO_LEAF)
            if ready.is_joining:
                # The sibling's node leaves the list, since its copy is now the sum of both.
                (first, _), _ = self.nodes.pop()
            push(self.nodes, (first, ready.index + 1), ready.flat, num_leaves, self._merge)

    def _merge(self, left: Flat, right: Flat) -> Flat:
        left.values.add_(right.values)
        # Free at once: the tree keeps at most about log2(micro-batches) sums of a bucket alive (ADR 3).
        self._free.append(right)
        return left
