"""Runs the DDP scripts in their usual and exact form at several numbers of processes, and writes a table of the hashes.

    python -m tests.foreign.record

Writes tests/foreign/README.md. Usual forms give other hashes on other processors.
"""

import sys
import tempfile
from pathlib import Path

from tests.foreign.forms import FOLDER, count_changed_lines
from tests.foreign.scripts import KILL_AT, Starter

HEAD = """# Training scripts of others

Scripts in the style of public examples, with the few changed lines that make each exact.

`usual.py` is a script's usual form, and `exact.diff` has the lines to change.

`make foreign` runs the DDP scripts and writes this table: the first digits of the SHA-256 of the final weights by the
number of processes, and after a kill on 3 processes and a resume on 2. They depend on the processor
and the version of torch.

| script | changed lines | usual at 1, 2, 4 | exact at 1, 2, 3, 4 | killed on 3, resumed on 2 |
|---|---|---|---|---|
"""


def main() -> int:
    """Run all, and return 1 if an exact form has several hashes."""
    rows, is_exact = [], True
    with Starter() as starter, tempfile.TemporaryDirectory() as folder:
        for name in sorted(KILL_AT):
            place = Path(folder) / name
            place.mkdir()
            usual = [starter.run(name, "usual", procs, place / f"usual{procs}.pt").sha256 for procs in (1, 2, 4)]
            exact = [starter.run(name, "exact", procs, place / f"exact{procs}.pt").sha256 for procs in (1, 2, 3, 4)]
            starter.run(name, "exact", 3, place / "killed.pt", kill_at=KILL_AT[name])
            assert (place / "killed.pt").exists(), name
            resumed = starter.run(name, "exact", 2, place / "killed.pt").sha256
            is_exact &= len({*exact, resumed}) == 1
            cells = [" ".join(digest[:6] for digest in digests) for digests in (usual, exact, [resumed])]
            rows.append(f"| [{name}]({name}/exact.diff) | {count_changed_lines(name)} | {' | '.join(cells)} |\n")
            print(rows[-1], end="", flush=True)
    (FOLDER / "README.md").write_text(HEAD + "".join(rows), encoding="utf-8")
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
