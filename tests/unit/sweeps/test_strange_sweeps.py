"""A sweep folder of a stranger runs no code: its settings are not those that the user typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samebits.errors import ConfigError
from samebits.recipes.trust import list_path, trust
from samebits.sweeps.state_file import check_recipe, read_sweep

OWNED = "from pathlib import Path\nPath('OWNED').touch()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sw").mkdir()
    (tmp_path / "sw" / "evil.py").write_text(OWNED)
    return tmp_path / "sw"


def write(folder: Path, **changes: Any) -> None:
    plain = {"format": 1, "arguments": ["digits", "epochs=1"], "keys": ["optim.lr"], "trials": [["optim.lr=0.1"]]}
    (folder / "sweep.json").write_text(json.dumps(plain | changes))


SEARCH = {"num_trials": 2, "lag": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": ["sw/evil.py"]},
        {"arguments": ["sw/evil.py/"]},
        {"arguments": ["sw/../sw/./evil.py//"]},
        {"arguments": ["digits", "report.trackers=[sw/evil.py]"]},
        {"arguments": ["digits", 'report={"trackers": ["sw/evil.py"]}']},
        {"trials": [["optim.lr=0.1"], ["optim.lr=0.2", "report.trackers=[./sw/evil.py]"]]},
        {"trials": [['report={"trackers": ["sw/evil.py"]}']]},
        {"trials": [], "search": {**SEARCH, "space": ["report.trackers=[sw/evil.py],[]"]}},
        {"arguments": ["sw/evil.yaml"]},
        {"arguments": ["sw/evil.yaml/"]},
    ],
)
def test_no_way_of_a_strangers_sweep_runs_code(folder: Path, changes: dict[str, Any]) -> None:
    (folder / "evil.yaml").write_text("recipe: sw/evil.py\n")
    write(folder, **changes)
    with pytest.raises(ConfigError):
        check_recipe(read_sweep(folder), folder)
    assert not Path("OWNED").exists()
    assert not list_path().exists()


def test_a_sweep_with_a_trusted_tracker_may_be_resumed(folder: Path) -> None:
    write(folder, arguments=["digits", "report.trackers=[sw/evil.py]"])
    trust(folder / "evil.py")
    check_recipe(read_sweep(folder), folder)
    assert not Path("OWNED").exists()
