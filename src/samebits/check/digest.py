"""Digests of what a step computes: the inputs and outputs of each module, loss terms, gradients, buffers, weights."""

import hashlib
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.bits import as_bytes, plain_in, tensors_in
from samebits.parallel.checksum import checksums

Event = tuple[str, str, str]
INPUT, OUTPUT = "input", "output"
ROOT = ""  # the name of the model itself among its modules


def digest_of(value: Any) -> str:
    """Return a digest of all tensors and plain values in a value, 16 hex digits."""
    text = repr(([_of_tensor(tensor) for tensor in tensors_in(value)], list(plain_in(value))))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digests(tensors: Mapping[str, Tensor | None]) -> dict[str, str]:
    """Return a digest of each tensor, of any shape, by name; of missing ones none."""
    return {name: _of_tensor(tensor) for name, tensor in tensors.items() if tensor is not None}


def _of_tensor(tensor: Tensor) -> str:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type == "cpu":  # quicker than checksums, and good enough for a few steps
        value = zlib.crc32(as_bytes(tensor).numpy().data)
    else:
        value = checksums({"": tensor})[""] & (1 << 64) - 1
    return f"{tensor.dtype} {tuple(tensor.shape)} {value:x}"


def gradients(model: nn.Module) -> dict[str, str]:
    """Return digests of the gradients, in the order of the backward pass: the last parameter first."""
    return digests({name: parameter.grad for name, parameter in reversed(list(model.named_parameters()))})


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Return digests of the optimizer's tensors, named after their parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return digests(
        {
            f"{key} of {names.get(id(parameter), 'a parameter')}": value
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
    )


class ModuleRecorder:
    """Records the digests of each module's inputs and outputs, in the order in which they are computed.

    Micro-batches may run in threads (batch_norm=sync), so the current list of events is a thread's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._current = threading.local()
        self._handles = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name)))

    def start(self) -> list[Event]:
        """Start a new list of events in this thread, and return it."""
        self._current.events = events = list[Event]()
        return events

    def stop(self) -> None:
        """Record no more in this thread."""
        self._current.events = None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, keywords: Any) -> None:
            if (events := getattr(self._current, "events", None)) is not None:
                events.append((INPUT, name, digest_of((inputs, keywords))))

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if (events := getattr(self._current, "events", None)) is not None:
                events.append((OUTPUT, name, digest_of(outputs)))

        return hook
