"""What only a recipe knows about its trials: steps per epoch, the monitored metric, and the settings that it reads.

A recipe may use any setting, such as `epochs` for the strength of an augmentation. Trials can share steps only if the
recipe does not read the settings in which they differ. So the recipe gets settings that record each read, while its
model is built, its data is opened and a micro-batch is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from samebits.config.schema import RunConfig
from samebits.config.sections import Settings
from samebits.recipes.catalog import RecipeSpec
from samebits.sweeps.prefixes import OF_STEPS

C = TypeVar("C", bound=Settings)
# Members that read all settings at once.
_WHOLE = frozenset({"model_dump", "model_dump_json", "model_copy", "copy", "dict", "json", "__dict__", "__iter__"})


@dataclass(frozen=True)
class Probe:
    """What a recipe knows about a group of trials.

    Attributes:
        steps_per_epoch: Steps of one epoch.
        metric: Name of the metric that the recipe monitors.
        better: Whether its "max" or "min" is best.
        reads: Settings of the schedule that the recipe reads; trials share nothing if there is one.
    """

    steps_per_epoch: int
    metric: str
    better: str
    reads: list[str]


def probe(found: RecipeSpec, config: RunConfig) -> Probe:
    """Build a recipe in this process, and return what it knows about a group of trials.

    Args:
        found: The recipe.
        config: The settings of one of the trials.
    """
    from samebits.cluster.env import ALONE
    from samebits.engine.assemble import make_job
    from samebits.engine.dataset_info import find_dataset_info
    from samebits.engine.parts import Parts
    from samebits.launch.kernels import pin_kernels
    from samebits.launch.start import join_world

    pin_kernels(config.kernels)
    reads: set[str] = set()
    watched = _watched(config, reads)
    with join_world(ALONE, config) as world:
        info = find_dataset_info(found, watched)

        def build() -> Parts:
            return found.build(watched, info)

        job = make_job(config, build, world)
    metric, better = job.parts.monitor
    return Probe(job.order.steps_per_epoch, metric, better, sorted(reads & OF_STEPS))


def _watched(settings: C, reads: set[str], above: str = "") -> C:
    """Return equal settings that add the dotted name of each setting that is read to a set."""
    kind = type(settings)
    fields = set(kind.model_fields)

    def read(self: Any, name: str) -> Any:
        if name in fields:
            reads.add(f"{above}{name}")
        elif name in _WHOLE:
            reads.update(OF_STEPS)
        return kind.__getattribute__(self, name)

    values = {name: getattr(settings, name) for name in fields}
    for name, value in values.items():
        if isinstance(value, Settings):
            values[name] = _watched(value, reads, f"{above}{name}.")
    # Not a subclass that pydantic builds: validators and serializers stay those of the class.
    watching = type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__})
    watched = settings.model_copy(update=values)
    object.__setattr__(watched, "__class__", watching)
    return watched
