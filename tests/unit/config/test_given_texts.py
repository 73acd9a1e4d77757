"""Intervals, numbers of processes and given settings, as their texts are read."""

from pathlib import Path

import numpy as np
import pytest
import torch

from samebits.config.given import as_overrides, given_path
from samebits.config.interval import parse_interval
from samebits.errors import ConfigError
from samebits.process_range import MAX_NODES, ProcessRange, parse_range


@pytest.mark.parametrize(
    ("text", "due"), [("3 steps", [3, 6, 9]), ("1 epoch", [4, 8]), ("2 epochs", [8]), ("1 step", list(range(1, 10)))]
)
def test_an_interval_of_steps_or_epochs_follows_from_the_step_alone(text: str, due: list[int]) -> None:
    interval = parse_interval(text)
    assert [step for step in range(1, 10) if interval.is_due(step, 4, elapsed_s=0.0)] == due
    assert [step for step in range(1, 10) if interval.is_due(step, 4, elapsed_s=1e6)] == due


def test_an_interval_of_seconds_follows_from_the_time_alone() -> None:
    interval = parse_interval("5min")
    assert not interval.is_due(300, 1, elapsed_s=299.9)
    assert interval.is_due(7, 1000, elapsed_s=300.0)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", ProcessRange(4, 4)), ("2:4", ProcessRange(2, 4)), (" 1:1 ", ProcessRange(1, 1)), ("03", ProcessRange(3, 3))],
)
def test_a_number_or_a_range_is_read(text: str, size: ProcessRange) -> None:
    assert parse_range(text, "--procs") == size
    assert parse_range(str(size), "--procs") == size


@pytest.mark.parametrize(
    "text", ["", "0", "0:2", "3:2", "-1", "2:", ":2", "2-3", "two", "1:2:3", "1000000000", "4097", "2:4097"]
)
def test_what_is_neither_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_range(text, "--procs")
    assert f"--procs is {text!r}" in str(caught.value)
    assert "from 1 to 4096, or MIN:MAX" in str(caught.value)


def test_more_than_fit_on_a_machine_may_be_nodes() -> None:
    assert parse_range("4096", "--procs") == ProcessRange(4096, 4096)
    assert parse_range("5000", "--nodes", MAX_NODES) == ProcessRange(5000, 5000)


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse_range("9" * 5000, "--procs")


def test_a_range_is_elastic_and_a_number_is_not() -> None:
    assert ProcessRange(2, 3).is_elastic
    assert not ProcessRange(3, 3).is_elastic


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
