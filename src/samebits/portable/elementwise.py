"""Activations, losses, remainders, updates of weights, and formulas of a few operations, each a kernel of its own.

Inside a fused kernel a product and a sum may be rounded once or twice, as the compiler chose for the processor.
Signatures are those of torch's operations (ATen).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.portable import floats, functions, pooling, reductions
from samebits.portable.grid import exact_sum, over, sum_of_squares
from samebits.portable.products import matmul


def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """x + value * a * b."""
    return x + (a * b if value == 1 else a * value * b)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """x + value * a / b."""
    return x + (a / b if value == 1 else a * value / b)


def lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    """x + weight * (end - x)."""
    moved: Tensor = x + (end - x) * weight
    return moved


def fmod(x: Tensor, y: Tensor | float) -> Tensor:
    """The rest of a division, with the sign of x: in float64, where kernels have no trouble with denormal float32."""
    dtype = torch.result_type(x, y)
    divisor = torch.as_tensor(y, device=x.device).to(dtype).double()
    if (
        dtype == torch.float64
        and ((divisor.abs() < torch.finfo(dtype).tiny) & (divisor != 0)).any()
    ):
        raise NotImplementedError
    return torch.fmod(x.double(), divisor).to(dtype)


def remainder(x: Tensor | float, y: Tensor | float) -> Tensor:
    """The rest of a division, with the sign of y."""
    x = torch.as_tensor(x)
    y = torch.as_tensor(y)
    rest = fmod(x, y)
    return torch.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest)


def floor_divide(x: Tensor, y: Tensor | float) -> Tensor:
    """x / y, rounded down, as Python does it: from the quotient without its rest."""
    y = torch.as_tensor(y, device=x.device).to(torch.result_type(x, y))
    rest = fmod(x, y)
    quotient = (x - rest) / y
    quotient = torch.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1.0, quotient)
    floor = quotient.floor()
    floor = torch.where(quotient - floor > 0.5, floor + 1.0, floor)
    floor = torch.where(quotient == 0, torch.copysign(torch.zeros_like(floor), x / y), floor)
    return torch.where(y == 0, x / y, floor)


def copysign(x: Tensor, y: Tensor | float) -> Tensor:
    """x with the sign of y: of NaN +, as its sign depends on the processor."""
    sign = torch.as_tensor(y, device=x.device)
    return torch.copysign(x, torch.where(sign.isnan(), 1.0, sign))


def divide(x: Tensor, y: Tensor | float, *, rounding_mode: str | None = None) -> Tensor:
    """x / y, rounded to a whole number in a mode."""
    if rounding_mode == "floor":
        return floor_divide(x, y)
    quotient = over(x, y)
    return quotient if rounding_mode is None else quotient.trunc()


def sigmoid_backward(g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the argument, from the result y."""
    return g * ((1.0 - y) * y)


def tanh_backward(g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the argument, from the result y."""
    return g * (1.0 - y * y)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x times the normal distribution's cumulative, or its approximation by tanh."""
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (functions.tanh(inner) + 1.0)
    return functions.gelu(x)


def gelu_backward(g: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """Return the gradient of `gelu`'s argument."""
    if approximate == "tanh":
        factor = math.sqrt(2 / math.pi)
        t = functions.tanh((x + x * x * x * 0.044715) * factor)
        slope = (1.0 - t * t) * ((x * x * (3 * 0.044715) + 1.0) * factor)
        return g * ((t + 1.0) * 0.5 + x * slope * 0.5)
    return g * functions.gelu_slope(x)


def silu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x * sigmoid(x)."""
    s = functions.sigmoid(x)
    return g * (s * (x * (1.0 - s) + 1.0))


def mse_loss(x: Tensor, y: Tensor, reduction: int = 1) -> Tensor:
    """Squared differences; reduction 0: each, 1: their mean, 2: their sum."""
    d = x - y
    return _reduced(d * d, reduction)


def mse_loss_backward(g: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tensor:
    """Return the gradient of the first argument."""
    return _of_each((x - y) * 2.0 * g, reduction)


def smooth_l1_loss(x: Tensor, y: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    """Squares below beta, absolute differences above."""
    d = (x - y).abs()
    return _reduced(
        torch.where(d < beta, over(d * d * 0.5, beta), d - 0.5 * beta) if beta else d, reduction
    )


def smooth_l1_loss_backward(g: Tensor, x: Tensor, y: Tensor, reduction: int, beta: float) -> Tensor:
    """Return the gradient of the first argument."""
    d = x - y
    slope = torch.where(d.abs() < beta, over(d, beta), d.sign()) if beta else d.sign()
    return _of_each(slope * g, reduction)


def huber_loss(x: Tensor, y: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """Squares below delta, delta times absolute differences above."""
    d = (x - y).abs()
    return _reduced(torch.where(d < delta, d * d * 0.5, (d - 0.5 * delta) * delta), reduction)


def huber_loss_backward(g: Tensor, x: Tensor, y: Tensor, reduction: int, delta: float) -> Tensor:
    """Return the gradient of the first argument."""
    return _of_each((x - y).clamp(-delta, delta) * g, reduction)


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    if reduction == 0:
        return losses
    return reductions.mean(losses) if reduction == 1 else reductions.sum_(losses)


def _of_each(gradients: Tensor, reduction: int) -> Tensor:
    """Gradients through `_reduced`: a mean divides them."""
    return over(gradients, gradients.numel()) if reduction == 1 else gradients


def binary_cross_entropy(
    x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Binary cross-entropy of probabilities x; logarithms are at least -100."""
    losses = -(
        y * functions.log(x).clamp(min=-100.0)
        + (1.0 - y) * functions.log(1.0 - x).clamp(min=-100.0)
    )
    return _reduced(losses if weight is None else losses * weight, reduction)


def binary_cross_entropy_backward(
    g: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Return the gradient of the probabilities."""
    slope = g * (x - y) / ((1.0 - x) * x).clamp(min=1e-12)
    return _of_each(slope if weight is None else slope * weight, reduction)


def binary_cross_entropy_with_logits(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """Binary cross-entropy of logits x."""
    factor = 1.0 if pos_weight is None else (pos_weight - 1.0) * y + 1.0
    losses = (1.0 - y) * x + functions.softplus(-x) * factor
    return _reduced(losses if weight is None else losses * weight, reduction)


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    """scale * x above 0, scale * alpha * (e**(input_scale * x) - 1) below."""
    return torch.where(x > 0, x * scale, functions.expm1(x * input_scale) * (alpha * scale))


def elu_backward(
    g: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor
) -> Tensor:
    """Return the gradient of `elu`'s argument, from the argument or the result."""
    slope = x + alpha * scale if is_result else functions.exp(x * input_scale) * (alpha * scale)
    return torch.where(x > 0, g * scale, g * slope * input_scale)


def hardsigmoid(x: Tensor) -> Tensor:
    """(x + 3) / 6 between 0 and 1."""
    return over((x + 3.0).clamp_(0.0, 6.0), 6.0)


def hardsigmoid_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `hardsigmoid`'s argument."""
    return torch.where((x > -3.0) & (x < 3.0), over(g, 6.0), 0.0)


def hardswish_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x * hardsigmoid(x)."""
    return torch.where(x <= -3.0, 0.0, torch.where(x < 3.0, g * (over(x, 3.0) + 0.5), g))


def mish_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x * tanh(softplus(x))."""
    t = functions.tanh(functions.softplus(x))
    return g * (t + x * functions.sigmoid(x) * (1.0 - t * t))


def prelu_backward(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of argument and weight."""
    return torch.where(x > 0, g, g * weight), torch.where(x > 0, 0.0, g * x)


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * functions.sigmoid(b)


def _glu_backward(g: Tensor, x: Tensor, dim: int) -> Tensor:
    a, b = x.chunk(2, dim)
    s = functions.sigmoid(b)
    return torch.cat([g * s, g * a * (s * (1.0 - s))], dim)


def _xlogy(x: Any, y: Any) -> Tensor:
    """x log y; 0 where x is 0."""
    logs = functions.log(
        torch.as_tensor(y, dtype=torch.float32) if not isinstance(y, Tensor) else y
    )
    factor = torch.as_tensor(x, dtype=logs.dtype, device=logs.device)
    return torch.where((factor == 0) & ~logs.isnan(), 0.0, factor * logs)


def _linear(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = matmul(x, y) if alpha == 1 else matmul(x, y) * alpha
    return product + (bias if beta == 1 else bias * beta) if beta else product


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return matmul(x[None], y[:, None])[0, 0]


def _addmv(bias: Tensor, x: Tensor, y: Tensor, **factors: float) -> Tensor:
    return _linear(bias[..., None], x, y[:, None], **factors)[:, 0]


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


def _affine_grid(theta: Tensor, size: Sequence[int], corners: bool) -> Tensor:
    """Multiply the places of all pixels, from -1 to 1, x first, and a one by (N, dimensions, dimensions + 1)."""
    axes = []
    for n in size[2:]:
        i = torch.arange(n, device=theta.device).double()
        axes.append(over(i * 2.0 + 1.0 - n, max(n - 1, 1) if corners else n))
    places = [
        *reversed(torch.meshgrid(*axes, indexing="ij")),
        torch.ones(list(size[2:]), device=theta.device),
    ]
    base = torch.stack([each.to(theta.dtype).flatten() for each in places], 1).expand(
        size[0], -1, -1
    )
    return matmul(base, theta.transpose(1, 2)).view(size[0], *size[2:], -1)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norms = reductions.norm(v, 2, reductions.others(v, dim), keepdim=True)
    return v * (g / norms), norms


def _weight_norm_backward(
    grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    along = exact_sum(grad * v, reductions.others(v, dim), keepdim=True).to(v.dtype)
    return g / norms * (grad - v * (along / (norms * norms))), along / norms


def _nansum(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return reductions.sum_(torch.where(x.isnan(), 0.0, x), dim, keepdim, dtype=dtype)


def std_mean(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean over dimensions."""
    variance, mean = reductions.var_mean(*args, **options)
    return functions.sqrt(variance), mean


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    if not accumulate:
        raise NotImplementedError  # places that occur twice have no order
    places = [index.reshape(-1)]
    return pooling.index_put(x.reshape(-1), places, source.reshape(-1), True).view(x.shape)


def _masked_scatter_backward(g: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    taken = g[mask.expand_as(g)]
    return torch.cat([taken, g.new_zeros(math.prod(sizes) - len(taken))]).view(list(sizes))


def _tan(x: Tensor) -> Tensor:
    wide = x.double()
    return (functions.sin(wide) / functions.cos(wide)).to(x.dtype)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    if beta == 1:
        return functions.softplus(x)
    return torch.where(x * beta > threshold, x, over(functions.softplus(x * beta), beta))


def _softplus_backward(g: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    if beta == 1:
        return g * functions.sigmoid(x)
    return torch.where(x * beta > threshold, g, g * functions.sigmoid(x * beta))


FORMULAS: dict[str, Callable[..., Any]] = {
    "addmm baddbmm": _linear, "mv": lambda x, y: matmul(x, y[:, None])[:, 0],
    "glu": _glu, "glu_backward": _glu_backward,
    "xlogy.Tensor xlogy.Scalar_Other xlogy.Scalar_Self": _xlogy,
    "dot vdot": _dot, "addmv": _addmv, "_trilinear": _trilinear,
    "affine_grid_generator": _affine_grid, "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm_backward, "nansum": _nansum, "std_mean.correction": std_mean,
    "put": _put, "masked_scatter_backward": _masked_scatter_backward, "tan": _tan,
    "softplus": _softplus, "softplus_backward": _softplus_backward,
    "celu": lambda x, alpha=1.0: torch.where(x > 0, x, functions.expm1(over(x, alpha)) * alpha),
}  # fmt: skip


Tensors = Sequence[Tensor]


def sgd(
    weights: Tensors, grads: Tensors, momenta: Tensors, *, weight_decay: float, momentum: float, lr: float | Tensor,
    dampening: float, nesterov: bool, maximize: bool, is_first_step: bool, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Stochastic gradient descent with momentum, in place."""
    lr = float(lr)
    for i, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        grad = -grad if maximize else grad
        if weight_decay:
            grad = grad + weight * weight_decay
        if momentum:
            if is_first_step:
                momenta[i].copy_(grad)
            else:
                momenta[i].mul_(momentum).add_(grad if dampening == 0 else grad * (1 - dampening))
            grad = grad + momenta[i] * momentum if nesterov else momenta[i]
        weight.sub_(grad * lr)


def adam(
    weights: Tensors, grads: Tensors, means: Tensors, squares: Tensors, largest: Tensors, steps: Tensors, *,
    lr: float | Tensor, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None, decoupled: bool = False,
) -> None:  # fmt: skip
    """Adam, or AdamW if the weight decay is `decoupled`, in place."""
    lr = float(lr)
    for i, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        step = int(steps[i])
        grad = -grad if maximize else grad
        if weight_decay and decoupled:
            weight.sub_(weight * (lr * weight_decay))
        elif weight_decay:
            grad = grad + weight * weight_decay
        means[i].add_((grad - means[i]) * (1 - beta1))
        squares[i].mul_(beta2).add_(grad * grad * (1 - beta2))
        square = squares[i]
        if amsgrad:
            square = largest[i].copy_(torch.maximum(largest[i], square))
        root = functions.sqrt(over(square, 1 - floats.power(beta2, step))).add_(eps)
        weight.sub_((means[i] * (lr / (1 - floats.power(beta1, step)))).div_(root))


def foreach_lerp(xs: Tensors, ends: Tensors, weight: Any) -> None:
    """Move each tensor towards another, in place."""
    weights = weight if isinstance(weight, (list, tuple)) else [weight] * len(xs)
    for x, end, each in zip(xs, ends, weights, strict=True):
        x.add_((end - x) * each)


def foreach_norm(xs: Tensors, p: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the 2-norm of each tensor."""
    if p != 2:
        raise NotImplementedError
    return [functions.sqrt(sum_of_squares(x).to(dtype or x.dtype)) for x in xs]


def one_by_one(name: str) -> Callable[..., Any]:
    """Return the loop over the tensors of a call `_foreach_name_`, of operations that round once."""
    operation = {"div": over, "div_": lambda x, y: x.copy_(over(x, y))}.get(
        name, getattr(torch.ops.aten, name)
    )

    def run(xs: Tensors, *others: Any, alpha: float = 1) -> list[Any] | None:
        columns = [each if isinstance(each, (list, tuple)) else [each] * len(xs) for each in others]
        rows = zip(xs, *columns, strict=True)
        results = [operation(x, *([rest[0] * alpha] if alpha != 1 else rest)) for x, *rest in rows]
        return None if name.endswith("_") else results

    return run
