"""Metrics of lines and of segmentations: against figures by hand and torchmetrics, however samples are shared out."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.samples import Batch
from samebits.metrics import segmentation
from samebits.metrics.segmentation import IGNORED, SegmentationMetric, label_map
from samebits.metrics.text import TextMetric

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
