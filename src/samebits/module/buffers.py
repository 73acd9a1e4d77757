"""Keep the buffers of a model over forward passes that must leave no trace."""

from collections.abc import Callable

import torch
from torch import nn


def buffers_of(model: nn.Module) -> Callable[[], None]:
    """Keep the buffers of a model and their values, and return a function that restores both."""
    # A model may count or collect values in a forward pass, different ones on each rank. The dictionaries themselves:
    # `register_buffer` would forget whether a buffer is persistent.
    kept = [
        (module._buffers, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]

    @torch.no_grad()
    def restore() -> None:
        for buffers, name, buffer, value in kept:
            # A forward pass may have bound the name to another tensor. References to the original one must stay valid.
            buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)

    return restore
