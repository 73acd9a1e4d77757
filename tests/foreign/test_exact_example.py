"""The examples of exact loops print the same at one and three processes, and after a stop."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.foreign.scripts import Starter
from tests.runs import ROOT

PARTS = ROOT / "examples" / "exact_parts.py"


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


@pytest.mark.full
def test_the_example_with_all_parts_has_equal_weights_at_any_world_size_and_after_a_stop(tmp_path: Path) -> None:
    with Starter() as starter:
        three = starter.run_files([PARTS], 3)
    assert three.codes == [0, 0, 0], three
    # A rank that waits for a slow one says so, in lines that start with its name or are indented.
    first, *_, last = [line for line in three.texts[0].splitlines() if not line.startswith(("rank", " "))]
    sha256 = last.split()[-1]
    command = [sys.executable, "-u", str(PARTS)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as stopped:
        assert stopped.stdout.readline() == f"{first}\n"
        stopped.terminate()
        assert stopped.wait(120) == 143
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert again.stdout.split()[-1] == sha256


def test_the_page_on_own_loops_shows_lines_of_the_example() -> None:
    page = (ROOT / "docs" / "own-loop.md").read_text(encoding="utf-8")
    start, end = (page.index(f"## {title}") for title in ("Precision, clipping", "Evaluation"))
    excerpts = re.findall(r"```python\n(.*?)```", page[start:end], re.DOTALL)
    assert len(excerpts) == 7
    source = _unindented(PARTS.read_text(encoding="utf-8"))
    assert [excerpt for excerpt in excerpts if _unindented(excerpt) not in source] == []


def _unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())
