"""Honest runs: trained on 1 to 4 processes, killed, resumed on others, and verified. None may be found to differ."""

import os
import random
from pathlib import Path

from samebits.cluster.world import World
from samebits.provenance.record import STEPS_FILE
from samebits.replay.verify import Verdict, lines
from samebits.storage.checkpoint import steps
from tests.ranks.rank_pool import RankPool
from tests.verify_trials.runs import (
    NUM_STEPS,
    alone,
    prepare_process,
    train_until,
    verdict_in,
    verified,
    verify_in,
)

OPTIONS = ((), (), ("record.content=true",), ("optim.ema=0.9",), ("optim.name=adamw",), ("batch_norm=sync",))
# Settings that do not change the result, with which a run is resumed.
RESUMED = (
    "eval_batch=7", "eval_every=2", "checkpoint.every=3 steps", "checkpoint.keep=3", "checkpoint.keep_every=5 steps",
    "checkpoint.keep_every=null", "checkpoint.on_change=warn", "record.steps=false", "record.content=true",
    "loader.num_workers=0", "loader.num_workers=1", "loader.prefetch=4", "cluster.timeout_s=300",
    "cluster.join_timeout_s=60", "cluster.stop_timeout_s=20", "cluster.recovery=restart", "watch.nonfinite=skip",
    "watch.hang_timeout_s=100", "watch.replica_check_every=2 steps", "report.every_steps=2",
    "report.profile=10:12", "report.tensorboard=true", "activation_checkpointing=['0']",
)  # fmt: skip
REQUESTS = (
    {"share": 1.0}, {"share": 1.0}, {"share": 0.3}, {"from_scratch": True}, {"steps": (6, 15)}, {"steps": (0, 10)},
)  # fmt: skip


def trust_in(world: World) -> None:
    """Trust the tiny recipe in a rank."""
    if world.is_main:
        prepare_process()


def honest_trial(pool: RankPool, folder: Path, number: int) -> tuple[Verdict, str]:
    """Train, kill, resume and verify one run. Returns the verdict and what was done."""
    chance = random.Random(number)
    options = chance.choice(OPTIONS)
    size, done = chance.randint(1, 4), [" ".join(options) or "plain"]
    for stop_at in sorted(chance.randrange(1, NUM_STEPS) for _ in range(chance.randrange(4))):
        pool.run(size, train_until, folder, options, stop_at, "auto")
        done.append(f"{size} until {stop_at}")
        log, saved = folder / STEPS_FILE, max(steps(folder / "checkpoints"), default=0)
        if chance.random() < 0.3:  # the machine died: the file lost what was not flushed with the last checkpoint
            os.truncate(log, max(56 + 72 * saved, log.stat().st_size - chance.randrange(200)))
            done.append("cut off")
        size = chance.randint(1, 4)
    assert all(pool.run(size, train_until, folder, options, NUM_STEPS, "auto"))
    request, verifiers = chance.choice(REQUESTS), chance.randint(1, 3)
    verdict = verdict_in(pool.run(verifiers, verify_in, folder, request)[0])
    done.append(f"then {size}; verified on {verifiers} by {request}")
    return verdict, ", ".join(done)


def resumed_with(setting: str, folder: Path) -> Verdict:
    """Train a run, resume it after 9 of its steps with another setting, and verify it in this process."""
    for stop_at, resume, options in ((9, "never", ()), (NUM_STEPS, "auto", (setting,))):
        with alone() as world:
            train_until(world, folder, options, stop_at, resume)
    return verified(folder)


def explain(verdict: Verdict) -> str:
    """Return the lines of a verdict that is not as it should be."""
    return "\n".join(lines(verdict))
