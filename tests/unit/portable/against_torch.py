"""Compare an operation in portable arithmetic with torch's own in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samebits.portable.arithmetic import portable_arithmetic


def check_against_torch(operation: Callable[..., Tensor], values: Sequence[Tensor], tolerance: float = 2e-5) -> None:
    """Check the result of an operation, and its gradients; and that an evaluation gets the same bits."""

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [
            each.to(dtype, copy=True).requires_grad_() if each.is_floating_point() else each.clone() for each in values
        ]
        result = operation(*inputs)
        weights = torch.arange(result.numel()).view(result.shape).to(dtype) / result.numel()
        return result, *torch.autograd.grad((result * weights).sum(), [each for each in inputs if each.requires_grad])

    expected = run(torch.float64)
    with portable_arithmetic():
        found = run(torch.float32)
        # There are no autograd's layers here: operations that consist of others, and other overloads, arrive whole.
        with torch.inference_mode():
            evaluated = operation(*(each.clone() for each in values))
    assert torch.equal(evaluated, found[0]), "other bits in inference mode"
    for mine, torchs in zip(found, expected, strict=True):
        assert torch.allclose(mine.double(), torchs, rtol=tolerance, atol=tolerance)
