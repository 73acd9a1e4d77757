"""Buffers that a forward pass changes, such as the running statistics of batch norm, the same at any world size.

Every micro-batch of a step starts from the same buffer values, whichever process runs it and after whichever other
micro-batch. Its change is weighted like its gradient and summed in the same tree, so the new value is the weighted mean
over the step's micro-batches. A counter (`num_batches_tracked`) therefore increases by one a step.
"""

import torch
from torch import Tensor, nn

from samebits.errors import ConfigError

# Buffers whose mean over a step's micro-batches is what training on the whole batch would give, up to the batch's size:
# those of torch's norm layers. A module of a model may name more in its attribute `averaged_buffers`.
AVERAGED = ("running_mean", "running_var", "num_batches_tracked")
# Differences in which the other buffers are compared: a queue or a counter changes in the first forward pass, and on a
# GPU each comparison waits for the device.
_NUM_COMPARED = 8


class RunningBuffers:
    """All float and integer buffers of a model, in one flat tensor for each dtype.

    Args:
        model: On its device. Its buffers become views of the flat tensors. Boolean buffers are treated as constants.

    Raises:
        ConfigError: A floating-point buffer is not float32.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries: list[tuple[nn.Module, str, str, Tensor]] = []
        self._constants: list[tuple[str, Tensor, Tensor]] = []
        by_type: dict[torch.dtype, list[Tensor]] = {}
        # name, number of the flat tensor, start and end within it
        self._others: list[tuple[str, int, int, int]] = []
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full_name = f"{prefix}.{name}" if prefix else name
                if (
                    buffer.is_floating_point() or buffer.is_complex()
                ) and buffer.dtype != torch.float32:
                    raise ConfigError(
                        f"buffer {full_name} is {buffer.dtype}",
                        allowed="float32, integers, bool",
                        fix="Register the buffer as float32.",
                    )
                if buffer.dtype == torch.bool:
                    self._constants.append((full_name, buffer, buffer.clone()))
                else:
                    before = by_type.setdefault(buffer.dtype, [])
                    start = sum(each.numel() for each in before)
                    before.append(buffer)
                    if name not in (*AVERAGED, *getattr(module, "averaged_buffers", ())):
                        number = list(by_type).index(buffer.dtype)
                        self._others.append((full_name, number, start, start + buffer.numel()))
                self._entries.append((module, name, full_name, buffer))
        self._flats = [_flatten(buffers) for buffers in by_type.values()]
        self._olds = [flat.clone() for flat in self._flats]
        self._bases = self._olds  # what `change` compares with
        self._num_to_compare = _NUM_COMPARED
        self._device = next(
            (parameter.device for parameter in model.parameters()), torch.device("cpu")
        )

    def __len__(self) -> int:
        return sum(len(flat) for flat in self._flats)

    def start_step(self) -> None:
        """Store the values that every micro-batch of the step starts from."""
        for flat, old in zip(self._flats, self._olds, strict=True):
            old.copy_(flat)
        self._bases = self._olds

    def take_change(self) -> Tensor:
        """Return the change since the step's start, and reset the buffers; see `change`. Returns (length,) float32."""
        change = self._difference()
        self.reset()
        return change

    def change(self) -> Tensor:
        """Return the change since the last call, or since the step's start: (length,) float32 of length `len(self)`.

        Raises:
            ConfigError: The model replaced a buffer instead of writing into it, or changed one of type bool, or one
                that is no average.
        """
        change = self._difference()
        self._bases = [flat.clone() for flat in self._flats]
        return change

    def has_changed(self) -> bool:
        """Return whether the buffers have changed since then."""
        return not all(
            torch.equal(flat, base) for flat, base in zip(self._flats, self._bases, strict=True)
        )

    def _difference(self) -> Tensor:
        for module, name, full_name, buffer in self._entries:
            # As stored: a module may define itself what attribute access returns.
            if module._buffers[name] is not buffer:
                raise ConfigError(
                    f"the model's forward replaced buffer {full_name}, so its change would be lost",
                    fix=f"Change it in place: self.{name}.copy_(...) or self.{name}.add_(...).",
                )
        for full_name, buffer, constant in self._constants:
            if not torch.equal(buffer, constant):
                raise ConfigError(
                    f"the model's forward changed buffer {full_name}, which is bool",
                    fix="Register the buffer as an integer tensor.",
                )
        if self._num_to_compare:
            self._num_to_compare -= 1
            self._check_others()
        changes = [
            # An unchanged infinite value, as in an attention mask, has the change 0: inf - inf would be nan.
            (flat - base).masked_fill_(flat == base, 0.0)
            if flat.is_floating_point()
            else (flat - base).float()
            for flat, base in zip(self._flats, self._bases, strict=True)
        ]
        return torch.cat(changes) if changes else torch.empty(0, device=self._device)

    def _check_others(self) -> None:
        changed = [
            full_name.rpartition(".")
            for full_name, number, start, end in self._others
            if not torch.equal(self._flats[number][start:end], self._bases[number][start:end])
        ]
        if changed:
            names = tuple(name for module, _, name in changed if module == changed[0][0])
            raise ConfigError(
                f"the model's forward changed buffer {''.join(changed[0])}, which is not known to be an average",
                allowed=f"{', '.join(AVERAGED)}, and buffers that a module lists in averaged_buffers",
                cause="A step's change is the mean of its micro-batches' changes. That of a queue, a pointer or a "
                "normalized vector is nonsense.",
                fix=f"If a mean is right, write averaged_buffers = {names!r} in the module's class. Otherwise "
                "update the buffer once a step, outside of forward.",
            )

    def reset(self) -> None:
        """Set the buffers to the values that the step started from."""
        for flat, old in zip(self._flats, self._olds, strict=True):
            flat.copy_(old)
        self._bases = self._olds

    def snapshot(self) -> list[Tensor]:
        """Return a copy of the buffers for `restore`, one flat tensor (length,) for each dtype, and reset them."""
        copies = [flat.clone() for flat in self._flats]
        self.reset()
        return copies

    def restore(self, copies: list[Tensor]) -> None:
        """Set the buffers to a `snapshot`: for each dtype one flat tensor, (length,)."""
        for flat, values in zip(self._flats, copies, strict=True):
            flat.copy_(values)

    def apply(self, change: Tensor) -> None:
        """Add the step's change, (length,) float32 as of `change`: the weighted mean over its micro-batches."""
        for flat, part in zip(
            self._flats, torch.split(change, [len(flat) for flat in self._flats]), strict=True
        ):
            # round(): the weights of the micro-batches add up to 1 only up to rounding.
            flat.add_(part if flat.is_floating_point() else part.round().to(flat.dtype))


def _flatten(buffers: list[Tensor]) -> Tensor:
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    start = 0
    for buffer in buffers:
        # Through `data`: the buffer object stays, and now is a part of the flat tensor.
        buffer.data = flat[start : start + buffer.numel()].view(buffer.shape)
        start += buffer.numel()
    return flat
