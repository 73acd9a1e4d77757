"""Floating-point operations of a model's forward and backward pass, counted with shapes only."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from samebits.bits import tensors_in


class _Counter(TorchDispatchMode):
    """Add up the FLOPs of operations. torch's FlopCounterMode also registers hooks for all modules of the process."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # torch's own table has one entry for all overloads of an operation.
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def training_flops(
    model: nn.Module, inputs: Any, num_samples: int, *, recomputes: bool = False
) -> int:
    """Count the FLOPs of one training pass; a multiplication and an addition are two.

    Tensors have shapes and no values, so this takes neither memory nor a device. The model is copied without its
    values and stays as it is. The loss is left out.

    Args:
        inputs: The inputs of one sample, `(1, ...)`: a tensor, or a dict, list or tuple of tensors and plain values.
        recomputes: Whether the backward pass computes activations again, which does not count as work on the model.

    Raises:
        Exception: The model reads values of tensors, or cannot be copied.
    """
    with shapes_alone() as mode:
        device = next(model.parameters()).device
        copied = copied_shapes(model, mode)
        recurrent = count_recurrent(copied)

        def sized(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.empty((num_samples, *leaf.shape[1:]), dtype=leaf.dtype, device=device)

        with _Counter() as counter:
            outputs = [
                tensor
                for tensor in tensors_in(copied(tree_map(sized, inputs)))
                if tensor.requires_grad
            ]
            forward = counter.total + sum(recurrent)
            torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
        total: int = 3 * forward if recomputes else counter.total + 3 * sum(recurrent)
    return total


@contextmanager
def shapes_alone() -> Iterator[FakeTensorMode]:
    """Give tensors that are made inside shapes and types, and no values."""
    # Portable arithmetic has no form for them: torch would end the process by SIGABRT at a convolution.
    # A module can hold tensors that are neither parameters nor buffers, and stay real.
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def copied_shapes(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a model with the shapes of its tensors and without their values."""
    # With these in the memo, deepcopy never touches a value.
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): mode.from_tensor(tensor) for tensor in tensors})


def count_recurrent(model: nn.Module) -> list[int]:
    """Count the FLOPs of each forward call of an LSTM, GRU or RNN, which torch's counters leave out.

    The backward pass takes twice as many: the products with the weights and those with the inputs.
    """
    calls: list[int] = []

    def note(module: nn.Module, args: Any, _: Any) -> None:
        num_steps = tensors_in(args)[0].shape[:-1].numel()  # of all sequences
        calls.append(
            2
            * num_steps
            * sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)
        )

    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.register_forward_hook(note)
    return calls
