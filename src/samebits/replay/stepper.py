"""One of two runs, opened for replay in this process."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from samebits.bench.bench import advance, joined
from samebits.cluster.env import ALONE
from samebits.config.document import mapping_layer
from samebits.config.load import load
from samebits.config.schema import RunConfig
from samebits.data.order import Step
from samebits.engine.build import build_from, init_weights, make_job
from samebits.engine.checkpoints import pack_job, restore_step
from samebits.engine.job import Job
from samebits.engine.output.recorder import digest_content, record_of
from samebits.engine.progress import Progress
from samebits.errors import CheckpointError
from samebits.inference.trained_model import TrainedModel
from samebits.module.determinism import use_deterministic_algorithms
from samebits.optim.build import load_state
from samebits.provenance.identity import SETTINGS, check_replay, identity
from samebits.provenance.record import NO_DIGEST, StepRecord, digest_of_samples
from samebits.provenance.run_files import settings_of
from samebits.recipes.catalog import RecipeSpec, find
from samebits.replay.compare import Tensors
from samebits.replay.folders import RecordedRun
from samebits.replay.trace import EVERYTHING, Key, Recorder, StepTrace, digest
from samebits.storage import checkpoint
from samebits.storage.checkpoint import name_of
from samebits.storage.manifest import WEIGHTS
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import file_limits, identity_of, read

# A run as a job of one process, from its run folder, for replays that write nothing.


# Requests are then read one by one, at any step.
_IN_PROCESS = ("loader.num_workers=0",)


def open_job(
    recorded: RecordedRun, overrides: Sequence[str], recipe: Path | None, stack: ExitStack
) -> Job:
    """Open a run, with a fresh model.

    Args:
        recorded, overrides: What the run folder states, and settings that do not change the result.
        recipe: The recipe file to replay with; None: the recipe that `config.yaml` names, if the user trusts it.

    Raises:
        ConfigError: The run is not exact, or an override would change its result.
        SamebitsError: Recipe, data or settings are missing or were altered.
    """
    folder = recorded.path.absolute()
    model = TrainedModel(folder, (*overrides, *_IN_PROCESS))
    spec, config = model.settings() if recipe is None else _settings_with(model, recipe)
    check_replay(recorded.path, config, is_other_recipe=True)
    world = stack.enter_context(joined(config, ALONE))
    info = model.dataset_info(spec, config, world)
    # The recipe file may have moved, or be another one: checkpoints have the name that the run gave it.
    kept = identity_of(folder, "last")[1].get(SETTINGS)
    if isinstance(kept, dict) and isinstance(kept.get("recipe"), str):
        config = config.model_copy(update={"recipe": kept["recipe"]})
    # As at a restart: the check that a recipe is repeatable is not what the user asks for here.
    job = make_job(config, lambda: build_from(spec, config, info, folder), world, is_restart=True)
    job.identity = identity(config, info)
    return job


def _settings_with(model: TrainedModel, recipe: Path) -> tuple[RecipeSpec, RunConfig]:
    """Return a run's settings with another recipe file, which the user named and therefore trusts."""
    base = find(str(recipe))
    values = settings_of(RunFolder(model.path))
    values.pop("recipe", None)
    layers = (*base.layers, mapping_layer(values, str(model.path / "config.yaml")))
    return replace(base, layers=layers), load(base.config_class, layers, model.overrides).config


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two steps."""

    tensors: dict[str, Tensor]  #: Weights, average and optimizer state, of any shape, by name.
    plain: dict[str, object]  #: The other state.
    progress: Progress  #: The position.


class ReplayedRun:
    """One run, as a job of one process. It has the bits of any number of processes.

    Args:
        name, recorded, overrides: "a" or "b", what its folder states, and settings that do not change the result.
        recipe: The recipe file to replay with; None: the recipe that `config.yaml` names, if the user trusts it.

    Attributes:
        num_replays: How often a part of the run was replayed.
        has_average: Whether the moving average is part of the state, as far as it is compared.

    Raises:
        SamebitsError: Recipe, data, settings or a checkpoint are missing or were altered.
    """

    def __init__(
        self,
        name: str,
        recorded: RecordedRun,
        overrides: Sequence[str],
        recipe: Path | None,
        stack: ExitStack,
    ) -> None:
        self.name = name
        self.recorded = recorded
        self.num_replays = 0
        self._folder = recorded.path.absolute()
        self.job = open_job(recorded, overrides, recipe, stack)
        self._has_content = recorded.log.has_content
        self.has_average = self.job.average is not None
        self.activate()
        init_weights(self.job)
        self._fresh = self.snapshot()
        self.loader, _ = self.job.open_loader()
        stack.callback(lambda: self.loader.close())

    @property
    def step_number(self) -> int:
        """Number of steps done."""
        return self.job.progress.step

    def activate(self) -> None:
        """Set the process's switches for this run: the other run may have other settings."""
        use_deterministic_algorithms(self.job.config, self.job.world.device)

    def starts(self, step: int) -> list[int]:
        """Return the steps up to `step` at which a replay can start, in ascending order."""
        return [0, *(each for each in sorted(self.recorded.checkpoints) if 0 < each <= step)]

    def go_to(self, step: int) -> None:
        """Restore the state of one of `starts`."""
        self.activate()
        self.num_replays += 1
        if step == 0:
            self.restore(self._fresh)
        else:
            restore_step(self.job, self._folder / "checkpoints", step)

    def advance(self, step: int) -> None:
        """Replay up to a step."""
        while self.step_number < step:
            self.step()

    def plan(self) -> Step:
        """Return the plan of the next step.

        Raises:
            CheckpointError: The run has no further step, although its record has.
        """
        if self.step_number >= self.job.num_steps:
            number = self.step_number
            num_steps = self.job.num_steps
            raise CheckpointError(
                f"{self._folder} records step {number:,}, and its settings lead to {num_steps:,} steps",
                fix="Restore steps.bin and config.yaml.",
            )
        return next(
            self.job.order.steps(self.job.world, start=self.step_number, stop=self.step_number + 1)
        )

    def step(self) -> StepRecord:
        """Replay the next step, as training runs it."""
        self.activate()
        job = self.job
        step = self.plan()
        self.loader.digests = [] if self._has_content else None
        result = advance(job, step, self.loader)
        samples = digest_of_samples(np.concatenate([each.indices for each in step.micro_batches]))
        return record_of(
            step, result, samples, digest_content(job) if self._has_content else NO_DIGEST
        )

    def trace(self, keep: Callable[[Key], bool] = lambda _: False) -> tuple[StepRecord, StepTrace]:
        """Replay the next step, and trace it; keep the tensors whose keys are wanted."""
        self.num_replays += 1
        job = self.job
        recorder = Recorder(
            [job.model], detail=EVERYTHING, keep=keep, is_compiled=job.compiled is not None
        )
        loader = self.loader
        with recorder.traced(job, loader) as traced:
            self.loader = traced
            try:
                record = self.step()
            finally:
                self.loader = loader
        return record, recorder.step({})

    def matches(self, record: StepRecord) -> bool:
        """Return whether a replayed step has the bits of the run's record; True if the run has none."""
        recorded = self.recorded.log.get(record.step)
        return recorded is None or recorded.to_bytes() == record.to_bytes()

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, average and optimizer state, of any shape, by name, without copies."""
        return self._in_order(pack_job(self.job)[0])

    def _in_order(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return tensors in the model's order: files have another. Optimizer state is called PARAMETER:ENTRY."""
        trained = [each for group in self.job.optimizer.param_groups for each in group["params"]]
        indices = {id(parameter): index for index, parameter in enumerate(trained)}
        found = {name: tensors[name] for name in self.job.state() if name in tensors}
        if self.has_average:
            found |= {
                name: tensors[name]
                for name in sorted(tensors)
                if name.startswith(checkpoint.AVERAGE)
            }
        for parameter_name, parameter in self.job.model.named_parameters():
            prefix = f"{checkpoint.OPTIMIZER_STATE}{indices.get(id(parameter))}:"
            for name in sorted(name for name in tensors if name.startswith(prefix)):
                found[f"{parameter_name}:{name.removeprefix(prefix)}"] = tensors[name]
        return found

    def state(self) -> list[str]:
        """Return a digest of each tensor of the state, in the model's order."""
        return [digest(tensor) for tensor in self.tensors().values()]

    def snapshot(self) -> Snapshot:
        """Copy the current state."""
        tensors, plain = pack_job(self.job)
        # Clones: training changes these tensors in place.
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return Snapshot(copies, copy.deepcopy(plain), copy.deepcopy(self.job.progress))

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a state that was copied before."""
        job = self.job
        # Copies again: an optimizer uses the loaded tensors as its own.
        tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        found = checkpoint.unpack(tensors, copy.deepcopy(snapshot.plain))
        job.model.load_state_dict(found.weights)
        load_state(job.optimizer, found.optimizer)
        if job.average is not None:
            job.average.reset(found.average)
        job.progress = copy.deepcopy(snapshot.progress)

    def stored(self, step: int) -> Iterator[tuple[str, Tensors, Tensors]]:
        """Yield each state of the run folder after a number of steps that are done, with the current state.

        Yields:
            The file's name, its tensors, and the current ones, each of any shape, by name.
        """
        if step in self.recorded.checkpoints:
            path = self._folder / "checkpoints" / name_of(step)
            tensors, _ = checkpoint.pack(
                checkpoint.load_checkpoint(path, file_limits(self.job.model))
            )
            yield f"checkpoints/{path.name}", self._in_order(tensors), self.tensors()
        if step == self.recorded.num_steps and self.recorded.weights_sha256:
            yield (
                WEIGHTS,
                read(self._folder / WEIGHTS, self.job.model),
                dict(self.job.final_weights()),
            )
