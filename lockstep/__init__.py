"""Trains PyTorch vision models on any number of processes, and gives the same model every time.

The names below are imported when they are first used, so that `import lockstep` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.api import Run, train, world
    from lockstep.data.order import Order
    from lockstep.data.samples import Batch, DatasetSamples
    from lockstep.engine.parts import Parts
    from lockstep.errors import LockstepError
    from lockstep.inference.predict import evaluate, predict
    from lockstep.parallel.reduce import Reducer

__all__ = [
    "Batch",
    "DatasetSamples",
    "LockstepError",
    "Order",
    "Parts",
    "Reducer",
    "Run",
    "__version__",
    "evaluate",
    "predict",
    "train",
    "world",
]

_HOMES = {
    "Batch": "lockstep.data.samples",
    "DatasetSamples": "lockstep.data.samples",
    "LockstepError": "lockstep.errors",
    "Order": "lockstep.data.order",
    "Parts": "lockstep.engine.parts",
    "Reducer": "lockstep.parallel.reduce",
    "Run": "lockstep.api",
    "evaluate": "lockstep.inference.predict",
    "predict": "lockstep.inference.predict",
    "train": "lockstep.api",
    "world": "lockstep.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
