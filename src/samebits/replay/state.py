"""What a recipe keeps between calls: generators, counters, caches, values in attributes and in globals.

`find_cells` walks the objects that are reachable from a recipe's parts. `changed` compares their values before and
after a call. `line_watch` then names the line at which each of them changes while the call is repeated.
"""

import itertools
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import _lru_cache_wrapper, partial
from itertools import islice
from types import CellType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samebits.cluster.collectives import encode
from samebits.frames import Line, is_user, user_line
from samebits.replay.trace import digest

MAX_OBJECTS = 5_000  # visited at most: a dataset may list millions of files
MAX_ITEMS = 500  # of one container
MAX_BYTES = 1 << 22  # of one array that is read whole
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset)
_MODULE_NAMES = frozenset(vars(nn.Module())) - {"training"}
# Parts of objects that vars() does not have.
_HIDDEN: dict[type, tuple[str, ...]] = {
    MethodType: ("__self__",),
    FunctionType: ("__defaults__",),
    partial: ("func", "args", "keywords"),
}
_MAIN = ("__main__", "__mp_main__")
GENERATOR = "generator"
CACHE = "cache"
STATE = "state"
IMPORT = "import"


@dataclass(frozen=True)
class Cell:
    """One piece of state."""

    kind: str  #: GENERATOR, CACHE or STATE, or another constant of `cause`.
    read: Callable[[], object]  #: Returns a comparable value.


# The global generators, which are not seeded before a recipe is imported.
GLOBAL = {
    "numpy's global generator": Cell(IMPORT, lambda: encode(np.random.get_state(legacy=False))),
    "Python's global generator": Cell(IMPORT, random.getstate),
    "torch's global generator": Cell(IMPORT, lambda: digest(torch.get_rng_state())),
}


def find_cells(roots: Mapping[str, object]) -> dict[str, Cell]:
    """Return the pieces of state that are reachable from objects, by their path: "dataset.rng"."""
    cells: dict[str, Cell] = {}
    seen: dict[int, object] = {}  # the objects themselves are kept, so that no id is used twice
    # Breadth first, so that MAX_OBJECTS leaves out what is deepest.
    waiting: deque[tuple[str, object]] = deque([("", SimpleNamespace(**roots))])
    while waiting and len(seen) < MAX_OBJECTS:
        above, owner = waiting.popleft()
        for name, value in _parts(owner).items():
            path = f"{above}{name}".removeprefix(".")
            is_atom = isinstance(value, _ATOMS)
            if id(value) in seen and not is_atom:
                continue
            kind, _ = _known(value)
            # A plain item of a container belongs to the container's own value.
            if kind and not (is_atom and isinstance(owner, _CONTAINERS)):
                cells[path] = Cell(kind, partial(_read, owner, name))
            if not is_atom:
                seen[id(value)] = value
                waiting.append((path, value))
    return cells


def changed(find: Callable[[], Mapping[str, Cell]], call: Callable[[], object]) -> dict[str, Cell]:
    """Return the state that a call changes, by its path.

    Args:
        find: Finds the state.
    """
    before = snapshot(find())
    call()
    now = find()
    after = snapshot(now)
    return {path: now[path] for path in now if path not in before or before[path] != after[path]}


def snapshot(cells: Mapping[str, Cell]) -> dict[str, object]:
    """Return the present values of some cells; None for one that cannot be read."""
    found: dict[str, object] = {}
    for path, cell in cells.items():
        try:
            found[path] = cell.read()
        except Exception:  # an object that cannot be read has no comparable state
            found[path] = None
    return found


def user_modules() -> dict[str, ModuleType]:
    """Return the loaded modules of the user, by their name."""
    # A copy of the list: reading an attribute of a lazy module may import others.
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name not in _MAIN and _is_users(module)
    }


def _is_users(module: ModuleType | None) -> bool:
    return is_user(str(getattr(module, "__file__", None) or "<built-in>"))


def _parts(value: Any) -> dict[str, object]:
    """Return the parts of an object that can hold state, by what leads to them: ".rng", "[3]"."""
    if isinstance(value, dict):
        return {f"[{key!r}]": item for key, item in islice(value.items(), MAX_ITEMS)}
    if isinstance(value, _CONTAINERS):
        return {f"[{index}]": item for index, item in enumerate(islice(value, MAX_ITEMS))}
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    if isinstance(value, ModuleType | type) and not _is_users(module):
        return {}
    if _known(value)[0] or not hasattr(value, "__dict__"):
        return {}
    attributes = dict(vars(value))
    if isinstance(value, nn.Module):
        attributes |= dict(value.named_children())
    found = {
        f".{name}": part
        for name, part in attributes.items()
        if name not in _MODULE_NAMES and not name.startswith("__")
    }
    for name in _HIDDEN.get(type(value), ()):
        found[f".{name}"] = getattr(value, name)
    if isinstance(value, FunctionType):
        closure = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        # A variable that is not assigned yet is equal to an empty cell.
        found |= {f".{name}": cell.cell_contents for name, cell in closure if cell != CellType()}
    found[" (class)"] = type(value)
    return found


def _read(owner: object, name: str) -> object:
    """Return a value that changes with a part of an object. The part may be another object by now."""
    value = _parts(owner).get(name)
    return _known(value)[1](value)


def _known(value: object) -> tuple[str, Callable[[Any], object]]:
    """Return the kind of an object that is one piece of state, and what reads it; an empty kind for another object."""
    for kind, types, read in _KNOWN:
        if isinstance(value, types):
            return kind, read
    return "", id


def _items(value: Any) -> object:
    """Return the length of a container and its first items: plain ones by value, others by identity."""
    items = [*islice(value, MAX_ITEMS)]
    if isinstance(value, dict):
        items += islice(value.values(), MAX_ITEMS)
    return len(value), [item if isinstance(item, _ATOMS) else id(item) for item in items]


def _tensor(tensor: Tensor) -> object:
    # torch counts the writes to a tensor: a change shows without a copy of the values.
    content = digest(tensor) if tensor.nbytes <= MAX_BYTES else ""
    return id(tensor), tensor._version, content


def _array(array: np.ndarray[Any, Any]) -> object:
    few = array.reshape(-1)[:: 1 + array.nbytes // MAX_BYTES]
    return array.shape, zlib.crc32(few.tobytes())


# What is one piece of state each: kind, types, and a function that returns a comparable value.
_KNOWN: tuple[tuple[str, tuple[type, ...], Callable[[Any], object]], ...] = (
    (STATE, _ATOMS, lambda value: value),
    (GENERATOR, (np.random.Generator,), lambda generator: encode(generator.bit_generator.state)),
    (
        GENERATOR,
        (np.random.RandomState,),
        lambda generator: encode(generator.get_state(legacy=False)),
    ),
    (GENERATOR, (random.Random,), random.Random.getstate),
    (GENERATOR, (torch.Generator,), lambda generator: digest(generator.get_state())),
    (CACHE, (_lru_cache_wrapper,), _lru_cache_wrapper.cache_info),
    (STATE, (itertools.count,), repr),
    (STATE, (Tensor,), _tensor),
    (STATE, (np.ndarray,), _array),
    (STATE, (dict, list, set), _items),
)


@contextmanager
def line_watch(cells: Mapping[str, Cell]) -> Iterator[dict[str, Line]]:
    """Find the user's lines at which pieces of state change, while a block of code runs.

    Args:
        cells: What to watch; each is read once a line.

    Yields:
        The line that changed a piece first, by its path.
    """
    lines: dict[str, Line] = {}
    values = snapshot(cells)
    last: Line | None = None

    def look() -> None:
        nonlocal values
        now = snapshot(cells)
        for path in now:
            # Without a line of the user, it was set back before.
            if last is not None and now[path] != values[path]:
                lines.setdefault(path, last)
        values = now

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal last
        file = frame.f_code.co_filename
        if not is_user(file):
            return None
        if event in ("line", "return"):
            look()
            last = (file, frame.f_lineno) if event == "line" else user_line(frame.f_back)
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)
        look()
