"""Outputs of the classify recipe: metrics, the confusion matrix, predictions."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from samebits.data.samples import Batch, DatasetSamples
from samebits.metrics import classification
from samebits.metrics.classification import Accuracy
from samebits.recipes.classify.recipe import _write_counts, draw_evaluation
from samebits.recipes.results import draw_matrix, top_classes


def test_the_label_among_the_likeliest_is_counted_exactly_however_samples_are_shared() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(731, 12), torch.randint(12, (731,))
    names = [f"class {place}" for place in range(12)]
    whole = Accuracy(12, num_top=5, classes=names)
    whole.add(logits, Batch(None, labels, torch.arange(731)))
    expected = (logits.topk(5).indices == labels[:, None]).any(1).sum().item()
    assert whole.result()["top5"] == expected / 731
    merged = Accuracy(12, num_top=5, classes=names)
    for rank in range(4):
        own = Accuracy(12, num_top=5, classes=names)
        own.add(logits[rank::4], Batch(None, labels[rank::4], torch.arange(731)[rank::4]))
        merged.merge(json.loads(json.dumps(own.state())))
    assert merged.num_samples == 731
    assert merged.result() == whole.result()
    right = (logits.argmax(1) == labels)[labels == 3]
    assert whole.result()["top1/class 3"] == right.sum().item() / len(right)


def test_equal_logits_count_as_argmax_has_it_and_no_number_never_counts() -> None:
    metric = Accuracy(7, num_top=5)
    metric.add(torch.zeros(7, 7), Batch(None, torch.arange(7), torch.arange(7)))
    assert metric.result() == {"top1": 1 / 7, "top5": 5 / 7}
    metric = Accuracy(7, num_top=5)
    metric.add(torch.full((1, 7), torch.nan), Batch(None, torch.tensor([3]), torch.arange(1)))
    assert metric.result()["top5"] == 0


def test_many_classes_and_few_have_the_figures_that_say_something() -> None:
    few, many = (
        Accuracy(5, num_top=5, classes=["daisy", "dandelion", "roses", "sunflowers", "tulips"]),
        Accuracy(60, num_top=5, classes=[str(place) for place in range(60)]),
    )
    few.add(torch.eye(5)[:2], Batch(None, torch.tensor([0, 2]), torch.arange(2)))
    many.add(torch.eye(60)[:2], Batch(None, torch.tensor([0, 2]), torch.arange(2)))
    assert few.result() == {"top1": 0.5, "top1/daisy": 1.0, "top1/roses": 0.0}
    assert set(many.result()) == {"top1", "top5"}


def test_a_matrix_is_drawn_for_up_to_forty_classes(tmp_path: Path) -> None:
    for count in (40, 41):
        draw_matrix(
            np.eye(count, dtype=np.int64).tolist(), [str(label) for label in range(count)], tmp_path / str(count)
        )
    assert [path.parent.name for path in tmp_path.rglob("confusion.png")] == ["40"]


def test_with_too_many_classes_for_a_matrix_each_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "MAX_DENSE_CLASSES", 50)
    classes = [f"class {place}" for place in range(60)]
    labels, predictions = torch.tensor([3, 3, 3, 3, 3, 8]), torch.tensor([3, 9, 9, 5, 5, 8])
    metric = Accuracy(60, num_worst=4)
    metric.add(torch.eye(60)[predictions], Batch(None, labels, torch.arange(6)))
    samples = DatasetSamples([(torch.zeros(8, 8, 3, dtype=torch.uint8), int(label)) for label in labels])
    draw_evaluation(metric, samples, tmp_path, classes=classes)
    rows = (tmp_path / "confusion.csv").read_text().splitlines()
    assert rows[0] == "ground truth,samples,correct"
    assert (rows[4], rows[9], len(rows)) == ("class 3,5,1", "class 8,1,1", 61)
    assert not (tmp_path / "confusion.png").exists()
    assert (tmp_path / "worst.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "cell"),
    [("=1+1", "'=1+1"), ("@SUM(A1)", "'@SUM(A1)"), ("-2", "'-2"), ("a\x1b[31m", "a\\x1b[31m"), ("rose", "rose")],
)
def test_a_class_name_is_no_formula_and_no_escape_sequence_in_the_table(tmp_path: Path, name: str, cell: str) -> None:
    _write_counts(np.array([[3, 2]]), [], [name], tmp_path / "counts.csv")
    with (tmp_path / "counts.csv").open(newline="") as file:
        assert list(csv.reader(file))[1] == [cell, "3", "2"]
    assert [path.name for path in tmp_path.iterdir()] == ["counts.csv"]


def test_an_answer_names_the_five_likeliest() -> None:
    said = top_classes(torch.arange(9.0), num_top=5, classes=[f"class {place}" for place in range(9)])
    assert [entry["class"] for entry in said["top"]] == [f"class {place}" for place in (8, 7, 6, 5, 4)]
