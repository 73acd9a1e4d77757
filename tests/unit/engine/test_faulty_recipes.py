"""Faults of a user's recipe are errors with a fix, before or in the first step."""

import sys
from pathlib import Path

import pytest

from samebits.cli.main import run

RECIPE = Path(__file__).with_name("faulty_recipe.py")


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def train(fault: str) -> int:
    return run(["train", str(RECIPE), f"fault={fault}", "--procs", "1", "--run-dir", "run"])


def test_the_recipe_without_a_fault_is_trained() -> None:
    assert train("none") == 0


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("float64", "parameter last.weight is torch.float64: only float32 parameters can be trained"),
        ("one float64", "parameter last.bias is torch.float64"),
        ("lazy", "last.weight of the recipe's model has no shape yet"),
        ("meta", "last.weight of the recipe's model has no values"),
        ("complex", "phase of the recipe's model is torch.complex64, which can't be saved"),
        ("frozen", "no parameter of the recipe's model requires a gradient"),
        ("no parameters", "no parameter of the recipe's model requires a gradient"),
        ("a function", "the recipe's model is a builtin_function_or_method, not a torch.nn.Module"),
        ("extra state", "_extra_state in the model's state_dict is a dict"),
        ("replaced buffer", "the model's forward replaced buffer count"),
        ("changed bool", "the model's forward changed buffer seen, which is bool"),
        ("detached", "the recipe's loss has no gradient"),
        ("no gradient", "the recipe's loss has no gradient"),
        ("integer loss", "the recipe's loss returned wrong as torch.int64"),
        ("loss by sample", "the recipe's loss returned cross_entropy of shape (4,), not one number"),
        ("negative length", "whose length can't be used: __len__() should return >= 0"),
        ("text length", "whose length can't be used"),
        ("tuple batch", "returned a tuple, not a Batch"),
        ("short batch", "returned other samples than the requested ones"),
        ("triples", "a sample of Triples is not a pair (input, target)"),
    ],
)
def test_a_fault_is_named_with_what_to_do(fault: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(fault) == 2
    error = capsys.readouterr().err
    assert "config error: " in error
    assert text in error
    assert "\n  fix " in error


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("uncounted", "the metric Uncounted has no num_samples"),
        ("method", "num_samples of the metric Method is a method"),
        ("made metric", "the recipe's metric is a Accuracy, not a function"),
        ("misspelt", "the metric Misspelt has failed: AttributeError: 'Batch' object has no attribute 'labels'"),
        ("twice", "the metric Twice counted 8 samples of 4"),
        ("unsendable", "the metric Unsendable has failed: TypeError: "),
        ("other name", "the validation has no metric top1"),
        ("monitor", "monitor is (('top1', 'max'),), not a name and a mode"),
        ("infer", "the recipe's infer has failed: AttributeError: "),
        ("bytes", "given  inputs: a tensor (4, 6) float32"),
    ],
)
def test_a_faulty_metric_is_named_before_the_first_step(
    fault: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(fault) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "\n  fix " in error
    if " has failed" in text and fault != "unsendable":
        assert f"faulty_recipe.py:{line_of('len(batch.labels)' if fault == 'misspelt' else 'numpi()')}, in " in error
    assert not Path("run/config.yaml").exists(), "no step was trained"


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(RECIPE.read_text().splitlines(), 1) if text in line)


def test_a_metric_without_a_value_for_few_samples_is_accepted() -> None:
    assert train("demanding") == 0


def test_an_empty_evaluation_set_is_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("no evaluation") == 3
    assert "the validation set is empty" in capsys.readouterr().err
    assert not Path("run/metrics.jsonl").exists()
