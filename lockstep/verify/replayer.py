"""Replay of one segment after another on a job, compared step by step with the run's record."""

from __future__ import annotations

import sys
from dataclasses import asdict

from lockstep.cluster import collectives
from lockstep.engine.job import Job
from lockstep.engine.output.recorder import digest_content, record_of, sample_ids
from lockstep.engine.saving import pack_job
from lockstep.engine.step import run_step
from lockstep.engine.validation import validate
from lockstep.provenance.step_log import NO_DIGEST, StepLog
from lockstep.report.console import Console
from lockstep.storage import checkpoint
from lockstep.storage.manifest import WEIGHTS
from lockstep.storage.weights import file_limits, read
from lockstep.verify.compare import Difference, compare_metrics, compare_step, compare_tensors
from lockstep.verify.plan import Plan
from lockstep.verify.segments import Segment


class Replayer:
    """Replays one segment after another.

    Args:
        plan: The plan.
        job: The run, with the state before the first segment.
        log: The run's record of steps, on rank 0.
    """

    def __init__(self, plan: Plan, job: Job, log: StepLog) -> None:
        self._plan, self._job, self._log = plan, job, log
        self._done, self._total = 0, sum(stop - start for start, stop in plan.segments)
        self.console = Console(sys.stderr)

    def replay(self, segment: Segment) -> Difference | None:
        """Replay a segment from the job's current state; return the first difference, on every rank."""
        job = self._job
        loader, steps = job.open_loader(segment.stop)
        if self._plan.has_content:
            loader.digests = []
        ids = sample_ids(job.order, segment.start, segment.stop)
        difference: Difference | None = None
        try:
            for step in steps:
                result = run_step(job, step, loader, 1.0 if difference is not None else 0.0)
                if int(result.flag):  # the step before differed, and this step's flag has informed all ranks
                    break
                if not result.is_finite and not result.is_overflow:
                    job.progress.skipped.append(step.number)
                job.progress.step = step.number + 1
                content = digest_content(job) if self._plan.has_content else NO_DIGEST
                if job.world.is_main:
                    difference = compare_step(self._log.get(step.number), record_of(step, result, next(ids), content))
                    self._done += 1
                    self.console.share_done("replaying", self._done, self._total)
                if job.is_evaluation_due() and job.progress.step in self._plan.evaluations:
                    metrics, _, _ = validate(job)
                    recorded = self._plan.evaluations[job.progress.step]
                    difference = difference or compare_metrics(job.progress.step, recorded, metrics)
        finally:
            loader.close()
        plain = collectives.broadcast_object(job.world, None if difference is None else asdict(difference))
        return self._compare_state(segment.stop) if plain is None else Difference(**plain)

    def _compare_state(self, step: int) -> Difference | None:
        """Compare weights and optimizer state after a segment with the checkpoint or the final weights there."""
        job = self._job
        mine, _ = pack_job(job)
        final = job.final_weights() if self._plan.weights_sha256 and step == self._plan.num_steps else None
        difference: Difference | None = None
        if job.world.is_main:
            path = self._plan.run / "checkpoints" / checkpoint.name_of(step)
            if path.is_dir():
                tensors, _ = checkpoint.pack(checkpoint.load_checkpoint(path, file_limits(job.model)))
                difference = compare_tensors(step, tensors, mine)
            if final is not None and difference is None:
                weights = self._plan.run / WEIGHTS
                difference = compare_tensors(step, read(weights, job.model), final)
        plain = collectives.broadcast_object(job.world, None if difference is None else asdict(difference))
        return None if plain is None else Difference(**plain)
