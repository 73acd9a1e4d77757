"""One trial of a check: a few real steps of a recipe in one world, with a record of everything that has to be equal.

Each trial runs in new processes. A rank writes its own record; `compare` merges them and finds the first difference.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.check.digest import ModuleRecorder, digests, gradients, optimizer_state
from lockstep.check.frames import is_user
from lockstep.cluster import codec
from lockstep.cluster.env import ALONE, RankAssignment, read_assignment
from lockstep.cluster.signals import exit_with_parent
from lockstep.cluster.world import World
from lockstep.config.load import load, short_path
from lockstep.data.groups import groups_of
from lockstep.data.keyed import IntArray, KeyArray, key
from lockstep.data.loader import Loader, Request
from lockstep.data.order import Step
from lockstep.data.samples import Batch, Samples, as_samples
from lockstep.engine.assemble import init_weights, make_job
from lockstep.engine.dataset_info import dataset_info_for
from lockstep.engine.evaluate import evaluate
from lockstep.engine.job import Job
from lockstep.engine.saving import CheckpointManager
from lockstep.engine.step import run_step
from lockstep.errors import ConfigError, LockstepError
from lockstep.launch.start import join_world
from lockstep.provenance.fingerprint import sample_digests
from lockstep.recipes.catalog import find
from lockstep.storage.run_folder import RunFolder

NUM_STEPS = 6
SAVED_AFTER = 3  # steps before the stop
MAX_DELAY_MS = 30  # of a rank before a micro-batch, where ranks have uneven speed
Record = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """What one world does.

    Attributes:
        name: For the user: "2 processes".
        procs: Processes.
        workers: DataLoader workers of each.
        is_uneven: Whether each rank waits a random time before each micro-batch.
        folder: Folder of the checkpoint; None: none is written or read.
        is_resume: Whether to resume from the checkpoint instead of writing it.
        is_other_hash: Whether it runs in an interpreter of its own, with another PYTHONHASHSEED.
    """

    name: str
    procs: int = 1
    workers: int = 0
    is_uneven: bool = False
    folder: Path | None = None
    is_resume: bool = False
    is_other_hash: bool = False


class Slice(Samples):
    """The first samples of a dataset.

    Args:
        source: The dataset.
        count: Number of samples.
    """

    def __init__(self, source: Any, count: int) -> None:
        samples = as_samples(source)
        self._samples, self._count = samples, min(count, len(samples))
        self.is_costly, self.finish = samples.is_costly, samples.finish
        groups = groups_of(source)
        self.groups = None if groups is None else groups[: self._count]

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read samples; see `Samples.batch`."""
        return self._samples.batch(indices, keys)


class _RecordingLoader:
    """A loader that records each micro-batch's samples, and delays it where ranks have uneven speed."""

    def __init__(self, loader: Loader, recorder: ModuleRecorder, is_uneven: bool, rank: int) -> None:
        self._loader, self._recorder, self._is_uneven, self._rank = loader, recorder, is_uneven, rank
        self.step: Step | None = None
        self.found: dict[int, Record] = {}
        self._current = threading.local()  # with batch_norm=sync, each micro-batch has a thread of its own

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        assert self.step is not None
        leaf = next(each for each in self.step.micro_batches if each.indices is indices)
        if self._is_uneven:
            time.sleep(key(self.step.number, self._rank, leaf.index) % MAX_DELAY_MS / 1000)
        batch = self._loader.batch(indices, keys)
        samples = {str(index): digest for index, digest in sample_digests(batch).items()}
        self.found[leaf.index] = {"samples": samples, "modules": self._recorder.start(), "loss": {}}
        self._current.leaf = leaf.index
        return batch

    def loss(self, loss: Callable[[Any, Batch], Mapping[str, Tensor]]) -> Callable[[Any, Batch], Mapping[str, Tensor]]:
        """Return a loss function that records its terms."""

        def recording(outputs: Any, batch: Batch) -> Mapping[str, Tensor]:
            self._recorder.stop()
            terms = loss(outputs, batch)
            if isinstance(terms, Mapping):
                tensors = {name: term for name, term in terms.items() if isinstance(term, Tensor)}
                self.found[self._current.leaf]["loss"] = digests(tensors)
            return terms

        return recording


def steps_to_run(steps_per_epoch: int) -> list[int]:
    """Return the steps of a trial: the first ones, and if an epoch is longer, those around its end."""
    if steps_per_epoch <= NUM_STEPS - 2:
        return list(range(NUM_STEPS))
    return [*range(SAVED_AFTER), *range(steps_per_epoch - 1, steps_per_epoch - 1 + NUM_STEPS - SAVED_AFTER)]


def run_trial(
    source: str,
    overrides: list[str],
    trial: Trial,
    num_eval: int,
    answers: Path,
    here: RankAssignment | None = None,
) -> int:
    """Run a trial as one process of its world, and write this rank's record or error.

    Args:
        source: The recipe.
        overrides: Its settings.
        trial: What to do.
        num_eval: Validation samples to evaluate.
        answers: Folder of the records.
        here: Which process this is; None: read from the environment.
    """
    here = here or read_assignment(os.environ) or ALONE
    shuffle_generators()
    with quiet():
        answer = guarded(lambda: _run(source, overrides, trial, num_eval, here))
    (answers / f"rank-{here.rank}").write_bytes(codec.encode(answer))
    return 0


def _run(source: str, overrides: list[str], trial: Trial, num_eval: int, here: RankAssignment) -> Record:
    found = find(source)
    config = load(found.config_class, found.layers, [*overrides, f"loader.num_workers={trial.workers}"]).config
    with join_world(here, config) as world:
        dataset_info = dataset_info_for(found, config, world, None)

        def build() -> Any:
            return found.build(config, dataset_info)

        job = make_job(config, build, world, is_restart=True)
        manager = None
        if trial.folder is not None:
            manager = CheckpointManager(RunFolder(trial.folder), config.checkpoint, world)
        if trial.is_resume:
            assert manager is not None
            manager.restore(job, "auto", lambda error: None)
            start: Record = {}
        else:
            init_weights(job, build)
            start = {"dataset info": {"": json.dumps(dataset_info)}, "initial weights": digests(job.model.state_dict())}
        steps = _steps(job, trial, manager, world)
        return {"start": start, "steps": steps, "evaluation": _evaluation(job, trial, num_eval)}


def _steps(job: Job, trial: Trial, manager: CheckpointManager | None, world: World) -> dict[str, Record]:
    order = job.order
    numbers = steps_to_run(order.steps_per_epoch)
    numbers = [number for number in numbers if number < job.num_steps]
    numbers = numbers[SAVED_AFTER:] if trial.is_resume else numbers
    plans = [next(order.steps(world, start=number, stop=number + 1)) for number in numbers]

    def requests() -> Iterator[Request]:
        for plan in plans:
            yield from ((leaf.indices, leaf.keys) for leaf in plan.micro_batches)

    config = job.config
    loader = Loader(
        job.train_data, requests, world.device, num_workers=trial.workers, channels_last=config.channels_last
    )
    recorder = ModuleRecorder(job.model)
    recording = _RecordingLoader(loader, recorder, trial.is_uneven, world.rank)
    parts = job.parts
    job.parts = dataclasses.replace(parts, loss=recording.loss(parts.loss))
    found: dict[str, Record] = {}
    try:
        for done, plan in enumerate(plans, start=1):
            recording.step, recording.found = plan, {}
            run_step(job, plan, recording, 0.0)  # type: ignore[arg-type]  # it has Loader's batch
            job.progress.step = plan.number + 1
            found[str(plan.number)] = {
                "micro-batches": {str(leaf): parts for leaf, parts in recording.found.items()},
                "gradients": gradients(job.model),
                "buffers": digests(dict(job.model.named_buffers())),
                "weights": digests(dict(job.model.named_parameters())),
                "optimizer": optimizer_state(job.model, job.optimizer),
            }
            if manager is not None and not trial.is_resume and done == SAVED_AFTER:
                manager.save(job)
                manager.wait()
    finally:
        job.parts = parts  # the evaluation is not recorded
        recorder.remove()
        loader.close()
    return found


def _evaluation(job: Job, trial: Trial, num_eval: int) -> Record:
    with job.evaluated_weights():
        metrics, _ = evaluate(
            job.model,
            Slice(job.eval_data, num_eval),
            job.world,
            loss=job.parts.loss,
            infer=job.parts.infer,
            metric=job.parts.metric,
            batch_size=job.config.eval_batch,
            num_workers=trial.workers,
            channels_last=job.config.channels_last,
        )
    return {name: repr(value) for name, value in metrics.items()}


def shuffle_generators() -> None:
    """Seed numpy's and Python's global generators from entropy, as in a fresh interpreter.

    The fork server has imported numpy, so its children would all start from the same state.
    """
    np.random.seed()
    random.seed()


@contextmanager
def quiet() -> Iterator[None]:
    """Discard what a recipe prints: it would appear once for each process of each trial."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def guarded(run: Callable[[], Record]) -> Record:
    """Call a function that runs the user's code; an error becomes `{"error": ...}` with its line."""
    try:
        return run()
    except LockstepError as error:
        return {"error": error, "line": user_line_of(error)}
    except Exception as error:  # a bug in the recipe
        if os.environ.get("LOCKSTEP_DEBUG") == "1":
            traceback.print_exception(error, file=sys.__stderr__)
        line = user_line_of(error)
        found = ConfigError(
            f"the recipe raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}",
            where=f"{short_path(Path(line[0]))}:{line[1]}" if line else None,
            fix="Correct the recipe. LOCKSTEP_DEBUG=1 shows the traceback.",
        )
        return {"error": found, "line": line}


def user_line_of(error: BaseException) -> list[Any] | None:
    """Return file and line of the user's innermost frame of an error, if it has one."""
    chain: BaseException | None = error
    while chain is not None:
        lines = [[each.filename, each.lineno] for each in traceback.extract_tb(chain.__traceback__)]
        if users := [line for line in lines if is_user(str(line[0]))]:
            return users[-1]
        chain = chain.__cause__
    return None


def main(arguments: list[str]) -> int:
    """Run a trial of one process in an interpreter of its own, for another PYTHONHASHSEED."""
    exit_with_parent()
    source, overrides, num_eval, answers = json.loads(arguments[0])
    return run_trial(source, overrides, Trial("", is_other_hash=True), num_eval, Path(answers), ALONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
