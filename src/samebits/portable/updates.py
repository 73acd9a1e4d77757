"""Updates of weights: torch's fused optimizers and calls over lists of tensors, one operation a kernel.

Inside a fused kernel a product and a sum may be rounded once or twice, as the compiler chose for the processor.
Signatures are those of torch's operations (ATen).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.portable import floats
from samebits.portable.functions import sqrt
from samebits.portable.grid import exact_sum, over

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
        root = sqrt(over(square, 1 - floats.power(beta2, step))).add_(eps)
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
    return [sqrt(exact_sum(x.double() * x.double(), range(x.dim())).to(dtype or x.dtype)) for x in xs]


def _divided(x: Tensor, y: Tensor | float) -> Tensor:
    return x / y if isinstance(y, Tensor) else over(x, y)


def one_by_one(name: str) -> Callable[..., Any]:
    """Return the loop over the tensors of a call `_foreach_name_`, of operations that round once."""
    operation = {"div": _divided, "div_": lambda x, y: x.copy_(_divided(x, y))}.get(name, getattr(torch.ops.aten, name))

    def run(xs: Tensors, *others: Any, alpha: float = 1) -> list[Any] | None:
        columns = [each if isinstance(each, (list, tuple)) else [each] * len(xs) for each in others]
        rows = zip(xs, *columns, strict=True)
        results = [operation(x, *([rest[0] * alpha] if alpha != 1 else rest)) for x, *rest in rows]
        return None if name.endswith("_") else results

    return run
