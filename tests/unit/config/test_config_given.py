from pathlib import Path

import numpy as np
import pytest
import torch

from samebits.config.given import as_overrides, given_path
from samebits.errors import ConfigError


def test_a_mapping_in_either_form_becomes_what_the_command_line_takes() -> None:
    given = {"epochs": 3, "optim.lr": 0.1, "data": {"root": Path("a b"), "on": True}, "name": "ä", "best": None}
    assert as_overrides(given) == [
        "epochs=3", "optim.lr=0.1", "data.root=a b", "data.on=true", 'name="ä"', "best=null"
    ]  # fmt: skip
    assert as_overrides(["epochs=3"]) == ["epochs=3"]
    assert as_overrides(None) == as_overrides(()) == as_overrides({}) == []


def test_numbers_of_numpy_and_torch_and_paths_within_lists_are_taken() -> None:
    given = {"epochs": np.int64(1), "lr": np.float32(0.5), "on": np.bool_(True), "sizes": np.array([1, 2]),
             "decay": torch.tensor(0.25), "files": [Path("a"), np.int32(7)]}  # fmt: skip
    assert as_overrides(given) == [
        "epochs=1", "lr=0.5", "on=true", "sizes=[1, 2]", "decay=0.25", 'files=["a", 7]'
    ]  # fmt: skip


def test_what_is_no_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr is <object .*of the type object\n"):
        as_overrides({"optim": {"lr": object()}})


def test_a_path_is_never_by_chance_the_folder_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = [given_path(path, "--out") for path in ("~/a", Path("~/a"), ".")]
    assert paths == [tmp_path / "a", tmp_path / "a", Path()]
    for text in ("", " "):
        with pytest.raises(ConfigError, match="--out is empty"):
            given_path(text, "--out")
    with pytest.raises(ConfigError, match="no user of that name"):
        given_path("~nobody-of-that-name/a", "--out")
