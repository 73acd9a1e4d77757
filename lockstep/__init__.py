"""Train PyTorch vision models on any number of processes, to the same model each time.

`train`, `evaluate` and `predict` do what the commands do. `Parts` and `RunConfig` make a recipe. `world`, `Order`,
`Reducer` and `Checkpoint` make a training loop of your own.

A name is imported when it is first used, so `import lockstep` takes milliseconds and does not import torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.api import train, world
    from lockstep.cli.main import run as run_command
    from lockstep.cluster.world import World
    from lockstep.config.schema import RunConfig
    from lockstep.config.sections import Settings
    from lockstep.data.keyed import seeded, uniform, uniforms
    from lockstep.data.order import MicroBatch, Order, Step
    from lockstep.data.samples import Batch, DatasetSamples, Samples
    from lockstep.data.sources.decoding import decode_rgb
    from lockstep.data.sources.parquet_rows import ParquetRows
    from lockstep.data.sources.tar_shards import TarShards
    from lockstep.data.sources.tar_writer import write_tar_shards
    from lockstep.engine.evaluate import evaluate as evaluate_model
    from lockstep.engine.parts import Parts
    from lockstep.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        HangError,
        LaunchError,
        LockstepError,
        TrainError,
    )
    from lockstep.inference.predict import evaluate, predict
    from lockstep.launch.function import launch
    from lockstep.launch.stopped import Stopped
    from lockstep.metrics.classification import Accuracy
    from lockstep.metrics.metric import Metric
    from lockstep.metrics.text import TextMetric
    from lockstep.module.freeze import freeze
    from lockstep.own_loop.evaluation import EvalLoader
    from lockstep.own_loop.exact import exact
    from lockstep.own_loop.loader import ExactLoader
    from lockstep.parallel.reduce import Reducer
    from lockstep.report.trackers.tracker import TrackedRun, Tracker
    from lockstep.run_views.run import Run, RunList, runs
    from lockstep.storage.checkpoint import Checkpoint
    from lockstep.storage.checkpoint import load_newest as load_newest_checkpoint
    from lockstep.storage.checkpoint import save as save_checkpoint
    from lockstep.storage.pretrained import load_pretrained
    from lockstep.storage.weights import weights_sha256

__all__ = [
    "Accuracy",
    "Batch",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DatasetSamples",
    "EvalLoader",
    "ExactLoader",
    "HangError",
    "LaunchError",
    "LockstepError",
    "Metric",
    "MicroBatch",
    "Order",
    "ParquetRows",
    "Parts",
    "Reducer",
    "Run",
    "RunConfig",
    "RunList",
    "Samples",
    "Settings",
    "Step",
    "Stopped",
    "TarShards",
    "TextMetric",
    "TrackedRun",
    "Tracker",
    "TrainError",
    "World",
    "__version__",
    "decode_rgb",
    "evaluate",
    "evaluate_model",
    "exact",
    "freeze",
    "launch",
    "load_newest_checkpoint",
    "load_pretrained",
    "predict",
    "run_command",
    "runs",
    "save_checkpoint",
    "seeded",
    "train",
    "uniform",
    "uniforms",
    "weights_sha256",
    "world",
    "write_tar_shards",
]

# Module -> the public names in it.
_MODULES = {
    "lockstep.api": ("train", "world"),
    "lockstep.cluster.world": ("World",),
    "lockstep.config.schema": ("RunConfig",),
    "lockstep.config.sections": ("Settings",),
    "lockstep.data.keyed": ("seeded", "uniform", "uniforms"),
    "lockstep.data.order": ("MicroBatch", "Order", "Step"),
    "lockstep.data.samples": ("Batch", "DatasetSamples", "Samples"),
    "lockstep.data.sources.decoding": ("decode_rgb",),
    "lockstep.data.sources.parquet_rows": ("ParquetRows",),
    "lockstep.data.sources.tar_shards": ("TarShards",),
    "lockstep.data.sources.tar_writer": ("write_tar_shards",),
    "lockstep.engine.parts": ("Parts",),
    "lockstep.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "HangError",
        "LaunchError",
        "LockstepError",
        "TrainError",
    ),
    "lockstep.inference.predict": ("evaluate", "predict"),
    "lockstep.launch.stopped": ("Stopped",),
    "lockstep.metrics.classification": ("Accuracy",),
    "lockstep.metrics.metric": ("Metric",),
    "lockstep.metrics.text": ("TextMetric",),
    "lockstep.own_loop.evaluation": ("EvalLoader",),
    "lockstep.own_loop.exact": ("exact",),
    "lockstep.own_loop.loader": ("ExactLoader",),
    "lockstep.module.freeze": ("freeze",),
    "lockstep.parallel.reduce": ("Reducer",),
    "lockstep.report.trackers.tracker": ("TrackedRun", "Tracker"),
    "lockstep.run_views.run": ("Run", "RunList", "runs"),
    "lockstep.storage.checkpoint": ("Checkpoint",),
    "lockstep.storage.pretrained": ("load_pretrained",),
    "lockstep.storage.weights": ("weights_sha256",),
}
_HOMES = {name: (module, name) for module, names in _MODULES.items() for name in names}
# Names that mean something only together with their module's.
_HOMES |= {
    "evaluate_model": ("lockstep.engine.evaluate", "evaluate"),
    "load_newest_checkpoint": ("lockstep.storage.checkpoint", "load_newest"),
    "run_command": ("lockstep.cli.main", "run"),
    "save_checkpoint": ("lockstep.storage.checkpoint", "save"),
}


class _Launch(ModuleType):
    """Run a function in several processes of this machine; see `lockstep.launch.function.launch`. Also a package."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from lockstep.launch.function import launch

        return launch(*args, **options)


class _Lockstep(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets a package's attribute when it imports the package inside.
        if name == "launch" and type(value) is ModuleType:
            value.__class__, value.__doc__ = _Launch, _Launch.__doc__
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Lockstep


def __getattr__(name: str) -> Any:
    if name == "launch":
        import lockstep.launch

        return lockstep.launch
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    from importlib import import_module

    module, inner_name = _HOMES[name]
    return getattr(import_module(module), inner_name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
