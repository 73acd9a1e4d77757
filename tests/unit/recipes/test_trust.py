"""A recipe file that only a YAML file or a run folder names runs when the user trusts it, and not otherwise."""

import os
import py_compile
import shutil
import sys
from collections.abc import Iterator
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from samebits.cli.main import run
from samebits.config.load import load
from samebits.errors import ConfigError
from samebits.recipes.catalog import find
from samebits.recipes.trust import list_path, trust, trust_named
from samebits.storage.manifest import sha256_of

EVIL = "from pathlib import Path\nPath('{mark}').touch()\ndef build(config): return None\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a stranger's run folder, and a list of trusted recipes of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "strange_model.py").write_text(EVIL.format(mark=tmp_path / "ran"))
    (tmp_path / "run" / "config.yaml").write_text("recipe: strange_model.py\nepochs: 1\n")
    (tmp_path / "picture.png").touch()
    yield tmp_path
    for name in set(sys.modules) - before:
        if "strange_model" in name or name == "own_model":
            del sys.modules[name]


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "run"],
        ["predict", "run", "picture.png"],
        ["export", "run"],
        ["config", "run/config.yaml"],
        ["config", "run/config.yaml", "--schema"],
        ["submit", "run/config.yaml", "--run-dir", "new", "--dry-run"],
        ["train", "--run-dir", "run", "--resume", "auto"],
        ["train", "run/config.yaml", "--run-dir", "new"],
        ["eval", "weights.pth", "--preset", "run/config.yaml"],
    ],
    ids=" ".join,
)
def test_no_command_runs_the_recipe_file_that_a_stranger_s_run_folder_names(
    folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "weights.pth").touch()
    assert run(arguments) == 2
    text = capsys.readouterr().err
    assert "recipe file run/strange_model.py is not trusted, so it was not run" in text
    assert "run/config.yaml:1: recipe: " in text
    assert "sha256" in text
    assert f"samebits trust {folder}/run/strange_model.py" in text
    assert not (folder / "ran").exists()
    assert not (folder / "new").exists()


def test_a_recipe_file_that_the_command_line_names_runs(folder: Path) -> None:
    find("run/strange_model.py")
    assert (folder / "ran").exists()


def test_a_trusted_file_runs_until_it_changes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trust", "run/strange_model.py"]) == 0
    assert "trusted: " in capsys.readouterr().out
    assert load(find("run/config.yaml").config_class, find("run/config.yaml").layers).config.epochs == 1
    assert (folder / "ran").exists()
    with (folder / "run" / "strange_model.py").open("a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match="is not trusted") as caught:
        find("run/config.yaml")
    assert "changed since you trusted it" in caught.value.slots["cause"]


def test_a_copy_of_a_trusted_file_in_another_folder_is_not_trusted(folder: Path) -> None:
    trust(folder / "run" / "strange_model.py")
    shutil.copytree(folder / "run", folder / "other")
    with pytest.raises(ConfigError, match="is not trusted"):
        find("other/config.yaml")


def test_a_compiled_file_beside_a_recipe_is_not_what_runs(folder: Path) -> None:
    recipe = folder / "run" / "strange_model.py"
    compiled = cache_from_source(str(recipe))
    py_compile.compile(str(recipe), compiled, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    recipe.write_text("def build(config): return None\n")
    trust(recipe)
    find("run/config.yaml")
    assert not (folder / "ran").exists()


def test_training_with_a_named_recipe_file_remembers_it_and_nothing_else(folder: Path) -> None:
    (folder / "own_model.py").write_text("def build(config): return None\n")
    for source in ("own_model.py", "own_model.py", "mnist", "run/config.yaml"):
        trust_named(source)
    (line,) = list_path().read_text().splitlines()
    assert line.endswith(f" {folder}/own_model.py")
    assert os.stat(list_path()).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("sign", ["\r", "\n", "\x1b[2K", "\u2028"])
def test_a_path_with_an_invisible_character_is_not_trusted(folder: Path, sign: str) -> None:
    """As one line of the list, it could end in the hash and the path of another file."""
    evil = folder / "run" / "strange_model.py"
    named = folder / f"x{sign}{sha256_of(evil.read_bytes())} "
    harmless = Path(f"{named}{evil}")
    harmless.parent.mkdir(parents=True)
    harmless.write_text("# harmless\n")
    with pytest.raises(ConfigError, match="its path has an invisible character"):
        trust(harmless)
    assert not list_path().exists()


def test_a_carriage_return_in_the_list_begins_no_line(folder: Path) -> None:
    evil = folder / "run" / "strange_model.py"
    trust(folder / "picture.png")
    with list_path().open("ab") as file:
        file.write(f"{'0' * 64} /x\r{sha256_of(evil.read_bytes())} {evil}\n".encode())
    with pytest.raises(ConfigError, match="is not trusted"):
        find("run/config.yaml")
    assert not (folder / "ran").exists()


def test_a_list_that_others_can_write_to_is_not_used(folder: Path) -> None:
    trust(folder / "run" / "strange_model.py")
    list_path().chmod(0o666)
    with pytest.raises(ConfigError, match="can be changed by other users") as caught:
        find("run/config.yaml")
    assert "chmod 600" in caught.value.slots["fix"]
    assert not (folder / "ran").exists()


def test_a_list_that_can_not_be_written_stops_no_training(folder: Path) -> None:
    (folder / "config").touch()
    trust_named("run/strange_model.py")
    with pytest.raises(ConfigError, match="can't be written"):
        trust(folder / "run" / "strange_model.py")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing.py", "recipe file missing.py can't be read"),
        ("run", "run is neither a recipe file nor a public key"),
        ("pipe.py", "recipe file pipe.py can't be read: it is not a regular file"),
    ],
)
def test_what_can_not_be_trusted_is_named(
    folder: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo("pipe.py")
    assert run(["trust", name]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", ["~nobody-of-this-name/m.py", "m\\0.py", "x" * 300 + ".py", "/dev/zero.py", "run.py"])
def test_a_recipe_that_can_not_be_is_named_with_its_line(folder: Path, name: str) -> None:
    (folder / "run.py").mkdir()
    (folder / "my.yaml").write_text(f'recipe: "{name}"\n')
    with pytest.raises(ConfigError) as caught:
        find("my.yaml")
    assert caught.value.slots["where"] == "my.yaml:1"
