"""The group of ranks on GPUs gives what gloo gives, also where ranks take turns."""

from pathlib import Path

import pytest

from tests.unit.ranks.in_ranks import run


@pytest.mark.timeout(900)
def test_every_call_gives_what_gloo_gives_and_ranks_take_turns(tmp_path: Path) -> None:
    usual = run("group_cases.py", "gloo")
    assert run("group_cases.py", "samebits") == usual
    assert run("group_cases.py", "samebits", tmp_path / "baton") == usual
