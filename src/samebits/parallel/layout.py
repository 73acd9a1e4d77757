"""Places of tensors in one flat tensor: gradients of a bucket, or what a unit of a sharded model holds."""

from collections.abc import Sequence

import torch
from torch import Tensor

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


class Layout:
    """Places of tensors in a flat one, in their own strides, each at a multiple of 64 bytes.

    Args:
        tensors: Dense tensors of any shape, on one device: the view of one with gaps would reach into the next one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(tensor.shape, tensor.stride()) for tensor in tensors]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._places: list[tuple[int, int, int]] = []  # start, end, and the start of the next one
        end = 0
        for tensor in tensors:
            start, end = end, round_up(end + tensor.numel(), ALIGNMENT)
            self._places.append((start, start + tensor.numel(), end))
        self.length = end  #: Number of values of the flat tensor, at least.

    def __len__(self) -> int:
        return len(self._shapes)

    def allocate(self) -> Tensor:
        """Return a flat float32 tensor, (length,), whose values are undefined."""
        return torch.empty(self.length, device=self._device)

    def view(self, values: Tensor, index: int) -> Tensor:
        """Return the view of a flat tensor, (length,) or longer, in the shape and strides of a tensor."""
        # In its own strides, so that a channels-last weight has a channels-last gradient.
        return values.as_strided(*self._shapes[index], self._places[index][0])

    def zero_gap(self, values: Tensor, index: int) -> None:
        """Set the values of a flat tensor, (length,), behind a tensor to zero: sums carry along whatever is there."""
        _, end, following = self._places[index]
        if end < following:
            values[end:following].zero_()
