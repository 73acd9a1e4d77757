"""Each folder, each wing and the whole stay within their line budgets, and comments keep their share."""

import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from tests.house.budgets import FOLDERS, ROOT, SUMS
from tests.house.source import sources

pytestmark = pytest.mark.check

TABLE = "tests/house/budgets.py"
# A budget may be this much above the size, so that a small cut need not touch the table.
SLACK, SLACK_LINES = 0.05, 40
MARGIN, MARGIN_LINES = 0.02, 15  # of the number that the test proposes after a cut


def problems(sizes: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """What to change in the table of budgets, or in the code, each with the line to write."""
    found = [
        f'{name}: add it to a wing of {TABLE}: "{name}": {proposed(sizes[name]):_},' for name in sizes.keys() - budgets
    ]
    for name, budget in budgets.items():
        size = sizes.get(name, 0)
        if not size:
            found.append(f"{name}: gone. Remove its line from {TABLE}")
        elif size > budget:
            found.append(
                f"{name}: {size:,} lines, {size - budget:,} over its budget of {budget:,}. Cut them, or raise the "
                f'number in {TABLE} with a reason: "{name}": {proposed(size):_},  # REASON'
            )
        elif budget - size > max(SLACK * size, SLACK_LINES):
            found.append(
                f"{name}: {size:,} lines, its budget of {budget:,} is far above. "
                f'Lower the number in {TABLE}: "{name}": {proposed(size):_},'
            )
    return sorted(found)


def proposed(size: int) -> int:
    """A budget for a part of this size: a little above, in tens."""
    return -(-(size + max(int(MARGIN * size), MARGIN_LINES)) // 10) * 10


def folder_sizes(root: Path) -> dict[str, int]:
    """Lines of the Python files of each folder of the package."""
    sizes: Counter[str] = Counter()
    for name, path in sources(root, "src/samebits"):
        folder = name.removeprefix("src/samebits/").rpartition("/")[0].partition("/")[0]
        sizes[folder or ROOT] += _lines(path)
    return {name: size for name, size in sizes.items() if size}


def sum_sizes(root: Path) -> dict[str, int]:
    """Lines of the wings and of the whole."""
    folders = folder_sizes(root)
    wings = {wing: sum(folders.get(name, 0) for name in names) for wing, names in FOLDERS.items()}
    beside = {part: sum(_lines(path) for _, path in sources(root, part)) for part in ("tests", "benchmarks")}
    return {**wings, "package": sum(folders.values()), **beside}


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def test_each_folder_of_the_package_keeps_its_line_budget(repo: Path) -> None:
    found = problems(folder_sizes(repo), {name: lines for wing in FOLDERS.values() for name, lines in wing.items()})
    assert not found, "\n".join(found)


def test_the_wings_and_the_whole_keep_their_line_budgets(repo: Path) -> None:
    found = problems(sum_sizes(repo), SUMS)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("sizes", "budgets", "says"),
    [
        ({"data": 1001}, {"data": 1000}, '1 over its budget of 1,000. Cut them, or raise .*"data": 1_030,  # REASON'),
        ({"data": 1000}, {"data": 1060}, 'Lower the number in .*"data": 1_020,'),
        ({"optim": 100}, {"optim": 141}, 'Lower the number in .*"optim": 120,'),
        ({"new": 100}, {}, 'add it to a wing of .*"new": 120,'),
        ({}, {"old": 100}, "old: gone"),
    ],
)
def test_a_wrong_budget_comes_with_the_line_to_write(sizes: dict[str, int], budgets: dict[str, int], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        raise AssertionError("\n".join(problems(sizes, budgets)))


@pytest.mark.parametrize("budget", [1000, 1050])
def test_a_small_change_need_not_touch_the_table(budget: int) -> None:
    assert problems({"data": 1000}, {"data": budget}) == []


# Comments per 100 lines. It only rises: the goal is 4, and models near torch have 7 to 18.
FLOOR = 3.8
STEP = 0.2
# They instruct a tool, or say what an attribute is. Text behind a directive, in a comment of its own, counts.
DIRECTIVE = re.compile(r"#\s*(type: ignore\S*|noqa(: [\w, ]+)?|fmt: \w+|pragma: .*|: .*)\s*(?=#|$)")


def num_comments(path: Path) -> int:
    """Lines of a file that have a comment for the reader."""
    with tokenize.open(path) as file:
        words = [token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT]
    return sum(bool(DIRECTIVE.sub("", word).strip()) for word in words)


def test_the_share_of_comments_does_not_fall(repo: Path) -> None:
    paths = [path for _, path in sources(repo, "src")]
    lines = sum(path.read_bytes().count(b"\n") for path in paths)
    share = 100 * sum(map(num_comments, paths)) / lines
    assert share >= FLOOR, (
        f"{share:.2f} comments per 100 lines, {FLOOR} at least. Give the reason at private names of other packages, "
        "patches, fixed times and counts, locks, and orders of operations that results depend on"
    )
    assert share < FLOOR + STEP, f"{share:.2f} comments per 100 lines: set FLOOR = {int(share * 10) / 10} in {__file__}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("# Why.\nx = 1  # because\n", 2),
        ("x = '# no'\n", 0),
        ("x = 1  # type: ignore[assignment]\ny = 1  # noqa: E501\n# fmt: skip\n", 0),
        ("x = 1  # type: ignore[assignment]  # untyped in torch\n", 1),
        ("x: int  #: Number of samples.\n#: In pixels, see #3.\ny: int\n", 0),
    ],
)
def test_comments_for_tools_do_not_count(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "x.py").write_text(text)
    assert num_comments(tmp_path / "x.py") == count
