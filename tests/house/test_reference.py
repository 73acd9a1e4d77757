"""The committed reference pages are those that the code generates."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs/site"))

import api_page
import generate
import navigation


@pytest.mark.check
def test_the_reference_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)  # a default is below it
    outdated = generate.outdated()
    assert not outdated, f"run `make reference` (python docs/site/generate.py) and commit: {', '.join(outdated)}"


def test_a_page_that_is_out_of_date_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [("reference/cli.md", "# New\n"), ("reference/api.md", "# Same\n")]
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate, "pages", lambda: iter(pages))
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference/cli.md").write_text("# Old\n")
    (tmp_path / "reference/api.md").write_text("# Same\n")
    (tmp_path / "reference/settings-gone.md").write_text(f"# Gone\n\n{navigation.GENERATED}\n")
    assert generate.outdated() == ["docs/reference/cli.md", "docs/reference/settings-gone.md"]
    generate.write()
    assert generate.outdated() == []
    assert not (tmp_path / "reference/settings-gone.md").exists()


def test_a_docstring_becomes_markdown() -> None:
    text = "Return <both> `<x>`.\n\nArgs:\n    a: One,\n        two.\n\nReturns:\n    Both:\n\n        code\nAfter it."
    expected = (
        "Return \\<both> `<x>`.\n\n**Args**\n\n- `a`: One, two.\n\n**Returns**\n\nBoth:\n\n    code\n\nAfter it.\n"
    )
    assert api_page.docstring_to_markdown(text) == expected
