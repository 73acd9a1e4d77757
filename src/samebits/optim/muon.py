"""Muon for a model's hidden matrices, and AdamW for the rest of its parameters, as one optimizer.

torch.optim.Muon accepts matrices only. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
train embeddings, the output layer, norms, biases and convolutions with AdamW. With the scaling of Liu et al., "Muon is
scalable for LLM training", 2025 (`match_rms_adamw`), both use the same learning rate and weight decay.
"""

from collections.abc import Callable
from typing import Any

import torch


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer of two kinds of parameter groups; its state is that of torch.optim.Muon and AdamW.

    Each update of a matrix depends on all of its values, so each rank needs whole parameters.

    Args:
        groups: Parameter groups. `use_muon` selects Muon for a group, whose parameters are then (O, I).
        momentum: Momentum of Muon; Nesterov's form is used.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "use_muon": False})
        self._muon = torch.optim.Muon(
            self._parameters(use_muon=True),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=True,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = torch.optim.AdamW(
            self._parameters(use_muon=False), lr=lr, betas=betas, weight_decay=weight_decay, fused=True
        )
        # Both read their settings from the groups, which replace their own in each step.
        for group in self.param_groups:
            inner = self._muon if group["use_muon"] else self._adamw
            for name, value in inner.defaults.items():
                group.setdefault(name, value)

    def _parameters(self, *, use_muon: bool) -> list[Any]:
        return [each for group in self.param_groups if group["use_muon"] == use_muon for each in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no loss is returned
        """Update all parameters that have a gradient. Closures are not supported."""
        assert closure is None, "MuonAdamW takes no closure"
        for inner, use_muon in ((self._muon, True), (self._adamw, False)):
            # Linked at each step, because load_state_dict replaces both objects.
            inner.param_groups = [group for group in self.param_groups if group["use_muon"] == use_muon]
            inner.state = self.state
            inner.step()  # type: ignore[no-untyped-call]  # Muon has no annotations
