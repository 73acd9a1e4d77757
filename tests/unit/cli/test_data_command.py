import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import samebits.recipes
from samebits.cli.main import run
from samebits.errors import CheckpointError, ConfigError, DataError

CONFIG = """
from pydantic import Field
from samebits.config.schema import Settings

class MakeConfig(Settings):
    num: int = Field(default=2, ge=1, description="how many")
    font_name: str = Field(default="serif", description="in what they are written")
"""
MAKE = """
from samebits.errors import DataError

def make(config, out):
    for place in range(config.num):
        (out / f"{place}.txt").write_text(config.font_name)
    if config.font_name == "missing":
        raise DataError("there is no font called missing")
    if config.font_name == "stuck":
        raise KeyboardInterrupt
    if config.font_name == "full":
        raise OSError(28, "No space left on device")
    return f"{config.num} files in {out}"
"""


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A recipe `notes` that can make data; the test works in tmp_path."""
    folder = tmp_path / "shelf" / "notes"
    folder.mkdir(parents=True)
    for name, text in {"__init__": "", "config": CONFIG, "make": MAKE}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(samebits.recipes, "__path__", [*samebits.recipes.__path__, str(tmp_path / "shelf")])
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("samebits.recipes.notes")]:
        del sys.modules[name]
    if hasattr(samebits.recipes, "notes"):
        del samebits.recipes.notes


def test_a_folder_is_made_with_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "make", "notes", "--out", "new/place", "num=3", "font_name=mono"]) == 0
    assert capsys.readouterr().out == "3 files in new/place\n"
    assert [path.read_text() for path in Path("new/place").iterdir()] == ["mono"] * 3


def test_without_a_folder_it_shows_what_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "make", "notes"]) == 2
    text = capsys.readouterr().out
    assert "samebits data make notes --out DIR" in text
    assert "num         2      how many (int >= 1)" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["notes", "--out", "a", "numm=3"], "fix    Use num (int >= 1, now 2)"),
        (["notes", "--out", "a", "num=0"], "num can't be 0"),
        (["notes", "--out", "a", "three"], "three"),
        (["note", "--out", "a"], "Use notes."),
        (["mnist", "--out", "a"], "recipe mnist makes no data"),
        (["notes", "--out", "shelf"], "shelf is not an empty folder"),
        (["notes", "--out", "shelf/notes/make.py"], "is a file"),
    ],
)
def test_a_mistake_ends_before_a_file(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert run(["data", "make", *arguments]) == ConfigError.exit_code
    assert text in capsys.readouterr().err
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("fault", "code"), [("missing", DataError.exit_code), ("stuck", 130), ("full", CheckpointError.exit_code)]
)
@pytest.mark.parametrize("was_there", [False, True])
def test_what_goes_wrong_leaves_nothing_half_made(fault: str, code: int, was_there: bool) -> None:
    if was_there:
        Path("a").mkdir()
    assert run(["data", "make", "notes", "--out", "a", f"font_name={fault}"]) == code
    assert list(Path().glob("a/*")) == []
    assert Path("a").exists() == was_there
