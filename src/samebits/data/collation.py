"""Errors for samples of a recipe's own dataset that cannot become a batch, with index, what was given and expected."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from samebits.data.keyed import IntArray
from samebits.errors import ConfigError

_EXPECTED = "a pair (input, target); input: a tensor, an array or a number, or a dict, list or tuple of them"
_FUNCTION = "pass collate=, a function of a list of samples that returns (inputs, targets)"
_MAX_NAMES = 6


def describe(value: object) -> str:
    """Describe a sample or a part of it: "a dict with image, label", "an array (28, 28) uint8", "a str"."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} {value.dtype}"
    if isinstance(value, Mapping):
        names = [str(name)[:40] for name in value]
        return f"a dict with {', '.join(names[:_MAX_NAMES])}{' …' if len(names) > _MAX_NAMES else ''}"
    if isinstance(value, list | tuple):
        parts = ", ".join(describe(item) for item in value[:_MAX_NAMES])
        return f"a {type(value).__name__} of {len(value)}" + (f": {parts}" if len(value) <= _MAX_NAMES else "")
    if _is_picture(value):
        return f"a PIL image {getattr(value, 'size', '')}"
    return "None" if value is None else f"a {type(value).__name__}"


def collate(
    items: Sequence[Any], function: Callable[[Sequence[Any]], Any] | None, dataset: Any, indices: IntArray
) -> tuple[Any, Any]:
    """Join samples to inputs and targets, and return both.

    Args:
        function: List of samples -> (inputs, targets). None: torch's `default_collate`.
        indices: (N,) indices of the samples.

    Raises:
        ConfigError: A sample is not a pair of an input that a model can take and a target, or they can't be joined.
    """
    if function is not None:
        joined = function(items)
    else:
        _check_pairs(items, dataset, indices)
        try:
            joined = default_collate(list(items))
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            raise _cannot_join(items, dataset, indices, error) from error
    if not isinstance(joined, list | tuple) or len(joined) != 2:
        raise ConfigError(
            f"a sample of {type(dataset).__name__} is not a pair (input, target)",
            given=f"after collation: {describe(joined)}",
            fix="Return (input, target) from __getitem__, or from collate=, a function of a list of samples. "
            "Put several inputs into one dict or tuple.",
        )
    return joined[0], joined[1]


def _check_pairs(items: Sequence[Any], dataset: Any, indices: IntArray) -> None:
    for index, item in zip(indices.tolist(), items, strict=True):
        fix = _fix_of(item)
        if fix is not None:
            raise ConfigError(
                f"a sample of {type(dataset).__name__} is not a pair (input, target)",
                given=f"sample {index:,}: {describe(item)}",
                allowed=_EXPECTED,
                fix=fix,
            )


def _fix_of(item: Any) -> str | None:
    """Return what to do about a sample that is no pair of input and target; None if it is one."""
    if isinstance(item, Mapping):
        names = [repr(name) for name in item][:2]
        pair = f"(row[{names[0]}], row[{names[1]}])" if len(names) == 2 else "(row[INPUT], row[TARGET])"
        return f"Return such a pair from __getitem__, for example {pair}; or {_FUNCTION}."
    if not isinstance(item, list | tuple):
        return f"Return (input, target) from __getitem__, or {_FUNCTION}."
    if len(item) != 2:
        return f"Return two values from __getitem__: put several inputs into one dict or tuple; or {_FUNCTION}."
    inputs = item[0]
    if _is_picture(inputs):
        return (
            "Convert the image to a tensor, with torchvision's v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, "
            "scale=True)])."
        )
    if inputs is None or isinstance(inputs, str | bytes):
        return f"Return a tensor as input: read and decode the file in __getitem__, or {_FUNCTION}."
    return None


def _cannot_join(items: Sequence[Any], dataset: Any, indices: IntArray, error: Exception) -> ConfigError:
    """Make the error for samples that torch cannot join: the first one, and the first that is unlike it."""
    texts = [describe(item) for item in items]
    other = next((place for place, text in enumerate(texts) if text != texts[0]), 0)
    given = [f"sample {indices[place]:,}: {texts[place]}" for place in sorted({0, other})]
    return ConfigError(
        f"samples of {type(dataset).__name__} can't be joined to a batch",
        given="\n".join(given),
        allowed="tensors, arrays, numbers, and dicts, lists and tuples of them, of equal shapes in all samples",
        cause=str(error).partition("\n")[0][:300],
        fix=f"Return values of one shape from __getitem__, such as images of one size; or {_FUNCTION}.",
    )


def _is_picture(value: object) -> bool:
    """Return whether a value is a Pillow image, without importing Pillow."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)
