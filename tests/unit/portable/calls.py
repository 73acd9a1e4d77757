"""Compare each operation that portable arithmetic computes with torch's in float64, as it is dispatched.

The sample inputs of torch's own tests reach most overloads. Those in place, and those that write into given tensors,
get the arguments of the one that returns new tensors.

    python -m tests.unit.portable.calls 3 add sub        # at most 3 samples of each type of these operations
    python -m tests.unit.portable.calls 25               # of all
    python -m tests.unit.portable.calls 1 written        # the calls of written_calls.py
    python -m tests.unit.portable.calls 2 --keep FILE    # and keep calls of those that are portable as they are
    python -m tests.unit.portable.calls --hash FILE      # compute these, and print a hash of each operation's results
"""

import argparse
import hashlib
import json
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torchvision  # noqa: F401  # its operations
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from samebits.portable.arithmetic import portable_arithmetic
from samebits.portable.mode import PortableMode, form_name
from samebits.portable.table import AROUND, AS_IT_IS, HANDLERS
from tests.unit.portable.written_calls import CALLS, OPTIONS

TABLE = frozenset({*AS_IT_IS, *AROUND, *HANDLERS})
# Their values are not those of torch: random numbers, and memory that nothing was written to.
# as_strided reads the storage behind a view, which a copied argument does not have.
OTHER_VALUES = (
    "empty new_empty rand uniform normal bernoulli exponential dropout random dirichlet resize_ set_ lift as_strided"
)


def overloads() -> Iterator[Any]:
    """Each overload of torch and torchvision whose name is in the tables."""
    bases = {each.partition("::")[2].partition(".")[0] or each.partition(".")[0] for each in TABLE}
    for schema in torch._C._jit_get_all_schemas():
        space, _, base = schema.name.partition("::")
        if space not in ("aten", "torchvision") or not {base, base.removesuffix("_")} & bases:
            continue
        packet = getattr(getattr(torch.ops, space), base)
        overload = schema.overload_name or "default"
        # Others are of TorchScript only.
        if overload in packet.overloads() and torch._C._dispatch_has_kernel(getattr(packet, overload).name()):
            yield getattr(packet, overload)


def op_db() -> list[Any]:
    """torch's own sample inputs. Its tests need a package for the names of their base classes only."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stub)
    torch.backends.disable_global_flags = lambda: None  # type: ignore[assignment]  # they forbid torch's switches
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db as samples
    from torch.testing._internal.opinfo import core

    # It looks for the test that asks for samples in the source of each caller: four fifths of the time.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None  # type: ignore[attr-defined]

    return list(samples)


def tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def copied(value: Any, dtype: torch.dtype | None = None) -> Any:
    def copy(each: Any) -> Any:
        if isinstance(each, Tensor):
            wide = dtype if each.is_floating_point() else None
            # Views keep their layout, which some operations need.
            return each.detach().clone().to(wide or each.dtype)
        return dtype if isinstance(each, torch.dtype) and each.is_floating_point and dtype is not None else each

    return tree_map(copy, value)


class Wrong(AssertionError):
    """An operation has another value than torch's, or changes an argument that torch does not change."""


class Compared(PortableMode):
    """Portable arithmetic that compares each operation with torch's in float64, and keeps some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self.wrong: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        before = copied((args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        kept = self.calls.setdefault(func, [])
        if form_name(func) in TABLE and len(kept) < 20:
            kept.append(before)
            try:
                compare(func, before, (args, kwargs), result)
            except Wrong as error:
                self.wrong.append(str(error))
        return result


def compare(func: Any, before: Any, after: Any, result: Any) -> None:
    """Compare the result of a call, and its arguments afterwards, with torch's in float64."""
    name = func.name()
    if any(each in name for each in OTHER_VALUES.split()):
        return
    args, kwargs = copied(before, torch.float64)
    try:
        expected = func(*args, **kwargs)
    except Exception:  # torch has no kernel for float64, or for a mixture of types
        return
    written = [i for i, each in enumerate(func._schema.arguments) if each.alias_info and each.alias_info.is_write]
    is_statistics = "batch_norm" in name
    for i, (mine, old, torchs) in enumerate(zip(after[0], before[0], args, strict=True)):
        if i in written or is_statistics:
            _check(name, f"argument {i}", tensors(mine), tensors(torchs))
        else:
            for x, y in zip(tensors(mine), tensors(old), strict=True):
                if not torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)):
                    raise Wrong(f"{name} changes argument {i}")
    # The other result is memory for the gradient, which only the CPU has, or which is not set behind a text.
    is_first = name.partition(".")[0] in ("aten::log_sigmoid_forward", "aten::_ctc_loss")
    num_results = 1 if is_first else None
    _check(name, "result", tensors(result)[:num_results], tensors(expected)[:num_results])


def _check(name: str, what: str, found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, torchs in zip(found, expected, strict=True):
        if mine.shape != torchs.shape:
            raise Wrong(f"{name}: {what} of {tuple(mine.shape)} instead of {tuple(torchs.shape)}")
        narrow = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(mine.dtype, 1e-3)
        wide = torchs.to(mine.dtype).to(torchs.dtype)  # beyond the range of a narrow type
        # A sum of an infinite term is NaN by definition.
        wide = torch.where(mine.isnan() & ~torchs.isfinite(), mine.to(torchs.dtype), wide)
        if not torch.allclose(mine.to(torchs.dtype), wide, rtol=narrow, atol=narrow, equal_nan=True):
            raise Wrong(f"{name}: {what} has other values than torch: {mine.flatten()[:4]}, {torchs.flatten()[:4]}")


def samples(operation: Any, dtype: torch.dtype, most: int) -> Iterator[Callable[[], None]]:
    """Sample inputs of an operation, each as a function that computes it and its gradients."""
    has_gradients = operation.supports_autograd and operation.supports_dtype(dtype, "cpu") and dtype.is_floating_point
    for sample in islice(operation.sample_inputs("cpu", dtype, requires_grad=has_gradients), most):

        def run(sample: Any = sample) -> None:
            results = tensors(operation.op(sample.input, *sample.args, **sample.kwargs))
            inputs = [each for each in tensors((sample.input, sample.args, sample.kwargs)) if each.requires_grad]
            total = [each.sum() for each in results if each.requires_grad]
            if inputs and total:
                torch.autograd.grad(sum(total), inputs, allow_unused=True)  # type: ignore[arg-type]

        yield run


def run_all(operations: Sequence[Any], dtypes: Sequence[torch.dtype], most: int, mode: Compared) -> int:
    """Compute samples of operations in a mode; return how many were not refused."""
    computed = 0
    for operation in operations:
        runs = [
            run
            for dtype in dtypes
            if dtype in operation.supported_dtypes("cpu")
            for run in samples(operation, dtype, most)
        ]
        with portable_arithmetic(mode):
            for run in runs:
                try:
                    run()
                    computed += 1
                except Wrong:
                    raise
                except Exception:  # refused by name, or by torch too
                    continue
    return computed


def run_written(mode: Compared) -> int:
    """Compute the calls of `written_calls` in a mode."""
    for name, arguments in CALLS.items():
        space, _, rest = name.rpartition("::")
        base, _, overload = rest.partition(".")
        operation = getattr(getattr(getattr(torch.ops, space or "aten"), base), overload or "default")
        with portable_arithmetic(mode):
            operation(*copied(arguments), **OPTIONS.get(name, {}))
    return len(CALLS)


def agree(compared: Compared) -> set[str]:
    """Compare overloads in place and into given tensors with the form that they share; return their names."""
    tried: set[str] = set()
    same_form: dict[str, list[Any]] = {}
    for each in overloads():
        same_form.setdefault(form_name(each), []).append(each)
    for func, kept in list(compared.calls.items()):
        if form_name(func) != func.name().removeprefix("aten::"):
            continue
        for variant in same_form.get(form_name(func), ()):
            if not variant._schema.is_mutable or variant is func:
                continue
            for args, kwargs in kept[:3]:
                try:
                    if _agrees(func, variant, args, kwargs):
                        tried.add(variant.name())
                except Wrong as error:
                    compared.wrong.append(str(error))
    return tried


def _agrees(func: Any, variant: Any, args: Any, kwargs: Any) -> bool:
    torch.manual_seed(1)
    args, kwargs = copied((args, kwargs))
    expected = tensors(func(*copied(args), **kwargs))
    outs = [each.name for each in variant._schema.arguments if each.is_out]
    if any(name in kwargs for name in ("dtype", "device", "layout", "pin_memory", "memory_format", "generator")):
        return False
    given = copied(args)
    torch.manual_seed(1)
    try:
        if outs:
            targets = [torch.empty_like(each) for each in expected]
            variant(*given, **kwargs, **dict(zip(outs, targets, strict=True)))
            found = targets
        else:
            first = tensors(given[:1])
            variant(*given, **kwargs)
            if not expected or first[0].dtype != expected[0].dtype or first[0].shape != expected[0].shape:
                return False
            found = first[:1]
    except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError):
        return False  # torch refuses these arguments in place
    for mine, other in zip(found, expected, strict=False):
        if not torch.equal(_plain(mine), _plain(other)):
            raise Wrong(f"{variant.name()} differs from {func.name()}")
    return True


def _plain(x: Tensor) -> Tensor:
    return x.nan_to_num(7.0) if x.is_floating_point() else x


TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


PLAIN = (Tensor, complex, float, int, str, type(None), torch.dtype)


def keep(mode: Compared, path: str, others: Sequence[str]) -> None:
    """Write the calls of operations that are portable as they are, so that other processes have the same values.

    Args:
        mode: It has the calls.
        path: Of the file.
        others: Names in the table of operations that are kept as if they were portable as they are.
    """
    torch.save(
        [
            (func.name(), args, kwargs)
            for func, kept in mode.calls.items()
            if form_name(func) in {*AS_IT_IS, *others} and not any(each in func.name() for each in OTHER_VALUES.split())
            for args, kwargs in kept
            if all(isinstance(each, PLAIN) for each in tree_leaves((args, kwargs)))
        ],
        path,
    )


def hash_results(path: str) -> dict[str, str]:
    """Compute kept calls, as torch does; return a hash for each operation.

    torch's samples are small, and vector instructions compute several values at once. So each call is computed again
    with many times as many values, and with denormal numbers.
    """
    hashes: dict[str, Any] = {}
    for name, args, kwargs in torch.load(path, weights_only=False):
        base, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(torch.ops.aten, base), overload or "default")
        for change in (lambda x: x, _denormal, _enlarged, _zero):
            try:
                results = tensors(func(*tree_map(change, args), **kwargs))
            except (RuntimeError, IndexError):  # boxes and bounds without a size, and shapes that do not fit any more
                continue
            found = hashes.setdefault(name, hashlib.sha256())
            for each in results:
                # The sign of NaN does not count.
                plain = torch.where(each.isnan(), torch.nan, each) if each.is_floating_point() else each
                found.update(plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {name: each.hexdigest()[:12] for name, each in hashes.items()}


def _denormal(x: Any) -> Any:
    return x * 2.0**-130 if isinstance(x, Tensor) and x.is_floating_point() else x


def _enlarged(x: Any) -> Any:
    """The values of a tensor and multiples of them, side by side in the last dimension."""
    if not isinstance(x, Tensor) or not x.dim() or x.numel() > 5_000:
        return x
    return torch.cat([x * (1.0 + i / 97) if x.is_floating_point() else x for i in range(97)], -1)


def _zero(x: Any) -> Any:
    """Many zeros with the signs of the values."""
    return _enlarged(x) * 0.0 if isinstance(x, Tensor) and x.is_floating_point() and x.isfinite().all() else x


def main(
    most: int,
    names: Sequence[str],
    share: tuple[int, int] = (0, 1),
    path: str | None = None,
    others: Sequence[str] = (),
) -> None:
    """Print, as JSON, how many samples were computed, which overloads were reached, and what was wrong."""
    torch.manual_seed(0)
    mode = Compared()
    if names == ["written"]:
        computed = run_written(mode)
    else:
        operations = [each for each in op_db() if not names or each.name in names][share[0] :: share[1]]
        computed = run_all(operations, TYPES, most, mode)
    if path is not None:
        keep(mode, path, others)
    with portable_arithmetic():
        reached = {each.name() for each in mode.calls} | agree(mode)
    forms = {form_name(each) for each in overloads() if each.name() in reached}
    print(json.dumps({"computed": computed, "reached": sorted(reached), "forms": sorted(forms), "wrong": mode.wrong}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("most", type=int, nargs="?", default=25)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="each n-th operation, from the i-th on")
    parser.add_argument("--keep", metavar="FILE")
    parser.add_argument("--others", nargs="*", default=(), help="names in the table, kept too")
    parser.add_argument("--hash", metavar="FILE")
    options = parser.parse_args()
    if options.hash:
        print(json.dumps(hash_results(options.hash)))
    else:
        main(options.most, options.names, tuple(options.share), options.keep, options.others)
