"""Tensors by their bits: the first element that differs, and the tensors and values within a nested value."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Element:
    """The first element in which two tensors differ."""

    index: str  #: Its index, such as "[5, 17, 4, 4]".
    a: str  #: Value in the first tensor.
    b: str  #: Value in the second tensor.
    is_value: bool = True  #: Whether they are values; otherwise types and shapes.


def first_element(a: Sequence[Tensor], b: Sequence[Tensor]) -> Element | None:
    """Return the first element whose bits differ, or else the first type or shape that differs.

    Args:
        a: Tensors of any shape.
    """
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        which = f"tensor {number}, " if len(a) > 1 else ""
        if (kinds := (_kind(one), _kind(other)))[0] != kinds[1]:
            return Element(f"{which}type and shape", *kinds, is_value=False)
        unequal = (as_bytes(one) != as_bytes(other)).nonzero()
        if len(unequal):
            return element_at(int(unequal[0]) // one.element_size(), one, other, which)
    return None


def element_at(number: int, a: Tensor, b: Tensor, which: str = "") -> Element:
    """Return an element of two tensors of any shape, equal in both, by its number in memory order.

    Args:
        which: Names the tensors.
    """
    index = tuple(int(axis) for axis in np.unravel_index(number, a.shape))
    return Element(f"{which}{list(index)}", number_text(a[index]), number_text(b[index]))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor of any shape, (num_bytes,), in the order of its elements.

    numpy has no bfloat16; as values, NaN would differ from itself, and 0.0 would equal -0.0.
    """
    # Contiguous: bytes must not depend on the memory format (channels last or not).
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.dim() and flat.stride(0) != 1:  # one value that was expanded counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors of any shape have the same type, shape and bits; or both are None."""
    if one is None or other is None:
        return one is other
    same_kind = one.shape == other.shape and one.dtype == other.dtype
    return same_kind and torch.equal(as_integers(one), as_integers(other))


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor of any shape as integers of the same size, on its device."""
    tensor = tensor.detach()
    # A sparse gradient has no memory of its own that could be read as integers.
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).view(
        _INTEGERS[tensor.element_size()]
    )


def number_text(value: Tensor) -> str:
    """Return a 0-d tensor as the shortest number that has its bits."""
    plain = value.detach().cpu()
    # numpy has no bfloat16. Each 16-bit number is a float32 number too, so nothing is rounded.
    if plain.dtype in (torch.bfloat16, torch.float16):
        plain = plain.float()
    return str(plain.numpy()[()])


def parts_of(value: Any) -> list[Any]:
    """Return what a nested value consists of: a list, tuple, dict with its keys, or data class; otherwise nothing."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, part.name) for part in fields(value)]
    return []


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors, of any shape, in a nested value."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in parts_of(value) for tensor in tensors_in(part)]


def plain_in(value: Any) -> Iterator[str]:
    """Yield the numbers and texts in a nested value, each as its repr."""
    if isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value)
    elif not isinstance(value, Tensor):
        for part in parts_of(value):
            yield from plain_in(part)
