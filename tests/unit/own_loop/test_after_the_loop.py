"""What a script does with its model during and after an exact loop, evaluation, and scripts under `samebits check`."""

# ruff: noqa: PT012  # what raises is the body of a loop

import contextlib
import linecache
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

import samebits
from samebits.errors import ConfigError, TrainError
from samebits.replay import check_script
from samebits.replay.check_script import _AGAIN, ScriptOutcome, _compare, _own_ranks
from samebits.replay.trace import StepTrace, Trace
from tests.unit.own_loop.loops import Loop, data_loader, dataset


def _trained() -> nn.Module:
    model: nn.Module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = samebits.exact(model, optimizer, data_loader(), global_batch=8, micro_batch=4)
    for batch in loader:
        inputs = batch[0]
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return model


def test_a_model_can_be_saved_as_safetensors(tmp_path: Path) -> None:
    model = nn.Sequential(_trained())
    save_model(model, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_gradients_of_other_code_add_up_after_the_loop() -> None:
    model = _trained()
    model.zero_grad()
    first = next(model.parameters())
    model.eval()
    inputs = next(iter(data_loader()))[0]
    model(inputs).square().mean().backward()
    once = first.grad.clone()
    model(inputs).square().mean().backward()
    assert torch.allclose(first.grad, 2 * once)


def test_buffers_change_by_the_passes_before_a_backward_pass_only() -> None:
    def train(measures: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ExponentialLR(optimizer, 0.9)  # wraps optimizer.step
        model, optimizer, loader = samebits.exact(model, optimizer, data_loader(), global_batch=8, micro_batch=4)
        for batch in loader:
            optimizer.zero_grad()
            model(batch[0]).square().mean().backward()
            if measures:
                model(batch[0])  # in training mode
            optimizer.step()
        return model.state_dict()

    usual = train(measures=False)
    assert usual["0.num_batches_tracked"] == 2  # one for each of the two steps
    with pytest.warns(UserWarning, match="after the last backward pass of a loop's body change no buffers") as caught:
        measured = train(measures=True)
    assert {linecache.getline(each.filename, each.lineno).strip() for each in caught} == {"optimizer.step()"}
    assert all(torch.equal(measured[name], value) for name, value in usual.items())


@pytest.mark.parametrize("way", ["left out", "without a loss", "without a backward pass"])
def test_micro_batches_that_are_padding_train_as_the_others(way: str) -> None:
    loop = Loop()
    with pytest.raises(TrainError, match=r"trains differently if loader\.is_padding"):
        for batch in loop.loader:
            is_other = loop.loader.is_padding
            if is_other and way == "left out":
                continue
            loop.optimizer.zero_grad()
            loss = loop.loss(batch) * (0.0 if is_other else 1.0)
            if not is_other or way == "without a loss":
                loss.backward()
            loop.optimizer.step()


def test_each_sample_is_seen_once_and_sums_are_those_of_all() -> None:
    loader = samebits.EvalLoader(data_loader(15, batch_size=4))
    assert len(loader) == 4
    for x, y in loader:
        loader.add(count=len(x), total=y.sum())
        loader.add(count=0)
    sums = loader.sums()
    assert sums["count"] == 15
    assert sums["total"] == pytest.approx(dataset(15).tensors[1].double().sum().item(), abs=1e-6)


def test_a_sum_that_is_not_finite_is_nan() -> None:
    loader = samebits.EvalLoader(data_loader(4))
    for _ in loader:
        loader.add(loss=math.inf)
    assert math.isnan(loader.sums()["loss"])


def test_an_evaluation_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    seen = [torch.rand(1) for _ in samebits.EvalLoader(data_loader(4))]
    assert torch.equal(torch.rand(1), expected)
    assert len(set(map(float, seen))) == 2


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4, affine=False)])
def test_a_batch_norm_in_training_mode_is_named(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Identity(), norm)
    batches: Any = iter(samebits.EvalLoader(data_loader(4)))
    x, _ = next(batches)
    with (
        pytest.warns(UserWarning, match="the model is in training mode while an EvalLoader is read"),
        contextlib.suppress(ValueError),  # SyncBatchNorm wants a GPU
    ):
        model(x)
    batches.close()


@pytest.mark.parametrize(
    "model",
    [
        nn.BatchNorm1d(4).eval(),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.Sequential(nn.Dropout(), nn.Linear(4, 2)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_model_that_counts_no_sample_is_not_named(model: nn.Module) -> None:
    loader = samebits.EvalLoader(data_loader(4))
    for x, _ in loader:
        loader.add(total=model(x).detach().sum())
    nn.BatchNorm1d(4)(torch.ones(3, 4))  # behind the pass


def test_numbers_outside_of_the_loop_are_refused() -> None:
    loader = samebits.EvalLoader(data_loader(4))
    with pytest.raises(ConfigError, match=re.escape("add(), collect() and update() belong to the current batch")):
        loader.add(loss=1.0)


def test_a_loader_without_a_batch_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="no batch_size"):
        samebits.EvalLoader(DataLoader(dataset(4), batch_size=None))


def test_a_metric_that_does_not_merge_is_refused() -> None:
    loader = samebits.EvalLoader(data_loader(4))
    with pytest.raises(ConfigError, match="the metric list has no merge_state"):
        for _ in loader:
            loader.update([])


def test_metrics_of_torchmetrics_have_the_value_over_all_samples() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    data = data_loader(15, batch_size=4)
    loader = samebits.EvalLoader(data)
    error, values, average = torchmetrics.MeanSquaredError(), torchmetrics.CatMetric(), torchmetrics.MeanMetric()
    for x, y in loader:
        loader.update(error, x[:, :1], y)
        loader.update(values, x)
        loader.update(average, x, weight=y.abs())
    x, y = dataset(15).tensors
    torch.testing.assert_close(loader.compute(error), (x[:, :1] - y).square().mean())
    assert torch.equal(loader.compute(values), x)
    torch.testing.assert_close(loader.compute(average), (x * y.abs()).sum() / (4 * y.abs().sum()))


def test_a_metric_whose_states_do_not_merge_is_refused() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    loader = samebits.EvalLoader(data_loader(4))

    class Whole(torchmetrics.MeanSquaredError):  # type: ignore[misc]
        full_state_update = True

    metric = Whole()
    with pytest.raises(ConfigError, match="Whole do not merge"):
        for x, y in loader:
            loader.update(metric, x[:, :1], y)


@pytest.mark.parametrize(
    ("line", "is_own"),
    [
        ('init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=args.rank)', True),
        ("parser.add_argument('--rank', type=int)", True),
        ('parser.add_argument("--local_rank")', True),
        ('init_process_group("gloo")', False),
    ],
)
def test_a_script_with_ranks_of_its_own_is_recognized(line: str, is_own: bool, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(line)
    assert bool(_own_ranks(str(tmp_path / "s.py"))) is is_own


@pytest.mark.full
def test_a_failure_of_a_script_with_ranks_of_its_own_names_them(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text('ADDRESS = "tcp://127.0.0.1:29500"\nraise OSError("EADDRINUSE")\n')
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError) as caught:
        check_script.observe([str(script)], check_script.FIRST, tmp_path / "out" / "0")
    assert "its rank and address from the script's own options" in caught.value.slots["cause"]
    assert "without init_method, rank and world_size" in caught.value.slots["fix"]


def test_a_script_that_resumes_from_the_checkpoint_of_the_trial_before_is_named() -> None:
    first, resumed = (
        ScriptOutcome(Trace(steps={str(number): StepTrace() for number in steps}), {}) for steps in ((0, 1), (1, 2))
    )
    finding = _compare(first, resumed, _AGAIN)
    assert "began with step 1" in finding.what
    assert "neither saves nor loads" in finding.fix
    assert "Delete that checkpoint" in finding.fix
    assert _compare(first, first, _AGAIN) is None
