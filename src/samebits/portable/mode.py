"""Run each operation of torch in portable arithmetic, or refuse it.

A dispatch mode sees every operation below autograd, also those of the backward pass, of optimizers and of initializers.
`table.py` lists which have a portable form here and which are portable as they are. All others are refused by name.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey  # no public name
from torch.utils._python_dispatch import TorchDispatchMode  # no public name

from samebits.errors import ConfigError
from samebits.portable.table import AS_IT_IS, HANDLERS, NOT_AS_IT_IS, WITH_ALPHA, with_alpha

_NARROW = (torch.bfloat16, torch.float16)
_OF_OTHERS = DispatchKey.CompositeImplicitAutograd
# Spaces of names, and names, of what computes nothing: marks for the profiler, messages between ranks.
HARMLESS = frozenset({"profiler", "c10d", "torchvision::_cuda_version"})


class PortableMode(TorchDispatchMode):
    """Replaces operations by portable ones while it is entered, in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.functions: dict[Any, Callable[..., Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise each operation passes through three more frames. What is compiled is refused anyway.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        function = self.functions.get(func)
        if function is None:
            function = self.functions[func] = self._resolve(func)
        return function(*args, **(kwargs or {}))

    def _resolve(self, func: Any) -> Callable[..., Any]:
        """Return the portable form of an operation.

        Raises:
            ConfigError: It has none.
        """
        space, _, full_name = func.name().partition("::")
        name = full_name.partition(".")[0]
        is_safe = name in AS_IT_IS and full_name not in NOT_AS_IT_IS
        if space in HARMLESS or func.name() in HARMLESS or is_safe:
            return func  # type: ignore[no-any-return]
        if name in WITH_ALPHA:
            return with_alpha(func)
        # Without autograd, operations that consist of others arrive here whole, with arguments of their own.
        if func.has_kernel_for_dispatch_key(_OF_OTHERS) and not func.has_kernel_for_dispatch_key(DispatchKey.CPU):
            return partial(self._decompose, func)
        if (handler := HANDLERS.get(full_name, HANDLERS.get(name))) is not None:
            function = converting(func, handler)
            # A converted tensor is a copy. Optimizers' operations on lists write into them as they are.
            return _in_place(function) if name.endswith("_") and not name.startswith("_") else function
        if (handler := HANDLERS.get(name.removesuffix("_"))) is not None:
            return _in_place(converting(func, handler))
        raise _refused(func.name())

    def _decompose(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        with self:
            # decompose() would prefer a form in Python, which the compiler uses, over the one that training sees.
            return func._op_dk(_OF_OTHERS, *args, **kwargs)


def converting(
    func: Any, handler: Callable[..., Any], refused: Callable[[str], Exception] | None = None
) -> Callable[..., Any]:
    """Use the handler for floating-point values only, in float32 at least; and write into `out`, if given.

    Args:
        func: The operation of torch.
        handler: Its portable form. NotImplementedError and NotImplemented mean that it has none for these arguments.
        refused: Makes the error for that from the operation's name.
    """
    refused = refused or _refused

    def run(*args: Any, **kwargs: Any) -> Any:
        values = [each for each in args if isinstance(each, Tensor)] or [
            each for part in args if isinstance(part, (list, tuple)) for each in part if isinstance(each, Tensor)
        ]
        if values and not any(each.is_floating_point() for each in values):
            if any(each.is_complex() for each in values):
                raise refused(f"{func.name()} of complex numbers")
            dtype = kwargs.get("dtype") or torch.int64
            if not dtype.is_floating_point and _base(func) not in _FLOATING:
                return func(*args, **kwargs)  # whole numbers
            args = tuple(each.float() if isinstance(each, Tensor) else each for each in args)
        narrow = next((each.dtype for each in values if each.dtype in _NARROW), None)
        if narrow is not None:
            args = tuple(_widened(each) for each in args)
        out = kwargs.pop("out", None)
        try:
            result = handler(*args, **kwargs)
        except NotImplementedError:
            result = NotImplemented
        if result is NotImplemented:
            raise refused(f"{func.name()} with these arguments")
        if narrow is not None and kwargs.get("dtype") is None:
            result = _narrowed(result, narrow)
        if out is not None:
            return out.resize_(result.shape).copy_(result)
        return result

    return run


# Functions whose result has a fraction, whatever their arguments; and random numbers, which torch draws in its own way.
_FUNCTIONS = (
    "bernoulli exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos erf sigmoid tanh logsumexp _softmax _log_softmax"
)
_FLOATING = frozenset(_FUNCTIONS.split())


def _base(func: Any) -> str:
    """Name without space, overload and the mark of an operation in place."""
    return str(func.name()).partition("::")[2].partition(".")[0].removesuffix("_")


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _NARROW else value


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_narrowed(each, dtype) for each in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = function(x, *args, **kwargs)
        return x if result is x else x.copy_(result)

    return run


class NoPortableForm(ConfigError):
    """An operation has no portable form: `operation` names it."""

    operation = ""


def _refused(name: str) -> NoPortableForm:
    frames = [(frame, line) for frame, line in traceback.walk_stack(None) if "samebits/portable/" not in _file(frame)]
    place = next((each for each in frames if "/torch/" not in _file(each[0])), None)
    # The innermost module; of a backward pass there is none.
    module = next((m for frame, _ in frames if isinstance(m := frame.f_locals.get("self"), nn.Module)), None)
    other = "other arguments, or " if name.endswith("arguments") else ""
    error = NoPortableForm(
        f"{name} has no portable form",
        where=place and f"{_file(place[0])}:{place[1]}: {linecache.getline(_file(place[0]), place[1]).strip()}",
        cause=("" if module is None else f"The module {type(module).__name__} calls it. ")
        + "With kernels=portable every operation must have equal bits on each processor.",
        fix=f"Use {other}another operation, or set kernels=auto.",
    )
    error.operation = name
    return error


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename
