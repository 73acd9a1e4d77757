"""One trial of a check: a few real steps of a recipe in one world, with a record of everything that has to be equal.

Each trial runs in new processes. A rank writes its own record; `compare` merges them and finds the first difference.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from samebits.bench.bench import opened
from samebits.check.digest import digests
from samebits.check.guard import Record, guarded, quiet, shuffle_generators
from samebits.check.sizes import NUM_EVAL
from samebits.check.steps import Trial, run_steps
from samebits.cluster import codec
from samebits.cluster.env import ALONE, RankAssignment
from samebits.cluster.signals import exit_with_parent
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch, Samples, as_samples, groups_of
from samebits.engine.assemble import init_weights
from samebits.engine.checkpoints.saving import CheckpointManager
from samebits.engine.job import Job
from samebits.engine.validation import evaluate_set
from samebits.storage.run_folder import RunFolder
from samebits.watchdog.detector import HangDetector


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


def run_trial(source: str, overrides: list[str], trial: Trial, here: RankAssignment | None = None) -> Record:
    """Run a trial as one process of its world, and return this rank's record or error.

    Args:
        source: The recipe.
        overrides: Its settings.
        trial: What to do.
        here: Which process this is; None: read from the environment.
    """
    shuffle_generators()
    with quiet():
        return guarded(lambda: _run(source, overrides, trial, here))


def _run(source: str, overrides: list[str], trial: Trial, here: RankAssignment | None) -> Record:
    with opened(source, [*overrides, f"loader.num_workers={trial.workers}"], here) as bench:
        world, config, manager = bench.world, bench.config, None
        job = bench.job(is_restart=True)
        if trial.folder is not None:
            manager = CheckpointManager(RunFolder(trial.folder), config.checkpoint, world)
        if trial.is_resume:
            assert manager is not None
            manager.restore(job, "auto", lambda error: None)
            start: Record = {}
        else:
            init_weights(job, bench.build)
            info = {"": json.dumps(bench.dataset_info)}
            start = {"dataset info": info, "initial weights": digests(job.model.state_dict())}
        # The stacks of a hang stay: the launcher's scratch folder is removed.
        stacks = Path(tempfile.gettempdir()) / f"samebits-stacks-{os.getppid()}"
        with HangDetector(world, config.watch.hang_timeout_s, stacks):
            steps = run_steps(job, trial, manager)
            return {"start": start, "steps": steps, "evaluation": _evaluation(job)}


def _evaluation(job: Job) -> Record:
    with job.evaluated_weights():
        metrics, _ = evaluate_set(job, Slice(job.eval_data, NUM_EVAL))
    return {name: repr(value) for name, value in metrics.items()}


def main(arguments: list[str]) -> int:
    """Run a trial of one process in an interpreter of its own, for another PYTHONHASHSEED."""
    # This interpreter has no launcher that would end it.
    exit_with_parent()
    source, overrides, file = json.loads(arguments[0])
    answer = codec.encode(run_trial(source, overrides, Trial("", is_other_hash=True), ALONE))
    Path(file).write_bytes(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
