"""The launcher as a program: its exit code and output, and that nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import warm_start
from tests.runs import LONG_S, PYTHON_PATH, environment, wait_until

HERE = Path(__file__).resolve().parent


class Program:
    """A running launcher, in a session of its own as in a terminal of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        clean = environment(TMPDIR=str(folder / "tmp"))
        (folder / "tmp").mkdir()
        # Into a file, so that it can be looked at while the program runs.
        with (folder / "said").open("w") as said:
            self.process = warm_start.popen(command, cwd=folder, env=clean, start_new_session=True, stderr=said)

    def wait(self) -> tuple[int, str]:
        code = self.process.wait(LONG_S)
        self.all_gone()  # what outlives the launcher may have its say
        return code, self.said()

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def until(self, pattern: str, count: int) -> None:
        wait_until(lambda: len(list(self.folder.glob(pattern))) >= count or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()

    def all_gone(self, timeout_s: float = 60.0) -> bool:
        """Whether every process of its session has ended."""
        end = time.monotonic() + timeout_s
        while self._living():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def _living(self) -> list[int]:
        """Process ids of its session; those that have ended and wait to be reaped (by init, at leisure) don't count."""
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process.pid)
        return living

    def left_files(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "tmp").glob("samebits-*"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def begin(scenario: str, num_procs: int = 2, max_restarts: int = 0, stop_timeout_s: float = 20.0) -> Program:
        words = [scenario, str(num_procs), str(max_restarts), str(stop_timeout_s), str(tmp_path)]
        programs.append(Program([sys.executable, str(HERE / "starter.py"), *words], tmp_path))
        return programs[-1]

    yield begin
    for program in programs:
        if not program.all_gone(0):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.process.pid, signal.SIGKILL)
        program.process.wait()


def test_finished_work_returns_0_and_prints_nothing(start: Callable[..., Program]) -> None:
    program = start("ok", num_procs=3)
    assert program.wait() == (0, "")
    assert [(program.folder / f"saved-0-{rank}").read_text() for rank in range(3)] == ["samebits"] * 3
    assert program.all_gone()
    assert program.left_files() == []


def test_an_error_for_users_is_printed_once(start: Callable[..., Program]) -> None:
    program = start("data error", max_restarts=3)
    code, text = program.wait()
    lines = text.splitlines()
    assert code == 3
    # No restart either: the same data would be found.
    # On one machine it is the same for every rank, so none is named.
    assert lines == ["data error: x.gz is truncated", "  where  byte 7"]
    assert "x.gz is truncated" in (program.folder / "logs" / "launcher.log").read_text()
    assert program.all_gone()


@pytest.mark.full
def test_any_other_error_shows_the_first_traceback_only(start: Callable[..., Program]) -> None:
    code, text = start("value error").wait()
    assert code == 1
    assert text.startswith("rank 1 (host ")
    assert text.rstrip().endswith("ValueError: made to fail")
    assert text.count("Traceback") == 1


@pytest.mark.full
def test_an_exit_code_is_passed_on(start: Callable[..., Program]) -> None:
    assert start("exit 7 slowly").wait()[0] == 7


@pytest.mark.full
def test_a_worker_that_vanishes_is_noticed(start: Callable[..., Program]) -> None:
    code, text = start("vanish").wait()
    assert code == 4
    assert "rank 1" in text
    assert "without an error message" in text


def test_a_killed_worker_is_named(start: Callable[..., Program]) -> None:
    program = start("killed")
    code, text = program.wait()
    assert code == 4
    assert "rank 1 (host " in text
    assert "was killed by signal 9 (SIGKILL)" in text
    assert "Traceback" not in text
    assert program.all_gone()
    assert program.left_files() == []


def test_a_worker_stopped_after_the_run_is_complete_does_not_keep_the_launcher(start: Callable[..., Program]) -> None:
    program = start("stopped at the end")
    code, text = program.wait()
    assert code == 0
    assert "was stopped by a signal for 0.3 s: killing it" in text


@pytest.mark.full
def test_a_killed_worker_is_started_again_within_seconds(start: Callable[..., Program]) -> None:
    program = start("killed once", max_restarts=2)
    code, text = program.wait()
    assert code == 0
    assert text.count("restart 1 of 2") == 1
    assert "restart 2" not in text
    killed_at = float((program.folder / "started-0-1").read_text().split()[1])
    again_at = float((program.folder / "started-1-1").read_text().split()[1])
    # About 0.2 s where the machine has nothing else to do: torch is not imported again.
    assert again_at - killed_at < 20


def test_ctrl_c_lets_the_workers_save(start: Callable[..., Program]) -> None:
    program = start("loop")
    program.until("started-0-*", 2)
    # As a terminal does: to every process of the group.
    os.killpg(program.process.pid, signal.SIGINT)
    code, text = program.wait()
    assert code == 128 + signal.SIGINT
    assert text.strip() == "SIGINT: finishing the step and saving; press Ctrl-C again to exit at once"
    assert len(list(program.folder.glob("saved-0-*"))) == 2
    assert program.all_gone()


@pytest.mark.full
def test_sigterm_to_one_worker_is_the_commands_end_too(start: Callable[..., Program]) -> None:
    program = start("loop", max_restarts=1)
    program.until("started-0-*", 2)
    os.kill(int((program.folder / "started-0-1").read_text().split()[0]), signal.SIGTERM)
    code, text = program.wait()
    # All have saved, and the work is not done: a script that waits for the command must not treat it as complete.
    assert (code, text) == (128 + signal.SIGTERM, "")
    assert len(list(program.folder.glob("saved-0-*"))) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_stop_before_all_have_joined_is_quiet(start: Callable[..., Program], number: signal.Signals) -> None:
    # They end at once: for as long as they may take to stop, the test would not wait.
    program = start("joins late", stop_timeout_s=2 * LONG_S)
    program.until("waited-for", 1)
    time.sleep(0.3)
    os.killpg(program.process.pid, number)
    code, text = program.wait()
    assert code == 128 + number
    again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
    assert text.strip() == f"{number.name}: finishing the step and saving; {again} to exit at once"
    assert program.all_gone()
    assert program.left_files() == []


def test_ctrl_c_twice_ends_at_once(start: Callable[..., Program]) -> None:
    program = start("deaf", stop_timeout_s=2 * LONG_S)
    program.until("started-0-*", 2)
    os.killpg(program.process.pid, signal.SIGINT)
    wait_until(lambda: "SIGINT" in program.said())
    time.sleep(0.6)  # within a moment it is taken for the same one
    os.killpg(program.process.pid, signal.SIGINT)
    code, text = program.wait()
    assert code == 128 + signal.SIGINT
    assert len(text.split("\n")) <= 3
    assert program.all_gone()
    assert program.left_files() == []


def test_workers_that_do_not_stop_are_killed(start: Callable[..., Program]) -> None:
    program = start("deaf", stop_timeout_s=0.5)
    program.until("started-0-*", 2)
    program.process.send_signal(signal.SIGTERM)
    code, text = program.wait()
    assert code == 128 + signal.SIGTERM
    assert "did not stop within" in text
    assert program.all_gone()


@pytest.mark.parametrize("scenario", [pytest.param("loop", marks=pytest.mark.full), "deaf"])
def test_nothing_is_left_when_the_launcher_is_killed(start: Callable[..., Program], scenario: str) -> None:
    program = start(scenario, stop_timeout_s=20.0 if scenario == "loop" else 1.0)
    program.until("started-0-*", 2)
    program.process.kill()
    assert program.all_gone()
    # Those that listen save first.
    assert len(list(program.folder.glob("saved-0-*"))) == (2 if scenario == "loop" else 0)
    assert program.left_files() == []


@pytest.mark.full
def test_torchrun_starts_the_same_work(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nfrom pathlib import Path\nsys.path.insert(0, {str(HERE)!r})\n"
        f"import scenarios\nscenarios.work(sys.argv[1], Path({str(tmp_path)!r}))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    program = Program([*command, str(script), "killed once"], tmp_path)
    code, text = program.wait()
    assert code == 0, text
    # Restarted by torchrun on the same store: what the first life left there is not in the way.
    assert (tmp_path / "saved-1-0").read_text() == "torchrun"
    assert (tmp_path / "saved-1-1").exists()
    assert program.all_gone()


def test_a_long_tmpdir_leaves_room_for_sockets(tmp_path: Path, repo: Path) -> None:
    place = tmp_path / ("long" * 25)
    place.mkdir()
    script = "from samebits.launch import forkserver as f; f.prepare([]); f.temp_folder().__enter__(); print('ready')"
    clean = {**os.environ, "PYTHONPATH": PYTHON_PATH, "TMPDIR": str(place)}
    done = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
