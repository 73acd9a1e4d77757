"""Try the sample inputs that torch's own tests have for each operation, in portable arithmetic and without.

    python -m tests.lab.portable_samples            # all operations, or those that are named

Prints a line for each operation that ends in another error than a refusal by name, gives other values or gradients than
torch, or other bits in inference mode; and how many samples agreed.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from samebits.portable.arithmetic import portable_arithmetic
from samebits.portable.mode import NoPortableForm

TOLERANCE = 1e-3
# Random numbers are others in portable arithmetic, and memory that is not initialized has none to compare.
OTHER_VALUES = "bernoulli cauchy dropout empty exponential geometric lowrank multi_head multinomial normal rand rrelu"
OTHER_VALUES += " scaled_dot uniform"
Run = Callable[[bool], list[Tensor]]


def tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def samples(operation: Any) -> Iterator[tuple[str, Run]]:
    """The sample inputs of an operation, each as a function that gives its results and, if asked, gradients."""

    def run(sample: Any, has_gradients: bool) -> list[Tensor]:
        def copy(each: Any) -> Any:
            return each.detach().clone().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each

        first, args, options = (tree_map(copy, each) for each in (sample.input, sample.args, sample.kwargs))
        results = tensors(operation.op(first, *args, **options))
        inputs = [each for each in tensors((first, args, options)) if each.requires_grad]
        differentiable = [each for each in results if each.requires_grad]
        gradients: tuple[Tensor | None, ...] = ()
        if has_gradients and inputs and differentiable:
            total = sum((x * torch.arange(x.numel()).view(x.shape)).sum() / max(x.numel(), 1) for x in differentiable)
            gradients = torch.autograd.grad(total, inputs, allow_unused=True)  # type: ignore[arg-type]
        return [each.detach() for each in (*results, *gradients) if each is not None]

    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": operation.supports_autograd}
    for sample in islice(operation.sample_inputs(**options), 25):
        shapes = [tuple(each.shape) for each in tensors((sample.input, sample.args))]
        yield f"{operation.name} {operation.variant_test_name} {shapes} {sample.kwargs}", lambda g, s=sample: run(s, g)


def problem(run: Run) -> str | None:
    """What is wrong with one sample; None if nothing, or torch refuses it too. Raises NoPortableForm."""
    try:
        expected = run(True)
    except Exception:
        return None
    try:
        with portable_arithmetic():
            found = run(True)
            with torch.inference_mode():
                evaluated = run(False)
    except NoPortableForm:
        raise
    except Exception as error:
        return repr(error)[:300]
    for mine, torchs in zip(found, expected, strict=True):
        if mine.shape != torchs.shape or mine.dtype != torchs.dtype:
            return f"{mine.dtype} {tuple(mine.shape)} instead of {torchs.dtype} {tuple(torchs.shape)}"
        if not torch.allclose(mine, torchs, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            return "other values than torch"
    if not all(torch.allclose(*pair, rtol=0.0, atol=0.0, equal_nan=True) for pair in zip(evaluated, found)):  # noqa: B905
        return "other bits in inference mode"  # `found` goes on with gradients
    return None


def main(names: list[str]) -> None:
    torch.backends.disable_global_flags = lambda: None  # type: ignore[assignment]  # torch's tests forbid its switches
    from torch.testing._internal.common_methods_invocations import op_db

    agreed = refused = 0
    for operation in op_db:
        is_random = any(word in operation.name for word in OTHER_VALUES.split())
        is_real = torch.float32 in operation.supported_dtypes("cpu")
        if is_random or not is_real or (names and operation.name not in names):
            continue
        for name, run in samples(operation):
            try:
                what = problem(run)
            except NoPortableForm:
                refused += 1
                continue
            agreed += what is None
            if what is not None:
                print(f"{name}: {what}")
                break
    print(f"{agreed} samples agree, {refused} are refused by name")


if __name__ == "__main__":
    main(sys.argv[1:])
