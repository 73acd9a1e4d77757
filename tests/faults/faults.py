"""A job to break, and what must hold of it afterwards: its weights, and that nothing is left behind."""

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.runs import TINY, kill_session, processes_with, records, start, wait_until

SHM = Path("/dev/shm")
WAIT_S = 120.0  # on a machine that is busy
# 401 samples, 24 a step: 17 steps an epoch, 34 in all.
SETTINGS = (
    "data.num_samples=401", "epochs=2", "checkpoint.every=3 steps", "report.every_steps=1", "report.tensorboard=false",
)  # fmt: skip
STEPS_PER_EPOCH = 17
# Long enough to be hit, short enough for twenty of them.
SLOW = ("data.slow_s=0.02", "data.eval_slow_s=0.1")


@dataclass
class Job:
    """A running `samebits train`, in a session and with a folder for temporary files of its own.

    Attributes:
        folder: Where all of it is.
        process: The launcher.
    """

    folder: Path
    process: subprocess.Popen[str]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def steps(self) -> int:
        """Steps done, as the records say."""
        return max((record["step"] for record in records(self.run, "train")), default=0)

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.steps() >= step or self.process.poll() is not None, WAIT_S)

    def workers(self) -> list[psutil.Process]:
        """The ranks: what the fork server has forked."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                if any("forkserver" in word for word in (child.name(), *child.cmdline())):
                    return child.children()
        return []

    def ended(self, timeout_s: float = 150.0) -> tuple[int, str]:
        """Return the exit code and all output."""
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output + errors

    def left(self, within_s: float = 90.0) -> list[str]:
        """What is still there a while after the end: processes, temporary files."""
        tmp = self.folder / "tmp"

        def look() -> list[str]:
            processes = [f"process {pid}" for pid in processes_with(str(self.folder))]
            # torch's own cache is one for all programs of a user.
            return processes + [path.name for path in tmp.iterdir() if not path.name.startswith("torchinductor_")]

        end = time.monotonic() + within_s
        while look() and time.monotonic() < end:
            time.sleep(0.05)
        return look()


@contextmanager
def job(folder: Path, *arguments: object, source: Path = TINY, **variables: str) -> Iterator[Job]:
    """Begin a job in `folder`; whatever is left of it at the end is ended."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    process = start(
        "train", source, *SETTINGS, *arguments, "--run-dir", folder / "run",
        cwd=folder, TMPDIR=str(folder / "tmp"), **variables,
    )  # fmt: skip
    try:
        with _shared_memory(process.pid) as seen:
            yield Job(folder, process)
    finally:
        kill_session(process)
    end = time.monotonic() + 60
    # Others may still have what they inherited, such as one that reads for another job.
    while (unused := _unmapped(seen)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not unused, f"left in {SHM}: {unused}"


@contextmanager
def _shared_memory(session: int) -> Iterator[set[str]]:
    """Names of the shared memory that processes of a session have mapped meanwhile; other programs have theirs."""
    seen: set[str] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.2):
            seen.update(*(_mapped_by(pid) for pid in _processes() if _session(pid) == session))

    thread = threading.Thread(target=look, name="shared-memory")
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def _unmapped(names: set[str]) -> set[str]:
    """Those of them that are there, and that no process has mapped."""
    there = names & set(os.listdir(SHM))
    return there - set().union(*map(_mapped_by, _processes())) if there else there


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _mapped_by(pid: int) -> set[str]:
    """Names of the shared memory that a process has mapped; none if it is gone."""
    with contextlib.suppress(OSError):
        # sem_open() of glibc makes sem.XXXXXX and renames it: a process killed in between leaves these 32 bytes.
        return set(re.findall(rf"{SHM}/(?!sem\.\w{{6}}\b)(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return set()


def _session(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0


@dataclass(frozen=True)
class Moment:
    """When to kill which rank, and how the job continues; all values follow from the seed and the number.

    Attributes:
        seed: Printed with each test.
        size: Processes at first.
        when: start, step, save or evaluation.
        how: again (--max-restarts), fewer (--procs MIN:MAX) or resume (a new command, of another size).
        victim: Which of the processes.
        step: Not before this step.
        delay_s: And so much later.
        next_size: Processes of the new command.
        num_workers: Loader workers of each rank.
    """

    seed: int
    size: int
    when: str
    how: str
    victim: int
    step: int
    delay_s: float
    next_size: int
    num_workers: int

    def __str__(self) -> str:
        return f"{self.when}-{self.size}-{self.how}-seed-{self.seed}"


def moment(number: int, seed: int) -> Moment:
    """The number walks through all kinds; the seed draws the rest."""
    random_numbers = random.Random(seed)
    size = 2 + number % 3
    # Both four kinds and three sizes come round in twelve, and with them each way of going on.
    when = ("step", "save", "evaluation", "start")[number % 4]
    how = ("again", "fewer", "resume")[(number + number // 3) % 3]
    return Moment(
        seed=seed,
        size=size,
        when=when,
        how=how,
        victim=random_numbers.randrange(size),
        step=random_numbers.randint(1, 30),
        delay_s=random_numbers.random() * (1.5 if when == "start" else 0.1),
        next_size=random_numbers.choice([other for other in (1, 2, 3, 4) if other != size]),
        num_workers=random_numbers.choice([0, 0, 1]),
    )


def kill(running: Job, at: Moment) -> bool:
    """Kill a rank at its moment; False where the job was over before it came."""
    workers = wait_until(lambda: (found := running.workers()) and len(found) >= at.size and found, WAIT_S)
    victim = workers[at.victim]
    if at.when == "step":
        running.wait_for_step(at.step)
    elif at.when == "save":
        running.wait_for_step(max(1, at.step - 3))
        checkpoints = running.run / "checkpoints"
        end = time.monotonic() + WAIT_S
        # Without a pause: writing takes some milliseconds.
        while not any(name.endswith(".partial") for name in _names(checkpoints)):
            if running.process.poll() is not None or time.monotonic() > end:
                return False
    elif at.when == "evaluation":
        running.wait_for_step(STEPS_PER_EPOCH)
    time.sleep(at.delay_s if at.when != "save" else at.delay_s / 50)
    # A world that was started again has other processes.
    if victim.is_running() and running.process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
            return True
    return False


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(folder)
    return []
