import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from samebits.config.interval import Interval, parse_interval
from samebits.config.schema import CheckpointConfig, OptimConfig, RunConfig


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("200 steps", Interval(steps=200)), ("1 step", Interval(steps=1)), ("1 epoch", Interval(epochs=1)),
        ("2 epochs", Interval(epochs=2)), ("30s", Interval(seconds=30)), ("5min", Interval(seconds=300)),
        ("0.5 h", Interval(seconds=1800)), (" 1h ", Interval(seconds=3600)),
    ],
)  # fmt: skip
def test_an_interval_is_read(text: str, interval: Interval) -> None:
    assert parse_interval(text) == interval


@pytest.mark.parametrize(
    "text", ["", "5", "epoch", "1 day", "-1 steps", "0 steps", "0s", "1.5 steps", "1e3 steps", "5 min 3"]
)
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_interval(text)
    with pytest.raises(ValidationError):
        CheckpointConfig(every=text)


@pytest.mark.parametrize("text", ["x", "30s", "0 epochs"])
def test_an_interval_between_evaluations_has_epochs_or_steps(text: str) -> None:
    with pytest.raises(ValidationError, match='must be a number of epochs, or like "500 steps"'):
        RunConfig(recipe="x", eval_every=text)
    assert RunConfig(recipe="x", eval_every="2").eval_interval == Interval(epochs=2)  # on the command line


@given(st.integers(1, 10**9), st.sampled_from(["steps", "epochs", "s", "min", "h"]))
def test_every_interval_sets_one_thing(number: int, unit: str) -> None:
    interval = parse_interval(f"{number} {unit}")
    given = [value for value in (interval.steps, interval.epochs, interval.seconds) if value is not None]
    assert len(given) == 1
    assert given[0] >= number


def test_a_config_can_not_be_changed() -> None:
    config = RunConfig(recipe="x")
    with pytest.raises(ValidationError, match="frozen"):
        config.epochs = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.optim.lr = 3.0


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"global_batch": 16}, r"micro_batch \(32\) is more than global_batch \(16\)"),
        ({"epochs": 2**64}, "epochs"),  # the number of steps must fit into the 64 bits of records and checkpoints
    ],
)
def test_a_number_that_can_not_be_is_refused(setting: dict[str, int], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        RunConfig(recipe="x", **setting)


@pytest.mark.parametrize(
    "values",
    [
        {"lr": 0}, {"lr": float("nan")}, {"lr": float("inf")}, {"momentum": 1}, {"nesterov": True, "momentum": 0},
        {"schedule": "multi_step"}, {"schedule": "multi_step", "milestones": [30, 10]}, {"milestones": [0]},
        {"betas": [0.9]}, {"clip_norm": 0}, {"unknown": 1},
    ],
)  # fmt: skip
def test_an_optimizer_that_can_not_be_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        OptimConfig.model_validate(values)


@pytest.mark.parametrize(
    ("lr_for_batch", "global_batch", "peak"), [(None, 512, 0.1), (256, 256, 0.1), (256, 512, 0.2), (256, 64, 0.025)]
)
def test_the_linear_rule_for_the_rate_is_explicit(lr_for_batch: int | None, global_batch: int, peak: float) -> None:
    optim = OptimConfig(lr=0.1, lr_for_batch=lr_for_batch)
    assert RunConfig(recipe="test", global_batch=global_batch, optim=optim).peak_lr == peak
