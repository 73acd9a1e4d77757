"""LAMB: Adam with decoupled weight decay, whose update of each tensor is scaled to the tensor's norm.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2, with
Adam's bias correction. torch has no LAMB. As in timm and NVIDIA's implementation, tensors without weight decay (norms
and biases) have a ratio of 1; unlike in these, gradients are not clipped here (`optim.clip_norm` does it).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from samebits.portable import floats


class Lamb(torch.optim.Optimizer):
    """The LAMB optimizer. The norms are of whole tensors, so each rank needs whole parameters.

    Args:
        params: Parameters of any shape, or groups of them.
        eps: Added to the root of the second moment.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no loss is returned
        """Update all parameters that have a gradient. Closures are not supported."""
        assert closure is None, "LAMB takes no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if not state:
            # On the CPU, so that item() waits for no GPU.
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        num_steps, (beta1, beta2) = int(state["step"].item()), group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - floats.power(beta2, num_steps))).sqrt_().add_(group["eps"])
        update = (state["exp_avg"] / (1 - floats.power(beta1, num_steps))).div_(root)
        if not group["weight_decay"]:
            parameter.sub_(update, alpha=group["lr"])
            return
        update.add_(parameter, alpha=group["weight_decay"])
        # float32 sums over millions of values would be off by 1e-4.
        norm, update_norm = (torch.linalg.vector_norm(each, dtype=torch.float64) for each in (parameter, update))
        ratio = torch.where((norm > 0) & (update_norm > 0), norm / update_norm, 1.0).to(parameter.dtype)
        parameter.sub_(update.mul_(ratio), alpha=group["lr"])
