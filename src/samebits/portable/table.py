"""Which operations are portable as they are, and which have a portable form here.

Names are those of torch's operations (ATen), without overloads. What stands in neither table is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.portable import elementwise, functions, randomness, reductions, updates
from samebits.portable.grid import exact_sum
from samebits.portable.operations import additions, ctc, detection, pooling, resizing
from samebits.portable.convolution import convolution, convolution_backward
from samebits.portable.operations.formulas import FORMULAS
from samebits.portable.products import matmul

# Moves values, or rounds once by IEEE 754: equal on every processor.
_AS_IT_IS = """
    transpose_ t_ squeeze_ unsqueeze_ swapaxes_ alias _reshape_alias as_strided as_strided_ detach detach_ expand
    permute select slice split split_with_sizes unsafe_split unsafe_chunk squeeze t transpose unsqueeze view
    _unsafe_view unbind unfold diagonal view_as random_ lift lift_fresh lift_fresh_copy real empty empty_like
    empty_strided
    new_empty new_empty_strided new_zeros new_ones new_full zeros zeros_like ones ones_like full full_like arange
    eye scalar_tensor zero_ zero fill_ fill resize_ set_ tril_indices triu_indices copy_ copy clone contiguous
    _to_copy constant_pad_nd cat stack repeat flip roll index_select gather index masked_fill masked_fill_
    masked_select masked_scatter where scatter scatter_ tril tril_ triu triu_ nonzero sort argsort topk bucketize
    searchsorted one_hot embedding im2col select_backward slice_backward diagonal_backward select_scatter
    slice_scatter repeat_interleave unique_dim _unique2 unique_consecutive isin mul mul_ div div_ neg neg_ abs abs_
    sign sgn floor floor_ ceil ceil_ round round_ trunc trunc_ frac fmod fmod_ remainder remainder_ reciprocal
    floor_divide clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ minimum maximum fmin fmax relu relu_
    threshold threshold_backward hardtanh hardtanh_ hardtanh_backward leaky_relu leaky_relu_ leaky_relu_backward eq
    ne lt le gt ge logical_and logical_and_ logical_or logical_or_ logical_not logical_not_ logical_xor bitwise_and
    bitwise_and_ bitwise_or bitwise_or_ bitwise_xor bitwise_xor_ bitwise_not __lshift__ __rshift__ __and__ __or__
    isnan isinf isfinite copysign signbit nan_to_num max min amax amin aminmax argmax argmin cummax cummin any all
    equal allclose isclose is_nonzero _local_scalar_dense is_pinned pin_memory _pin_memory item is_same_size
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d reflection_pad1d
    reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    index_copy index_copy_ index_fill index_fill_ take hardshrink hardshrink_backward softshrink softshrink_backward
    channel_shuffle rot90 block_diag count_nonzero _pack_padded_sequence
    _int_mm record_stream frexp nextafter native_channel_shuffle pixel_shuffle pixel_unshuffle
"""
AS_IT_IS = frozenset(_AS_IT_IS.split())
# Overloads of these that add or multiply by index, in no defined order.
NOT_AS_IT_IS = frozenset({"scatter.reduce", "scatter.value_reduce", "scatter_.reduce", "scatter_.value_reduce"})

aten = torch.ops.aten


def with_alpha(func: Any) -> Callable[..., Any]:
    """`add` and `sub` with a factor: a product and a sum, which a fused kernel might round once."""

    def run(x: Tensor, y: Any, *, alpha: float = 1, **options: Any) -> Any:
        return func(x, y if alpha == 1 else y * alpha, **options)

    return run


WITH_ALPHA = frozenset({"add", "add_", "sub", "sub_"})


def _linear(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    result = matmul(x, y)
    result = result if alpha == 1 else result * alpha
    return result + (bias if beta == 1 else bias * beta) if beta else result


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if not x.dim() or not x.numel():
        return x.to(dtype or x.dtype, copy=True)
    moved = x.movedim(dim, -1)
    flat = moved.reshape(-1, moved.shape[-1])
    sums = pooling.on_grid(flat, flat.shape[1], lambda q: q.cumsum(1))
    return sums.view(moved.shape).movedim(-1, dim).to(dtype or x.dtype)


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError  # its gradient has another formula in torch 2.11 than in 2.15
    return _products(x, dim, dtype=dtype)


def _products(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    x = x.to(dtype or x.dtype)
    products: list[Tensor] = []
    for each in x.unbind(dim) if x.dim() else ():
        products.append(products[-1] * each if products else each)
    return torch.stack(products, dim) if products else x.clone()


def _prod(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if dim is None or not x.dim():
        x, dim, keepdim = x.reshape(-1), 0, False
    if not x.shape[dim]:
        return x.new_ones(x.sum(dim, keepdim=keepdim).shape)
    last = _products(x, dim, dtype=dtype).select(dim, -1)
    return last.unsqueeze(dim) if keepdim else last


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = reductions.dims_of(x, dim)
    top = x.amax(dims, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    sums = exact_sum(functions.exp((x - top).double()), dims, keepdim=True)
    result = (functions.log(sums) + top).to(x.dtype)
    return result if keepdim else result.amax(dims)


def _drawn(fill: Callable[..., Tensor], default: torch.dtype | None = None) -> Callable[..., Tensor]:
    """A function that makes a tensor and fills it with random numbers."""

    def run(size: Any, *, generator: torch.Generator | None = None, **options: Any) -> Tensor:
        options = {name: each for name, each in options.items() if each is not None and name != "pin_memory"}
        if isinstance(size, Tensor):
            return fill(torch.empty_like(size, **options), generator=generator)
        return fill(torch.empty(size, **{"dtype": default, **options}), generator=generator)

    return run


def _randint(*args: Any, generator: torch.Generator | None = None, **options: Any) -> Tensor:
    *bounds, size = args
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    fill = partial(randomness.integer, low=low, high=high)
    return _drawn(fill, torch.int64)(size, generator=generator, **options)


def _linspace(start: float, end: float, steps: int, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    i = torch.arange(steps, device=options.get("device"), dtype=torch.float64)
    step = (end - start) / max(steps - 1, 1)
    return torch.where(i < max(steps // 2, 1), i * step + start, (i - (steps - 1)) * step + end).to(
        dtype or torch.float32
    )


def _randperm(n: int, *, generator: torch.Generator | None = None, **options: Any) -> Tensor:
    device = torch.device(options.get("device") or "cpu")
    return randomness.permutation(n, device, generator=generator).to(options.get("dtype") or torch.int64)


HANDLERS: dict[str, Callable[..., Any]] = {
    "rsub": lambda x, y, alpha=1: y - (x if alpha == 1 else x * alpha),
    "addcmul": elementwise.addcmul,
    "addcdiv": elementwise.addcdiv,
    "lerp": elementwise.lerp,
    "mm": matmul,
    "bmm": matmul,
    "addmm": _linear,
    "baddbmm": _linear,
    "mv": lambda x, y: matmul(x, y[:, None])[:, 0],
    "dot": lambda x, y: matmul(x[None], y[:, None])[0, 0],
    "convolution": convolution,
    "convolution_overrideable": convolution,
    "convolution_backward": convolution_backward,
    "sum": reductions.sum_,
    "mean": reductions.mean,
    "var_mean": reductions.var_mean,
    "var": lambda *args, **options: reductions.var_mean(*args, **options)[0],
    "std": lambda *args, **options: functions.sqrt(reductions.var_mean(*args, **options)[0]),
    "norm": reductions.norm,
    "linalg_vector_norm": reductions.norm,
    "cumsum": _cumsum,
    "cumprod": _cumprod,
    "prod": _prod,
    "scatter_reduce": additions.scatter_reduce,
    "erfinv": functions.erfinv,
    "bincount": lambda *_, **__: NotImplemented,  # of whole numbers it is portable, of weights it is not
    "logaddexp": functions.logaddexp,
    "logsumexp": _logsumexp,
    "native_batch_norm": reductions.batch_norm,
    "_native_batch_norm_legit": reductions.batch_norm,
    "_native_batch_norm_legit.no_stats": lambda x, weight, bias, training, momentum, eps: reductions.batch_norm(
        x, weight, bias, None, None, training, momentum, eps
    ),
    "native_batch_norm_backward": reductions.batch_norm_backward,
    "native_layer_norm": reductions.layer_norm,
    "native_layer_norm_backward": reductions.layer_norm_backward,
    "native_group_norm": reductions.group_norm,
    "native_group_norm_backward": reductions.group_norm_backward,
    "_softmax": reductions.softmax,
    "_safe_softmax": lambda x, dim, dtype=None: reductions.softmax(x, dim, False).nan_to_num(0.0),
    "_softmax_backward_data": reductions.softmax_backward,
    "_log_softmax": reductions.log_softmax,
    "_log_softmax_backward_data": reductions.log_softmax_backward,
    "nll_loss_forward": reductions.nll_loss,
    "nll_loss2d_forward": reductions.nll_loss,
    "nll_loss_backward": reductions.nll_loss_backward,
    "nll_loss2d_backward": reductions.nll_loss_backward,
    "mse_loss": elementwise.mse_loss,
    "mse_loss_backward": elementwise.mse_loss_backward,
    "smooth_l1_loss": elementwise.smooth_l1,
    "smooth_l1_loss_backward": elementwise.smooth_l1_backward,
    "huber_loss": elementwise.huber,
    "huber_loss_backward": elementwise.huber_backward,
    "binary_cross_entropy": elementwise.bce,
    "binary_cross_entropy_backward": elementwise.bce_backward,
    "binary_cross_entropy_with_logits": elementwise.bce_with_logits,
    "exp": functions.exp,
    "exp2": lambda x: functions.exp(x.double() * math.log(2)).to(x.dtype),
    "expm1": functions.expm1,
    "log": functions.log,
    "log2": lambda x: (functions.log(x.double()) / math.log(2)).to(x.dtype),
    "log10": lambda x: (functions.log(x.double()) / math.log(10)).to(x.dtype),
    "log1p": functions.log1p,
    "sqrt": functions.sqrt,
    "rsqrt": functions.rsqrt,
    "pow": functions.power,
    "sin": functions.sin,
    "cos": functions.cos,
    "erf": functions.erf,
    "sigmoid": functions.sigmoid,
    "sigmoid_backward": elementwise.sigmoid_backward,
    "tanh": functions.tanh,
    "tanh_backward": elementwise.tanh_backward,
    "gelu": elementwise.gelu,
    "gelu_backward": elementwise.gelu_backward,
    "silu": lambda x: x * functions.sigmoid(x),
    "silu_backward": elementwise.silu_backward,
    **FORMULAS,
    "elu": elementwise.elu,
    "elu_backward": elementwise.elu_backward,
    "hardsigmoid": elementwise.hardsigmoid,
    "hardsigmoid_backward": elementwise.hardsigmoid_backward,
    "hardswish": lambda x: x * elementwise.hardsigmoid(x),
    "hardswish_backward": elementwise.hardswish_backward,
    "mish": lambda x: x * functions.tanh(functions.softplus(x)),
    "mish_backward": elementwise.mish_backward,
    "log_sigmoid_forward": lambda x: (-functions.softplus(-x), x.new_empty(0)),
    "log_sigmoid_backward": lambda g, x, buffer: g * functions.sigmoid(-x),
    "_prelu_kernel": lambda x, weight: torch.where(x > 0, x, x * weight),
    "_prelu_kernel_backward": elementwise.prelu_backward,
    **pooling.POOLING,
    "embedding_dense_backward": additions.embedding_dense_backward,
    "index_add": additions.index_add,
    "scatter_add": additions.scatter_add,
    "index_put": additions.index_put,
    "_index_put_impl": lambda x, indices, values, accumulate=False, unsafe=False: additions.index_put(
        x, indices, values, accumulate
    ),
    **resizing.RESIZING,
    "grid_sampler_2d": resizing.grid_sampler_2d,
    "grid_sampler_2d_backward": resizing.grid_sampler_2d_backward,
    "roi_align": detection.roi_align,
    "_roi_align_backward": detection.roi_align_backward,
    "nms": detection.nms,
    "_ctc_loss": ctc.ctc_loss,
    "_ctc_loss_backward": ctc.ctc_loss_backward,
    "uniform": randomness.uniform,
    "normal": randomness.normal,
    "exponential": randomness.exponential,
    "bernoulli": randomness.bernoulli,
    # torch leaves out an argument that has its default: without this, `x` itself would be the probabilities.
    "bernoulli_.float": lambda x, p=0.5, **options: randomness.bernoulli(x, p, **options),
    "rand": _drawn(randomness.uniform),
    "rand_like": _drawn(randomness.uniform),
    "randn": _drawn(randomness.normal),
    "randn_like": _drawn(randomness.normal),
    "randint": _randint,
    "randperm": _randperm,
    "linspace": _linspace,
    "native_dropout": randomness.dropout,
    "_fused_sgd_": updates.sgd,
    "_fused_adam_": updates.adam,
    "_fused_adamw_": partial(updates.adam, decoupled=True),
    "_foreach_lerp_": updates.foreach_lerp,
    "_foreach_norm": updates.foreach_norm,
    **{
        f"_foreach_{name}": updates.one_by_one(name)
        for name in ("add_", "sub_", "mul", "mul_", "div", "div_", "copy_", "zero_")
    },
}
