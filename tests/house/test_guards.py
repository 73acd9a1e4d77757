"""The guards in tests/conftest.py, each tried by a test that leaks on purpose."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import guards
from tests.runs import PYTHON_PATH

LEAKS = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import pytest

def test_clean(monkeypatch, tmp_path):
    monkeypatch.setenv("LEAK", "1")
    monkeypatch.chdir(tmp_path)
    thread = threading.Thread(target=time.sleep, args=(0.1,)); thread.start()
    subprocess.Popen(["sleep", "0.1"])

def test_environment(): os.environ["LEAK_VARIABLE"] = "1"
def test_directory(tmp_path): os.chdir(tmp_path)
def test_signal(): signal.signal(signal.SIGTERM, lambda *_: None)
def test_thread(): threading.Thread(target=time.sleep, args=(30,), daemon=True, name="leak-thread").start()
def test_process(): subprocess.Popen([sys.executable, "-c", "import time; time.sleep(77)"])
def test_file(): (Path(__file__).parent / "left.jsonl").write_text("x")
def test_folder(): (Path(__file__).parent / "runs" / "digits-0001").mkdir(parents=True)

@pytest.mark.skipif(sys.platform != "linux", reason="orphans are only seen on Linux")
def test_orphan():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(78)'])"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_group(tmp_path):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
"""

EXPECTED = {
    "test_environment": "environment variable LEAK_VARIABLE: None became '1'",
    "test_directory": "working directory",
    "test_signal": "handler of SIGTERM",
    "test_thread": "thread leak-thread",
    "test_process": r"process \d+: .*sleep\(77\)",
    "test_orphan": r"process \d+: .*sleep\(78\)",
    "test_file": "file .*left.jsonl",
    "test_folder": "file .*runs",
    "test_group": "a torch process group",
}


@pytest.mark.full
def test_each_guard_names_what_a_test_left_behind(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rA", "-s"],
        cwd=tmp_path,
        env={**environ, "PYTHONPATH": PYTHON_PATH, "COLUMNS": "400", "GUARDS_GRACE_S": "3"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert "Using --randomly-seed=" in run.stdout, "tests run in random order and print the seed"
    errors = dict(re.findall(r"^ERROR test_leaks.py::(\w+) - (.*)$", run.stdout, re.MULTILINE))
    for test, text in EXPECTED.items():
        if test == "test_orphan" and sys.platform != "linux":
            continue
        assert re.search(text, errors.pop(test, "")), f"{test}\n{run.stdout}{run.stderr}"
    assert not errors, f"a clean test was refused: {errors}"
    assert run.returncode == 1


def _train_in_this_process() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)


def test_settings_left_by_a_fixture_of_a_wider_scope_end_before_the_test() -> None:
    _train_in_this_process()
    guards.Torch().look()
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()) == (False, torch.float32)


def test_settings_left_by_a_test_end_with_it() -> None:
    guard = guards.Torch()
    before = guard.look()
    _train_in_this_process()
    torch.set_num_threads(before + 1)
    assert guard.left(before) == []
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()) == (False, torch.float32)
    assert torch.get_num_threads() == before


def test_settings_of_a_test_that_imports_torch_first_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = guards.Torch()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        before = guard.look()
    _train_in_this_process()
    assert (before, guard.left(before)) == (0, [])
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()) == (False, torch.float32)
