"""The two forms of a script: `usual.py`, and what makes it exact, the lines of `exact.diff`."""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def names(framework: str) -> list[str]:
    """The folders with scripts of a framework: ddp, accelerate, lightning or trainer."""
    return sorted(path.parent.name for path in FOLDER.glob(f"{framework}_*/usual.py"))


def script(name: str, form: str, folder: Path) -> Path:
    """Return the file of a script, such as "ddp_cnn" in the form "exact", which is written into a folder."""
    usual = FOLDER / name / "usual.py"
    if form == "usual":
        return usual
    exact = folder / f"{name}.py"
    diff = (FOLDER / name / "exact.diff").read_text(encoding="utf-8")
    exact.write_text(patched(usual.read_text(encoding="utf-8"), diff), encoding="utf-8")
    return exact


def patched(text: str, diff: str) -> str:
    """Apply a unified diff. Unlike `patch`, it searches for no other place where a line may fit."""
    before, after, num_read = text.splitlines(keepends=True), [], 0
    for line in diff.splitlines(keepends=True)[2:]:  # after the names of the two files
        if header := re.match(r"@@ -(\d+)", line):
            start = int(header[1]) - 1
            after += before[num_read:start]
            num_read = start
        elif line[0] == "+":
            after.append(line[1:])
        else:
            if before[num_read] != line[1:]:
                raise ValueError(f"line {num_read + 1} is {before[num_read]!r}, and in the diff {line[1:]!r}")
            after += [line[1:]] * (line[0] == " ")
            num_read += 1
    return "".join([*after, *before[num_read:]])


def count_changed_lines(name: str) -> int:
    """Lines that the exact form replaces, adds or removes. A line that is replaced counts once."""
    diff = (FOLDER / name / "exact.diff").read_text(encoding="utf-8").splitlines()[2:]
    blocks = re.findall(r"[-+]+", "".join(line[0] for line in diff))
    return sum(max(block.count("-"), block.count("+")) for block in blocks)
