"""The fork server of a launcher that imports torch itself, for a recipe file: started before the settings are known."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.runs import LONG_S, TINY, environment, samebits

SCRIPT = """
import os
from multiprocessing import forkserver as server
import psutil
from samebits.launch import forkserver

def pid():
    return server._forkserver._forkserver_pid

os.environ.pop("MKL_NUM_THREADS", None)
os.environ["OMP_NUM_THREADS"] = "7"
with forkserver.early():
    unused = pid()
    assert psutil.pid_exists(unused)
assert not psutil.pid_exists(unused), "nobody needs it"
assert pid() is None
assert os.environ["OMP_NUM_THREADS"] == "7"
assert "MKL_NUM_THREADS" not in os.environ

with forkserver.early():
    first = pid()
    forkserver.prepare([], 1)
    assert pid() == first, "the settings are the defaults"
assert psutil.pid_exists(first)
forkserver.prepare([], 3)
assert pid() == first, "it may be in use"
"""
REPLACED = """
import os, time
from multiprocessing import forkserver as server
import psutil
from samebits.launch import forkserver

with forkserver.early():
    first = server._forkserver._forkserver_pid
    {change}
    forkserver.prepare([], {threads})
second = server._forkserver._forkserver_pid
assert second != first and not psutil.pid_exists(first)
while "OMP_NUM_THREADS" not in (found := psutil.Process(second).environ()):  # it is forked, but not executed yet
    time.sleep(0.01)
assert found["OMP_NUM_THREADS"] == "{threads}" and found.get("ATEN_CPU_CAPABILITY", "") == "{kernels}", found
"""


def _run(script: str) -> None:
    environ = environment()
    for name in ("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS"):
        environ.pop(name, None)
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr


def test_it_is_kept_for_the_default_settings_and_ended_if_nobody_uses_it() -> None:
    _run(SCRIPT)


@pytest.mark.parametrize(
    ("threads", "kernels"), [(2, ""), (1, "avx2"), pytest.param(2, "avx2", marks=pytest.mark.full)]
)
def test_it_is_replaced_for_other_threads_or_kernels(threads: int, kernels: str) -> None:
    change = f"os.environ['ATEN_CPU_CAPABILITY'] = '{kernels}'" if kernels else ""
    _run(REPLACED.format(change=change, threads=threads, kernels=kernels))


@pytest.mark.full
def test_a_recipe_file_is_loaded_beside_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    found = tmp_path / "found"
    more = f"""
import os, psutil, pathlib
found = pathlib.Path({str(found)!r})
if not found.exists():
    found.write_text(" ".join(str(child.pid) for child in psutil.Process().children()))
if os.environ.get("IS_WRONG"):
    raise ValueError("wrong")
"""
    recipe.write_text(TINY.read_text() + more)
    samebits("train", recipe, "max_steps=1", "--procs", 2, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert len(found.read_text().split()) >= 2  # the fork server and multiprocessing's resource tracker
    found.unlink()
    failed = samebits("train", recipe, "--procs", 2, cwd=tmp_path, code=2, SAMEBITS_DEBUG="", IS_WRONG="1")
    assert "wrong" in failed.stderr
    pids = [int(pid) for pid in found.read_text().split()]
    assert len(pids) >= 2
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=LONG_S)
    assert not any(psutil.pid_exists(pid) for pid in pids)
