"""The benchmark of image loaders: quality is measured on different crops; wrong options are no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import images
from samebits.recipes.classify.config import MakeConfig
from samebits.recipes.classify.make import make


def test_quality_is_of_different_parts_of_each_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(MakeConfig(num_per_class=2, size_px=60), tmp_path)
    asked: list[int] = []
    keys = images.keys

    def noted(*arguments: Any) -> Any:
        made = keys(*arguments)
        asked.extend(made.tolist())
        return made

    monkeypatch.setattr(images, "keys", noted)
    images.quality(tmp_path, [0, 7], num_parts=3)
    assert len(asked) == len(set(asked)) == 6
    assert capsys.readouterr().out.strip().endswith("6 crops")


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere"], "the folder nowhere can't be read"),
        (["--data", ".", "--rounds", "0"], "argument --rounds: invalid count value: '0'"),
    ],
)
def test_a_mistake_is_named(repo: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    command = [sys.executable, str(repo / "benchmarks" / "images.py"), *arguments]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode != 0
    assert said in run.stderr
    assert "Traceback" not in run.stderr
