"""Python processes that are started import nothing from the current folder, which may be a stranger's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import TINY, environment

NAMES = ("torch", "random", "tempfile", "selectors", "socket", "numpy", "yaml", "queue", "samebits_missing")
QUICKLY = "data.num_samples=24 epochs=1 device=cpu report.tensorboard=false loader.num_workers=1"


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A folder with modules in it that leave a sign when they are imported."""
    folder = tmp_path / "strange"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    return folder


def run(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", line], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=380)


def test_training_on_two_processes_runs_nothing_of_the_current_folder(strange: Path, tmp_path: Path) -> None:
    done = run(f"{sys.executable} -m samebits train {TINY} {QUICKLY} --procs 2 --run-dir {tmp_path}/run", strange)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


LOOP = """
import samebits
import torch
from torch.utils.data import DataLoader, TensorDataset
import beside
torch.manual_seed(0)
m = torch.nn.Linear(4, 2)
o = torch.optim.SGD(m.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
m, o, data = samebits.exact(m, o, data, global_batch=16)
for _ in range(3):
    for (x,) in data:
        o.zero_grad(); m(x).square().mean().backward(); o.step()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("gate --steps 2", ""),  # starts a script as check does, once
        ("check", "--as 2"),
        pytest.param("check", "", marks=pytest.mark.lab),
    ],
)
def test_a_script_is_observed_without_modules_of_the_current_folder(
    strange: Path, tmp_path: Path, command: str, ranks: str
) -> None:
    (strange / "samebits.py").write_text((strange / "torch.py").read_text())
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "beside.py").touch()
    lines = LOOP.splitlines(keepends=True)
    (mine / "loop.py").write_text("".join(each for each in lines if not ranks or "samebits" not in each))
    done = run(f"{sys.executable} -P -m samebits {command} {mine}/loop.py {ranks}", strange)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.mark.full
def test_hosts_and_batch_scripts_start_python_so_too(strange: Path, tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    # What ssh would have a shell do over there.
    ssh.write_text(f'#!/bin/sh\nfor last; do :; done\necho "$last" > {tmp_path}/there\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    command = f"PATH={ssh.parent}:$PATH {sys.executable} -P -m samebits"
    done = run(f"{command} train {TINY} {QUICKLY} --hosts nowhere:1 --run-dir {tmp_path}/run", strange)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " -P -m samebits train" in (tmp_path / "there").read_text()
    done = run(f"{command} submit {TINY} --run-dir {tmp_path}/run --dry-run", strange)
    assert f"srun --kill-on-bad-exit=0 {sys.executable} -P -m samebits" in done.stdout
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.mark.full
def test_a_recipe_may_import_what_is_beside_the_script_that_calls_train(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "recipes").mkdir(parents=True)
    (project / "shared_part.py").write_text("WIDTH = 5\n")
    recipe = TINY.read_text().replace("default=6,", "default=WIDTH,")
    recipe = recipe.replace("import torch\n", "import torch\nfrom shared_part import WIDTH\n", 1)
    (project / "recipes" / "mine.py").write_text(recipe)
    settings = {"data.num_samples": 24, "epochs": 1, "device": "cpu", "report.tensorboard": False}
    (project / "main.py").write_text(
        f"import samebits\nsamebits.train({str(project / 'recipes' / 'mine.py')!r}, {settings!r}, procs=1,"
        f" run_dir={str(tmp_path / 'run')!r})\n"
    )
    done = run(f"{sys.executable} project/main.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "width: 5" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.full
def test_a_script_that_a_recipe_starts_finds_what_is_beside_it(tmp_path: Path) -> None:
    """What keeps the fork server's imports safe is not handed on to a user's own programs."""
    (tmp_path / "helper_of_mine.py").write_text("print('found')\n")
    (tmp_path / "tool.py").write_text("import helper_of_mine\n")
    recipe = TINY.read_text() + (
        "\nimport subprocess, sys\n_build = build\n"
        "def build(config):\n"
        f"    subprocess.run([sys.executable, {str(tmp_path / 'tool.py')!r}], check=True)\n"
        "    return _build(config)\n"
    )
    (tmp_path / "starts.py").write_text(recipe)
    done = run(f"{sys.executable} -P -m samebits train starts.py {QUICKLY} --procs 2 --run-dir run", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "PYTHONSAFEPATH" not in os.environ


def test_a_reader_that_goes_away_does_not_stop_the_machines(tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    # Says much, slowly enough for `head` to be gone, and ends with a code of its own.
    ssh.write_text("#!/bin/sh\nfor i in $(seq 40); do echo line $i; sleep 0.02; done\ntouch done\nexit 6\n")
    ssh.chmod(0o755)
    command = f"PATH={ssh.parent}:$PATH {sys.executable} -P -m samebits train digits --hosts nowhere --run-dir run"
    done = run(f"({command}; echo $? > code) | head -n 1", tmp_path)
    assert done.stdout == "line 1\n"
    assert (tmp_path / "done").exists()
    assert (tmp_path / "code").read_text() == "6\n"
    assert done.stderr == ""


def test_a_closed_terminal_does_not_stop_the_machines_under_nohup(tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    # Waits until the command handles SIGUSR2 (bit 11), the last of its signals. What it says after them still arrives.
    handled = "$((0x$(sed -n 's/^SigCgt:[^0-9a-f]*//p' /proc/$PPID/status) & 0x800))"
    text = f"until [ {handled} != 0 ]; do sleep 0.01; done; kill -HUP $PPID; kill -USR1 $PPID; echo continued; exit 6"
    ssh.write_text(f"#!/bin/sh\n{text}\n")
    ssh.chmod(0o755)
    command = f"PATH={ssh.parent}:$PATH {sys.executable} -P -m samebits train digits --hosts nowhere --run-dir run"
    ignoring = run(f"trap '' HUP USR1; {command}", tmp_path)
    assert (ignoring.stdout, ignoring.stderr, ignoring.returncode) == ("continued\n", "", 6)
    for ignored, number in (("HUP", signal.SIGUSR1), ("USR1", signal.SIGHUP)):
        stopped = run(f"trap '' {ignored}; {command}", tmp_path)
        assert "stopping all machines" in stopped.stderr
        assert stopped.returncode == 128 + number
