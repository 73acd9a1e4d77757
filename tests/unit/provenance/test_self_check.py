"""Behaviour of recipes that makes a result depend on how a run went: exact mode refuses it, or makes it exact."""

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samebits.cluster.world import alone
from samebits.config.schema import CheckpointConfig, OptimConfig, RunConfig
from samebits.data.samples import DatasetSamples
from samebits.engine.build import make_job
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.job import Job
from samebits.engine.parts import Parts
from samebits.errors import ConfigError
from samebits.provenance.self_check import try_micro_batch
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import weights_sha256
from tests.in_loop import train_alone
from tests.ranks.runs_in_ranks import Quiet
from tests.unit.provenance import habits
from tests.unit.provenance.habits import Data, Net, parts


def job_of(made: Parts, *, is_restart: bool = False, **more: Any) -> Job:
    config = RunConfig(
        recipe="test", epochs=2, global_batch=4, micro_batch=2, device="cpu", optim=OptimConfig(lr=0.1),
        checkpoint=CheckpointConfig(every="1 step", keep=1), **more,
    )  # fmt: skip
    return make_job(config, lambda: made, alone("cpu"), is_restart=is_restart)


REFUSED = {
    "a counter in the module": (lambda: parts(habits.Counts), "gradient of layer.weight"),
    "a torch generator of its own": (lambda: parts(habits.OwnTorch), "loss term loss"),
    "a numpy generator of its own": (lambda: parts(habits.OwnNumpy), "loss term loss"),
    "a Python generator of its own": (lambda: parts(habits.OwnPython), "loss term loss"),
    "the clock in forward": (lambda: parts(habits.Clock), "loss term loss"),
    "random numbers of the system": (lambda: parts(habits.Secret), "loss term loss"),
    "a memory of the batch before": (lambda: parts(habits.Remembers), "loss term loss"),
    "a forward pass that writes into a parameter": (lambda: parts(habits.Writes), "wrote into parameter layer.weight"),
    "one that does so unseen by autograd": (lambda: parts(habits.WritesNoGradient), "wrote into parameter layer"),
    "a loss with a running mean": (lambda: parts(loss=habits.RunningMean()), "loss term loss"),
    "a dataset that counts its calls": (lambda: parts(data=habits.CountingData), "training sample"),
    "a map-style dataset that counts its calls": (
        lambda: parts(data=lambda: DatasetSamples(habits.CountingItems())), "training sample",
    ),
    "a dataset that changes samples in place": (lambda: parts(data=habits.ChangingData), "training sample"),
    "a dataset with a generator of its own": (lambda: parts(data=habits.OwnRngData), "training sample"),
    "a dataset that reads the clock": (lambda: parts(data=habits.ClockData), "training sample"),
    "evaluation samples that change": (lambda: parts(eval_data=habits.OwnRngData), "evaluation sample"),
}  # fmt: skip
EXACT = {
    "numpy in forward": lambda: parts(habits.GlobalNumpy),
    "random in forward": lambda: parts(habits.GlobalPython),
    "numpy in a data set's batch": lambda: parts(data=habits.NumpyData),
    "random in a data set's batch": lambda: parts(data=habits.PythonData),
    "torch in a data set's batch": lambda: parts(data=habits.TorchData),
}


@pytest.mark.parametrize("habit", REFUSED)
def test_exact_mode_refuses_and_names(habit: str) -> None:
    make, named = REFUSED[habit]
    with pytest.raises(ConfigError) as caught:
        job_of(make())
    assert named in str(caught.value)
    assert "had other values when it was read again" in caught.value.what or "computed again" in caught.value.what
    assert caught.value.slots["fix"].startswith("Draw from torch's")


@pytest.mark.parametrize("habit", ["a counter in the module", "a dataset that counts its calls"])
def test_a_restart_does_nothing_twice(habit: str) -> None:
    make, _ = REFUSED[habit]
    job_of(make(), is_restart=True)


def weights_of(folder: Path, habit: str, stop_at: int | None = None) -> str:
    """The hash of a run's weights, stopped once and gone on with in a new job."""
    for last in [stop_at, None] if stop_at is not None else [None]:
        random.seed(time.time_ns())
        np.random.seed(time.time_ns() & 0xFFFFFFFF)
        torch.manual_seed(time.time_ns())
        job, run = job_of(EXACT[habit]()), RunFolder(folder)
        run.open()
        checkpoints = CheckpointManager(run, job.config.checkpoint, job.world)
        checkpoints.restore(job, "auto", print)
        train_alone(job, checkpoints, Quiet(), lambda last=last, job=job: job.progress.step == last)
        run.close()
    return weights_sha256(job.model.state_dict())


@pytest.mark.parametrize("habit", EXACT)
def test_exact_mode_makes_exact(habit: str, tmp_path: Path) -> None:
    assert weights_of(tmp_path / "straight", habit) == weights_of(tmp_path / "stopped", habit, stop_at=2)


def test_the_process_id_in_forward_shows_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = job_of(parts(habits.Pid)).fingerprint.trial
    monkeypatch.setattr(os, "getpid", lambda: 123_456)
    there = job_of(parts(habits.Pid)).fingerprint.trial
    assert {name for name in here if here[name] != there[name]} == {
        "loss of a trial micro-batch",
        "gradients of a trial micro-batch",
    }


def test_the_trial_leaves_a_model_and_the_generators_as_they_were() -> None:
    made = parts()
    made.model.norm = nn.BatchNorm1d(3)
    made.model.forward = lambda inputs: made.model.layer(made.model.norm(inputs))  # type: ignore[method-assign]
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    random.seed(5)
    states = random.getstate(), torch.get_rng_state()
    batch = Data().batch(np.arange(4), np.arange(4).astype(np.uint64))
    assert try_micro_batch(made.model, made.loss, batch, 7, torch.device("cpu"), twice=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.model.state_dict().items())
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert made.model.training
    assert states[0] == random.getstate()
    assert states[1].equal(torch.get_rng_state())


def test_an_error_in_the_forward_pass_is_left_to_the_first_step() -> None:
    class Broken(Net):
        def scale(self) -> float:
            raise RuntimeError("no such kernel")

    assert job_of(parts(Broken)).fingerprint.trial == {}
