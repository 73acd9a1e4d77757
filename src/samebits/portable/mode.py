"""Run each operation of torch in portable arithmetic, or refuse it.

A dispatch mode sees every operation below autograd, also those of the backward pass, of optimizers and of initializers.
`table.py` lists which have a portable form here and which are portable as they are. All others are refused by name.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey  # no public name
from torch.utils._python_dispatch import TorchDispatchMode  # no public name
from torch.utils._pytree import tree_leaves  # no public name

from samebits.errors import ConfigError
from samebits.portable.table import AROUND, AS_IT_IS, HANDLERS, NARROW

_OF_OTHERS = DispatchKey.CompositeImplicitAutograd
# Spaces of names, and names, of what computes nothing: marks for the profiler, messages between ranks.
HARMLESS = frozenset({"profiler", "c10d", "torchvision::_cuda_version"})
# torch's schema does not mark running statistics as written.
_WRITTEN = {"aten::native_batch_norm": (3, 4)}


class PortableMode(TorchDispatchMode):
    """Replaces operations by portable ones while it is entered, in this thread.

    Args:
        lists: Note the operations that have no portable form, and compute them as torch does, instead of refusing them.
    """

    def __init__(self, *, lists: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.refused: dict[str, NoPortableForm] = {}
        self._lists = lists
        if lists:
            _listing.append(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise each operation passes through three more frames. What is compiled is refused anyway.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            function = self.functions.get(func)
            if function is None:
                function = self.functions[func] = self._resolve(func)
            result = function(*args, **(kwargs or {}))
            if result is NotImplemented:
                raise _refused(f"{func.name()} with these arguments")
            return result
        except NoPortableForm as error:
            if not self._lists:
                raise
            self.refused.setdefault(error.operation, error)
            return func(*args, **(kwargs or {}))

    def _resolve(self, func: Any) -> Callable[..., Any]:
        """Return the portable form of an operation.

        Raises:
            ConfigError: It has none.
        """
        if func.name() in HARMLESS or func.namespace in HARMLESS:
            return func  # type: ignore[no-any-return]
        name = form_name(func)
        if name in AS_IT_IS:
            return func  # type: ignore[no-any-return]
        if name in AROUND:
            return AROUND[name](func)
        if name in HANDLERS:
            function = converting(func, HANDLERS[name])
            # The form of the operation that is not in place returns a new tensor.
            is_own = func.name().removeprefix("aten::") == name
            return function if is_own or not _is_in_place(func) else _in_place(function)
        # Without autograd, operations that consist of others arrive here whole, with arguments of their own.
        if (
            func.namespace == "aten"
            and func.has_kernel_for_dispatch_key(_OF_OTHERS)
            and not func.has_kernel_for_dispatch_key(DispatchKey.CPU)
        ):
            return partial(self._decompose, func)
        raise _refused(func.name())

    def _decompose(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        with self:
            # decompose() would prefer a form in Python, which the compiler uses, over the one that training sees.
            return func._op_dk(_OF_OTHERS, *args, **kwargs)


@cache
def _names_of_forms() -> dict[str, list[str]]:
    """The names in the tables, by their names without overload."""
    names: dict[str, list[str]] = {}
    for each in (*AS_IT_IS, *AROUND, *HANDLERS):
        names.setdefault(each.partition(".")[0], []).append(each)
    return names


def form_name(func: Any) -> str:
    """Return the name in the tables of an operation's form: its own, or that of the one with the same arguments.

    Operations in place, and those that write into given tensors, have the form of the one that returns new tensors. An
    operation of another library than torch is named with its library.
    """
    space, _, full_name = func.name().partition("::")
    if space != "aten":
        return str(func.name())
    base = full_name.partition(".")[0]
    forms = _names_of_forms()
    if full_name in forms.get(base, ()):
        return str(full_name)
    base = base.removesuffix("_") if _is_in_place(func) else base
    for each in forms.get(base, ()):
        other = getattr(getattr(torch.ops.aten, base), each.partition(".")[2] or "default")
        if _signature(other) == _signature(func):
            return each
    return str(full_name)


def _signature(func: Any) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in func._schema.arguments if not each.is_out]


def _is_in_place(func: Any) -> bool:
    first = next(iter(func._schema.arguments), None)
    return first is not None and _is_written(first) and not first.is_out


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def converting(
    func: Any, handler: Callable[..., Any], refused: Callable[[str], Exception] | None = None
) -> Callable[..., Any]:
    """Use the handler for floating-point values only, in float32 at least; and write into tensors that torch writes.

    Args:
        func: The operation of torch.
        handler: Its portable form. NotImplementedError and NotImplemented mean that it has none for these arguments.
        refused: Makes the error for that from the operation's name.
    """
    refused = refused or _refused
    arguments = func._schema.arguments
    outs = [each.name for each in arguments if each.is_out]
    written = _WRITTEN.get(
        func.name(), [i for i, each in enumerate(arguments) if _is_written(each)]
    )
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_layer = "native_" in func.name()

    def run(*args: Any, **kwargs: Any) -> Any:
        values = _tensors(args) or _tensors(tree_leaves(args))
        types = {each.dtype for each in values}
        narrow = None
        given = args
        if not types <= {torch.float32}:
            if any(each.is_complex for each in types) or any(
                isinstance(each, complex) for each in args
            ):
                raise refused(f"{func.name()} of complex numbers")
            if not any(each.is_floating_point for each in types) and not is_random:
                result = func(*args, **kwargs)
                if not any(each.is_floating_point() for each in _tensors(tree_leaves(result))):
                    return result  # of whole numbers
                args = tuple(each.float() if isinstance(each, Tensor) else each for each in args)
            if types.intersection(NARROW):
                narrow = _result_type(values, of_first=is_layer)
                args = tuple(
                    each.float() if isinstance(each, Tensor) and each.dtype in NARROW else each
                    for each in args
                )
        targets = [kwargs.pop(name) for name in outs if name in kwargs]
        try:
            result = handler(*args, **kwargs)
        except NotImplementedError:
            result = NotImplemented
        if result is NotImplemented:
            raise refused(f"{func.name()} with these arguments")
        for i in written if narrow is not None else ():
            if i < len(args) and args[i] is not given[i]:
                given[i].copy_(args[i])
                result = given[i] if result is args[i] else result
        if narrow in NARROW and kwargs.get("dtype") is None:
            result = _narrowed(result, narrow)
        if not targets:
            return result
        for target, each in zip(
            targets, result if isinstance(result, tuple) else [result], strict=True
        ):
            target.resize_(each.shape).copy_(each)
        return tuple(targets) if len(targets) > 1 else targets[0]

    return run


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [each for each in values if isinstance(each, Tensor)]


def _result_type(values: Sequence[Tensor], *, of_first: bool) -> torch.dtype:
    """The type of a result: of a layer that of its input, else the widest, in which single values count last."""
    floats = [each for each in values if each.is_floating_point()]
    if of_first:
        return floats[0].dtype
    types = [each.dtype for each in floats if each.dim()] or [each.dtype for each in floats]
    return reduce(torch.promote_types, types)


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
    frames = [
        (frame, line)
        for frame, line in traceback.walk_stack(None)
        if "samebits/portable/" not in _file(frame)
    ]
    place = next((each for each in frames if "/torch/" not in _file(each[0])), None)
    # The innermost module; of a backward pass there is none.
    module = next(
        (m for frame, _ in frames if isinstance(m := frame.f_locals.get("self"), nn.Module)), None
    )
    other = "other arguments, or " if name.endswith("arguments") else ""
    error = NoPortableForm(
        f"{name} has no portable form",
        where=place
        and f"{_file(place[0])}:{place[1]}: {linecache.getline(_file(place[0]), place[1]).strip()}",
        cause=("" if module is None else f"The module {type(module).__name__} calls it. ")
        + "With kernels=portable every operation must have equal bits on each processor.",
        fix=f"Use {other}another operation, or set kernels=auto.",
    )
    error.operation = name
    return error


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


# A process that has this variable computes what has no portable form as torch does, and lists it.
LIST_OPERATIONS = "SAMEBITS_LIST_OPERATIONS"

_listing: list[PortableMode] = []


def listed_operations() -> dict[str, Any] | None:
    """Return what this process has computed, as plain JSON; None without a mode that lists operations.

    Returns:
        portable: the number of operations; refused: for each other one what, cause, fix and where.
    """
    if not _listing:
        return None
    used = {func.name().partition(".")[0] for mode in _listing for func in mode.functions}
    refused = {name: each for mode in _listing for name, each in mode.refused.items()}
    portable = used - {name.partition(" ")[0].partition(".")[0] for name in refused}
    return {
        "portable": len(portable),
        "refused": [{"what": each.what, **each.slots} for each in refused.values()],
    }
