"""Walk a pickle before torch reads it: only tensors and plain values, and bounded work.

`torch.load(weights_only=True)` runs no code of a file. But some functions that it allows can take any amount of memory
(`bytearray(8_000_000_000)`), and a few hundred bytes can expand to more values than fit into memory: nested tuples, or
a list that is copied ten thousand times. This walk keeps a stack as the unpickler does, but with the cost of using each
value in place of the value itself.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

_MAX_OPCODES = 600_000  # torch reads about 200,000 per second; each tensor takes about 25
_MAX_WORK = 1_000_000  # values that are hashed or copied in addition
_MAX_DEPTH = 100  # of nested tuples: hashing recurses in C, and Python does not limit that recursion
_MAX_ID_COST = 400  # a storage's id is a tuple of five plain values, or six with a small tuple
# Cost of a key that is not text or a small number: a file can choose keys of one hash, which are compared pairwise.
_TUPLE_COST = 100
_BYTES_PER_UNIT = 64
_MAX_NAME = 200

_REBUILD = "torch._tensor._rebuild_from_type_v2"  # calls its first argument
_ENCODE = "_codecs.encode"  # how bytes are written; with another codec than latin1 they could grow
CALLABLE = frozenset(
    {
        _REBUILD, _ENCODE, "collections.OrderedDict", "collections.Counter", "torch.Size", "torch.device",
        "torch.nn.parameter.Parameter", "torch.serialization._get_layout", "builtins.set", "__builtin__.set",
        "argparse.Namespace", "pathlib.PosixPath", "pathlib._local.PosixPath", "numpy.dtype",
        "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
        *(f"torch._utils._rebuild_{name}" for name in (
            "tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state", "sparse_tensor", "qtensor",
        )),
    }
)  # fmt: skip

_TEXTS = ("BINUNICODE", "SHORT_BINSTRING")


@dataclass(slots=True)
class _Value:
    """The cost of one value on the unpickler's stack.

    Attributes:
        cost: Work to hash it.
        inside: Work to copy it, or to hash all of its items.
        depth: Nesting of tuples.
        text: A string, or the full name of a function or class.
        is_global: Whether it is a function or class.
        items: The items of a tuple; None for all other values.
    """

    cost: int = 1
    inside: int = 1
    depth: int = 0
    text: str = ""
    is_global: bool = False
    items: tuple[_Value, ...] | None = None


_PLAIN = _Value()
_MARK = _Value()


@dataclass(frozen=True)
class Walked:
    """The content of a pickle.

    Attributes:
        texts: All strings.
        storages: Names of the storages that it refers to.
    """

    texts: set[str] = field(default_factory=set)
    storages: set[str] = field(default_factory=set)


def walk_pickle(file: IO[bytes]) -> Walked:
    """Check that unpickling takes memory and time in proportion to the file's size.

    Raises:
        UnpicklingError: The pickle calls a function that weights do not need; the text has `GLOBAL` and its name.
        ValueError: The pickle expands to too many values.
        Exception: Raised by pickletools for a damaged file.
    """
    stack: list[_Value] = []
    memo: dict[Any, _Value] = {}
    seen = Walked()
    work = 0
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        name = opcode.name
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = _top(stack)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "STOP":
            work += _top(stack).inside
        elif name == "BINPERSID":
            seen.storages.add(_storage_in(_pop(stack)))
            stack.append(_Value(cost=_TUPLE_COST))
        elif name in _TEXTS:
            seen.texts.add(argument)
            stack.append(_Value(inside=1 + len(argument) // _BYTES_PER_UNIT, text=argument))
        elif name in _STEPS:
            work += _STEPS[name](stack, argument)
        elif name != "PROTO":
            raise ValueError(f"its pickle has the operation {name}, which torch.save does not write")
        if count > _MAX_OPCODES or work > _MAX_WORK:
            raise ValueError("its pickle holds too many values")
    return seen


def _storage_in(identity: _Value) -> str:
    """Return the storage's name in a persistent id: ("storage", type, name, device, number of values, ...)."""
    if identity.cost > _MAX_ID_COST or identity.items is None:
        raise ValueError("its pickle names a storage by something else than a tuple of plain values")
    return identity.items[2].text


def _top(stack: list[_Value]) -> _Value:
    if not stack or stack[-1] is _MARK:
        raise ValueError("its pickle takes a value where there is none")
    return stack[-1]


def _pop(stack: list[_Value]) -> _Value:
    value = _top(stack)
    stack.pop()
    return value


def _pop_to_mark(stack: list[_Value]) -> list[_Value]:
    start = next(index for index in range(len(stack) - 1, -1, -1) if stack[index] is _MARK)
    taken = stack[start + 1 :]
    del stack[start:]
    return taken


def _push_plain(stack: list[_Value], argument: Any) -> int:
    stack.append(_PLAIN)
    return 0


def _push_number(stack: list[_Value], argument: int) -> int:
    stack.append(_PLAIN if argument.bit_length() <= 64 else _Value(cost=_TUPLE_COST))
    return 0


def _push_container(stack: list[_Value], argument: Any) -> int:
    stack.append(_Value())
    return 0


def _push_global(stack: list[_Value], argument: str) -> int:
    if len(argument) > _MAX_NAME:  # torch would format the name into its error for hours
        raise pickle.UnpicklingError(f"GLOBAL {argument[:_MAX_NAME]}")
    stack.append(_Value(text=argument.replace(" ", "."), is_global=True))
    return 0


def _push_tuple(stack: list[_Value], items: list[_Value]) -> int:
    value = _Value(
        cost=_TUPLE_COST + sum(item.cost for item in items),
        inside=1 + sum(item.inside for item in items),
        depth=1 + max((item.depth for item in items), default=0),
        items=tuple(items),
    )
    if max(value.cost, value.inside) > _MAX_WORK or value.depth > _MAX_DEPTH:
        raise ValueError("its pickle holds a tuple that stands for too many values")
    stack.append(value)
    return 0


def _tuple_of(count: int) -> Any:
    return lambda stack, argument: _push_tuple(stack, [_pop(stack) for _ in range(count)][::-1])


def _append(stack: list[_Value], values: list[_Value]) -> int:
    _top(stack).inside += sum(value.cost for value in values)
    return 0


def _set_items(stack: list[_Value], values: list[_Value]) -> int:
    keys = sum(key.cost for key in values[::2])
    _top(stack).inside += keys
    return keys - len(values[::2])  # text and small numbers are already counted as opcodes


def _call(stack: list[_Value], argument: Any) -> int:
    """Handle REDUCE and NEWOBJ: a function or class, and a tuple of arguments."""
    arguments, function = _pop(stack), _pop(stack)
    items = arguments.items
    if items is None:
        raise ValueError("its pickle calls a function without a tuple of arguments")
    _check_callable(function)
    if function.text == _REBUILD:
        _check_callable(items[0])
    if _ENCODE in (function.text, *(item.text for item in items if item.is_global)):
        codec = items[1].text if len(items) == 2 else ""
        if codec.lower() not in ("latin1", "latin-1"):
            raise ValueError(f"its pickle encodes text as {codec[:20]!r}")
    # All that is known about the result: it is not larger than the arguments.
    stack.append(_Value(cost=_TUPLE_COST + arguments.cost, inside=arguments.inside))
    return arguments.inside


def _check_callable(function: _Value) -> None:
    if not function.is_global or function.text not in CALLABLE:
        raise pickle.UnpicklingError(f"GLOBAL {function.text[:_MAX_NAME]}")


def _build(stack: list[_Value], argument: Any) -> int:
    state = _pop(stack)
    _top(stack).inside += state.inside
    return state.inside


# The opcodes that torch's weights-only unpickler supports, in addition to those in `walk_pickle`.
_STEPS: Mapping[str, Any] = {
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT", "BININT", "BININT1", "BININT2"), _push_plain),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), _push_container),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _call),
    "LONG1": _push_number,
    "GLOBAL": _push_global,
    "EMPTY_TUPLE": _tuple_of(0),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": lambda stack, _: _push_tuple(stack, _pop_to_mark(stack)),
    "APPEND": lambda stack, _: _append(stack, [_pop(stack)]),
    "APPENDS": lambda stack, _: _append(stack, _pop_to_mark(stack)),
    "SETITEM": lambda stack, _: _set_items(stack, [_pop(stack) for _ in range(2)][::-1]),
    "SETITEMS": lambda stack, _: _set_items(stack, _pop_to_mark(stack)),
    "BUILD": _build,
}
