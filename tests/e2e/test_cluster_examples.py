"""The examples for Slurm, SkyPilot and Kubeflow run. Two machines are two processes with the variables of each."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.runs import LONG_S, TINY, environment, own_port, weights

KEY = "a key of these tests that is long enough"


@pytest.fixture
def programs(tmp_path: Path) -> Callable[[str, str], None]:
    """Puts programs of these tests first on the PATH."""
    (tmp_path / "bin").mkdir()

    def write(name: str, text: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    write("samebits", f'exec {shlex.quote(sys.executable)} -m samebits "$@"')
    return write


def _run_all(commands: Sequence[tuple[list[str], dict[str, str]]], folder: Path) -> None:
    """Run commands at the same time, each with its variables, and check that all succeed."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    options = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(words, env=environment(PATH=path) | more, **options) for words, more in commands]
    said = [process.communicate(timeout=LONG_S)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)


def test_the_skypilot_task_has_the_fields_that_skypilot_takes(repo: Path) -> None:
    schema = json.loads((repo / "tests/fixtures/skypilot_task.json").read_text())
    task = yaml.safe_load((repo / "examples/skypilot.yaml").read_text())
    jsonschema.validate(task, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(task | {"num_machines": 2}, schema)


@pytest.mark.full
@pytest.mark.usefixtures("programs")
def test_the_skypilot_task_trains_on_two_machines(repo: Path, tiny: Path, tmp_path: Path) -> None:
    text = yaml.safe_load((repo / "examples/skypilot.yaml").read_text())["run"]
    for before, after in (("train mnist", f"train {TINY}"), ("/runs/mnist", "run"), ("export PATH", "#")):
        assert before in text
        text = text.replace(before, after)
    address = f"127.0.0.1:{own_port()}"
    text = text.replace('"$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"', '"$(head -n 1 <<< "$SKYPILOT_NODE_IPS")" --procs 1')
    common = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": f"{address}\n{address}", "SAMEBITS_KEY": KEY}
    _run_all([(["bash", "-ec", text], {**common, "SKYPILOT_NODE_RANK": str(rank)}) for rank in range(2)], tmp_path)
    assert weights(tmp_path / "run") == weights(tiny)


@pytest.mark.full
def test_the_slurm_script_trains(repo: Path, tiny: Path, tmp_path: Path, programs: Callable[[str, str], None]) -> None:
    # srun starts two tasks with Slurm's variables; the container is this machine, so its options are left out.
    programs("apptainer", 'echo "$*" >> apptainer.log; while [ "$1" != samebits ]; do shift; done; exec "$@"')
    programs(
        "srun",
        "shift; export SLURM_NTASKS=2 SLURM_JOB_ID=77 SLURM_STEP_NODELIST=127.0.0.1 SLURM_JOB_NODELIST=127.0.0.1\n"
        "export SLURM_NNODES=1 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0\n"
        'SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & SLURM_PROCID=1 SLURM_LOCALID=1 "$@" && wait $!',
    )
    script = (repo / "examples/slurm/container.sh").read_text()
    assert '--run-dir "/workspace/$run"' in script
    (tmp_path / "job.sh").write_text(script.replace('"/workspace/$run"', '"$run"'))
    variables = {"RECIPE": str(TINY), "RUN": "run", "SLURM_JOB_ID": "77", "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = str(own_port())
    _run_all([(["bash", "job.sh"], variables)], tmp_path)
    assert weights(tmp_path / "run") == weights(tiny)
    given = (tmp_path / "apptainer.log").read_text().splitlines()
    assert len(given) == 2
    assert given[0].startswith(f"exec --nv --bind {tmp_path}:/workspace --pwd /workspace samebits.sif samebits train")


@pytest.mark.full
def test_the_variables_of_a_trainjobs_pods_start_a_world(repo: Path, tiny: Path, tmp_path: Path) -> None:
    job = yaml.safe_load((repo / "examples/kubernetes/trainjob.yaml").read_text())
    trainer = job["spec"]["trainer"]
    command = " ".join(trainer["command"])
    assert command.startswith(
        "torchrun --max-restarts 3 -m samebits train mnist data.root=/runs/data --run-dir /runs/mnist"
    )
    words = [sys.executable, "-m", "torch.distributed.run", *trainer["command"][1:]]
    words[words.index("mnist") : words.index("/runs/mnist") + 1] = [str(TINY), "--run-dir", "run"]
    common = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    common |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(own_port())}
    _run_all([(words, {**common, "PET_NODE_RANK": str(rank)}) for rank in range(2)], tmp_path)
    assert weights(tmp_path / "run") == weights(tiny)
