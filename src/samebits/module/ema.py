"""Exponential moving average of the weights, which often generalizes better than the weights themselves."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ModelEma:
    """The exponential moving average of a model's state: parameters, and buffers such as batch norm's statistics.

    After step t: average = d * average + (1 - d) * weights with d = min(decay, (1 + t) / (10 + t)), so that the random
    initial weights are forgotten soon (as TensorFlow's ExponentialMovingAverage with `num_updates`). Tensors of other
    than floating-point dtypes are copied. The update is elementwise and its inputs are equal on all ranks, so the
    average is too.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._live = model.state_dict
        self._decay = decay
        self.state: dict[str, Tensor] = {}
        self.reset(self._live())

    def reset(self, state: Mapping[str, Tensor]) -> None:
        """Set the average to tensors of the shapes of the model's."""
        # Cloned from the model, so that each tensor has the strides that the update uses.
        self.state = {
            name: tensor.detach().clone().copy_(state[name])
            for name, tensor in self._live().items()
        }

    # Otherwise autograd would record each update, since the weights require gradients.
    @torch.no_grad()
    def update(self, num_steps: int) -> None:
        """Update the average after step number `num_steps`."""
        decay = min(self._decay, (1 + num_steps) / (10 + num_steps))
        now = self._live()
        floating = [name for name, tensor in now.items() if tensor.is_floating_point()]
        # One call for all tensors, as in torch.optim.swa_utils.
        torch._foreach_lerp_(
            [self.state[name] for name in floating], [now[name] for name in floating], 1 - decay
        )
        for name in now.keys() - set(floating):
            self.state[name].copy_(now[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averaged weights into the model for the duration of the context."""
        live = self._live()
        own = {name: tensor.clone() for name, tensor in live.items()}
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(self.state[name])
            try:
                yield
            finally:
                for name, tensor in live.items():
                    tensor.copy_(own[name])
