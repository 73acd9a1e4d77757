"""`samebits.launch` and `samebits.evaluate` from a script, also without `if __name__ == "__main__"`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import LONG_S, environment, python

SCRIPT = """
import json
import samebits
from beside import SCALE

def work(numbers, kind):
    with samebits.world(device="cpu") as world:
        if kind == "object":
            return (part for part in "a generator")
        if kind == "failure" and world.rank == 1:
            raise ValueError("rank 1 has had enough")
        return {"sum": SCALE * sum(numbers), "size": world.size}

told = {"result": samebits.launch(work, (1, 2, 3), "", procs=2)}
for kind in ("object", "failure"):
    try:
        samebits.launch(work, (), kind, procs=2)
    except samebits.SamebitsError as error:
        told[kind] = [type(error).__name__, str(error)]
try:
    samebits.launch(work, (part for part in "a generator"), "", procs=2)
except samebits.ConfigError as error:
    told["argument"] = str(error)
json.dump(told, open("told.json", "w"))
"""


@pytest.mark.full
def test_a_script_gets_the_result_of_rank_0_or_the_error_of_the_rank_that_failed(tmp_path: Path) -> None:
    # Without `if __name__ == "__main__"`: the script does not run again in the processes.
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("SCALE = 10\n")
    python("script.py", cwd=tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["result"] == {"sum": 60, "size": 2}
    assert told["object"][0] == "ConfigError"
    assert "the generator that the function returned cannot be sent" in told["object"][1]
    assert "rank 1" in told["failure"][1]
    assert "ValueError: rank 1 has had enough" in told["failure"][1]
    assert "work or its arguments cannot be sent to another process" in told["argument"]
    assert {path.name for path in tmp_path.iterdir()} <= {"script.py", "beside.py", "told.json", "__pycache__"}


PROGRAM = """
import samebits
print("it runs")
print(samebits.evaluate("run", procs=2) == samebits.evaluate("run", {"device": "cpu"}))
"""


@pytest.mark.full
def test_a_program_is_run_once_whatever_it_starts(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-"], input=PROGRAM, cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=LONG_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "it runs\nTrue\n"), done.stderr
