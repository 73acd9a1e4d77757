"""Random mistakes on the command line, in a folder full of a user's files: none of them is lost or changed.

A trial is a command with paths that a user may well give by mistake: folders with files, files, links, devices, other
runs' folders. Before and after it, all that was there is compared: names, contents, times, links. What is new is
removed, so that each trial finds the same tree. MISTAKES and MISTAKES_SEED give other ones.
"""

import contextlib
import hashlib
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from samebits.cli.main import run
from samebits.errors import SamebitsError
from tests.runs import TINY

SEED = int(os.environ.get("MISTAKES_SEED", "1"))
NUM_TRIALS = int(os.environ.get("MISTAKES", "200"))
NUM_QUICK = 40
QUICKLY = ["data.num_samples=8", "epochs=1", "device=cpu", "report.tensorboard=false"]
RUN, OTHER_RUN = "runs/good-0001", "runs/good-0002"
CHECKPOINT = f"{RUN}/checkpoints/step-000001"
# Names that a run, an export or a cache would like to use, in a folder of the user's own work.
USERS = (
    "notes.txt", "config.yaml", "weights.safetensors", "result.json", "environment.json", "metrics.jsonl", "used",
    "logs/rank-0.log", "checkpoints/step-000001/weights.safetensors", "pictures/confusion.png", "photos/a/deep.txt",
    "photos/used", "locked/run.lock", "my work/notes.txt", "数据/notes.txt", "model.safetensors",
)  # fmt: skip
PLACES = (
    ".", "..", "", "~", "./", "photos", "photos/", "photos/..", "empty", "locked", "my work", "数据", "logs",
    "checkpoints",
    "notes.txt", "notes.txt/x", "config.yaml", "weights.safetensors", "model.safetensors", "picture.png", "run.lock",
    "link to folder", "link to file", "link to nothing", "link to run", "fifo", RUN, OTHER_RUN, "runs", CHECKPOINT,
    f"{RUN}/checkpoints", f"{RUN}/config.yaml", f"{RUN}/weights.safetensors", f"{RUN}/run.lock", "new", "new/deep",
    "photos/new", "new.png", "new.safetensors", "/dev/null", "/dev/null/x", "/dev/full", "/dev/zero", "/proc/self/x",
    "-rf", "a=b", "x\ny", "x\x1b[2Jy", 300 * "a",
)  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with runs in it."""
    home = tmp_path_factory.mktemp("home")
    folder = home / "work"
    for name in ("../letter.txt", *USERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the user's {name}")
    (folder / "empty").mkdir()
    Image.new("RGB", (8, 8), (200, 10, 10)).save(folder / "picture.png")
    for name, target in (("folder", "photos"), ("file", "notes.txt"), ("nothing", "gone"), ("run", RUN)):
        (folder / f"link to {name}").symlink_to(target)
    os.mkfifo(folder / "fifo")
    before = Path.cwd()
    os.chdir(folder)
    try:
        for name in (RUN, OTHER_RUN):
            assert run(["train", str(TINY), *QUICKLY, "--procs", "1", "--run-dir", name]) == 0
    finally:
        os.chdir(before)
    for tool in ("ssh", "sbatch"):
        script = home / "bin" / tool
        script.parent.mkdir(exist_ok=True)
        script.write_text("#!/bin/sh\nexit 255\n")
        script.chmod(0o755)
    return folder


def look(home: Path) -> dict[str, tuple[object, ...]]:
    """All that is there: kind and mode; of files time and content, of links where to."""
    seen: dict[str, tuple[object, ...]] = {}
    for path in [home, *home.rglob("*")]:
        facts = path.lstat()
        more: tuple[object, ...] = ()
        if stat.S_ISLNK(facts.st_mode):
            more = (os.readlink(path),)
        elif stat.S_ISREG(facts.st_mode):
            more = (facts.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        seen[str(path)] = (facts.st_mode, facts.st_ino, *more)
    for device in ("/dev/null", "/dev/full", "/dev/zero"):
        facts = os.lstat(device)
        seen[device] = (facts.st_mode, facts.st_ino, facts.st_rdev)
    return seen


def remove_what_is_new(home: Path, before: dict[str, tuple[object, ...]]) -> None:
    for path in sorted(home.rglob("*"), reverse=True):
        if str(path) not in before:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def trial(choose: random.Random) -> list[str]:
    """A command with mistakes in it."""

    def place() -> str:
        found = choose.choice(PLACES)
        is_whole = choose.random() < 0.2 and found and found[0] not in "~/-"
        return os.path.abspath(found) if is_whole else found

    def resume() -> list[str]:
        return choose.choice([[], [], ["--resume", "never"], ["--resume", place()], ["--resume", CHECKPOINT]])

    tiny = [str(TINY), *QUICKLY]
    commands: list[Callable[[], list[str]]] = [
        lambda: ["train", *tiny, "--procs", "1", "--run-dir", place(), *resume()],
        lambda: ["train", *tiny, "--procs", "1", "--run-dir", place(), *resume()],
        lambda: ["train", *tiny, "--hosts", "nowhere", "--run-dir", place(), *resume()],
        lambda: ["train", *tiny, "--hosts", choose.choice(["nowhere", "a,b", place()]), *resume()],
        lambda: ["train", place(), "--procs", "1"],
        lambda: ["train", "--run-dir", choose.choice([place(), "photos", "empty"]), *resume()],
        lambda: ["eval", place(), *choose.choice([[], ["--preset", place()], ["--checkpoint", place()]])],
        lambda: ["predict", choose.choice([RUN, place()]), place(), "--draw", place()],
        lambda: ["export", choose.choice([RUN, place()]), "--out", place()],
        lambda: ["export", RUN, "--out", place(), "--checkpoint", choose.choice(["last", "best", place()])],
        lambda: ["data", "make", "classify", "num_per_class=1", "--out", place()],
        lambda: ["data", "make", "text", "num=-1", "--out", place()],
        lambda: ["submit", *tiny, "--run-dir", place(), *choose.choice([[], ["--dry-run"], ["--sbatch", place()]])],
    ]  # fmt: skip
    return choose.choice(commands)()


def mistakes(work: Path, numbers: range) -> list[str]:
    """Carry trials out; what they lost or changed, and with which command."""
    faults = []
    home = work.parent
    before = look(home)
    for number in numbers:
        words = trial(random.Random(f"{SEED}-{number}"))
        with contextlib.suppress(SamebitsError, SystemExit):
            run(words)
        after = look(home)
        wrong = [path for path, facts in before.items() if after.get(path) != facts]
        if wrong:
            faults.append(f"{number}: samebits {' '.join(map(repr, words))}: {wrong}")
            break  # the others would find another tree
        remove_what_is_new(home, before)
    return faults


@pytest.fixture
def at_home(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(work.parent))
    monkeypatch.setenv("PATH", f"{work.parent / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return work


@pytest.mark.parametrize(
    "numbers", [range(NUM_QUICK), pytest.param(range(NUM_QUICK, NUM_TRIALS), marks=pytest.mark.full)], ids=str
)
def test_no_file_is_lost_by_mistakes_on_the_command_line(at_home: Path, numbers: range) -> None:
    assert mistakes(at_home, numbers) == []


@pytest.mark.parametrize("place", [".", "photos", "link to folder", "my work", "..", RUN, ""])
def test_hosts_that_can_not_be_reached_leave_the_run_folder_as_it_was(at_home: Path, place: str) -> None:
    before = look(at_home.parent)
    assert run(["train", str(TINY), "--hosts", "nowhere", *(["--run-dir", place] if place else [])]) != 0
    after = look(at_home.parent)
    assert after.keys() == before.keys()  # a new run folder is not left
    assert after == before or not place
