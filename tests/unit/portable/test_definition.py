"""docs/portable.md defines each operation that has a portable form."""

import re
from pathlib import Path

from samebits.portable.table import AROUND, AS_IT_IS, HANDLERS

PAGE = Path(__file__).parents[3] / "docs" / "portable.md"


def plain(name: str) -> str:
    """Without library and overload, the marks of private names, of lists, of gradients and of dimensions."""
    name = re.sub(r"^(foreach|fused)_", "", name.rpartition("::")[2].partition(".")[0].strip("_"))
    return re.sub(r"_?[123]d(?=_|$)", "", re.sub(r"_backward(_data)?$|_forward$", "", name))


def test_each_operation_is_named_in_the_definition() -> None:
    definition = PAGE.read_text(encoding="utf-8").partition("## Portable v1")[2]
    named = {plain(word) for word in re.findall(r"\w+", definition)}
    assert not sorted({plain(each) for each in (*AS_IT_IS, *AROUND, *HANDLERS)} - named)


def test_each_operation_is_in_one_table() -> None:
    names = [*AS_IT_IS, *AROUND, *HANDLERS]
    assert len(names) == len(set(names))
