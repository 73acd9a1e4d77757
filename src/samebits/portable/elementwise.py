"""Activations, losses, and combinations of products and sums, each operation a kernel of its own.

Signatures are those of torch's operations (ATen).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samebits.portable import functions, reductions
from samebits.portable.grid import over


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
    if dtype == torch.float64 and ((divisor.abs() < torch.finfo(dtype).tiny) & (divisor != 0)).any():
        raise NotImplementedError
    return torch.fmod(x.double(), divisor).to(dtype)


def remainder(x: Tensor | float, y: Tensor | float) -> Tensor:
    """The rest of a division, with the sign of y."""
    x, y = torch.as_tensor(x), torch.as_tensor(y)
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
    quotient = x / y if isinstance(y, Tensor) else over(x, y)
    return quotient if rounding_mode is None else quotient.trunc()


def round_to_decimals(x: Tensor, *, decimals: int) -> Tensor:
    """Round to decimal places: of the rounded product with a power of ten, the quotient."""
    ten = float(10 ** abs(decimals))
    return over((x * ten).round(), ten) if decimals >= 0 else over(x, ten).round() * ten


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
    d = (x - y) * 2.0 * g
    return over(d, x.numel()) if reduction == 1 else d


def smooth_l1(x: Tensor, y: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    """Squares below beta, absolute differences above."""
    d = (x - y).abs()
    return _reduced(torch.where(d < beta, over(d * d * 0.5, beta), d - 0.5 * beta) if beta else d, reduction)


def smooth_l1_backward(g: Tensor, x: Tensor, y: Tensor, reduction: int, beta: float) -> Tensor:
    """Return the gradient of the first argument."""
    d = x - y
    slope = torch.where(d.abs() < beta, over(d, beta), d.sign()) if beta else d.sign()
    return over(slope * g, x.numel()) if reduction == 1 else slope * g


def huber(x: Tensor, y: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """Squares below delta, delta times absolute differences above."""
    d = (x - y).abs()
    return _reduced(torch.where(d < delta, d * d * 0.5, (d - 0.5 * delta) * delta), reduction)


def huber_backward(g: Tensor, x: Tensor, y: Tensor, reduction: int, delta: float) -> Tensor:
    """Return the gradient of the first argument."""
    slope = (x - y).clamp(-delta, delta) * g
    return over(slope, x.numel()) if reduction == 1 else slope


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    if reduction == 0:
        return losses
    return reductions.mean(losses) if reduction == 1 else reductions.sum_(losses)


def bce(x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    """Binary cross-entropy of probabilities x; logarithms are at least -100."""
    losses = -(y * functions.log(x).clamp(min=-100.0) + (1.0 - y) * functions.log(1.0 - x).clamp(min=-100.0))
    return _reduced(losses if weight is None else losses * weight, reduction)


def bce_backward(g: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    """Return the gradient of the probabilities."""
    slope = g * (x - y) / ((1.0 - x) * x).clamp(min=1e-12)
    slope = slope if weight is None else slope * weight
    return over(slope, x.numel()) if reduction == 1 else slope


def bce_with_logits(
    x: Tensor, y: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Binary cross-entropy of logits x."""
    factor = 1.0 if pos_weight is None else (pos_weight - 1.0) * y + 1.0
    losses = (1.0 - y) * x + functions.softplus(-x) * factor
    return _reduced(losses if weight is None else losses * weight, reduction)


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    """scale * x above 0, scale * alpha * (e**(input_scale * x) - 1) below."""
    return torch.where(x > 0, x * scale, functions.expm1(x * input_scale) * (alpha * scale))


def elu_backward(g: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor) -> Tensor:
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
