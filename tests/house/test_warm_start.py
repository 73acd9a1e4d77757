"""A command that is forked from a process with torch is started, answers and ends like any other."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests import warm_start
from tests.runs import TINY, environment, samebits, wait_until

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def begin(*arguments: object, cwd: Path, **more: str) -> warm_start.Popen:
    environ = environment(**more)
    if not warm_start.is_possible(environ):
        pytest.skip("SAMEBITS_TESTS_COLD is set, or this is not Linux")
    return warm_start.Popen(["-m", "samebits", *map(str, arguments)], text=True, cwd=cwd, env=environ, **PIPES)


def test_it_has_its_own_process_folder_streams_and_exit_code(tmp_path: Path) -> None:
    with begin("config", "missing.yaml", cwd=tmp_path) as refused:
        out, err = refused.communicate(timeout=180)
    assert refused.returncode == 2
    assert out == ""
    assert "missing.yaml" in err
    with begin("train", TINY, "max_steps=1", "--procs", 1, "--run-dir", "here", cwd=tmp_path) as trained:
        assert trained.pid not in (os.getpid(), refused.pid)
        out, err = trained.communicate(timeout=180)
    assert trained.returncode == 0, err
    assert "weights" in out
    assert (tmp_path / "here" / "result.json").exists()


def test_its_end_by_a_signal_is_reported(tmp_path: Path) -> None:
    slow = ["data.slow_s=0.05", f"data.slow_while={tmp_path}", "epochs=1000"]
    process = begin("train", TINY, *slow, "--procs", 1, "--run-dir", tmp_path / "run", cwd=tmp_path)
    try:
        wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.wait(100) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()


def test_its_fork_server_is_forked_too_and_ends_with_it(tmp_path: Path) -> None:
    slow = ["data.slow_s=0.05", f"data.slow_while={tmp_path}", "epochs=1000"]
    process = begin("train", TINY, *slow, "--procs", 2, "--run-dir", tmp_path / "run", cwd=tmp_path)
    try:
        wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        (server,) = (child for child in psutil.Process(process.pid).children() if child.name() == "forkserver")
        assert warm_start.__file__ in server.cmdline()
        assert len(server.children()) == 2
        process.kill()
        assert process.wait(100) == -signal.SIGKILL
        server.wait(100)
    finally:
        process.kill()
        process.communicate()


def test_variables_of_one_command_do_not_reach_the_next(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(TINY.read_text())
    for home in ("a", "b"):
        with begin("trust", recipe, cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path / home)) as process:
            out, err = process.communicate(timeout=180)
        assert f"list     {tmp_path / home}" in out, out + err


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "PYTHONHASHSEED", "MPLBACKEND"])
def test_variables_that_libraries_read_when_they_are_loaded_need_a_new_interpreter(name: str, tmp_path: Path) -> None:
    samebits("config", TINY, cwd=tmp_path)  # starts the process that the others are forked from
    assert not warm_start.is_possible(environment(**{name: "3"}))
