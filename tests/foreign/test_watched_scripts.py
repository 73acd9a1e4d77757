"""In a script's own loop the rank that hangs, is missing, or has other code, settings or weights is named."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from samebits.errors import HangError
from tests.foreign.forms import FOLDER
from tests.foreign.scripts import Starter
from tests.runs import TORCHRUN, python

SCRIPT = FOLDER / "watched.py"


def remove_stacks(text: str) -> str:
    """Return the stacks that an error names, and delete them."""
    (found,) = set(re.findall(r"stacks: (\S+)/stacks-rank-\*\.txt", text))
    folder = Path(found)
    stacks = (folder / "stacks-rank-1.txt").read_text()
    shutil.rmtree(folder)
    return stacks


def test_a_rank_that_hangs_in_the_loop_is_named_with_its_stack(starter: Starter) -> None:
    ended = starter.run_files([SCRIPT], 2, "sleep")
    text = "\n".join(ended.texts)
    assert HangError.exit_code in ended.codes, ended
    assert "hang: rank 1 has made no progress for" in text
    assert "set hang_timeout_s=12" in text
    assert "watched.py" in remove_stacks(text)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("late", "waited 2 s for 2 processes: rank 1 did not come"),
        pytest.param("settings", "the ranks differ in global_batch", marks=pytest.mark.full),
        ("nan", "the gradient is not finite"),
        pytest.param("drift", "the ranks differ after step 3: first in bias", marks=pytest.mark.full),
    ],
)
def test_what_goes_wrong_on_one_rank_is_named(starter: Starter, what: str, says: str) -> None:
    ended = starter.run_files([SCRIPT], 2, what)
    assert ended.codes != [0, 0]
    assert says in "\n".join(ended.texts), ended


def test_other_code_on_one_rank_is_named(starter: Starter, tmp_path: Path) -> None:
    other = tmp_path / "watched.py"
    other.write_text(SCRIPT.read_text().replace("lr=0.1", "lr=0.2"))
    ended = starter.run_files([SCRIPT, other], 2, "none")
    assert ended.codes != [0, 0]
    assert re.search(r"the ranks differ in .*watched\.py", "\n".join(ended.texts)), ended


@pytest.mark.full
@pytest.mark.parametrize("what", ["pause", "validation"])
def test_a_pause_outside_of_the_loop_or_a_validation_in_it_is_no_hang(starter: Starter, what: str) -> None:
    assert starter.run_files([SCRIPT], 2, what).codes == [0, 0]


@pytest.mark.full
def test_a_hang_under_torchrun_is_named() -> None:
    done = python(*TORCHRUN, 2, "--standalone", SCRIPT, "sleep", code=1)
    assert "hang: rank 1 has made no progress for" in done.stderr
    assert "watched.py" in remove_stacks(done.stderr)


@pytest.mark.full
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_what_goes_wrong_in_the_loop_of_a_framework_is_named(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    with Starter(f"samebits.integrations.{framework}") as starter:
        for what, says in [
            ("nan", "the gradient is not finite"),
            ("drift", "weights changed within a step"),
            ("sleep", "hang: rank 1 has made no progress for"),
        ]:
            ended = starter.run_files([FOLDER / "watched_frameworks.py"], 2, framework, what)
            assert ended.codes != [0, 0]
            text = "\n".join(ended.texts)
            assert says in text, ended
    assert "watched_frameworks.py" in remove_stacks(text)
