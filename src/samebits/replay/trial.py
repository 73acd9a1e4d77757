"""One trial of a check: a few real steps of a recipe in one world, with a record of everything that has to be equal.

Each trial runs in new processes. A rank writes its own record; `compare` merges them and finds the first difference.
"""

import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from samebits.bench.bench import advance, joined
from samebits.cluster import collectives
from samebits.cluster.env import ALONE, RankAssignment
from samebits.cluster.signals import exit_with_parent
from samebits.config.schema import RunConfig
from samebits.data.keyed import IntArray, KeyArray, key
from samebits.data.order import MicroBatch
from samebits.data.samples import Batch, Samples, as_samples, groups_of
from samebits.engine.build import dataset_info_for, init_weights, make_job
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.evaluate import evaluate_set
from samebits.engine.job import Job
from samebits.errors import ConfigError, SamebitsError
from samebits.frames import Line, is_user
from samebits.plain_file import short_path
from samebits.provenance.fingerprint import describe_kernels
from samebits.recipes.catalog import find
from samebits.replay.trace import CALLS, OPERATIONS, Recorder, StepTrace, Trace, digests
from samebits.storage.run_folder import RunFolder
from samebits.watchdog.detector import HangDetector

# Sizes of a check: small micro-batches, so that a few steps take seconds on any recipe.


MICRO_BATCH = 4
EVAL_BATCH = 4
# Micro-batches of a step, the first that fits: 2 and 3 processes get unequal shares of 5.
NUM_MICRO_BATCHES = (5, 4, 3, *range(6, 100))
NUM_EVAL = 6 * EVAL_BATCH  # validation samples
TIMEOUT_S = 120
# Come before the user's settings. A hang is found before the others' collectives time out, and named by its rank.
TIMEOUTS = (
    f"cluster.timeout_s={TIMEOUT_S}",
    f"cluster.join_timeout_s={TIMEOUT_S}",
    f"watch.hang_timeout_s={3 * TIMEOUT_S // 4}",
)


def small_sizes(config: RunConfig, num_samples: int) -> list[str]:
    """Return settings that make a recipe's steps small and keep everything else.

    No step has a single sample, which batch norm could not normalize.
    """
    micro = min(config.micro_batch, MICRO_BATCH)
    steps = [micro * count for count in NUM_MICRO_BATCHES]
    step = next((step for step in steps if num_samples % step != 1), steps[0])
    return [
        f"micro_batch={micro}",
        f"global_batch={step}",
        f"eval_batch={min(config.eval_batch, EVAL_BATCH)}",
        f"epochs={max(config.epochs, 6)}",
        "compile=false",
        "activation_checkpointing=false",
    ]


# Run the user's code in a process of its own: quietly, with fresh generators, and with errors as values.


RAISED = "the recipe raised"  # the start of the error for an exception in the user's code


def shuffle_generators() -> None:
    """Seed numpy's and Python's global generators from entropy, as in a fresh interpreter.

    The fork server has imported numpy, so its children would all start from the same state.
    """
    np.random.seed()
    random.seed()


@contextmanager
def quiet() -> Iterator[None]:
    """Discard what a recipe prints: it would appear once for each process of each trial."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


def guarded(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call a function that runs the user's code; an error becomes `{"error": ...}` with its line."""
    try:
        return run()
    except SamebitsError as error:
        return {"error": error, "line": user_line_of(error)}
    except Exception as error:  # a bug in the recipe
        if os.environ.get("SAMEBITS_DEBUG") == "1":
            # The stream of before `quiet`, which discards standard error.
            traceback.print_exception(error, file=sys.__stderr__)
        line = user_line_of(error)
        found = ConfigError(
            f"{RAISED} {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}",
            where=f"{short_path(Path(line[0]))}:{line[1]}" if line else None,
            fix="Correct the recipe. SAMEBITS_DEBUG=1 shows the traceback.",
        )
        return {"error": found, "line": line}


def user_line_of(error: BaseException) -> Line | None:
    """Return file and line of the user's innermost frame of an error, if it has one."""
    # Errors that were raised `from` another one: the user's frame may be in the first of them.
    chain: BaseException | None = error
    while chain is not None:
        lines = [
            (each.filename, each.lineno or 0) for each in traceback.extract_tb(chain.__traceback__)
        ]
        if users := [line for line in lines if is_user(line[0])]:
            return users[-1]
        chain = chain.__cause__
    return None


NUM_STEPS = 6
SAVED_AFTER = 3  # steps before the stop
MAX_DELAY_MS = 30  # of a rank before a micro-batch, where ranks have uneven speed


@dataclass(frozen=True)
class Trial:
    """What one world does."""

    name: str  #: For the user: "2 processes".
    procs: int = 1  #: Processes.
    workers: int = 0  #: DataLoader workers of each.
    is_uneven: bool = False  #: Whether each rank waits a random time before each micro-batch.
    folder: Path | None = None  #: Folder of the checkpoint; None: none is written or read.
    is_resume: bool = False  #: Whether to resume from the checkpoint instead of writing it.
    num_steps: int = 0  #: Number of steps from the first one on; 0: those of a check.
    is_other_hash: bool = (
        False  #: Whether it runs in an interpreter of its own, with another PYTHONHASHSEED.
    )


class Slice(Samples):
    """The first samples of a dataset."""

    def __init__(self, source: Any, count: int) -> None:
        samples = as_samples(source)
        self._samples = samples
        self._count = min(count, len(samples))
        self.is_costly = samples.is_costly
        self.finish = samples.finish
        groups = groups_of(source)
        self.groups = None if groups is None else groups[: self._count]

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read samples; see `Samples.batch`."""
        return self._samples.batch(indices, keys)


def run_trial(
    source: str, overrides: list[str], trial: Trial, here: RankAssignment | None = None
) -> dict[str, Any]:
    """Run a trial as one process of its world, and return this rank's record or error.

    Args:
        here: Which process this is; None: read from the environment.
    """
    shuffle_generators()
    with quiet():
        return guarded(lambda: _run(source, overrides, trial, here))


def _run(
    source: str, overrides: list[str], trial: Trial, here: RankAssignment | None
) -> dict[str, Any]:
    recipe = find(source)
    config = recipe.load([*overrides, f"loader.num_workers={trial.workers}"]).config
    with joined(config, here) as world:
        manager = None
        known = dataset_info_for(recipe, config, world, None)
        build = partial(recipe.build, config, known)
        job = make_job(config, build, world, is_restart=True)
        if trial.folder is not None:
            manager = CheckpointManager(RunFolder(trial.folder), config.checkpoint, world)
        if trial.is_resume:
            assert manager is not None
            manager.restore(job, "auto", lambda error: None)
            start = {}
        else:
            init_weights(job)
            info = {"": json.dumps(known)}
            start = {"dataset info": info, "initial weights": digests(job.model.state_dict())}
        # The stacks of a hang stay: the launcher's scratch folder is removed.
        stacks = Path(tempfile.gettempdir()) / f"samebits-stacks-{os.getppid()}"
        with HangDetector(world, config.watch.hang_timeout_s, stacks):
            detail = OPERATIONS if trial.num_steps else CALLS
            recorder = Recorder([job.model], [job.optimizer], detail=detail)
            steps = run_steps(job, trial, manager, recorder)
            with job.evaluated_weights():
                metrics, _ = evaluate_set(job, Slice(job.eval_data, NUM_EVAL))
            evaluation = {name: repr(value) for name, value in metrics.items()}
            environment = describe_kernels(world.device, config.kernels)
            return Trace(start, steps, evaluation, environment).to_plain()


def steps_to_run(steps_per_epoch: int) -> list[int]:
    """Return the steps of a trial: the first ones, and if an epoch is longer, those around its end."""
    if steps_per_epoch <= NUM_STEPS - 2:
        return list(range(NUM_STEPS))
    return [
        *range(SAVED_AFTER),
        *range(steps_per_epoch - 1, steps_per_epoch - 1 + NUM_STEPS - SAVED_AFTER),
    ]


def run_steps(
    job: Job, trial: Trial, manager: CheckpointManager | None, recorder: Recorder
) -> dict[str, StepTrace]:
    """Run a trial's steps, or those after the stop, and return their traces by step.

    Args:
        manager: Writes the checkpoint in the middle; None: none is written.
    """
    order = job.order
    numbers = list(range(trial.num_steps)) or steps_to_run(order.steps_per_epoch)
    numbers = [number for number in numbers if number < job.num_steps]
    numbers = numbers[SAVED_AFTER:] if trial.is_resume else numbers
    found: dict[str, StepTrace] = {}
    loader, plans = job.open_loader(
        steps=(next(order.steps(job.world, start=number, stop=number + 1)) for number in numbers)
    )

    def wait(micro_batch: MicroBatch) -> None:
        # By a key, so that a trial can be repeated with the same delays.
        delay = key(micro_batch.step, job.world.rank, micro_batch.index)
        time.sleep(delay % MAX_DELAY_MS / 1000 if trial.is_uneven else 0.0)

    try:
        with recorder.traced(job, loader, wait) as traced:
            for plan in plans:
                result = advance(job, plan, traced)
                values = {"loss": result.loss, "norm": result.norm, "lr": result.lr}
                found[str(plan.number)] = recorder.step(values)
                if manager is not None and not trial.is_resume and len(found) == SAVED_AFTER:
                    manager.save(job)
                    manager.wait()
    finally:
        loader.close()
    return found


def main(arguments: list[str]) -> int:
    """Run a trial of one process in an interpreter of its own; see `examine.in_interpreter`."""
    # This interpreter has no launcher that would end it.
    exit_with_parent()
    source, overrides, file, num_steps = json.loads(arguments[0])
    trial = Trial("", is_other_hash=True, num_steps=num_steps)
    answer = collectives.encode(run_trial(source, overrides, trial, ALONE))
    Path(file).write_bytes(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
