"""Operations that are a few others, of products, of layers and of statistics. Signatures are those of torch (ATen)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.portable import functions, reductions
from samebits.portable.grid import exact_sum, over
from samebits.portable.operations import additions
from samebits.portable.products import matmul


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * functions.sigmoid(b)


def _glu_backward(g: Tensor, x: Tensor, dim: int) -> Tensor:
    a, b = x.chunk(2, dim)
    s = functions.sigmoid(b)
    return torch.cat([g * s, g * a * (s * (1.0 - s))], dim)


def _xlogy(x: Any, y: Any) -> Tensor:
    """x log y; 0 where x is 0."""
    logs = functions.log(torch.as_tensor(y, dtype=torch.float32) if not isinstance(y, Tensor) else y)
    factor = torch.as_tensor(x, dtype=logs.dtype, device=logs.device)
    return torch.where((factor == 0) & ~logs.isnan(), 0.0, factor * logs)


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else torch.where(x < eps, eps, x.clamp(max=1.0 - eps))  # in this order, if eps > 0.5
    return functions.log(x / (1.0 - x))


def _logit_backward(g: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    low = 0.0 if eps is None else eps
    return torch.where((x >= low) & (x <= 1.0 - low), g / (x * (1.0 - x)), math.nan if eps is None else 0.0)


def _linear(bias: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta) if beta else product


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return matmul(x[None], y[:, None])[0, 0]


def _addmv(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _linear(bias, matmul(x, y[:, None])[:, 0], beta, alpha)


def _addr(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _linear(bias, x[:, None] * y, beta, alpha)


def _addbmm(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = matmul(x.transpose(0, 1).flatten(1), y.flatten(0, 1))
    return _linear(bias, product, beta, alpha)


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: Sequence[int], expand2: Sequence[int], expand3: Sequence[int],
    sumdim: Sequence[int], unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """Sum products of three factors, each with new dimensions of size 1; of nn.Bilinear."""
    factors = [a, b, c]
    for i, dims in enumerate((expand1, expand2, expand3)):
        for dim in dims:
            factors[i] = factors[i].unsqueeze(dim)
    return exact_sum(factors[0] * factors[1] * factors[2], list(sumdim)).to(a.dtype)


def _cross(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    (a, b, c), (d, e, f) = x.unbind(dim), y.unbind(dim)
    return torch.stack([b * f - c * e, c * d - a * f, a * e - b * d], dim)


def _affine_grid(theta: Tensor, size: Sequence[int], corners: bool) -> Tensor:
    """Multiply the places of all pixels, from -1 to 1, x first, and a one by (N, dimensions, dimensions + 1)."""
    axes = []
    for n in size[2:]:
        i = torch.arange(n, device=theta.device).double()
        axes.append(over(i * 2.0 + 1.0 - n, max(n - 1, 1) if corners else n))
    places = [*reversed(torch.meshgrid(*axes, indexing="ij")), torch.ones(list(size[2:]), device=theta.device)]
    base = torch.stack([each.to(theta.dtype).flatten() for each in places], 1).expand(size[0], -1, -1)
    return matmul(base, theta.transpose(1, 2)).view(size[0], *size[2:], -1)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norms = reductions.norm(v, 2, _others(v, dim), keepdim=True)
    return v * (g / norms), norms


def _weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    along = exact_sum(grad * v, _others(v, dim), keepdim=True).to(v.dtype)
    return g / norms * (grad - v * (along / (norms * norms))), along / norms


def _others(x: Tensor, dim: int) -> list[int]:
    return [each for each in range(x.dim()) if each != dim % x.dim()]


def _nansum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return reductions.sum_(torch.where(x.isnan(), 0.0, x), dim, keepdim, dtype=dtype)


def _std_mean(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    variance, mean = reductions.var_mean(*args, **options)
    return functions.sqrt(variance), mean


def _renorm(x: Tensor, p: float, dim: int, maximum: float) -> Tensor:
    norms = reductions.norm(x, p, _others(x, dim), keepdim=True)
    return x * torch.where(norms > maximum, maximum / (norms + 1e-7), 1.0)


def _embedding_renorm(weight: Tensor, indices: Tensor, maximum: float, p: float) -> Tensor:
    rows = indices.unique()
    return weight.index_copy(0, rows, _renorm(weight[rows], p, 0, maximum))


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    if not accumulate:
        raise NotImplementedError  # places that occur twice have no order
    index = torch.where(index < 0, index + x.numel(), index)
    return additions.scatter_add(x.reshape(-1), 0, index.reshape(-1), source.reshape(-1)).view(x.shape)


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    shape = [1] * x.dim()
    if shape:
        shape[dim] = -1
    places = index.view(shape).expand(source.shape)
    return additions.scatter_reduce(x, dim, places, source, reduce, include_self=include_self)


def _masked_scatter_backward(g: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    taken = g[mask.expand_as(g)]
    return torch.cat([taken, g.new_zeros(math.prod(sizes) - len(taken))]).view(list(sizes))


def _tan(x: Tensor) -> Tensor:
    wide = x.double()
    return (functions.sin(wide) / functions.cos(wide)).to(x.dtype)


def _sinh(x: Tensor) -> Tensor:
    """Of u = e**|x| - 1: (u + u / (u + 1)) / 2, with the sign of x."""
    wide = x.double()
    up = functions.expm1(wide.abs())
    return torch.copysign((up + up / (up + 1.0)) * 0.5, wide).to(x.dtype)


def _cosh(x: Tensor) -> Tensor:
    up = functions.exp(x.double().abs())
    return ((up + 1.0 / up) * 0.5).to(x.dtype)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    if beta == 1:
        return functions.softplus(x)
    return torch.where(x * beta > threshold, x, over(functions.softplus(x * beta), beta))


def _softplus_backward(g: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    if beta == 1:
        return g * functions.sigmoid(x)
    return torch.where(x * beta > threshold, g, g * functions.sigmoid(x * beta))


FORMULAS: dict[str, Callable[..., Any]] = {
    "glu": _glu, "glu_backward": _glu_backward, "xlogy.Tensor xlogy.Scalar_Other xlogy.Scalar_Self": _xlogy, "logit": _logit, "logit_backward": _logit_backward,
    "vdot": _dot, "addmv": _addmv, "addr": _addr, "addbmm": _addbmm, "_trilinear": _trilinear, "linalg_cross": _cross,
    "affine_grid_generator": _affine_grid, "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm_backward, "nansum": _nansum, "std_mean.correction": _std_mean,
    "trace": lambda x: exact_sum(x.diagonal(), (0,)).to(x.dtype), "renorm": _renorm,
    "embedding_renorm": _embedding_renorm, "put": _put, "index_reduce": _index_reduce,
    "masked_scatter_backward": _masked_scatter_backward, "tan": _tan, "sinh": _sinh, "cosh": _cosh,
    "softplus": _softplus, "softplus_backward": _softplus_backward,
    "celu": lambda x, alpha=1.0: torch.where(x > 0, x, functions.expm1(over(x, alpha)) * alpha),
    "dist": lambda x, y, p=2: reductions.norm(x - y, p),
}  # fmt: skip
