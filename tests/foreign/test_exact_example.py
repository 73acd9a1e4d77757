"""The shortest example of an exact loop prints the same at one and three processes."""

from __future__ import annotations

import re

import pytest

from tests.foreign.scripts import Starter
from tests.runs import ROOT


@pytest.mark.full
def test_the_example_of_an_exact_loop_prints_the_same_at_any_world_size() -> None:
    with Starter() as starter:
        alone = starter.run_files([ROOT / "examples" / "exact_ddp.py"], 1)
        three = starter.run_files([ROOT / "examples" / "exact_ddp.py"], 3)
    assert alone.codes == [0], alone
    assert three.codes == [0, 0, 0], three
    # A rank that waits for a slow one says so.
    lines = [re.findall(r"^(?:epoch .+|\w{64})$", text, re.MULTILINE) for text in [*alone.texts, *three.texts]]
    assert len(lines[0]) == 6
    assert lines[1:] == [lines[0], [], []]
    accuracy = float(alone.texts[0].split("epoch 4: accuracy ")[1].split()[0])
    assert accuracy > 0.9
