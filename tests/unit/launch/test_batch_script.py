"""The batch script for Slurm holds what was given as one word each, and nothing of it as a command."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from samebits.cli.main import run
from samebits.errors import ConfigError
from samebits.launch.slurm import BatchJob, batch_script


def test_a_folder_with_spaces_and_quotes_is_one_word_everywhere(tmp_path: Path) -> None:
    folder = tmp_path / 'my "best" $(touch x) run\'s'
    text = batch_script(
        BatchJob(["python", "-m", "samebits", "train", "digits"], folder, time="1:00:00", options=["-p gpu"])
    )
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert f"--output={folder}.log" in [shlex.split(option)[0] for option in options]
    assert shlex.split(next(line for line in text.splitlines() if line.startswith("srun"))).count(str(folder)) == 1
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_each_start_has_a_key_of_its_own_unless_the_user_gives_one(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nprintenv SAMEBITS_KEY\n", encoding="utf-8")
    srun.chmod(0o700)
    text = batch_script(BatchJob(["true"], tmp_path / "run"))

    def key(**given: str) -> str:
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", **given}
        done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    keys = {key(), key()}
    assert len(keys) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", found) for found in keys)
    assert key(SAMEBITS_KEY="one of my own, long enough") == "one of my own, long enough"


def test_signs_that_slurm_replaces_in_names_of_files_stand_for_themselves() -> None:
    text = batch_script(BatchJob(["true"], Path("/data/50%-off")))
    assert "#SBATCH --output=/data/50%%-off.log" in text


@pytest.mark.parametrize(
    "job",
    [
        BatchJob(["true"], Path("a\ntouch x\n#")),
        BatchJob(["true"], Path("a"), options=["-pgpu\ntouch x"]),
        BatchJob(["true"], Path("a"), time="1\ntouch x"),
        BatchJob(["true"], Path("a\rb")),
    ],
)
def test_a_line_break_never_becomes_a_line_of_the_script(job: BatchJob) -> None:
    with pytest.raises(ConfigError, match="line break"):
        batch_script(job)


def test_submit_refuses_a_folder_with_a_line_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["submit", "digits", "--dry-run", "--run-dir", f"{tmp_path}/a\ntouch x"])
    said = capsys.readouterr()
    assert code == ConfigError.exit_code
    assert "--run-dir has a line break" in said.err
    assert said.out == ""
