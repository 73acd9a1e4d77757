"""What a recipe remembers between calls: generators, counters, caches, values in attributes and in globals.

`snapshot` walks the objects that are reachable from a recipe's parts and takes a comparable value of each piece of
state. Two snapshots around a call give the state that the call changed. `line_watch` then repeats the call and names
the line at which each piece changes.
"""

import copy
import functools
import itertools
import json
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samebits.frames import Line, is_user, user_line

# Restore state, to prove which piece of it makes a result differ.
#
# A recipe often keeps several things that change: a counter for its log, a cache, a generator. Only one of them may act
# on the result. `find_acting` repeats a call with all of them restored but one: if the result then differs, this one
# acts.


Undo = Callable[[], object]


@dataclass(frozen=True)
class Holder:
    """The place of a value in its owner: an attribute, or a variable of a closure.

    Attributes:
        get: Returns the present value.
        put: Replaces it.
        drop: Removes the attribute; None for a variable.
    """

    get: Callable[[], Any]
    put: Callable[[Any], object]
    drop: Undo | None = None


def keep_value(value: Any, place: Holder | None) -> Undo:
    """Keep a piece of state, and return what restores it.

    Args:
        value: An object of the kinds that `state.find_cells` knows.
        place: Its place, to which a replaced object returns; None for an item of a container.
    """
    restore = _restorer(value)
    # Its repr has its next number and its step: "count(3, 2)". Copying it is deprecated.
    numbers = json.loads(f"[{repr(value)[6:-1]}]") if isinstance(value, itertools.count) else []

    def undo() -> None:
        restore()
        if place is not None:
            # A count has no way back, so that another one takes its place.
            place.put(itertools.count(*numbers) if numbers else value)

    return undo


def _restorer(value: Any) -> Undo:
    """Return what gives an object its present content again, in place: others may refer to it."""
    if isinstance(value, np.random.Generator):
        return functools.partial(
            setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state)
        )
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, functools._lru_cache_wrapper):
        return value.cache_clear
    if isinstance(value, Tensor):
        return functools.partial(value.detach().copy_, value.detach().clone())
    if isinstance(value, np.ndarray):
        return functools.partial(np.copyto, value, value.copy())
    if isinstance(value, list):
        return functools.partial(value.__setitem__, slice(None), list(value))
    if isinstance(value, dict | set):
        return functools.partial(_refill, value, value.copy())
    return lambda: None  # the place of a plain value restores it


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content)


def find_acting(
    undo: Mapping[str, Undo], advance: Callable[[], object], is_equal: Callable[[], bool]
) -> dict[str, bool] | None:
    """Find the pieces of state that make a result differ.

    Args:
        undo: Gives each piece its value before the first call, by its path.
        advance: Makes the calls after which the result differs.
        is_equal: Computes the result again, and returns whether it is that of the first call.

    Returns:
        Path -> whether this piece alone makes the result differ. None if the result differs although all are restored:
        then it depends on something else.
    """

    def restore(without: str = "") -> None:
        for path, each in undo.items():
            if path != without:
                each()

    try:
        restore()
        if not is_equal():
            return None
        acting = {}
        for path in undo:
            restore()
            advance()
            restore(without=path)
            acting[path] = not is_equal()
        restore()
    except (
        Exception
    ):  # state that was restored in part may not fit together: then nothing is proved
        return {}
    return acting if any(acting.values()) else {}


MAX_OBJECTS = 5_000  # visited at most: a dataset may list millions of files
MAX_ITEMS = 500  # of one container
MAX_BYTES = 1 << 22  # of one array that is read whole
MAX_KEPT_BYTES = 1 << 28  # of all values together: a dataset may hold its images in memory
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_MODULE_NAMES = frozenset(vars(nn.Module()))
_MAIN = ("__main__", "__mp_main__")
GENERATOR = "generator"
CACHE = "cache"
STATE = "state"
# Objects that are one piece of state each.
_KNOWN: tuple[tuple[str, str, type], ...] = (
    (GENERATOR, "numpy.random.Generator", np.random.Generator),
    (GENERATOR, "numpy.random.RandomState", np.random.RandomState),
    (GENERATOR, "random.Random", random.Random),
    (GENERATOR, "torch.Generator", torch.Generator),
    (CACHE, "functools.lru_cache", functools._lru_cache_wrapper),  # the class has no public name
    (STATE, "itertools.count", itertools.count),
    (STATE, "tensor", Tensor),
    (STATE, "array", np.ndarray),
)


@dataclass(frozen=True)
class Cell:
    """One piece of state.

    Attributes:
        path: Its name for the user: "dataset.rng".
        kind: GENERATOR, CACHE or STATE.
        what: Its type: "numpy.random.Generator".
        read: Returns a comparable value.
        keep: Keeps the present value, and returns what restores it; None for state of the engine.
        drop: Removes the attribute; None for others.
        num_bytes: Size of an array or tensor, otherwise 0.
    """

    path: str
    kind: str
    what: str
    read: Callable[[], object]
    keep: Callable[[], Undo] | None = None
    drop: Undo | None = None
    num_bytes: int = 0


def find_cells(roots: Mapping[str, object]) -> dict[str, Cell]:
    """Return the pieces of state that are reachable from objects, by their path, also in modules of the user."""
    cells: dict[str, Cell] = {}
    seen: dict[int, object] = {}  # the objects themselves are kept, so that no id is used twice
    # Breadth first, so that MAX_OBJECTS leaves out what is deepest.
    waiting: deque[tuple[str, object, Holder | None]] = deque(
        (name, each, None) for name, each in roots.items()
    )
    while waiting and len(seen) < MAX_OBJECTS:
        path, value, place = waiting.popleft()
        undo = partial(keep_value, value, place), None if place is None else place.drop
        if isinstance(value, _ATOMS):
            if place is not None:
                cells.setdefault(path, Cell(path, STATE, type(value).__name__, place.get, *undo))
            continue
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if (known := _known(value)) is not None:
            # Read through the owner where there is one: an attribute may get another object.
            read = partial(_state, partial(_same, value) if place is None else place.get)
            cells.setdefault(path, Cell(path, *known, read, *undo, getattr(value, "nbytes", 0)))
        elif not isinstance(value, ModuleType) or _is_users(value):
            if isinstance(value, dict | list | set):
                read = partial(_plain_items, value)
                cells.setdefault(path, Cell(path, STATE, type(value).__name__, read, *undo))
            waiting.extend(
                (f"{path}{name}", child, below) for name, child, below in _children(value)
            )
    return cells


def snapshot(cells: Mapping[str, Cell]) -> dict[str, object]:
    """Return the present values of some cells."""
    return {path: value_of(cell) for path, cell in cells.items()}


def changed(
    roots: Mapping[str, object], call: Callable[[], object]
) -> tuple[list[Cell], dict[str, Undo]]:
    """Return the state of objects that a call changes, generators first, and what restores each piece, by its path."""
    before_cells = find_cells(roots)
    before = snapshot(before_cells)
    undo = keep_all(before_cells.values())
    call()
    after_cells = find_cells(roots)
    after = snapshot(after_cells)
    found = [
        cell
        for path, cell in after_cells.items()
        if path not in before or before[path] != after[path]
    ]
    found.sort(key=lambda cell: (GENERATOR, CACHE, STATE).index(cell.kind))
    undo |= {
        cell.path: cell.drop for cell in found if cell.drop is not None and cell.path not in before
    }
    return found, {cell.path: undo[cell.path] for cell in found if cell.path in undo}


def keep_all(cells: Iterable[Cell]) -> dict[str, Undo]:
    """Keep pieces of state, and return what restores each, by its path; without those that are too large."""
    found: dict[str, Undo] = {}
    left = MAX_KEPT_BYTES
    for cell in cells:
        left -= cell.num_bytes
        if cell.keep is not None and left >= 0:
            with suppress(
                Exception
            ):  # an object of the user may refuse to be copied: then nothing is proved of it
                found[cell.path] = cell.keep()
    return found


def global_generators() -> dict[str, Cell]:
    """Return the global generators of numpy, Python and torch."""
    return {
        name: Cell(name, GENERATOR, name, read)
        for name, read in (
            ("numpy's global generator", lambda: _numpy_state(np.random.get_state(legacy=False))),
            ("Python's global generator", random.getstate),
            ("torch's global generator", lambda: torch.get_rng_state().numpy().tobytes()),
        )
    }


def user_modules() -> dict[str, ModuleType]:
    """Return the loaded modules of the user, by their name."""
    # A copy of the list: reading an attribute of a lazy module may import others.
    named = {
        name: module
        for name, module in list(sys.modules.items())
        if getattr(module, "__file__", None)
    }
    return {
        name: module
        for name, module in named.items()
        if is_user(str(module.__file__)) and name not in _MAIN
    }


def value_of(cell: Cell) -> object:
    """Return the present value of a cell, comparable; None if it cannot be read."""
    try:
        return cell.read()
    except Exception:  # an object that cannot be read has no comparable state
        return None


def _known(value: object) -> tuple[str, str] | None:
    """Return kind and type of an object that is one piece of state; None for one that has parts."""
    for kind, name, types in _KNOWN:
        # SystemRandom has no state: it reads the system's entropy.
        if isinstance(value, types) and not isinstance(value, random.SystemRandom):
            return kind, name
    return None


def _state(read: Callable[[], Any]) -> object:
    """Return a comparable value of an object of `_KNOWN`."""
    value = read()
    if isinstance(value, np.random.Generator):
        return _numpy_state(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _numpy_state(value.get_state(legacy=False))
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, functools._lru_cache_wrapper):
        return value.cache_info()
    if isinstance(value, Tensor):
        return _tensor_state(value)
    return _array_state(value) if isinstance(value, np.ndarray) else repr(value)


def _same(value: object) -> object:
    return value


def _children(value: Any) -> Iterator[tuple[str, object, Holder | None]]:
    """Yield the parts of an object that can hold state: accessor (".rng", "[3]"), part, and its place in the object."""
    if isinstance(value, dict):
        yield from (
            (f"[{key!r}]", item, None)
            for key, item in itertools.islice(list(value.items()), MAX_ITEMS)
        )
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (
            (f"[{index}]", item, None)
            for index, item in enumerate(itertools.islice(list(value), MAX_ITEMS))
        )
    elif isinstance(value, functools.partial):
        yield from [
            ("", value.func, None),
            (".args", value.args, None),
            (".keywords", value.keywords, None),
        ]
    elif isinstance(value, MethodType):
        yield ".self", value.__self__, None
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield (
                f".{name}",
                _content(cell),
                Holder(partial(_content, cell), partial(setattr, cell, "cell_contents")),
            )
        yield from (
            (f".default {index}", item, None) for index, item in enumerate(value.__defaults__ or ())
        )
        yield from _attributes(value, vars(value))
    elif isinstance(value, ModuleType):
        yield from _attributes(value, vars(value))
    elif isinstance(value, type):
        if _is_users(sys.modules.get(value.__module__)):
            yield from _attributes(value, vars(value))
    elif isinstance(value, nn.Module):
        yield from _attributes(value, [name for name in vars(value) if name not in _MODULE_NAMES])
        yield from ((f".{name}", child, None) for name, child in value.named_children())
        yield " (class)", type(value), None
    elif hasattr(value, "__dict__"):
        yield from _attributes(value, vars(value))
        yield " (class)", type(value), None


def _attributes(owner: Any, names: Iterable[str]) -> Iterator[tuple[str, object, Holder]]:
    for name in list(names):
        if not (name.startswith("__") and name.endswith("__")):
            place = Holder(
                partial(vars(owner).get, name),
                partial(setattr, owner, name),
                partial(_drop, owner, name),
            )
            yield f".{name}", place.get(), place


def _drop(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _plain_items(value: Any) -> object:
    """Return the length of a container and those of its first items that are plain values."""
    items = value.items() if isinstance(value, dict) else value
    few = itertools.islice(list(items), MAX_ITEMS)
    tuples = ((item, item if isinstance(item, tuple) else (item,)) for item in few)
    return len(value), [
        item for item, parts in tuples if all(isinstance(each, _ATOMS) for each in parts)
    ]


def _is_users(module: ModuleType | None) -> bool:
    return is_user(str(getattr(module, "__file__", None) or "<built-in>"))


def _numpy_state(state: Any) -> str:
    # Without this, numpy's repr leaves out the middle of a long state.
    with np.printoptions(threshold=sys.maxsize):
        return repr(state)


def _tensor_state(tensor: Tensor) -> object:
    # torch counts the writes to a tensor: a change shows without a copy of the values.
    version = -1 if tensor.is_inference() else tensor._version
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.nbytes > MAX_BYTES:
        return id(tensor), version
    return id(tensor), version, _array_state(tensor.detach().numpy())


def _array_state(array: np.ndarray[Any, Any]) -> object:
    if array.dtype == object:
        return len(array)
    few = (
        array if array.nbytes <= MAX_BYTES else array.reshape(-1)[:: -(-array.nbytes // MAX_BYTES)]
    )
    return array.shape, zlib.crc32(np.ascontiguousarray(few).view(np.uint8).reshape(-1).tobytes())


# The user's line at which a piece of state changes.


class LineWatch:
    """Names the user's line at which each cell changes, while a block of code runs.

    Args:
        cells: What to watch; each is read once a line.

    Attributes:
        lines: Path of a cell -> the line that changed it first.
    """

    def __init__(self, cells: Mapping[str, Cell]) -> None:
        self._cells = cells
        self._values: dict[str, object] = {}
        self._last: Line | None = None
        self.lines: dict[str, Line] = {}

    def __enter__(self) -> "LineWatch":
        self._values = snapshot(self._cells)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._look()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return self._local if is_user(frame.f_code.co_filename) else None

    def _local(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if event not in ("line", "return"):
            return self._local
        self._look()
        self._last = (
            (frame.f_code.co_filename, frame.f_lineno)
            if event == "line"
            else user_line(frame.f_back)
        )
        return self._local

    def _look(self) -> None:
        if self._last is None:
            return
        for path, cell in self._cells.items():
            value = value_of(cell)
            if path not in self.lines and value != self._values[path]:
                self.lines[path] = self._last
            self._values[path] = value
