"""No file of a stranger ends in a traceback, takes a gigabyte or ten seconds.

FUZZ sets how many mutated files are tried, FUZZ_SEED which ones, FUZZ_KEEP a folder for those that fail: make fuzz.
"""

import json
import os
import selectors
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz import readers, seeds
from tests.fuzz.mutations import Mutation, mutated, several

NUM_FILES = int(os.environ.get("FUZZ", "60"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
MAX_BYTES, MAX_SECONDS = 1 << 30, 10.0
_PATIENCE_S = 120.0  # of wall time, on a busy machine

bounded = settings(
    max_examples=NUM_FILES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)


class Reader:
    """A process that reads files; started again after a file has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.outcomes: Counter[str] = Counter()

    def read(self, kind: str, path: Path) -> dict[str, Any]:
        process = self._process or self._start()
        process.stdin.write(json.dumps({"kind": kind, "path": str(path)}) + "\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(_PATIENCE_S) else "waits without end"
        if not line.startswith("{"):
            process.kill()
            code = process.wait()
            self.close()
            return {"outcome": line or f"the process ended with {code}", "peak_bytes": 0, "seconds": 0.0}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", readers.__name__]
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self._process


def fault(reader: Reader, one: seeds.Seed, folder: Path, content: bytes) -> str | None:
    """What is wrong with how a file was read; None if all is well."""
    answer = reader.read(one.kind, one.write(folder, content))
    outcome, is_well = str(answer["outcome"]), True
    if outcome not in ("read", "refused"):
        is_well, found = False, outcome
    elif answer["peak_bytes"] > MAX_BYTES or answer["seconds"] > MAX_SECONDS:
        is_well, found = False, f"it took {answer['peak_bytes']:,} bytes and {answer['seconds']:.1f} s"
    reader.outcomes[f"{one.kind}: {outcome if is_well else 'failed'}"] += 1
    if is_well:
        return None
    if keep := os.environ.get("FUZZ_KEEP"):
        (Path(keep) / f"{one.kind}-{sum(reader.outcomes.values())}-{one.name}").write_bytes(content)
    return f"{one.kind} {one.name}: {found}"


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
@pytest.mark.timeout(0)
def test_no_mutated_file_ends_in_a_traceback_or_takes_a_gigabyte_or_ten_seconds(tmp_path: Path) -> None:
    reader = Reader()
    faults: list[str] = []
    by_kind = {kind: [one for one in seeds.all_seeds() if one.kind == kind] for kind in readers.READERS}

    @seed(SEED)
    @bounded
    @given(st.sampled_from(sorted(by_kind)).flatmap(lambda kind: st.sampled_from(by_kind[kind])), several)
    def try_one(one: seeds.Seed, mutations: list[Mutation]) -> None:
        if found := fault(reader, one, tmp_path, mutated(one.content, mutations)):
            faults.append(found)

    try:
        for one in seeds.all_seeds():
            assert fault(reader, one, tmp_path, one.content) is None
            if one.name not in seeds.REFUSED:
                assert reader.outcomes[f"{one.kind}: refused"] == 0, f"{one.name} is valid"
            else:
                assert reader.outcomes.pop(f"{one.kind}: refused") == 1, f"{one.name} is of a format that is not read"
        reader.outcomes.clear()
        try_one()
    finally:
        reader.close()
    print(f"\nfuzz, seed {SEED}: {sum(reader.outcomes.values()):,} files: {dict(sorted(reader.outcomes.items()))}")
    distinct = {text.splitlines()[0] + text.splitlines()[-1]: text for text in faults}
    assert not faults, f"{len(faults):,} faults, {len(distinct):,} of them distinct\n" + "\n".join(
        list(distinct.values())[:20]
    )
