"""Habits in training loops with `samebits.exact`: equal hashes at any number of processes, or an error with a fix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.own_loops import EXACT, LOGS, NAMED, WARNED, Loop
from tests.foreign.scripts import Ended, Starter


def start(starter: Starter, folder: Path, loop: Loop, procs: int) -> Ended:
    script = folder / "train.py"
    script.write_text(loop.script)
    return starter.run_files([script], procs)


def some_of(loops: Mapping[str, Loop]) -> list[Any]:
    """Every third loop is tried by `make test`; each trains in several worlds."""
    return [pytest.param(name, marks=pytest.mark.full if number % 3 else ()) for number, name in enumerate(loops)]


@pytest.mark.parametrize("name", LOGS)
def test_what_is_only_logged_changes_nothing(starter: Starter, tmp_path: Path, name: str) -> None:
    usual = start(starter, tmp_path, Loop(), 1).sha256
    assert start(starter, tmp_path, LOGS[name], 2).sha256 == usual


@pytest.mark.parametrize("name", some_of(EXACT))
@pytest.mark.one_in(3)
def test_the_loop_is_exact_where(starter: Starter, tmp_path: Path, name: str) -> None:
    loop = EXACT[name]
    ended = [start(starter, tmp_path, loop, procs) for procs in (1, 2, 3)]
    assert len({each.sha256 for each in ended}) == 1
    assert all(loop.warns in each.texts[0] for each in ended)


@pytest.mark.parametrize("name", some_of(WARNED))
@pytest.mark.one_in(3)
def test_the_loop_is_exact_with_a_warning_where(starter: Starter, tmp_path: Path, name: str) -> None:
    ended = [start(starter, tmp_path, WARNED[name], procs) for procs in (1, 2)]
    assert len({each.sha256 for each in ended}) == 1
    assert all(WARNED[name].warns in " ".join(each.texts[0].split()) for each in ended)


@pytest.mark.parametrize("name", NAMED)
def test_the_loop_is_named_on_one_process_where(starter: Starter, tmp_path: Path, name: str) -> None:
    ended = start(starter, tmp_path, NAMED[name], 1)
    assert ended.codes == [1], ended
    assert NAMED[name].says in ended.texts[0]
    assert "  fix " in ended.texts[0]
    assert "  where " in ended.texts[0] or "config error" in ended.texts[0]
