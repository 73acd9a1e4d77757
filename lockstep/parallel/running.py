"""Buffers that a forward pass changes: batch norm's running statistics above all.

Every micro-batch of a step starts from the values that the step found, whichever process runs it and after whichever
other micro-batch. What it changed is weighted like its gradient and summed in the same tree, so the new value is the
weighted mean over the step's micro-batches. A counter (`num_batches_tracked`) so goes up by one a step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError


class RunningBuffers:
    """All float and integer buffers of a model, laid side by side in one flat tensor for each type.

    Args:
        model: Already on its device. Its buffers become views of the flat tensors. Buffers of truth values are taken
            for constants.

    Raises:
        ConfigError: A floating-point buffer is not float32.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str, str, Tensor]] = []
        self._constants: list[tuple[str, Tensor, Tensor]] = []
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full_name = f"{prefix}.{name}" if prefix else name
                if (buffer.is_floating_point() or buffer.is_complex()) and buffer.dtype != torch.float32:
                    raise ConfigError(
                        f"buffer {full_name} is {buffer.dtype}: only float32 can be kept equal on all ranks",
                        fix="register it as float32",
                    )
                if buffer.dtype == torch.bool:
                    self._constants.append((full_name, buffer, buffer.clone()))
                else:
                    by_type.setdefault(buffer.dtype, []).append(buffer)
                self._places.append((module, name, full_name, buffer))
        self._flats = [_lay_flat(buffers) for buffers in by_type.values()]
        self._olds = [flat.clone() for flat in self._flats]
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def __len__(self) -> int:
        return sum(len(flat) for flat in self._flats)

    def begin_step(self) -> None:
        """Remember the values that every micro-batch of the step starts from."""
        for flat, old in zip(self._flats, self._olds, strict=True):
            old.copy_(flat)

    def take_change(self) -> Tensor:
        """What the last forward pass changed, (len(self),) float32; the buffers go back to the step's old values.

        Raises:
            ConfigError: The model replaced a buffer instead of writing into it, or changed one of type bool.
        """
        for module, name, full_name, buffer in self._places:
            if module._buffers[name] is not buffer:
                raise ConfigError(
                    f"the model's forward replaced buffer {full_name}, so its change would be lost",
                    fix=f"write into it in place: self.{name}.copy_(...), self.{name}.add_(...)",
                )
        for full_name, buffer, constant in self._constants:
            if not torch.equal(buffer, constant):
                raise ConfigError(
                    f"the model's forward changed buffer {full_name}, which is bool", fix="use an integer type"
                )
        # What did not change stays as it is, also where it is infinite, as in masks.
        changes = [
            torch.where(flat == old, torch.zeros_like(flat), flat - old).float()
            for flat, old in zip(self._flats, self._olds, strict=True)
        ]
        self.put_back()
        return torch.cat(changes) if changes else torch.empty(0, device=self._device)

    def put_back(self) -> None:
        """Give the buffers the values that the step found."""
        for flat, old in zip(self._flats, self._olds, strict=True):
            flat.copy_(old)

    def put_aside(self) -> list[Tensor]:
        """What they hold now, for `take_up`; they go back to the step's old values."""
        aside = [flat.clone() for flat in self._flats]
        self.put_back()
        return aside

    def take_up(self, aside: list[Tensor]) -> None:
        """Give the buffers what was put aside."""
        for flat, values in zip(self._flats, aside, strict=True):
            flat.copy_(values)

    def apply(self, change: Tensor) -> None:
        """Add the step's change, (len(self),) float32, the weighted mean over its micro-batches."""
        for flat, part in zip(self._flats, torch.split(change, [len(flat) for flat in self._flats]), strict=True):
            # The weights of the micro-batches add up to 1 but for rounding.
            flat.add_(part if flat.is_floating_point() else part.round().to(flat.dtype))


def _lay_flat(buffers: list[Tensor]) -> Tensor:
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    start = 0
    for buffer in buffers:
        buffer.data = flat[start : start + buffer.numel()].view(buffer.shape)
        start += buffer.numel()
    return flat
