"""Metrics of classifications, lines and segmentations: figures by hand, however samples are shared out."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.cluster import collectives
from samebits.data.samples import Batch
from samebits.metrics import classification, segmentation
from samebits.metrics.classification import Accuracy
from samebits.metrics.segmentation import IGNORED, SegmentationMetric, label_map
from samebits.metrics.text import TextMetric


def _batch(labels: list[int], start: int = 0) -> Batch:
    return Batch(None, torch.tensor(labels), torch.arange(start, start + len(labels)))


def _logits(choices: list[int], num_classes: int = 3) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), num_classes).float()


def test_top1_is_the_share_of_right_answers() -> None:
    metric = Accuracy(3)
    metric.add(_logits([0, 1, 2, 0]), _batch([0, 1, 1, 2]))
    assert metric.num_samples == 4
    assert metric.result()["top1"] == 0.5
    assert metric.state()["confusion"] == [[1, 0, 0], [0, 1, 1], [1, 0, 0]]


def test_the_loss_is_left_to_the_engine_which_knows_what_is_minimized() -> None:
    metric = Accuracy(3)
    metric.add(_logits([0]), _batch([0]))
    assert metric.result() == {"top1": 1.0}


@settings(max_examples=60, deadline=None)
@given(num_samples=st.integers(1, 60), num_parts=st.integers(1, 8), seed=st.integers(0, 1000))
def test_any_sharing_out_gives_the_same_state_and_figures(num_samples: int, num_parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, 5, generator=generator).round(decimals=1)
    labels = torch.randint(0, 5, (num_samples,), generator=generator)
    whole = Accuracy(5, num_worst=7)
    whole.add(logits, Batch(None, labels, torch.arange(num_samples)))
    owner = torch.randint(0, num_parts, (num_samples,), generator=generator)
    shared = Accuracy(5, num_worst=7)
    for part in reversed(range(num_parts)):
        mine = torch.nonzero(owner == part).flatten()
        metric = Accuracy(5, num_worst=7)
        for index in mine.tolist():
            metric.add(logits[index : index + 1], Batch(None, labels[index : index + 1], torch.tensor([index])))
        shared.merge(json.loads(json.dumps(metric.state())))
    assert shared.state() == whole.state()
    assert shared.result() == whole.result()


def test_the_worst_samples_are_kept_with_label_and_answer() -> None:
    metric = Accuracy(3, num_worst=2)
    metric.add(_logits([0, 1, 2]) * torch.tensor([[1.0], [5.0], [9.0]]), _batch([0, 2, 0], start=10))
    (first, second) = metric.state()["worst"]
    assert first[1:] == [12, 0, 2]
    assert second[1:] == [11, 2, 1]
    assert first[0] > second[0]


def test_of_equal_losses_the_lower_index_is_kept() -> None:
    metric = Accuracy(3, num_worst=2)
    metric.add(_logits([1, 1, 1]), _batch([0, 0, 0], start=5))
    assert [row[1] for row in metric.state()["worst"]] == [5, 6]


def test_outputs_that_are_not_finite_count_as_worst() -> None:
    metric = Accuracy(3)
    outputs = _logits([0, 1])
    outputs[1] = math.nan
    metric.add(outputs, _batch([0, 1]))
    assert metric.num_samples == 2
    assert metric.state()["worst"][0][:2] == [math.inf, 1]


def test_no_samples_have_no_accuracy() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Accuracy(3).result()


def _states(num_classes: int, labels: torch.Tensor, logits: torch.Tensor, num_parts: int) -> list[dict[str, Any]]:
    """Count samples on several ranks, and return each rank's state as it is sent."""
    states = []
    for part in range(num_parts):
        metric = Accuracy(num_classes, num_top=5)
        mine = torch.arange(part, len(labels), num_parts)
        for few in mine.split(7):
            metric.add(logits[few], Batch(None, labels[few], few))
        states.append(collectives.decode(collectives.encode(metric.state())))
    return states


def _merged(num_classes: int, states: list[dict[str, Any]]) -> Accuracy:
    metric = Accuracy(num_classes, num_top=5)
    for state in states:
        metric.merge(state)
    return metric


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat 9 classes as too many for a matrix."""
    monkeypatch.setattr(classification, "MAX_DENSE_CLASSES", 8)


def _samples(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (num_samples,), generator=generator), torch.randn(num_samples, 9, generator=generator)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("seed", range(5))
def test_without_a_matrix_all_figures_are_those_of_the_matrix(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, logits = _samples(100, seed)
    sparse = [_merged(9, _states(9, labels, logits, num_parts)) for num_parts in (1, 2, 3)]
    assert "confusion" not in sparse[0].state()
    assert all(each.state() == sparse[0].state() for each in sparse)
    monkeypatch.setattr(classification, "MAX_DENSE_CLASSES", 9)
    dense = _merged(9, _states(9, labels, logits, 2))
    assert sparse[0].result() == dense.result()
    counts, matrix = sparse[0].state(), torch.tensor(dense.state()["confusion"])
    expected = (matrix.sum(1), matrix.diagonal(), matrix.sum(0))
    assert [counts[name] for name in ("samples", "correct", "predicted")] == [each.tolist() for each in expected]


def test_many_classes_take_little_memory_and_a_short_message() -> None:
    num_classes = 21_841  # ImageNet-21k; a matrix would take 3.8 GB
    labels = torch.arange(64) * 300
    logits = torch.nn.functional.one_hot((labels + torch.arange(64) % 2), num_classes).float()
    metric = Accuracy(num_classes)
    metric.add(logits, Batch(None, labels, torch.arange(64)))
    message = collectives.encode(metric.state())
    assert len(message) < 200_000
    merged = _merged(num_classes, [collectives.decode(message)] * 2)
    assert merged.num_samples == 128
    assert merged.result()["top1"] == 0.5
    assert sum(merged.state()["predicted"]) == 128


pairs = st.lists(st.tuples(st.text("ab你", max_size=4), st.text("ab你", max_size=4)), max_size=20)


def lines(num_worst: int = 3) -> TextMetric:
    """Outputs are the texts as read, targets the true texts."""
    return TextMetric(list, lambda batch: batch.targets, num_worst)


def batch(rows: list[tuple[str, str]], start: int = 0) -> tuple[Any, Batch]:
    indices = torch.arange(start, start + len(rows))
    return [text for text, _ in rows], Batch(None, [truth for _, truth in rows], indices)


def test_figures_are_those_counted_by_hand() -> None:
    metric = lines()
    metric.add(*batch([("abc", "abc"), ("ab", "abc"), ("你好", "您好"), ("", ""), ("aa", "")]))
    assert metric.num_samples == 5
    assert metric.result() == {"line_accuracy": 2 / 5, "cer": 4 / 8}
    assert metric.state()["worst"] == [[2, 4, "", "aa"], [1, 1, "abc", "ab"], [1, 2, "您好", "你好"]]


@settings(max_examples=100, deadline=None)
@given(rows=pairs, data=st.data())
def test_any_sharing_gives_the_same_figures_and_worst_lines(rows: list[tuple[str, str]], data: st.DataObject) -> None:
    whole = lines()
    whole.add(*batch(rows))
    cut = data.draw(st.integers(0, len(rows)))
    first, second, merged = lines(), lines(), lines()
    first.add(*batch(rows[:cut]))
    second.add(*batch(rows[cut:], start=cut))
    for part in data.draw(st.permutations([first, second])):
        merged.merge(json.loads(json.dumps(part.state())))
    assert merged.state() == whole.state()
    if rows:
        assert merged.result() == whole.result()


def test_no_lines_have_no_accuracy() -> None:
    with pytest.raises(ValueError, match="no lines were added"):
        lines().result()


CLASSES = ("background", "road", "tree", "car", "never")


def batch_of(count: int, first: int = 0) -> tuple[torch.Tensor, Batch]:
    """Random logits and masks of several sizes; the last class occurs in none."""
    generator = torch.Generator().manual_seed(first)
    logits = torch.randn(count, 5, 16, 24, generator=generator)
    logits[:, 4] = -100
    masks = []
    for index in range(count):
        mask = torch.randint(4, (20 + index, 30), generator=generator, dtype=torch.uint8)
        mask[:3] = IGNORED
        masks.append(mask)
    return logits, Batch(None, {"masks": masks}, torch.arange(first, first + count))


def test_miou_and_dice_equal_those_of_torchmetrics_over_all_pixels() -> None:
    from torchmetrics.classification import MulticlassJaccardIndex  # takes seconds
    from torchmetrics.segmentation import DiceScore

    logits, batch = batch_of(7)
    metric = SegmentationMetric(CLASSES)
    metric.add(logits, batch)
    found = metric.result()
    theirs = MulticlassJaccardIndex(5, average="macro", ignore_index=IGNORED)
    dice = DiceScore(4, average="macro", aggregation_level="global", input_format="index")
    for image, mask in zip(logits, batch.targets["masks"], strict=True):
        chosen = torch.nn.functional.interpolate(image[None], mask.shape, mode="bilinear")[0].argmax(0)
        theirs.update(chosen[None], mask[None].long())
        is_counted = mask != IGNORED
        dice.update(chosen[is_counted][None, None], mask[is_counted][None, None].long())
    assert found["mIoU"] == pytest.approx(float(theirs.compute()), abs=1e-6)
    assert found["Dice"] == pytest.approx(float(dice.compute()), abs=1e-6)
    assert "IoU/never" not in found
    assert {"IoU/background", "IoU/car"} < set(found)


def test_every_distribution_of_the_images_gives_the_same_state() -> None:
    logits, batch = batch_of(9)
    masks = batch.targets["masks"]
    states = []
    for size in (1, 2, 3):
        whole = SegmentationMetric(CLASSES, num_worst=3)
        for rank in reversed(range(size)):
            part = SegmentationMetric(CLASSES, num_worst=3)
            mine = range(rank, 9, size)
            part.add(logits[list(mine)], Batch(None, {"masks": [masks[i] for i in mine]}, batch.indices[list(mine)]))
            whole.merge(json.loads(json.dumps(part.state())))
        assert whole.num_samples == 9
        states.append((json.dumps(whole.state()), whole.result()))
    assert states[0] == states[1] == states[2]
    scores = [row[0] for row in json.loads(states[0][0])["worst"]]
    assert len(scores) == 3
    assert scores == sorted(scores)


def test_classes_are_interpolated_a_few_at_a_time_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 16, 24, generator=torch.Generator().manual_seed(0)).round()  # with equal logits
    whole = label_map(logits, (40, 50))
    assert torch.equal(label_map(logits, (16, 24)), logits.argmax(0).to(torch.uint8))
    monkeypatch.setattr(segmentation, "_VALUES_AT_ONCE", 2000)
    assert torch.equal(label_map(logits, (40, 50)), whole)


def test_masks_without_a_counted_pixel_have_no_iou() -> None:
    metric = SegmentationMetric(CLASSES)
    metric.add(torch.zeros(1, 5, 4, 4), Batch(None, {"masks": [torch.full((4, 4), IGNORED)]}, torch.arange(1)))
    assert metric.num_samples == 1
    with pytest.raises(ValueError, match="no pixels were counted"):
        metric.result()
