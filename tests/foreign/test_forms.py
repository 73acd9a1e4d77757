"""Scripts become exact by a few changed lines, which fit the usual form."""

from pathlib import Path

import pytest

from tests.foreign.forms import FOLDER, count_changed_lines, patched, script

SCRIPTS = sorted(path.parent.name for path in FOLDER.glob("*/usual.py"))
MAX_CHANGED_LINES = 5


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_becomes_exact_by_few_changed_lines(name: str, tmp_path: Path) -> None:
    exact = script(name, "exact", tmp_path).read_text(encoding="utf-8")
    compile(exact, name, "exec")
    usual = (FOLDER / name / "usual.py").read_text(encoding="utf-8")
    assert len(set(exact.splitlines()) - set(usual.splitlines())) <= count_changed_lines(name) <= MAX_CHANGED_LINES
    assert exact != usual


def test_a_diff_replaces_adds_and_removes_lines() -> None:
    diff = "--- a\n+++ b\n@@ -1,2 +1,2 @@\n-1\n+one\n 2\n@@ -4,2 +4,2 @@\n 4\n-5\n+6\n"
    assert patched("1\n2\n3\n4\n5\n", diff) == "one\n2\n3\n4\n6\n"


def test_a_diff_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 2 is 'two\\n', and in the diff '2\\n'"):
        patched("1\ntwo\n", "--- a\n+++ b\n@@ -2 +2 @@\n-2\n+3\n")
