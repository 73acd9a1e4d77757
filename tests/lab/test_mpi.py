"""mpirun of Open MPI and of MPICH, real ones."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import Host
from tests.runs import LONG_S, PYTHON_PATH, ROOT, weights

MPIRUN = {
    "open mpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n"],
    "mpich": ["mpiexec.hydra", "-n"],
}


@pytest.mark.parametrize("kind", MPIRUN)
def test_mpirun_starts_a_world(
    kind: str, command: Callable[..., list[str]], environ: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    if shutil.which(MPIRUN[kind][0]) is None:
        pytest.skip(f"needs {MPIRUN[kind][0]}")
    done = subprocess.run(
        [*MPIRUN[kind], "3", *command()], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "run") == wanted


@pytest.mark.parametrize("kind", MPIRUN)
def test_an_exact_loop_joins_the_world_of_mpirun(kind: str, environ: dict[str, str], tmp_path: Path) -> None:
    if shutil.which(MPIRUN[kind][0]) is None:
        pytest.skip(f"needs {MPIRUN[kind][0]}")
    script = [sys.executable, str(ROOT / "examples/exact_ddp.py")]
    outputs = []
    for start in ([], [*MPIRUN[kind], "3"]):
        done = subprocess.run(
            [*start, *script], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert "epoch 4: accuracy 0.9" in outputs[0]
    assert outputs[0] == outputs[1]


def test_open_mpi_over_two_hosts_meets_at_mpirun(
    three: list[Host], command: Callable[..., list[str]], environ: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("needs mpirun.openmpi")
    # mpirun reaches other hosts by ssh; this is what stands for it where a key would have to be made.
    remote = tmp_path / "rsh"
    remote.write_text(_rsh(three[1]))
    remote.chmod(0o755)
    options = ["--allow-run-as-root", "--mca", "plm_rsh_agent", str(remote), "-H", "n1:1,n2:1", "-n", "2"]
    done = three[0].run(
        "mpirun.openmpi", *options, "-x", "PYTHONPATH", *command(), env={**environ, "PYTHONPATH": PYTHON_PATH},
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes on 2 hosts" in done.stdout
    assert weights(tmp_path / "run") == wanted


def _rsh(host: Host) -> str:
    """A script that takes `HOST COMMAND...` as ssh does, and runs the command on the host."""
    return f'#!/bin/sh\nshift\nexec {shlex.join(host.command(["sh", "-c"]))} "$*"\n'
