"""Runs the `samebits` command as a user would, in separate processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from samebits.cluster.address import ReservedPort
from tests import warm_start

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
TINY = ROOT / "tests" / "e2e" / "tiny_recipe.py"
SAMEBITS = [sys.executable, "-m", "samebits"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node"]
# For what takes seconds: a busy machine takes many times as long. A test has 400 s.
LONG_S = 180.0

_kept: list[ReservedPort] = []


def own_port() -> int:
    """A port without a listener, which no other program gets as a free port until the tests end."""
    _kept.append(ReservedPort())
    return _kept[-1].renew()


def environment(**more: str) -> dict[str, str]:
    """This process's variables, with the checkout to be imported from any folder."""
    path = os.pathsep.join([PYTHON_PATH, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "80", **more}


def samebits(*arguments: object, cwd: Path, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and check its exit code. Where possible, its process has imported torch already."""
    words = list(map(str, arguments))
    with _begin(words, cwd, environment(**more)) as process:
        try:
            out, err = process.communicate(timeout=LONG_S)
        finally:
            process.kill()
    assert process.returncode == code, f"exit code {process.returncode}, not {code}\n{out}\n{err}"
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def start(*arguments: object, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Begin a command, in a session of its own, as a terminal gives it one."""
    return _begin(list(map(str, arguments)), cwd, environment(**more), start_new_session=True)


@contextlib.contextmanager
def running(*arguments: object, cwd: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Begin a command as `start` does, and end what is left of it behind the block."""
    process = start(*arguments, cwd=cwd, **more)
    try:
        yield process
    finally:
        kill_session(process)


def communicate_all(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Wait for processes that `start` began, and end what is left of them; return what each printed."""
    try:
        return [process.communicate(timeout=LONG_S) for process in processes]
    finally:
        for process in processes:
            kill_session(process)


def python(*arguments: object, cwd: Path | None = None, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments to its end, and check its exit code."""
    words = [sys.executable, *map(str, arguments)]
    done = subprocess.run(words, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
    return done


def _begin(words: list[str], cwd: Path, environ: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return warm_start.popen([*SAMEBITS, *words], cwd=cwd, env=environ, text=True, **pipes, **options)


def result(folder: Path) -> dict[str, Any]:
    """A run's result.json."""
    return json.loads((folder / "result.json").read_text())


def weights(folder: Path) -> str:
    """The hash of a run's final weights."""
    return result(folder)["weights_sha256"]


def chain(folder: Path) -> str:
    """The last link of a run's record of steps."""
    return result(folder)["chain"]


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """A run's records of one kind, so far; not of a line that is just being written."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def wait_until(condition: Callable[[], Any], timeout_s: float = 90.0) -> Any:
    """Wait for something to become true, and give it back."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, f"still waiting after {timeout_s} s"
        time.sleep(0.02)
    return found


def processes_with(text: str) -> list[int]:
    """Processes whose command line or environment names a text, such as a run's folder.

    Forked commands and their workers have none of their own; they count if they work in a folder above it.
    """
    found = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            known = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
            is_forked = warm_start.__file__.encode() in known
            if is_forked and Path(os.readlink(place / "cwd")) in Path(text, "_").parents:
                known += text.encode()
            is_zombie = (place / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if text.encode() in known and not is_zombie:
            found.append(int(place.name))
    return found


def process_with_open(file: Path) -> int:
    """A process that has a file open; 0 if none has."""
    for place in Path("/proc").iterdir():
        # Processes end, and files are closed, between being listed and being looked at.
        with contextlib.suppress(OSError):
            for handle in os.listdir(place / "fd") if place.name.isdigit() else ():
                with contextlib.suppress(OSError):
                    if os.readlink(place / "fd" / handle) == str(file):
                        return int(place.name)
    return 0


def kill_machine(pid: int) -> None:
    """kill -9 of a launcher and all below it, but for the process that frees its shared memory: this machine stays."""
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in process.cmdline()):
                process.kill()


def kill_session(process: subprocess.Popen[str]) -> None:
    """End whatever a test started and did not see end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
