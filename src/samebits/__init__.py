"""Train PyTorch vision models on any number of processes, to the same model each time.

`train`, `evaluate` and `predict` do what the commands do. `Parts` and `RunConfig` make a recipe. `world`, `Order`,
`Reducer` and `Checkpoint` make a training loop of your own.

A name is imported when it is first used, so `import samebits` takes milliseconds and does not import torch.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from samebits.version import __version__

if TYPE_CHECKING:
    from samebits.api import train, world
    from samebits.cli.main import run as run_command
    from samebits.cluster.world import World
    from samebits.config.schema import RunConfig, Settings
    from samebits.data.keyed import uniform, uniforms
    from samebits.data.order import MicroBatch, Order, Step
    from samebits.data.samples import Batch, DatasetSamples, Samples
    from samebits.data.seeding import seeded
    from samebits.data.sources.decoding import decode_rgb
    from samebits.data.sources.parquet_rows import ParquetRows
    from samebits.data.sources.tar_shards import TarShards
    from samebits.engine.evaluate import evaluate as evaluate_model
    from samebits.engine.parts import Parts
    from samebits.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        HangError,
        LaunchError,
        SamebitsError,
        TrainError,
    )
    from samebits.inference.predict import evaluate, predict
    from samebits.launch.subcommand import Stopped, launch
    from samebits.metrics.classification import Accuracy
    from samebits.metrics.metric import Metric
    from samebits.metrics.text import TextMetric
    from samebits.module.freeze import freeze
    from samebits.own_loop.evaluation import EvalLoader
    from samebits.own_loop.exact import exact
    from samebits.own_loop.loader import ExactLoader
    from samebits.parallel.reduce import Reducer
    from samebits.portable.scripts import use_kernels
    from samebits.report.trackers.tracker import TrackedRun, Tracker
    from samebits.run_views.run import Run, RunList, runs
    from samebits.storage.checkpoint import Checkpoint
    from samebits.storage.checkpoint import load_newest as load_newest_checkpoint
    from samebits.storage.checkpoint import save as save_checkpoint
    from samebits.storage.pretrained import load_pretrained
    from samebits.storage.weights import weights_sha256

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
    "Metric",
    "MicroBatch",
    "Order",
    "ParquetRows",
    "Parts",
    "Reducer",
    "Run",
    "RunConfig",
    "RunList",
    "SamebitsError",
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
    "use_kernels",
    "weights_sha256",
    "world",
]

# Module -> the public names in it.
_MODULES = {
    "samebits.api": ("train", "world"),
    "samebits.cluster.world": ("World",),
    "samebits.config.schema": ("RunConfig", "Settings"),
    "samebits.data.keyed": ("uniform", "uniforms"),
    "samebits.data.order": ("MicroBatch", "Order", "Step"),
    "samebits.data.samples": ("Batch", "DatasetSamples", "Samples"),
    "samebits.data.seeding": ("seeded",),
    "samebits.data.sources.decoding": ("decode_rgb",),
    "samebits.data.sources.parquet_rows": ("ParquetRows",),
    "samebits.data.sources.tar_shards": ("TarShards",),
    "samebits.engine.parts": ("Parts",),
    "samebits.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "HangError",
        "LaunchError",
        "SamebitsError",
        "TrainError",
    ),
    "samebits.inference.predict": ("evaluate", "predict"),
    "samebits.launch.subcommand": ("Stopped",),
    "samebits.metrics.classification": ("Accuracy",),
    "samebits.metrics.metric": ("Metric",),
    "samebits.metrics.text": ("TextMetric",),
    "samebits.own_loop.evaluation": ("EvalLoader",),
    "samebits.own_loop.exact": ("exact",),
    "samebits.own_loop.loader": ("ExactLoader",),
    "samebits.module.freeze": ("freeze",),
    "samebits.parallel.reduce": ("Reducer",),
    "samebits.portable.scripts": ("use_kernels",),
    "samebits.report.trackers.tracker": ("TrackedRun", "Tracker"),
    "samebits.run_views.run": ("Run", "RunList", "runs"),
    "samebits.storage.checkpoint": ("Checkpoint",),
    "samebits.storage.pretrained": ("load_pretrained",),
    "samebits.storage.weights": ("weights_sha256",),
}
_HOMES = {name: (module, name) for module, names in _MODULES.items() for name in names}
# Names that mean something only together with their module's.
_HOMES |= {
    "evaluate_model": ("samebits.engine.evaluate", "evaluate"),
    "load_newest_checkpoint": ("samebits.storage.checkpoint", "load_newest"),
    "run_command": ("samebits.cli.main", "run"),
    "save_checkpoint": ("samebits.storage.checkpoint", "save"),
}


class _Module(ModuleType):
    # cloudpickle sends modules by name, and knows only those whose class is ModuleType itself.
    def __reduce__(self) -> tuple[Any, ...]:
        from importlib import import_module

        return import_module, (self.__name__,)


class _Launch(_Module):
    """Run a function in several processes of this machine; see `samebits.launch.subcommand.launch`. Also a package."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from samebits.launch.subcommand import launch

        return launch(*args, **options)


class _Samebits(_Module):
    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets a package's attribute when it imports the package inside.
        if name == "launch" and type(value) is ModuleType:
            value.__class__ = _Launch
            value.__doc__ = _Launch.__doc__
        super().__setattr__(name, value)


# Python looks for `__setattr__` and `__call__` on a module's class, never in the module.
sys.modules[__name__].__class__ = _Samebits


def __getattr__(name: str) -> Any:
    if name == "launch":
        import samebits.launch

        return samebits.launch
    if name not in _HOMES:
        raise AttributeError(f"module 'samebits' has no attribute {name!r}")
    from importlib import import_module

    module, inner_name = _HOMES[name]
    return getattr(import_module(module), inner_name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
