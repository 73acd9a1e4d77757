"""A sweep folder of a stranger runs no code: its settings are not those that the user typed."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from samebits.cli.main import run
from samebits.cluster.signals import StopSignal
from samebits.errors import CheckpointError, ConfigError
from samebits.launch.subcommand import Subcommand
from samebits.recipes.trust import list_path, trust
from samebits.sweeps import runner
from samebits.sweeps.runner import Runner, TrialSlot
from samebits.sweeps.state_file import check_recipe, define_grid, read_sweep

OWNED = "from pathlib import Path\nPath('OWNED').touch()\n"
SPELLINGS = [
    "report.trackers=[sw/evil.py]", " report.trackers=[./sw/evil.py]", "\treport.trackers = [sw/evil.py]",
    'report={"trackers": ["sw/evil.py"]}', ' report = {"trackers": ["sw/evil.py"]}',
    "{report: {trackers: [sw/evil.py]}}", "--report.trackers=[sw/evil.py]",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sw").mkdir()
    (tmp_path / "sw" / "evil.py").write_text(OWNED)
    return tmp_path / "sw"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the trials that start; each ends at once."""
    commands: list[list[str]] = []

    def start(command: Sequence[str], *args: Any, **options: Any) -> Subcommand:
        commands.append(list(command))
        return Subcommand([sys.executable, "-c", ""], *args, **options)

    monkeypatch.setattr(runner, "Subcommand", start)
    return commands


def write(folder: Path, **changes: Any) -> None:
    plain = {"format": 1, "arguments": ["digits", "epochs=1"], "keys": ["optim.lr"], "trials": [["optim.lr=0.1"]]}
    (folder / "sweep.json").write_text(json.dumps(plain | changes))


def resume(folder: Path) -> dict[str, str]:
    found = read_sweep(folder)
    check_recipe(found, folder)
    return Runner(folder, found, [TrialSlot([], None)], 1, lambda line: None, lambda active, done: None).run(
        StopSignal()
    )


@pytest.mark.parametrize(
    "source", ["sw/evil.py", "sw/evil.py/", "sw/../sw/./evil.py//", "sw/evil.yaml", "sw/evil.yaml/"]
)
def test_the_recipe_file_of_a_strangers_sweep_is_not_run(folder: Path, started: list[list[str]], source: str) -> None:
    (folder / "evil.yaml").write_text("recipe: sw/evil.py\n")
    write(folder, arguments=[source])
    with pytest.raises(ConfigError):
        resume(folder)
    assert started == []
    assert not Path("OWNED").exists()
    assert not list_path().exists()


@pytest.mark.parametrize("name", ["output", "trial-0001", "sweep.lock"])
def test_a_link_in_a_strangers_sweep_reaches_no_file_of_the_user(folder: Path, name: str) -> None:
    write(folder)
    mine = folder.parent / "mine"
    mine.mkdir()
    (mine / "trial-0001.json").write_text("results")
    (mine / "trial-0001.txt").write_text("notes")
    (folder / name).symlink_to(mine if name != "sweep.lock" else mine / "trial-0001.txt")
    assert run(["sweep", str(folder), "--jobs", "1"]) == CheckpointError.exit_code
    assert {path.name: path.read_text() for path in mine.iterdir()} == {
        "trial-0001.json": "results",
        "trial-0001.txt": "notes",
    }


@pytest.mark.parametrize("place", ["arguments", "trials", "second trial"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_tracker_of_a_strangers_sweep(folder: Path, started: list[list[str]], spelling: str, place: str) -> None:
    if place == "arguments":
        write(folder, arguments=["digits", spelling])
    else:
        write(folder, trials=[[spelling]] if place == "trials" else [["no.such=1"], [spelling]])
    try:
        reasons = resume(folder)
    except ConfigError:
        reasons = {"trial-0001": "refused before any trial"}
    assert reasons
    assert started == []
    assert not Path("OWNED").exists()
    assert not list_path().exists()


def test_a_sweep_with_a_trusted_tracker_may_be_resumed(folder: Path, started: list[list[str]]) -> None:
    write(folder, arguments=["digits", "report.trackers=[sw/evil.py]"])
    trust(folder / "evil.py")
    assert resume(folder).keys() <= {"trial-0001"}
    assert len(started) == 1
    assert not Path("OWNED").exists()


def test_a_tracker_among_the_values_that_the_user_types_may_start(folder: Path, started: list[list[str]]) -> None:
    sweep = define_grid("digits", ["epochs=1"], ["report.trackers=[],[sw/evil.py]"])
    sweep.write(folder)
    resume(folder)
    assert len(started) == 2
