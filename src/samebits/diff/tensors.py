"""Comparison of tensors by their bits."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from samebits.bits import Element, first_element, number_text

MODEL = "(the model)"
_STANDS_OUT = 4.0  # times as much as any other module


def module_of(tensor: str) -> str:
    """Return the name of the module that a parameter or buffer belongs to."""
    return tensor.rpartition(".")[0] or MODEL


def first_tensor(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[str, Element] | None:
    """Return the first of the tensors, of any shape, that differs, and its first element that does.

    Names may differ, if the order is the same.
    """
    names = list(zip(a, b, strict=False))
    if len(a) != len(b) or any(a[one].shape != b[other].shape for one, other in names):
        names = [(name, name) for name in a if name in b]
    for one, other in names:
        found = first_element([a[one]], [b[other]])
        if found is not None:
            return one, found
    name = next((name for name in [*a, *b] if len(a) != len(b) and (name not in a or name not in b)), None)
    if name is None:
        return None
    kinds = ["present" if name in each else "none" for each in (a, b)]
    return name, Element("", kinds[0], kinds[1], is_value=False)


def largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[str, Element] | None:
    """Return the tensor that differs most, relative to its largest value, and the element that differs most.

    Both have the same names, and tensors of the same shapes.

    None if another module differs almost as much, so that no single tensor stands out.
    """
    scores: dict[str, tuple[float, int]] = {}
    for name in a:
        if ":" in name or name not in b or a[name].shape != b[name].shape or not a[name].is_floating_point():
            continue
        one, other = a[name].detach().cpu().double().reshape(-1), b[name].detach().cpu().double().reshape(-1)
        # A NaN counts as the largest difference. As NaN it would never compare as larger.
        distance = torch.nan_to_num((one - other).abs(), nan=float("inf"))
        # A tensor of zeros has no scale to divide by.
        scores[name] = float(distance.max() / other.abs().max().clamp_min(1e-12)), int(distance.argmax())
    if not scores:
        return None
    name = max(scores, key=lambda each: scores[each][0])
    score, at = scores[name]
    rest = [other for each, (other, _) in scores.items() if module_of(each) != module_of(name)]
    if score <= _STANDS_OUT * max(rest, default=0.0):
        return None
    index = tuple(int(axis) for axis in np.unravel_index(at, a[name].shape)) if a[name].dim() else ()
    return name, Element(f"{list(index)}", number_text(a[name][index]), number_text(b[name][index]))
