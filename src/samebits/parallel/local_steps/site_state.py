"""What a site changes in an outer step: weights, the optimizer's tensors and the model's buffers, and their start."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_NO_SHAPE = "step"  # Adam's number of steps: the only tensor of an optimizer without the parameter's shape


class SiteState:
    """Stores the state that an outer step starts from, and restores it for each site.

    Args:
        model: The model, on its device.
        optimizer: The optimizer of the local steps.
        averaged: The names of the optimizer's tensors to average, for each parameter, of any shape. With none, the
            optimizer has no state at the start of an outer step.

    Attributes:
        parameters: The trained parameters, in the model's order.
        templates: Tensors with the shapes and strides of what is averaged: parameters, then the optimizer's tensors.
        tail_length: Number of further values: how many sites have state for each parameter, and changes of buffers.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, averaged: Sequence[tuple[Tensor, tuple[str, ...]]]
    ) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer, self._averaged = optimizer, [(each, names) for each, names in averaged if names]
        # A bool buffer is a constant, as in `running.py`.
        self._buffers = [buffer for buffer in model.buffers() if buffer.dtype != torch.bool]
        self._entries = [(parameter, name) for parameter, names in self._averaged for name in names]
        scalar = torch.empty((), device=self.parameters[0].device)
        self.templates = [
            *self.parameters,
            *(nn.Parameter(scalar if name == _NO_SHAPE else each.detach(), False) for each, name in self._entries),
        ]
        self.tail_length = len(self._averaged) + sum(buffer.numel() for buffer in self._buffers)
        self._live = [parameter.detach() for parameter in self.parameters] + self._buffers
        self._start = [tensor.clone() for tensor in self._live]
        self._start_state: dict[Tensor, dict[str, Tensor]] = {}

    def store(self) -> None:
        """Store the current state as the start of an outer step."""
        self._write(self._start, self._live)
        self._start_state = {
            parameter: {name: value.clone() for name, value in entries.items()}
            for parameter, entries in self._optimizer.state.items()
        }

    def restore(self) -> None:
        """Return to the start of the outer step."""
        self.load(self._start)
        state = self._optimizer.state
        for parameter in [each for each in state if each not in self._start_state]:
            del state[parameter]
        for parameter, entries in self._start_state.items():
            for name, value in entries.items():
                self._put(parameter, name, value)

    def copy(self) -> list[Tensor]:
        """Return a copy of parameters and buffers, of any shape, for `load`."""
        return [tensor.clone() for tensor in self._live]

    def load(self, values: Sequence[Tensor]) -> None:
        """Set parameters and buffers.

        Args:
            values: From `copy`, in the shapes of parameters and buffers.
        """
        self._write(self._live, values)

    @torch.no_grad()
    def write_change(self, views: list[Tensor]) -> None:
        """Write a site's change of the parameters, start - now, and its optimizer's tensors.

        Args:
            views: The memory, with the shapes of `templates`.
        """
        num = len(self.parameters)
        torch._foreach_copy_(views[:num], self._start[:num])
        torch._foreach_sub_(views[:num], self._live[:num])
        for view, (parameter, name) in zip(views[num:], self._entries, strict=True):
            # Without state, as of a parameter that no micro-batch of the site used, it counts as zero: what an
            # optimizer begins with.
            entries = self._optimizer.state.get(parameter, {})
            if name in entries:
                view.copy_(entries[name])
            else:
                view.zero_()

    def tail(self) -> Tensor:
        """Return the further values of a site, (tail_length,)."""
        state, device = self._optimizer.state, self.parameters[0].device
        has_state = torch.tensor([float(bool(state.get(each))) for each, _ in self._averaged]).to(device)
        starts = self._start[len(self.parameters) :]
        changes = [
            # An unchanged infinite value, as in an attention mask, has the change 0: inf - inf would be nan.
            (now - start).masked_fill_(now == start, 0).float().reshape(-1)
            for now, start in zip(self._buffers, starts, strict=True)
        ]
        return torch.cat([has_state, *changes])

    def read_mean(self, views: Sequence[Tensor], tail: Tensor, num_sites: int) -> None:
        """Set the optimizer's tensors and the buffers to the mean over the sites. Parameters are left as they are.

        Args:
            views: The means, with the shapes of `templates`.
            tail: The sums of all sites' `tail`, (tail_length,).
            num_sites: Number of sites.
        """
        counts, *changes = torch.split(tail, [len(self._averaged), *(buffer.numel() for buffer in self._buffers)])
        has_state = {each: count > 0 for (each, _), count in zip(self._averaged, counts.tolist(), strict=True)}
        for view, (parameter, name) in zip(views[len(self.parameters) :], self._entries, strict=True):
            if has_state[parameter]:
                self._put(parameter, name, view)
        for buffer, change in zip(self._buffers, changes, strict=True):
            mean = change.view(buffer.shape) / num_sites
            buffer.add_(mean if buffer.is_floating_point() else mean.round().to(buffer.dtype))

    def _put(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Set a tensor of the optimizer's state, in place if there is one: fused kernels need its memory layout."""
        entries = self._optimizer.state[parameter]
        if name in entries:
            entries[name].copy_(value)
        else:
            entries[name] = value.clone()

    @staticmethod
    @torch.no_grad()
    def _write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
