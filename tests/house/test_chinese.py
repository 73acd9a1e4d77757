"""Chinese pages have full-width punctuation, lead to their English versions, and have the same commands."""

import re
from pathlib import Path

import pytest

HAN = "\u4e00-\u9fff"
CODE = re.compile(r"```.*?```|``.+?``|`[^`\n]+`", re.DOTALL)
LINK_TARGET = re.compile(r"\]\([^)\s]*\)")
# A half-width mark beside a Chinese character, also with a code span or a bracket of Markdown between.
HALF_WIDTH = re.compile(rf"[{HAN}]\**[,;:?!()](?!\d)|[,;:?!()]\**[{HAN}]|[{HAN}]\.(?:\s|$)")
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)


def chinese_pages(root: Path) -> list[Path]:
    """The Chinese README and the pages in docs/zh-CN."""
    return [root / "README.zh-CN.md", *sorted((root / "docs/zh-CN").glob("*.md"))]


def english_page(page: Path, root: Path) -> Path:
    """The page that a Chinese one translates."""
    return root / "README.md" if page.parent == root else root / "docs" / page.name


def half_width_marks(text: str) -> list[str]:
    """Lines with half-width punctuation in Chinese text; code and the targets of links are left out."""
    prose = LINK_TARGET.sub("]", CODE.sub("\u7801", text))
    return [line for line in prose.splitlines() if HALF_WIDTH.search(line)]


def commands(text: str) -> set[str]:
    """The commands of a page's transcripts, without comments."""
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines() if line.startswith("$ ")]
    return {re.sub(r"\s+#.*", "", line) for line in lines}


def test_chinese_pages_have_full_width_punctuation(repo: Path) -> None:
    pages = chinese_pages(repo)
    assert len(pages) > 6
    found = {page.name: half_width_marks(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("text", ["\u8fdb\u7a0b,", "\u4e00(`x`)", "`x`:", "\u4e00.", "**\u4e00**;"])
def test_half_width_punctuation_is_noticed(text: str) -> None:
    assert half_width_marks(f"\u4e00{text}") != []


def test_full_width_punctuation_and_code_are_left_alone() -> None:
    text = "\u4e00\uff0c[\u4e00](a.md)\u3002`a, b`\uff08c\uff09 torch 2.15, a\n```\n\u4e00, b\n```\n"
    assert half_width_marks(text) == []


def test_a_chinese_page_has_the_commands_of_the_english_one(repo: Path) -> None:
    missing = {}
    for page in chinese_pages(repo)[1:]:
        english = english_page(page, repo)
        link = f"[English](../{english.name})"
        assert link in page.read_text(encoding="utf-8"), page.name
        missing[page.name] = commands(english.read_text(encoding="utf-8")) - commands(page.read_text(encoding="utf-8"))
    assert {name: lines for name, lines in missing.items() if lines} == {}
