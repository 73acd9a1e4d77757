"""The order of a set of strings is the same in all workers of all runs."""

import os
import subprocess
import sys

import pytest

from tests.runs import LONG_S, environment

IN_A_WORKER = """
import multiprocessing
from samebits.launch import forkserver
if __name__ == "__main__":
    forkserver.prepare([])
    process = multiprocessing.get_context("forkserver").Process(target=exec, args=("print(hash('a'), flush=True)",))
    with forkserver.without_script():
        process.start()
    process.join()
"""


def run(code: str, **more: str) -> str:
    variables = {name: value for name, value in environment(**more).items() if name != "PYTHONHASHSEED" or name in more}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=LONG_S, cwd=os.sep, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("variables", [{}, pytest.param({"PYTHONHASHSEED": "7"}, marks=pytest.mark.full)])
def test_a_worker_has_a_fixed_hash_seed_or_the_user_s(variables: dict[str, str]) -> None:
    assert run(IN_A_WORKER, **variables) == run("print(hash('a'))", **{"PYTHONHASHSEED": "0", **variables})
