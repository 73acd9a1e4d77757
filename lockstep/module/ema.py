"""A moving average of the weights, which often does better on held-out samples than the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ModelEma:
    """The exponential moving average of a model's state: parameters, and buffers such as batch norm's statistics.

    After step t it becomes d * average + (1 - d) * weights, with d = min(decay, (1 + t) / (10 + t)), so that the first
    weights, which are random, are soon forgotten; the rule is that of TensorFlow's ExponentialMovingAverage with
    `num_updates`. Tensors that hold no floating-point numbers are the model's own. It is worked out element by element
    from what is equal on all ranks, so it is equal on all ranks.

    Args:
        model: Whose weights are averaged; on its device.
        decay: The largest d.
        state: Gives what is averaged where that is not the model's state_dict: a rank's parts of it.
    """

    def __init__(self, model: nn.Module, decay: float, state: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        self._live, self._decay = state or model.state_dict, decay
        self.state: dict[str, Tensor] = {}
        self.begin(self._live())

    def begin(self, state: Mapping[str, Tensor]) -> None:
        """Take a state as the average so far: the weights that training starts from, or what a checkpoint kept."""
        # Cloned from the model, so that each has the layout in memory that it is averaged with.
        self.state = {name: tensor.detach().clone().copy_(state[name]) for name, tensor in self._live().items()}

    @torch.no_grad()
    def update(self, num_steps: int) -> None:
        """Take the model's weights in, after so many steps."""
        decay = min(self._decay, (1 + num_steps) / (10 + num_steps))
        now = self._live()
        floating = [name for name, tensor in now.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([self.state[name] for name in floating], [now[name] for name in floating], 1 - decay)
        for name in now.keys() - set(floating):
            self.state[name].copy_(now[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the averaged weights for a while."""
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
