"""Slurm, a real one of two nodes: tasks of a step, the doctor in it, and jobs that queue themselves again."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.lab.slurm import Slurm
from tests.runs import (
    LONG_S,
    PYTHON_PATH,
    ROOT,
    SAMEBITS,
    processes_with,
    records,
    result,
    samebits,
    wait_until,
    weights,
)

Command = Callable[..., list[str]]


def _srun(slurm: Slurm, *arguments: object) -> subprocess.CompletedProcess[str]:
    return slurm.run("srun", *arguments, PYTHONPATH=PYTHON_PATH, NO_COLOR="1", COLUMNS="80", OMP_NUM_THREADS="1")


def test_tasks_of_a_step_on_two_nodes_form_a_world(slurm: Slurm, command: Command, wanted: str, tmp_path: Path) -> None:
    done = _srun(slurm, "-N2", "-n4", *command())
    assert done.returncode == 0, done.stderr
    assert "4 processes on 2 hosts" in done.stdout
    assert weights(tmp_path / "run") == wanted
    assert [(world["size"], world["from_step"]) for world in result(tmp_path / "run")["worlds"]] == [(4, 0)]


def test_a_script_with_an_exact_loop_joins_the_world_of_a_step(slurm: Slurm) -> None:
    script = [sys.executable, ROOT / "examples/exact_ddp.py"]
    alone, spread = _srun(slurm, "-N1", "-n1", *script), _srun(slurm, "-N2", "-n3", *script)
    assert (alone.returncode, spread.returncode) == (0, 0), alone.stderr + spread.stderr
    assert "epoch 4: accuracy 0.9" in alone.stdout
    assert alone.stdout == spread.stdout


def test_a_step_of_one_task_starts_own_processes(slurm: Slurm, command: Command, wanted: str, tmp_path: Path) -> None:
    done = _srun(slurm, "-N1", "-n1", *command("--procs", 2))
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "run") == wanted


def test_the_doctor_looks_at_all_nodes_of_a_step(slurm: Slurm) -> None:
    done = _srun(slurm, "-N2", "-n2", *SAMEBITS, "doctor", "digits")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes on 2 hosts (gloo)" in done.stdout
    assert "every pair" in done.stdout
    assert "correct; " in done.stdout
    assert "0 problems" in done.stdout or "no problems found" in done.stdout  # a busy machine is a warning


def test_a_task_that_is_killed_ends_the_step_and_is_named(slurm: Slurm, command: Command, tmp_path: Path) -> None:
    running = slurm.start("srun", "--kill-on-bad-exit=1", "-N2", "-n2", *command("epochs=500"), PYTHONPATH=PYTHON_PATH)
    wait_until(lambda: records(tmp_path / "run", "train"))
    (pid,) = [pid for pid in processes_with(str(tmp_path)) if "SLURM_PROCID=1" in _environ(pid)]
    os.kill(pid, signal.SIGKILL)
    said, _ = running.communicate(timeout=LONG_S)
    assert running.returncode != 0
    assert "task 1: Killed" in said
    wait_until(lambda: not processes_with(str(tmp_path)))


def _environ(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:  # gone since it was listed
        return ""


def _submit(slurm: Slurm, *arguments: object) -> str:
    """Submit a job, and give its number."""
    done = slurm.run(
        *SAMEBITS, "submit", "digits", "report.tensorboard=false", *arguments, PYTHONPATH=PYTHON_PATH, COLUMNS="80"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Submitted batch job ")
    return done.stdout.splitlines()[0].split()[-1]


def _state(slurm: Slurm, job: str) -> str:
    return slurm.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").stdout.strip()


def test_a_job_at_its_time_limit_saves_requeues_itself_and_ends_as_without_it(slurm: Slurm, tmp_path: Path) -> None:
    settings = ["epochs=12", "report.every_steps=1", "checkpoint.every=100s"]
    samebits(
        "train", "digits", "report.tensorboard=false", *settings, "--procs", 1, "--run-dir", tmp_path / "a",
        cwd=tmp_path,
    )  # fmt: skip
    folder = tmp_path / "b"
    job = _submit(slurm, *settings, "--nodes", 2, "--procs", 1, "--time", "10:00", "--run-dir", folder)
    wait_until(lambda: len(records(folder, "train")) > 5, timeout_s=LONG_S)
    # What Slurm does `--signal` before the time is up.
    assert slurm.run("scancel", "--signal=USR1", job).returncode == 0
    wait_until(lambda: _state(slurm, job) == "PENDING", timeout_s=LONG_S)
    stopped_at = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())
    assert 5 < stopped_at < result(tmp_path / "a")["steps"]
    wait_until(lambda: _state(slurm, job) == "COMPLETED", timeout_s=120)
    assert weights(folder) == weights(tmp_path / "a")
    log = Path(f"{folder}.log").read_text()
    assert f"stopped after step {stopped_at:,} and saved" in log
    assert f"from step {stopped_at:,}" in log


def test_a_refusal_by_sbatch_is_reported_in_its_words(slurm: Slurm, tmp_path: Path) -> None:
    options = ["--run-dir", tmp_path / "run", "--sbatch=--partition=none"]
    done = slurm.run(*SAMEBITS, "submit", "digits", *options, PYTHONPATH=PYTHON_PATH)
    assert done.returncode == 4
    assert "sbatch refused the job" in done.stderr
    assert "invalid partition" in done.stderr
