"""Temporary folders: only those of dead processes of this user are swept, and nothing that a user gave."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits import scratch
from tests.runs import environment, python

HOLDER = """
import sys, time
from pathlib import Path
from samebits import scratch
with scratch.scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has a scratch folder in tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def folder_of(process: subprocess.Popen[str]) -> Path:
    return Path(process.stdout.readline().strip())


def test_a_scratch_folder_is_gone_at_the_end_of_its_block(tmp_path: Path) -> None:
    with scratch.scratch_folder(tmp_path) as folder:
        (folder / "a" / "b").mkdir(parents=True)
        assert scratch.is_scratch(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_swept_only_after_its_process_ended(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    folder = folder_of(holder)
    scratch.sweep(tmp_path)
    assert (folder / "deep" / "file").exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    scratch.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_proven_to_be_ours_is_never_swept(tmp_path: Path) -> None:
    owner = json.dumps({"host": os.uname().nodename, "boot": scratch._this_machine()["boot"]})
    for name, text in {
        ".samebits-without": None,
        ".samebits-other": json.dumps({"host": "another", "boot": "x"}),
        ".samebits-torn": "{",
        "photos": owner,
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "photo").touch()
        if text is not None:
            (tmp_path / name / scratch.OWNER).write_text(text)
    # Of a real one only a link is there: what it leads to is not ours to delete.
    real = tmp_path / "elsewhere" / ".samebits-real"
    real.mkdir(parents=True)
    (real / scratch.OWNER).write_text(owner)
    (tmp_path / ".samebits-link").symlink_to(real)
    (tmp_path / ".samebits-linked-owner").mkdir()
    (tmp_path / ".samebits-linked-owner" / scratch.OWNER).symlink_to(real / scratch.OWNER)
    before = sorted(tmp_path.rglob("*"))
    scratch.sweep(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    for path in before:
        if path != real:
            scratch.release(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_inside_a_scratch_folder_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").touch()
    with scratch.scratch_folder(tmp_path) as folder:
        (folder / "link").symlink_to(tmp_path / "data")
    assert (tmp_path / "data" / "file").exists()


def test_partial_files_of_dead_processes_are_swept_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    mine = scratch.partial_path(tmp_path / "result.json")
    left = tmp_path / mine.name.replace(str(os.getpid()), str(dead.pid))
    other = tmp_path / f".result.json.{dead.pid}-00000000.partial"  # of another host
    target = tmp_path / "target"
    for path in (mine, left, other, target):
        path.touch()
    link = tmp_path / left.name.replace("result", "linked")
    link.symlink_to(target)
    scratch.sweep_partials(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, other.name, target.name, link.name}


@pytest.mark.parametrize("module", ["samebits.launch.cleanup", "samebits.launch.forkserver", "samebits.cli.main"])
def test_a_folder_named_in_the_environment_is_left_alone_and_the_exit_code_too(tmp_path: Path, module: str) -> None:
    (tmp_path / "file").touch()
    python("-c", f"import {module}; raise SystemExit(3)", cwd=tmp_path, code=3, SAMEBITS_TEMP=str(tmp_path))
    assert (tmp_path / "file").exists()
