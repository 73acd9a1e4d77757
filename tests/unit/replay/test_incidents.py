"""`samebits debug` on thirty incidents: the printed hints lead from the error to step, sample and module."""

import shlex
from pathlib import Path

import pytest

from tests.runs import samebits
from tests.unit.replay.incidents import INCIDENTS, Incident


@pytest.mark.full
@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: each.name)
@pytest.mark.one_in(3)
def test_the_printed_hints_lead_to_a_planted_incident(tmp_path: Path, incident: Incident) -> None:
    (tmp_path / "recipe.py").write_text(incident.recipe())
    code = 0 if incident.look else 6
    ended = samebits("train", "recipe.py", *incident.settings, "--run-dir", "run", cwd=tmp_path, code=code)
    words = ["debug", "run", *incident.look]
    if not incident.look:
        fix = next(line for line in ended.stderr.splitlines() if "samebits debug" in line)
        _, *words = shlex.split(fix.partition("Look at the step: ")[2])
    found = samebits(*words, "--print", incident.expression, cwd=tmp_path)
    assert incident.found in found.stderr
    assert "False" not in found.stdout


def test_there_are_thirty_incidents() -> None:
    assert len({each.name for each in INCIDENTS}) == len(INCIDENTS) == 30
    assert all(compile(each.recipe(), each.name, "exec") for each in INCIDENTS)
