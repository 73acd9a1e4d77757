"""Which operations are portable as they are, and which have a portable form here.

What stands in neither table is refused: an operation of another library too, whatever its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # no public name

from samebits.portable import (
    elementwise,
    floats,
    functions,
    images,
    pooling,
    randomness,
    reductions,
)
from samebits.portable.convolution import convolution, convolution_backward
from samebits.portable.elementwise import FORMULAS
from samebits.portable.grid import exact_sum, over
from samebits.portable.products import matmul

# A name stands for one overload of torch (ATen), as torch writes it: `sum` and `sum.dim_IntList` are two. Overloads in
# place and those that write into `out` have the form of the one with the same arguments.
_AS_IT_IS = {
    "a view of the same memory, or a question about it": """
        _reshape_alias alias as_strided detach diagonal expand permute select.int slice.Tensor split.Tensor
        split_with_sizes squeeze squeeze.dim squeeze.dims t transpose.int unbind.int unfold unsqueeze view view.dtype
        _unsafe_view unsafe_split.Tensor lift lift_fresh lift_fresh_copy set_.source_Storage_storage_offset
        set_.source_Tensor set_ set_.source_Storage resize_ record_stream is_pinned _pin_memory is_same_size""",
    "memory, empty or filled with one value": """
        empty.memory_format empty_like empty_strided new_empty new_empty_strided new_full new_ones new_zeros zeros
        zeros_like ones ones_like full full_like eye eye.m scalar_tensor fill.Scalar fill.Tensor zero tril_indices
        triu_indices""",
    "copies values, or converts their type, which rounds once": """
        clone copy _to_copy constant_pad_nd cat stack repeat flip roll rot90 index_select gather index.Tensor
        masked_fill.Scalar masked_fill.Tensor masked_select masked_scatter where.self scatter.value scatter.src tril
        triu embedding im2col select_backward slice_backward diagonal_backward select_scatter slice_scatter index_copy
        index_fill.int_Tensor index_fill.int_Scalar take channel_shuffle native_channel_shuffle block_diag
        _pack_padded_sequence pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d repeat_interleave.Tensor
        _local_scalar_dense""",
    "compares values, or chooses among them": """
        eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor
        ge.Scalar isnan isinf equal allclose isin.Tensor_Tensor isin.Tensor_Scalar isin.Scalar_Tensor nonzero
        count_nonzero count_nonzero.dim_IntList any any.dim any.dims all all.dim all.dims _is_all_true _is_any_true
        max.dim min.dim argmax argmin cummax cummin sort sort.stable topk bucketize.Tensor bucketize.Scalar
        searchsorted.Tensor searchsorted.Scalar unique_dim _unique2 unique_consecutive threshold threshold_backward
        hardtanh_backward hardshrink hardshrink_backward softshrink_backward nan_to_num sign
        max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d logical_and logical_or
        logical_xor logical_not""",
    "bits, signs, and rounding to whole numbers: nothing is lost": """
        bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_or.Tensor
        bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_xor.Tensor bitwise_xor.Scalar
        bitwise_xor.Scalar_Tensor bitwise_not __lshift__.Tensor __lshift__.Scalar __rshift__.Tensor __rshift__.Scalar
        frexp.Tensor nextafter floor ceil round trunc frac neg""",
    "one product or difference a value, which rounds once": "leaky_relu leaky_relu_backward",
}
AS_IT_IS = frozenset(name for names in _AS_IT_IS.values() for name in names.split())

NARROW = (torch.bfloat16, torch.float16)


def is_complex(value: Any) -> bool:
    """Return whether a value is a complex number or a tensor of them."""
    return value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)


def _of_reals(func: Any) -> Callable[..., Any]:
    """One operation of IEEE 754, as it is. Of complex numbers it is several, in an order of the kernel's."""

    def run(x: Any, *others: Any, **options: Any) -> Any:
        if is_complex(x) or (others and is_complex(others[0])):
            return NotImplemented
        return func(x, *others, **options)

    return run


def _with_alpha(func: Any) -> Callable[..., Any]:
    """`add` and `sub` with a factor: a product and a sum, which a fused kernel might round once."""

    def run(x: Tensor, y: Any, alpha: float = 1, **options: Any) -> Any:
        return func(x, y if alpha == 1 else y * alpha, **options)

    return run


def _dividing(func: Any) -> Callable[..., Any]:
    """Division by a tensor where it is one by a number: CUDA's kernel multiplies by the number's reciprocal."""
    is_out = any(each.is_out for each in func._schema.arguments)
    by_tensor = func.overloadpacket.out if is_out else func.overloadpacket.Tensor

    def run(x: Tensor, y: Any, **options: Any) -> Any:
        if is_complex(x) or is_complex(y):
            return NotImplemented
        if isinstance(y, Tensor):
            return by_tensor(x, y if y.dim() or not x.dim() else y.to(x.device), **options)
        if x.dtype not in NARROW:
            dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
            return by_tensor(x, torch.full((), y, dtype=dtype, device=x.device), **options)
        quotient = over(x.float(), y)  # the number is not rounded to their type
        target = options.get("out", x)
        return (
            target.resize_(x.shape).copy_(quotient)
            if func._schema.is_mutable
            else quotient.to(x.dtype)
        )

    return run


def _without_negative_zero(func: Any) -> Callable[..., Any]:
    """A choice of values. Which of two zeros it is depends on the processor and on the number of threads: here +0."""
    # False is a zero of any type, and -0 + 0 is +0.
    return lambda *args, **options: tree_map(lambda x: x.add_(False), func(*args, **options))


def _on_cpu(func: Any) -> Callable[..., Any]:
    """Whole random numbers of the CPU's generator, which is the same on each processor; a GPU has another one."""
    return lambda x, *args, **options: (
        func(x, *args, **options) if x.device.type == "cpu" else NotImplemented
    )


_CHOICES = """
    max min amax amin aminmax maximum minimum clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor
    relu hardtanh"""
# These take the operation, in place or not, and return what to call instead.
AROUND: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "mul.Tensor": _of_reals, "mul.Scalar": _of_reals, "reciprocal": _of_reals, "abs": _of_reals, "sgn": _of_reals,
    "add.Tensor": _with_alpha, "add.Scalar": _with_alpha, "sub.Tensor": _with_alpha, "sub.Scalar": _with_alpha,
    "div.Tensor": _dividing, "div.Scalar": _dividing, "random_": _on_cpu, "random_.from": _on_cpu,
    "random_.to": _on_cpu,
    **dict.fromkeys(_CHOICES.split(), _without_negative_zero),
    # The int8 kernels of processors without VNNI saturate.
    "_int_mm": lambda _: lambda x, y: (x.double() @ y.double()).to(torch.int32),
}  # fmt: skip


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


def _prod(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if dim is None or not x.dim():
        x = x.reshape(-1)
        dim = 0
        keepdim = False
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


def _drawn(
    fill: Callable[..., Tensor], default: torch.dtype | None = None
) -> Callable[..., Tensor]:
    """A function that makes a tensor and fills it with random numbers."""

    def run(size: Any, *, generator: torch.Generator | None = None, **options: Any) -> Tensor:
        options = {
            name: each
            for name, each in options.items()
            if each is not None and name != "pin_memory"
        }
        if isinstance(size, Tensor):
            return fill(torch.empty_like(size, **options), generator=generator)
        return fill(torch.empty(size, **{"dtype": default, **options}), generator=generator)

    return run


def _randint(*args: Any, generator: torch.Generator | None = None, **options: Any) -> Tensor:
    *bounds, size = args
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    fill = partial(randomness.integer, low=low, high=high)
    return _drawn(fill, torch.int64)(size, generator=generator, **options)


def _arange(*bounds: float, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    is_whole = (
        all(isinstance(each, int) for each in bounds)
        if dtype is None
        else not dtype.is_floating_point
    )
    device = options.get("device")
    if is_whole or not step or (end - start) / step < 0:  # torch has the error for a wrong step
        return torch.arange(*bounds, dtype=dtype, device=device)
    i = torch.arange(math.ceil((end - start) / step), dtype=torch.float64, device=device)
    return (i * step + start).to(dtype or torch.get_default_dtype())


def _linspace(
    start: float, end: float, steps: int, *, dtype: torch.dtype | None = None, **options: Any
) -> Tensor:
    start = float(start)
    end = float(end)
    i = torch.arange(steps, device=options.get("device"), dtype=torch.float64)
    step = (end - start) / max(steps - 1, 1)
    return torch.where(i < max(steps // 2, 1), i * step + start, (i - (steps - 1)) * step + end).to(
        dtype or torch.get_default_dtype()
    )


def _randperm(n: int, *, generator: torch.Generator | None = None, **options: Any) -> Tensor:
    device = torch.device(options.get("device") or "cpu")
    return randomness.permutation(n, device, generator=generator).to(
        options.get("dtype") or torch.int64
    )


def _named(module: ModuleType, names: str) -> dict[str, Callable[..., Any]]:
    """Functions of a module that are named as the operations."""
    return {name: getattr(module, name) for name in names.split()}


_FORMS: dict[str, Callable[..., Any]] = {
    **_named(
        elementwise,
        """
        addcmul addcdiv sigmoid_backward tanh_backward gelu gelu_backward silu_backward mse_loss
        mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
        binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits elu
        elu_backward hardsigmoid hardsigmoid_backward hardswish_backward mish_backward
        """,
    ),
    **_named(functions, "logaddexp exp expm1 log log1p sqrt rsqrt sin cos erf sigmoid tanh"),
    **_named(pooling, "embedding_dense_backward index_add scatter_add index_put"),
    **_named(images, "grid_sampler_2d grid_sampler_2d_backward"),
    "rsub.Tensor rsub.Scalar": lambda x, y, alpha=1: y - (x if alpha == 1 else x * alpha),
    "lerp.Scalar lerp.Tensor": elementwise.lerp,
    "mm bmm": matmul,
    "convolution convolution_overrideable": convolution,
    "convolution_backward": convolution_backward,
    "sum sum.dim_IntList": reductions.sum_,
    "mean mean.dim": reductions.mean,
    "var_mean.correction": reductions.var_mean,
    "var.correction": lambda *args, **options: reductions.var_mean(*args, **options)[0],
    "std.correction": lambda *args, **options: elementwise.std_mean(*args, **options)[0],
    "norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype linalg_vector_norm": reductions.norm,
    "cumsum": _cumsum,
    "cumprod": _cumprod,
    "prod prod.dim_int": _prod,
    "scatter_reduce.two": pooling.scatter_reduce,
    "fmod.Tensor fmod.Scalar": elementwise.fmod,
    "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor": elementwise.remainder,
    "floor_divide floor_divide.Scalar": elementwise.floor_divide,
    "div.Tensor_mode div.Scalar_mode": elementwise.divide,
    # A number that is not one has a sign, which is the processor's.
    "copysign.Tensor copysign.Scalar": elementwise.copysign,
    "signbit": lambda x: torch.signbit(x) & ~x.isnan(),
    "fmax": lambda x, y: torch.where(x.isnan() | (y > x), y, x),
    "fmin": lambda x, y: torch.where(x.isnan() | (y < x), y, x),
    "arange arange.start arange.start_step": _arange,
    "bincount": lambda *_, **__: (
        NotImplemented
    ),  # of whole numbers it is portable, of weights it is not
    "logsumexp": _logsumexp,
    "native_batch_norm _native_batch_norm_legit": reductions.batch_norm,
    "_native_batch_norm_legit.no_stats": lambda x, weight, bias, training, momentum, eps: (
        reductions.batch_norm(x, weight, bias, None, None, training, momentum, eps)
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
    "nll_loss_forward nll_loss2d_forward": reductions.nll_loss,
    "nll_loss_backward nll_loss2d_backward": reductions.nll_loss_backward,
    "exp2": lambda x: functions.exp(x.double() * floats.log(2)).to(x.dtype),
    "log2": lambda x: over(functions.log(x.double()), floats.log(2)).to(x.dtype),
    "log10": lambda x: over(functions.log(x.double()), floats.log(10)).to(x.dtype),
    "pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar": functions.power,
    "silu": lambda x: x * functions.sigmoid(x),
    **FORMULAS,
    "hardswish": lambda x: x * elementwise.hardsigmoid(x),
    "softshrink": lambda x, lambd=0.5: x + 0.0 - x.clamp(-lambd, lambd),
    "mish": lambda x: x * functions.tanh(functions.softplus(x)),
    "log_sigmoid_forward": lambda x: (-functions.softplus(-x), x.new_empty(0)),
    "log_sigmoid_backward": lambda g, x, buffer: g * functions.sigmoid(-x),
    "_prelu_kernel": lambda x, weight: torch.where(x > 0, x, x * weight),
    "_prelu_kernel_backward": elementwise.prelu_backward,
    **pooling.POOLING,
    "_index_put_impl": lambda x, indices, values, accumulate=False, unsafe=False: pooling.index_put(
        x, indices, values, accumulate
    ),
    **images.RESIZING,
    "torchvision::roi_align": images.roi_align,
    "torchvision::_roi_align_backward": images.roi_align_backward,
    "torchvision::nms": images.nms,
    "_ctc_loss _ctc_loss.Tensor": reductions.ctc_loss,
    "_ctc_loss_backward _ctc_loss_backward.Tensor": reductions.ctc_loss_backward,
    "uniform_": randomness.uniform,
    "normal_": randomness.normal,
    "normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor": randomness.normal_around,
    "normal.float_float": lambda mean, std, size, **options: _drawn(
        partial(randomness.normal, mean=mean, std=std)
    )(size, **options),
    "exponential_": randomness.exponential,
    "bernoulli": randomness.bernoulli,
    "_sample_dirichlet": randomness.dirichlet,
    # torch leaves out an argument that has its default.
    "bernoulli.p bernoulli.Tensor": lambda x, p=0.5, **options: randomness.bernoulli(
        torch.empty_like(x), p, **options
    ),
    "rand rand.generator": _drawn(randomness.uniform),
    "rand_like rand_like.generator": _drawn(randomness.uniform),
    "randn randn.generator": _drawn(randomness.normal),
    "randn_like randn_like.generator": _drawn(randomness.normal),
    "randint randint.generator randint.low randint.low_generator": _randint,
    "randperm randperm.generator": _randperm,
    "linspace": _linspace,
    "native_dropout": randomness.dropout,
    "_fused_sgd_ _fused_sgd_.tensor_lr": elementwise.sgd,
    "_fused_adam_ _fused_adam_.tensor_lr": elementwise.adam,
    "_fused_adamw_ _fused_adamw_.tensor_lr": partial(elementwise.adam, decoupled=True),
    "_foreach_lerp_.Scalar _foreach_lerp_.List _foreach_lerp_.ScalarList": elementwise.foreach_lerp,
    "_foreach_norm.Scalar": elementwise.foreach_norm,
    **{
        " ".join(f"_foreach_{name}{kind}" for kind in kinds): elementwise.one_by_one(name)
        for names, kinds in (
            ("add_ mul mul_ div div_", (".Scalar", ".List", ".ScalarList", ".Tensor")),
            ("sub_", (".Scalar", ".List", ".ScalarList")),
            ("copy_ zero_", ("",)),
        )
        for name in names.split()
    },
}
HANDLERS = {name: form for names, form in _FORMS.items() for name in names.split()}
