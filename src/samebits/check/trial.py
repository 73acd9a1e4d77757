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

from samebits.check.digest import digests
from samebits.check.guard import Record, guarded, quiet, shuffle_generators
from samebits.check.steps import Trial, run_steps
from samebits.cluster import codec
from samebits.cluster.env import ALONE, RankAssignment, read_assignment
from samebits.cluster.signals import exit_with_parent
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch, Samples, as_samples, groups_of
from samebits.engine.assemble import init_weights, make_job
from samebits.engine.checkpoints.saving import CheckpointManager
from samebits.engine.dataset_info import dataset_info_for
from samebits.engine.evaluate import evaluate
from samebits.engine.job import Job
from samebits.launch.start import join_world
from samebits.recipes.catalog import find
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
    # The stacks of a hang stay when the scratch folder of the answers is removed.
    stacks = Path(tempfile.gettempdir()) / f"samebits-stacks{answers.parent.name}"
    shuffle_generators()
    with quiet():
        answer = guarded(lambda: _run(source, overrides, trial, num_eval, here, stacks))
    (answers / f"rank-{here.rank}").write_bytes(codec.encode(answer))
    return 0


def _run(source: str, overrides: list[str], trial: Trial, num_eval: int, here: RankAssignment, stacks: Path) -> Record:
    found = find(source)
    config = found.load([*overrides, f"loader.num_workers={trial.workers}"]).config
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
        with HangDetector(world, config.watch.hang_timeout_s, stacks):
            steps = run_steps(job, trial, manager, world)
            return {"start": start, "steps": steps, "evaluation": _evaluation(job, trial, num_eval)}


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


def main(arguments: list[str]) -> int:
    """Run a trial of one process in an interpreter of its own, for another PYTHONHASHSEED."""
    # This interpreter has no launcher that would end it.
    exit_with_parent()
    source, overrides, num_eval, answers = json.loads(arguments[0])
    return run_trial(source, overrides, Trial("", is_other_hash=True), num_eval, Path(answers), ALONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
