"""Scripts that give their ranks themselves, or resume by themselves, under `samebits check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.errors import ConfigError
from samebits.replay import check_script
from samebits.replay.check_script import _AGAIN, ScriptOutcome, _compare, _own_ranks
from samebits.replay.trace import StepTrace, Trace


@pytest.mark.parametrize(
    ("line", "is_own"),
    [
        ('init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=args.rank)', True),
        ("parser.add_argument('--rank', type=int)", True),
        ('parser.add_argument("--local_rank")', True),
        ('init_process_group("gloo")', False),
    ],
)
def test_a_script_with_ranks_of_its_own_is_recognized(line: str, is_own: bool, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(line)
    assert bool(_own_ranks(str(tmp_path / "s.py"))) is is_own


@pytest.mark.full
def test_a_failure_of_a_script_with_ranks_of_its_own_names_them(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text('ADDRESS = "tcp://127.0.0.1:29500"\nraise OSError("EADDRINUSE")\n')
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError) as caught:
        check_script.observe([str(script)], check_script.FIRST, tmp_path / "out" / "0")
    assert "its rank and address from the script's own options" in caught.value.slots["cause"]
    assert "without init_method, rank and world_size" in caught.value.slots["fix"]


def test_a_script_that_resumes_from_the_checkpoint_of_the_trial_before_is_named() -> None:
    first, resumed = (
        ScriptOutcome(Trace(steps={str(number): StepTrace() for number in steps}), {}) for steps in ((0, 1), (1, 2))
    )
    finding = _compare(first, resumed, _AGAIN)
    assert "began with step 1" in finding.what
    assert "neither saves nor loads" in finding.fix
    assert "Delete that checkpoint" in finding.fix
    assert _compare(first, first, _AGAIN) is None
