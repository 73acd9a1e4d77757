"""The models of docs/publish.md: the two smallest are rebuilt, and other weights and other data are told apart."""

import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import models
from benchmarks.models import MODELS, PAGE, Line, on_page, verdict


def test_the_page_has_each_model_with_the_command_that_trains_it() -> None:
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    commands = {tuple(shlex.split(line)[3:]) for line in text.splitlines() if line.startswith("$ samebits train")}
    assert commands == {tuple(words) for words in MODELS.values()}
    for name in MODELS:
        line = on_page(name)
        assert (len(line.weights), len(line.data)) == (64, 16), name


@pytest.mark.full
@pytest.mark.parametrize(("name", "procs"), [pytest.param("digits", 3, marks=pytest.mark.lab), ("mnist", 2)])
def test_the_smallest_models_are_rebuilt(
    name: str, procs: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--mnist", str(request.getfixturevalue("mnist_folder"))] if name == "mnist" else []
    monkeypatch.setattr(sys, "argv", ["models", name, "--procs", str(procs), *options])
    with pytest.raises(SystemExit) as ended:
        models.main()
    assert ended.value.code == 0


def test_other_weights_and_other_data_are_told_apart() -> None:
    stated = on_page("mnist")
    assert verdict("mnist", stated) == "equal"
    assert "equal data" in verdict("mnist", Line(stated.data, "0" * 64, stated.metric))
    assert "other data" in verdict("mnist", Line("0" * 16, "0" * 64, stated.metric))


def test_the_flowers_are_the_first_of_each_class(tmp_path: Path) -> None:
    for name in models.CLASSES:
        (tmp_path / "all" / name).mkdir(parents=True)
        for number in range(170):
            (tmp_path / "all" / name / f"{number:03}.jpg").touch()
    models.link_flowers(tmp_path / "all", tmp_path / "flowers")
    assert [path.name for path in sorted((tmp_path / "flowers/roses").iterdir())][-1] == "159.jpg"
