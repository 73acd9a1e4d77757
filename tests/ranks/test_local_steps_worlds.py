"""Local steps over real processes: one hash for a number of sites, whatever the number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samebits.config.sync import SyncConfig
from samebits.data.order import Order
from samebits.storage.checkpoint import load_checkpoint
from tests.ranks.local_steps_in_ranks import messages, trained, trained_plain
from tests.ranks.networks import make, samples
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import NUM_SAMPLES, carry_out, settings

FULL = pytest.mark.full
DILOCO = {"outer_momentum": 0.9, "outer_lr": 0.7}
MOMENTUM = {"optim": {"ema": 0.9}}
ADAM = {"optim": {"name": "adam"}}


def local(sync: dict[str, Any] | None = None, every: str = "1 steps", **more: Any) -> Any:
    """Two epochs of four global batches: outer steps of three local steps and of one."""
    return settings(every, sync=SyncConfig(**{"every": 3, **(sync or {})}), **more)


# A step's micro-batches are 6, 6, 6 and 2. With four sites, those of the last one have none or one.
@pytest.mark.parametrize(
    ("sync", "more", "worlds"),
    [
        ({}, MOMENTUM, (2, 3)),
        ({"sites": 3, **DILOCO}, ADAM, (2, 4)),
        pytest.param({}, MOMENTUM, (4,), marks=FULL),
        *(
            pytest.param({"sites": sites, "inner_state": kept, **outer}, more, (2, 3, 4), marks=FULL)
            for sites, kept, outer, more in [
                (2, "reset", DILOCO, ADAM),
                (3, "reset", {}, MOMENTUM),
                (4, "average", DILOCO, {"optim": {"name": "adamw", "weight_decay": 0.1}}),
                (5, "average", {}, {"optim": {"name": "lamb"}, "micro_batch": 2}),
                (2, "average", DILOCO, {"precision": "bf16", "activation_checkpointing": ("layers.0",)}),
            ]
        ),
    ],
)
def test_the_weights_depend_on_the_sites_and_not_on_the_processes(
    pool: RankPool, tmp_path: Path, sync: dict[str, Any], more: Any, worlds: tuple[int, ...]
) -> None:
    (expected,) = pool.run(1, carry_out, tmp_path / "one", local(sync, **more))
    assert expected[2]
    assert (expected[1]["step"], expected[1]["num_samples"]) == (4, 2 * NUM_SAMPLES)
    for world in worlds:
        assert pool.run(world, carry_out, tmp_path / str(world), local(sync, **more)) == [expected] * world


def test_other_sites_and_intervals_train_to_other_weights(pool: RankPool, tmp_path: Path) -> None:
    kinds = [{}, {"sites": 3}, {"every": 2}, DILOCO, {"inner_state": "reset"}]
    hashes = [pool.run(1, carry_out, tmp_path / str(at), local(kind))[0][0] for at, kind in enumerate(kinds)]
    assert len(set(hashes)) == len(kinds)


@pytest.mark.parametrize("sync", [{"every": 1}, {"sites": 1}, {"every": 1, **DILOCO}])
def test_one_site_or_an_average_in_each_step_leaves_every_bit_as_it_is(
    pool: RankPool, tmp_path: Path, sync: dict[str, Any]
) -> None:
    (plain,) = pool.run(1, carry_out, tmp_path / "plain", settings())
    assert pool.run(1, carry_out, tmp_path / "run", local(sync, every="3 steps")) == [plain]


@pytest.mark.parametrize(
    ("sync", "more", "stop_at"),
    [
        (DILOCO, ADAM, 1),
        *(pytest.param(DILOCO, ADAM, stop_at, marks=FULL) for stop_at in (0, 2)),
        *(pytest.param({"inner_state": "reset", **DILOCO}, MOMENTUM, stop_at, marks=FULL) for stop_at in (0, 1)),
        pytest.param({}, MOMENTUM, 2, marks=FULL),
    ],
)
def test_a_stopped_run_resumes_on_other_processes_to_the_same_weights(
    pool: RankPool, tmp_path: Path, sync: dict[str, Any], more: Any, stop_at: int
) -> None:
    (straight,) = pool.run(1, carry_out, tmp_path / "straight", local(sync, **more))
    stopped = pool.run(2, carry_out, tmp_path / "run", local(sync, **more), "auto", stop_at)
    assert {(result[1]["step"], result[2]) for result in stopped} == {(stop_at + 1, False)}
    kept = load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{stop_at + 1:06}").optimizer["state"]
    assert all(("outer_momentum" in entries) == bool(sync.get("outer_momentum")) for entries in kept.values())
    assert pool.run(3, carry_out, tmp_path / "run", local(sync, **more)) == [straight] * 3


@pytest.mark.parametrize("in_chunks", [True, pytest.param(False, marks=FULL)])
def test_parts_used_by_some_sites_only_and_counters_are_averaged(pool: RankPool, in_chunks: bool) -> None:
    arguments = (SyncConfig(every=3, sites=3, **DILOCO), {"name": "adam", "lr": 0.01}, "gaps", in_chunks)
    (expected,) = pool.run(1, trained, *arguments)
    _, buffers, with_state = expected
    assert buffers == {"seen": [8, 8, 8]}  # once in each local step
    assert 0 < len(with_state) < 10  # not of the unused part
    for world in (2, 4):
        assert pool.run(world, trained, *arguments) == [expected] * world


def poisoned(number: int) -> int:
    """A sample of the last micro-batch of a global batch, which belongs to the last site."""

    class Alone:
        rank, size = 0, 1

    (plan,) = Order(NUM_SAMPLES, 16, 3, seed=0).steps(Alone(), start=number, stop=number + 1)
    return int(plan.micro_batches[-1].indices[0])


def test_a_local_step_that_is_not_finite_is_named_and_can_be_skipped(pool: RankPool, tmp_path: Path) -> None:
    sample = poisoned(1)
    texts = {world: pool.run(world, carry_out, tmp_path / f"stop-{world}", local(), "auto", -1, (sample, 99))
             for world in (1, 3)}  # fmt: skip
    for world, said in texts.items():
        assert len(set(said)) == 1
        # The second local step; its site has three micro-batches.
        assert f"loss is not finite at step 0 on rank {world - 1}, micro-batch 2" in said[0]
        assert f"samples {sample}" in said[0] or f" {sample} " in said[0]
        assert "the step changed nothing" in said[0]
    skip = local(nonfinite="skip")
    (expected,) = pool.run(1, carry_out, tmp_path / "one", skip, "auto", -1, (sample, 99))
    assert expected[1]["skipped"] == [0, 2]  # once in each epoch
    for result in pool.run(3, carry_out, tmp_path / "three", skip, "auto", -1, (sample, 99)):
        assert result[:3] == expected[:3]


@FULL
def test_a_run_goes_back_for_a_local_step_that_is_not_finite(pool: RankPool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, carry_out, tmp_path / "one", local(DILOCO))
    sample = poisoned(3)  # of the second outer step, which has one local step
    back = pool.run(2, carry_out, tmp_path / "two", local(DILOCO, nonfinite="rollback"), "auto", -1, (sample, 2))
    assert [result[:3] for result in back] == [expected[:3]] * 2
    assert "rollback" in back[0][3][0]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=FULL)])
def test_only_the_average_is_sent_between_sites(pool: RankPool, world: int) -> None:
    sent = pool.run(world, messages, SyncConfig(every=3), 2)
    plain = pool.run(world, messages, SyncConfig(), 6)
    size = sent[0]["parameter_bytes"]
    # Weights and momentum, once in each direction for an outer step, and little else.
    assert 2 * 2 * size <= sent[0]["between"] <= 2 * 2 * size + 2000
    assert sum(each["between"] for each in sent) == 2 * sent[0]["between"]
    assert all(each["inside"] > 0 for each in sent) == (world > 2)
    assert plain[0]["between"] >= 6 * size


@pytest.mark.parametrize(
    ("sync", "optim"),
    [
        ({}, {"lr": 0.05, "momentum": 0.9}),
        (DILOCO, {"lr": 0.05, "momentum": 0.9}),
        pytest.param({"sites": 3}, {"lr": 0.05, "momentum": 0.0}, marks=FULL),
        pytest.param({"inner_state": "reset", **DILOCO}, {"lr": 0.02, "momentum": 0.5, "nesterov": True}, marks=FULL),
    ],
)
def test_a_run_is_that_of_local_sgd_written_in_plain_pytorch(
    pool: RankPool, sync: dict[str, Any], optim: dict[str, Any]
) -> None:
    config = SyncConfig(every=3, **sync)
    (ours,) = pool.run(1, trained_plain, config, optim)
    theirs = local_sgd(config, optim)
    for name, tensor in theirs.items():
        torch.testing.assert_close(torch.from_numpy(ours[name]), tensor.float(), rtol=2e-4, atol=2e-5)


def local_sgd(sync: SyncConfig, optim: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Local SGD or DiLoCo with whole batches, in float64."""

    class Site:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, sync.sites

    inputs, labels = samples(NUM_SAMPLES)
    common = make("plain").double()
    outer = torch.optim.SGD(
        common.parameters(), lr=sync.outer_lr, momentum=sync.outer_momentum, nesterov=sync.outer_momentum > 0
    )
    order = Order(NUM_SAMPLES, 16, 3, seed=0)
    momenta: dict[int, torch.Tensor] = {}
    for numbers in ((0, 1, 2), (3,), (4, 5, 6), (7,)):
        changes, states = [], []
        for rank in range(sync.sites):
            model = make("plain").double()
            model.load_state_dict(common.state_dict())
            inner = torch.optim.SGD(model.parameters(), **optim)
            for parameter, value in zip(model.parameters(), momenta.values(), strict=False):
                inner.state[parameter]["momentum_buffer"] = value.clone()
            for step in order.steps(Site(rank), start=numbers[0], stop=numbers[-1] + 1):
                if not step.micro_batches:
                    continue  # the site has no share of an epoch's last, small batch
                places = torch.from_numpy(np.concatenate([m.indices for m in step.micro_batches]))
                inner.zero_grad()
                nn.functional.cross_entropy(model(inputs[places].double()), labels[places]).backward()
                inner.step()
            changes.append(
                [a.detach() - b.detach() for a, b in zip(common.parameters(), model.parameters(), strict=True)]
            )
            states.append([each["momentum_buffer"] for each in inner.state.values() if optim["momentum"]])
        for parameter, *each in zip(common.parameters(), *changes, strict=True):
            parameter.grad = torch.stack(each).mean(0)
        outer.step()
        if sync.inner_state == "average":
            momenta = {at: torch.stack(each).mean(0) for at, each in enumerate(zip(*states, strict=True))}
    return {name: tensor.detach() for name, tensor in common.state_dict().items()}
