"""Restore state, to prove which piece of it makes a result differ.

A recipe often keeps several things that change: a counter for its log, a cache, a generator. Only one of them may act
on the result. `find_acting` repeats a call with all of them restored but one: if the result then differs, this one
acts.
"""

import copy
import functools
import itertools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
        return functools.partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
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
    except Exception:  # state that was restored in part may not fit together: then nothing is proved
        return {}
    return acting if any(acting.values()) else {}
