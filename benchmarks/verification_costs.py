"""What the record costs a step, and what a verification costs compared with training. In one process, one thread.

CPU time, not wall-clock time: other work on the machine changes it less, and one thread that waits for nothing has the
same of both.
"""

import contextlib
import io
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from benchmarks.small_networks import job_of
from samebits.data.loader import Loader
from samebits.data.order import Step
from samebits.engine import loop
from samebits.engine.job import Job
from samebits.engine.opening import opened
from samebits.engine.output.recorder import StepRecorder, sample_ids
from samebits.engine.output.reports import Reports
from samebits.engine.progress import StepResult
from samebits.engine.run_spec import RunSpec
from samebits.engine.step import run_step
from samebits.provenance.record import STEPS_FILE
from samebits.recipes.catalog import find
from samebits.replay import segments as replay
from samebits.replay.verify import Request, verify
from tests.verify_trials.runs import alone

GLOBAL_BATCH = 64


def cost_of_record(name: str, folder: Path, num_steps: int) -> dict[str, float]:
    """Measure steps with and without a record, in turn.

    Returns:
        Milliseconds of a step without it (median), of the record itself (mean, with the order of samples that several
        processes compute for it), and the differences of neighboring steps with and without it (median), as shares of
        a step; bytes per step.
    """
    with alone() as world:
        job = job_of(name, world, num_samples=640, global_batch=GLOBAL_BATCH, epochs=1000)
        path = folder / f"{name}-{STEPS_FILE}"
        recorder = StepRecorder(job, path)
        loader, steps = job.open_loader(job.num_steps)
        recorder.start(job)
        ids = sample_ids(job.order, 0, job.num_steps)
        alone_s, record_s, ids_s, pairs = [], [], [], []
        for step in _first(steps, 2 * num_steps + 4):
            started = time.process_time()
            result = run_step(job, step, loader)
            stepped = time.process_time()
            # Each step is recorded, as the chain has no gaps; only the second of a pair counts it as its own.
            recorder.step(job, step, result)
            recorded = time.process_time()
            next(ids)
            ids_s.append(time.process_time() - recorded)
            alone_s.append(stepped - started)
            record_s.append(recorded - stepped)
        loader.close()
        recorder.close()
    warm = slice(4, None)
    alone_s, record_s, ids_s = alone_s[warm], record_s[warm], ids_s[warm]
    pairs = [
        (later + record - first) / first
        for first, later, record in zip(alone_s[::2], alone_s[1::2], record_s[1::2], strict=False)
    ]
    step_s = statistics.median(alone_s)
    return {
        "step_ms": 1000 * step_s,
        "record_us": 1e6 * statistics.fmean(record_s),
        "share": statistics.fmean(record_s) / step_s,
        "share_in_worlds": (statistics.fmean(record_s) + statistics.fmean(ids_s)) / step_s,
        "paired": statistics.median(pairs),
        "bytes": (path.stat().st_size - 56) / (2 * num_steps + 4),
    }


def _first(steps: Iterator[Step], count: int) -> Iterator[Step]:
    return (step for step, _ in zip(steps, range(count), strict=False))


def cost_of_verification(folder: Path, epochs: int = 20) -> dict[str, float]:
    """Train digits and verify it: every step, 1% five times, and every step by two verifiers."""
    found = find("digits")
    overrides = [f"epochs={epochs}", "checkpoint.keep_every=5 steps", "report.tensorboard=false", "device=cpu"]
    config = found.load(overrides).config
    training_s = 0.0

    def timed(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        nonlocal training_s
        started = time.process_time()
        result = run_step(job, step, loader, flag)
        training_s += time.process_time() - started
        return result

    spec = RunSpec("digits", config, {}, folder, "never", False, time.time())
    with (
        alone() as world,
        patch.object(loop, "run_step", timed),
        patch.object(Reports, "_draw", lambda *_: None),
        contextlib.redirect_stdout(io.StringIO()),
        opened(spec, found, world) as run,
    ):
        assert loop.train(run)
    shares = []
    for number in range(5):
        seconds, share = _verify(Request(folder, share=0.01, challenge=str(number)))
        shares.append(seconds / training_s / share * 0.01)
    every, _ = _verify(Request(folder))
    parts = [_verify(Request(folder, part=(part, 2)))[0] for part in (1, 2)]
    return {
        "training_s": training_s,
        "steps": epochs * 23,
        "one_percent": statistics.median(shares),
        "one_percent_worst": max(shares),
        "every": every / training_s,
        "two": max(parts) / every,
    }


def _verify(request: Request) -> tuple[float, float]:
    # The replay's own measure: restoring, replaying, evaluating and comparing.
    clock = SimpleNamespace(perf_counter=time.process_time)
    with patch.object(replay, "time", clock), contextlib.redirect_stderr(io.StringIO()):
        verdict = verify(request)
    assert verdict.is_verified
    return verdict.seconds, verdict.share
