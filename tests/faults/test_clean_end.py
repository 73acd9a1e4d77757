"""However a run ends, it leaves no process, temporary file or shared memory, and its exit code shows the reason."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import threading
from pathlib import Path

import pytest

from samebits import scratch
from tests.faults.faults import SETTINGS, SLOW, Job, job
from tests.runs import LONG_S, SAMEBITS, TINY, environment, kill_session, processes_with, wait_until

WORKERS = "loader.num_workers=1"
# So that it is not over before it is stopped.
ENDLESS = "epochs=1000"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short name: that of a socket in it may not be long."""
    return tmp_path_factory.mktemp("c")


def checkpoint_steps(running: Job) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted((running.run / "checkpoints").glob("step-*"))]


@pytest.mark.full
def test_a_schedulers_warning_to_all_processes_saves_and_exits_with_its_own_code(folder: Path) -> None:
    with job(folder, *SLOW, WORKERS, ENDLESS, "--procs", 2) as running:
        running.wait_for_step(4)
        os.killpg(running.process.pid, signal.SIGUSR1)
        code, said = running.ended()
        assert code == 128 + signal.SIGUSR1, said
        assert "SIGUSR1: finishing the step and saving" in said
        assert "--resume auto" in said
        assert checkpoint_steps(running)[-1] == running.steps()
        assert running.left() == []


@pytest.mark.full
def test_a_process_that_is_alone_takes_a_warning_in_the_same_way(folder: Path) -> None:
    with job(folder, *SLOW, WORKERS, ENDLESS, "--procs", 1) as running:
        running.wait_for_step(4)
        running.process.send_signal(signal.SIGUSR2)
        code, said = running.ended()
        assert code == 128 + signal.SIGUSR2, said
        assert checkpoint_steps(running)[-1] == running.steps()
        assert running.left() == []


@pytest.mark.full
def test_sigterm_to_one_rank_stops_all_of_them(folder: Path) -> None:
    with job(folder, *SLOW, WORKERS, ENDLESS, "--procs", 2, "--max-restarts", 2) as running:
        running.wait_for_step(4)
        wait_until(running.workers)[1].send_signal(signal.SIGTERM)
        code, said = running.ended()
        assert code == 128 + signal.SIGTERM, said
        assert "restart" not in said
        assert running.left() == []


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.full), 4])
def test_nothing_is_left_of_a_launcher_that_is_killed(folder: Path, step: int) -> None:
    with job(folder, *SLOW, WORKERS, ENDLESS, "--procs", 2) as running:
        if step:
            running.wait_for_step(step)
        else:
            # The fork server is still importing torch.
            wait_until(lambda: len(processes_with(str(folder))) > 2)
        running.process.kill()
        if not step:
            # It may not have come to what sweeps up; then the next start does.
            running.process.wait(LONG_S)
            wait_until(lambda: not processes_with(str(folder)))
            scratch.sweep(folder / "tmp")
        assert running.left() == []


@pytest.mark.full
def test_a_terminal_that_is_closed_ends_the_run_as_a_stop_does(folder: Path) -> None:
    (folder / "tmp").mkdir()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*SAMEBITS, "train", TINY, *SETTINGS, *SLOW, WORKERS, ENDLESS, "--procs", "2", "--run-dir", folder / "run"],
        cwd=folder, env=environment(TMPDIR=str(folder / "tmp")), stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=_take_terminal, text=True,
    )  # fmt: skip
    os.close(theirs)
    closing = threading.Event()
    # A terminal reads what is printed. Who reads closes it too: while one reads, another's close would wait for that.
    reader = threading.Thread(target=lambda: _read_until(closing, ours), daemon=True)
    reader.start()
    running = Job(folder, process)
    try:
        running.wait_for_step(4)
        assert process.poll() is None
        closing.set()
        assert process.wait(LONG_S) == 128 + signal.SIGHUP
        assert checkpoint_steps(running)[-1] == running.steps()
        assert running.left() == []
    finally:
        kill_session(process)
        closing.set()
        reader.join()


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # With nohup before the tests it is ignored, which the run would inherit and respect.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _read_until(closing: threading.Event, descriptor: int) -> None:
    while not closing.is_set():
        if select.select([descriptor], [], [], 0.05)[0]:
            try:
                os.read(descriptor, 4096)
            except OSError:  # no process writes any more
                break
    os.close(descriptor)
