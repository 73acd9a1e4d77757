"""Convolutions over one to three dimensions, plain or transposed. Signatures are those of torch's operations (ATen)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.portable.convolution import convolve, input_gradient, weight_gradient
from samebits.portable.grid import exact_sum
from samebits.portable.operations import volumes
from samebits.portable.operations.pooling import per_dim


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    """Convolve (N, C, L), (N, C, H, W) or (N, C, D, H, W), or the transposed; torch's signature."""
    stride, padding, dilation = (per_dim(each, x.dim() - 2) for each in (stride, padding, dilation))
    if x.dim() == 3:
        result = convolution(
            x.unsqueeze(2), w.unsqueeze(2), bias, (1, *stride), (0, *padding), (1, *dilation), transposed,
            (0, *output_padding), groups,
        )  # fmt: skip
        return result if result is NotImplemented else result.squeeze(2)
    if x.dim() == 5 and _is_plain(x, w):
        result = volumes.convolution(
            x, w, stride, padding, dilation, transposed, output_padding, groups
        )
        return result if bias is None else result + bias.view(1, -1, 1, 1, 1)
    if x.dim() != 4 or not _is_plain(x, w):
        return NotImplemented
    if transposed:
        size = [
            (x.shape[2 + d] - 1) * stride[d]
            - 2 * padding[d]
            + dilation[d] * (w.shape[2 + d] - 1)
            + output_padding[d]
            + 1
            for d in (0, 1)
        ]
        result = input_gradient(x, w, size, stride, padding, dilation, groups)
    else:
        result = convolve(x, w, stride, padding, dilation, groups)
    return result if bias is None else result + bias.view(1, -1, 1, 1)


def convolution_backward(
    g: Tensor, x: Tensor, w: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, mask: Any,
) -> Any:  # fmt: skip
    """Return the gradients of input, weight and bias of `convolution`."""
    stride, padding, dilation = (per_dim(each, x.dim() - 2) for each in (stride, padding, dilation))
    if x.dim() == 3:
        result = convolution_backward(
            g.unsqueeze(2), x.unsqueeze(2), w.unsqueeze(2), bias_sizes, (1, *stride), (0, *padding), (1, *dilation),
            transposed, (0, *output_padding), groups, mask,
        )  # fmt: skip
        if result is NotImplemented:
            return result
        of_input, of_weight, of_bias = result
        return (
            None if of_input is None else of_input.squeeze(2),
            None if of_weight is None else of_weight.squeeze(2),
            of_bias,
        )
    if x.dim() == 5 and _is_plain(g, x, w):
        of_volume = volumes.convolution_backward(
            g, x, w, stride, padding, dilation, transposed, groups, mask
        )
        return *of_volume, exact_sum(g, (0, 2, 3, 4)).float() if mask[2] else None
    if x.dim() != 4 or not _is_plain(g, x, w):
        return NotImplemented
    of_input = of_weight = None
    if transposed:
        if mask[0]:
            # An output_padding of a stride or more adds pixels that no input has reached.
            of_input = convolve(g, w, stride, padding, dilation, groups)[
                :, :, : x.shape[2], : x.shape[3]
            ]
        if mask[1]:
            of_weight = weight_gradient(x, g, w.shape[2:], stride, padding, dilation, groups)
    else:
        if mask[0]:
            of_input = input_gradient(g, w, x.shape[2:], stride, padding, dilation, groups)
        if mask[1]:
            of_weight = weight_gradient(g, x, w.shape[2:], stride, padding, dilation, groups)
    return of_input, of_weight, exact_sum(g, (0, 2, 3)).float() if mask[2] else None


def _is_plain(*values: Tensor) -> bool:
    return all(each.dtype == torch.float32 for each in values)
