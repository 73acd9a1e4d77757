"""What training learns from its metrics: that a classifier guesses, and when `stop_early` ends a run."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samebits.config.interval import parse_steps
from samebits.config.schema import StopEarlyConfig
from samebits.data.samples import Batch
from samebits.metrics import classification
from samebits.metrics.classification import Accuracy, chance_level, guess, single_answer
from samebits.metrics.early_stop import Patience, last_step, metric_of

COUNTS = st.lists(st.integers(0, 200), min_size=2, max_size=12).filter(lambda counts: sum(counts) >= 10)


def accuracy(labels: Tensor, answers: Tensor, num_classes: int, **settings: object) -> Accuracy:
    metric = Accuracy(num_classes, **settings)  # type: ignore[arg-type]
    outputs = torch.nn.functional.one_hot(answers, num_classes).float()
    metric.add(outputs, Batch(None, labels, torch.arange(len(labels))))
    return metric


@settings(max_examples=200, deadline=None)
@given(counts=COUNTS, answer=st.integers(0, 11))
def test_one_answer_for_all_samples_is_named_unless_they_are_of_one_class(counts: list[int], answer: int) -> None:
    labels, answers = torch.tensor(counts), torch.zeros(len(counts), dtype=torch.int64)
    answer %= len(counts)
    answers[answer] = sum(counts)
    chance = guess(labels, answers)
    assert chance.accuracy == pytest.approx(counts[answer] / sum(counts))
    is_named = single_answer(labels, answers) == answer
    assert is_named == (counts[answer] < 0.98 * sum(counts))


@settings(max_examples=200, deadline=None)
@given(counts=COUNTS)
def test_a_perfect_classifier_is_never_warned_about(counts: list[int]) -> None:
    labels = torch.tensor(counts)
    assert not chance_level(labels, labels, sum(counts))
    assert single_answer(labels, labels) is None or max(counts) >= 0.99 * sum(counts)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), num_classes=st.integers(2, 10))
def test_shuffled_answers_are_at_chance_level_and_good_ones_are_not(seed: int, num_classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (2000,), generator=generator)
    counts = torch.bincount(labels, minlength=num_classes)
    chance = guess(counts, counts)
    assert chance_level(counts, counts, int(2000 * chance.accuracy))
    assert not chance_level(counts, counts, int(2000 * (chance.accuracy + 4 * chance.std)) + 1)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_warnings_name_the_class_and_the_chance_level(is_sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_sparse:
        monkeypatch.setattr(classification, "MAX_DENSE_CLASSES", 1)
    labels = torch.arange(160) % 5
    classes = ["daisy", "dandelion", "roses", "sunflowers", "tulips"]
    one = accuracy(labels, torch.full((160,), 2), 5, classes=classes)
    assert one.warnings() == ["all 160 predictions are roses, as 20.00% of the samples are"]
    assert accuracy(labels, torch.full((160,), 2), 5).warnings()[0].startswith("all 160 predictions are class 2,")
    shifted = accuracy(labels, (labels + torch.arange(160) // 5) % 5, 5)
    assert shifted.warnings() == ["top-1 21.88% is at chance level (13.68% to 26.32%)"]
    assert accuracy(labels, labels, 5).warnings() == []
    assert Accuracy(5).warnings() == []


def test_a_few_samples_say_nothing() -> None:
    labels = torch.arange(8) % 2
    assert accuracy(labels, torch.zeros(8, dtype=torch.int64), 2).warnings() == []


MONITOR = ("top1", "max")
VALUES = st.lists(st.one_of(st.floats(0, 1), st.just(math.nan)), max_size=20)


def test_a_run_ends_when_as_many_validations_as_the_patience_are_no_better() -> None:
    config = StopEarlyConfig(patience=2)
    values = [0.5, 0.6, 0.6, 0.59, 0.7]
    assert last_step([(step, {"top1": value}) for step, value in enumerate(values)], config, MONITOR) == 3


def test_a_small_improvement_does_not_count() -> None:
    values = [0.5, 0.505, 0.509, 0.9]
    steps = [(step, {"top1": value}) for step, value in enumerate(values)]
    assert last_step(steps, StopEarlyConfig(patience=2, min_delta=0.01), MONITOR) == 2
    assert last_step(steps, StopEarlyConfig(patience=2), MONITOR) is None


@pytest.mark.parametrize("name", ["loss", "night.loss", "cer", "mean_error", "Perplexity", "val.rmse"])
def test_a_loss_or_an_error_is_minimized_without_a_word(name: str) -> None:
    assert metric_of(StopEarlyConfig(patience=1, metric=name), MONITOR) == (name, -1.0)
    falling = [(step, {name: value}) for step, value in enumerate([1.941, 0.2352, 0.0497, 0.05])]
    assert last_step(falling, StopEarlyConfig(patience=2, metric=name), MONITOR) is None
    assert last_step(falling, StopEarlyConfig(patience=1, metric=name), MONITOR) == 3


@pytest.mark.parametrize("name", ["top5", "AP", "mean_iou", "night.recall", "slower"])
def test_any_other_metric_is_maximized_unless_the_user_says_otherwise(name: str) -> None:
    assert metric_of(StopEarlyConfig(patience=1, metric=name), MONITOR) == (name, 1.0)
    assert metric_of(StopEarlyConfig(patience=1, metric=name, better="min"), MONITOR) == (name, -1.0)


def test_the_metric_that_the_recipe_monitors_keeps_its_direction() -> None:
    assert metric_of(StopEarlyConfig(patience=1, metric="score"), ("score", "min")) == ("score", -1.0)
    assert metric_of(StopEarlyConfig(patience=1), ("loss_of_rivals", "max")) == ("loss_of_rivals", 1.0)
    # Settings that were stored when max was the default, and did not count without a metric.
    assert StopEarlyConfig(better="max") == StopEarlyConfig()
    assert metric_of(StopEarlyConfig(patience=1, better="max"), ("loss", "min")) == ("loss", -1.0)
    with pytest.raises(ValueError, match=r"must be set with stop_early\.metric"):
        StopEarlyConfig(patience=1, better="min")


def test_another_metric_has_a_direction_of_its_own() -> None:
    config = StopEarlyConfig(patience=1, metric="loss")
    assert metric_of(config, MONITOR) == ("loss", -1.0)
    steps = [(1, {"loss": 2.0}), (2, {"loss": 1.0}), (3, {"loss": 1.5})]
    assert last_step(steps, config, MONITOR) == 3


@given(values=VALUES, patience=st.integers(1, 5))
def test_the_rule_is_the_length_of_the_last_stretch_without_a_new_best(values: list[float], patience: int) -> None:
    config = StopEarlyConfig(patience=patience)
    now, expected = Patience(), None
    for step, value in enumerate(values):
        now = now.after(value, 1.0, config)
        seen = [each for each in values[: step + 1] if not math.isnan(each)]
        newest = next((index for index, each in enumerate(values) if seen and each == max(seen)), -1)
        assert now.num_stale == step - newest
        if expected is None and now.is_over(config):
            expected = step
    recorded = [(step, {"top1": None if math.isnan(value) else value}) for step, value in enumerate(values)]
    assert last_step(recorded, config, MONITOR) == expected


@pytest.mark.parametrize("text", ["3", "3:3", "4:3", "a:b", "-1:2", "1:2:3"])
def test_a_range_of_steps_has_a_first_step_and_one_after_the_last(text: str) -> None:
    with pytest.raises(ValueError, match="10:13"):
        parse_steps(text)
    assert parse_steps("10:13") == (10, 13)
