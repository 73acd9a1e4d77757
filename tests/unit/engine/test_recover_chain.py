"""The chain of step records, continued by a process that takes over from a lost rank 0."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from samebits.engine.output.recorder import recover_chain
from samebits.errors import CheckpointError
from samebits.provenance.record import FIRST_LINK


def job(step: int) -> Any:
    progress, record = SimpleNamespace(step=step), SimpleNamespace(steps=True)
    return cast(Any, SimpleNamespace(progress=progress, config=SimpleNamespace(record=record), last_result=None))


def test_a_rank_0_that_is_lost_before_the_first_step_has_written_no_records(tmp_path: Path) -> None:
    assert recover_chain(job(0), tmp_path) == FIRST_LINK.hex()


def test_records_that_are_missing_later_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        recover_chain(job(5), tmp_path)
