"""Each benchmark starts, and each that can be small runs with a tiny setting; a start by its path is refused."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import why_not

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef main(" in path.read_text())

# Options of a short run, and a text that it prints. Others have tests of their own in this folder or in tests/faults.
TINY = {
    "check_faults": (["secrets in a sample"], "1 of 1 found, 1 with the cause"),
    "diff_faults": (["--only", "momentum"], "3 of 3 steps, 3 modules"),
    "exact_cost": (["--procs", "2", "--models", "cnn", "--rounds", "1"], "cnn"),
    "faults": (["--only", "kill", "--tools", "Samebits"], "kill"),
    "kernels": (["--digits"], "portable"),
    "kills": (["--trials", "1"], "| moment |"),
    "link": (["--layouts", "1+1", "--models", "cnn", "--megabits", "0", "--steps", "2"], "| cnn |"),
    "own_loop": (["--models", "cnn", "--steps", "2"], "ratio"),
    "portable": (["--networks", "digits", "--rounds", "1"], "| digits |"),
    "steps": (["--rounds", "1", "--networks", "crnn"], "crnn"),
    "tampered_runs": (["--parts", "tampered", "--kinds", "chain"], "chain"),
}  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_lists_its_options(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as exit_info:
        importlib.import_module(f"benchmarks.{name}").main()
    assert exit_info.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


# The others start more processes: up to a minute.
CHOSEN = ("exact_cost", "tampered_runs")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in CHOSEN else pytest.mark.lab) for name in TINY]
)
def test_it_runs_with_a_tiny_setting(name: str, tmp_path: Path) -> None:
    if name == "link" and (reason := why_not()):
        pytest.skip(reason)
    options, expected = TINY[name]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    # 1: the figures miss a bar of speed, as they may on a busy machine.
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert expected in done.stdout


@pytest.mark.full
def test_a_start_by_its_path_names_the_command() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "benchmarks/exact_cost.py"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "run python -m benchmarks.exact_cost, or make bench-exact-cost" in done.stderr
