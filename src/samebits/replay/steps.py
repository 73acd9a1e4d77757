"""The record of what each step computes, of a recipe's job or of a script's own loop."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.replay.compare import ModuleRecorder, digests, gradients, optimizer_state


class LoopRecorder:
    """Records the steps of a loop: samples, modules, loss and gradients of each micro-batch, and the state after each.

        batch -> forward pass -> loss -> backward pass     for each micro-batch
        step                                               after the update

    Args:
        modules, optimizers: Those of the loop.
        has_operations: See `ModuleRecorder`.

    Attributes:
        model: All modules in one.
        modules: The recorder of the modules' calls.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        has_operations: bool = False,
    ) -> None:
        self.model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self._optimizers = optimizers
        self.modules = ModuleRecorder(self.model, has_operations=has_operations)
        # With batch_norm=sync, each micro-batch has a thread of its own.
        self._current = threading.local()
        self._found: dict[str, dict[str, Any]] = {}

    def batch(self, index: int, samples: dict[str, str]) -> None:
        """Begin a micro-batch, with the digest of each of its samples."""
        self._current.index = str(index)
        self._found[str(index)] = {
            "samples": samples,
            "modules": self.modules.start(),
            "loss": {},
        }

    def stop(self) -> None:
        """End the forward pass of the current micro-batch."""
        self.modules.stop()

    def loss(self, terms: Mapping[str, Any]) -> None:
        """Record the loss of the current micro-batch: its terms by name."""
        self.stop()
        tensors = {name: term for name, term in terms.items() if isinstance(term, Tensor)}
        micro_batch = self._found[self._current.index]
        micro_batch["loss"] = digests(tensors)
        micro_batch["value"] = sum(float(term.detach().sum()) for term in tensors.values())

    def values(self) -> dict[str, float]:
        """Return the mean loss of the step's micro-batches, the norm of its gradient, and the learning rate."""
        losses = [each.get("value", math.nan) for each in self._found.values()]
        squares = [
            float(parameter.grad.detach().double().square().sum())
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]
        return {
            "loss": sum(losses) / max(1, len(losses)),
            "norm": math.sqrt(sum(squares)),
            "lr": float(self._optimizers[0].param_groups[0]["lr"]),
        }

    def step(self) -> dict[str, Any]:
        """Return the record of the step that has ended."""
        found, self._found = self._found, {}
        state = [optimizer_state(self.model, each) for each in self._optimizers]
        return {
            "micro-batches": found,
            "gradients": gradients(self.model),
            "buffers": digests(dict(self.model.named_buffers())),
            "weights": digests(dict(self.model.named_parameters())),
            "optimizer": {name: value for each in state for name, value in each.items()},
        }

    def described(self) -> dict[str, Any]:
        """Return the class and the operations of each module, by name."""
        return {"kinds": self.modules.kinds, "operations": self.modules.operations}

    def remove(self) -> None:
        """Remove the hooks."""
        self.modules.remove()
