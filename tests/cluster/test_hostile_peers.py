"""Programs of strangers reach the ports of a run: nothing of theirs runs, and the run ends as it would without them."""

import contextlib
import os
import resource
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest

from samebits.cluster.signed import ForgedError, Seal
from tests.runs import (
    LONG_S,
    SAMEBITS,
    TINY,
    environment,
    kill_session,
    own_port,
    running,
    samebits,
    start,
    wait_until,
    weights,
)

KEY = "a secret that strangers do not know"
SETTINGS = ("epochs=1", "report.tensorboard=false", "report.every_steps=1")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights of a run without attacks."""
    folder = tmp_path_factory.mktemp("alone")
    samebits("train", TINY, *SETTINGS, "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return weights(folder / "run")


def slow(folder: Path) -> tuple[str, str]:
    return "data.slow_s=0.2", f"data.slow_while={folder}/slow"


@contextlib.contextmanager
def slow_run(folder: Path, *arguments: object, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A run on two processes that takes its time until the file `slow` is removed."""
    (folder / "slow").touch()
    with running(
        "train", TINY, *SETTINGS, *slow(folder), "--run-dir", folder / "run", *arguments, cwd=folder, **environ
    ) as run:
        yield run


def test_a_run_that_strangers_write_to_ends_in_the_same_weights(undisturbed: str, tmp_path: Path) -> None:
    with slow_run(tmp_path, "--procs", 2) as run:
        wait_until(lambda: hostile.trains(tmp_path, run), LONG_S)
        places = hostile.listening(run.pid)
        assert places, "nothing listens, so this test shows nothing"
        ours = {address for found in places.values() for address, _ in found}
        assert ours <= {"127.0.0.1", "::1"}, "other machines can connect"

        port = hostile.store_port(places)
        idlers = hostile.idle(port, 200)
        store = hostile.connect(port)
        watched = wait_until(lambda: [key for key in store.list_keys() if "watch/1" in key], LONG_S)
        keys = store.list_keys()
        prefix = watched[0].rpartition("watch/")[0]
        made_up = [f"{prefix}watch/verdict", f"{prefix}samebits/stop"]
        for only in range(len(hostile.garbage(tmp_path))):
            hostile.poison(store, [*keys, *made_up], tmp_path / "canary", only)
        (tmp_path / "slow").unlink()
        output, errors = run.communicate(timeout=LONG_S)
        for idler in idlers:
            idler.close()
    assert run.returncode == 0, output + errors
    assert weights(tmp_path / "run") == undisturbed
    assert not (tmp_path / "canary").exists()
    assert "was ignored" in (tmp_path / "run" / "logs" / "rank-0.log").read_text() + errors


def test_strangers_with_a_rank_keep_no_rank_from_joining(visits: Callable[..., Any], init: str, tmp_path: Path) -> None:
    environ = {"SAMEBITS_KEY": KEY}
    first = visits(init, 0, 2, environ=environ)
    port = int(init.rpartition(":")[2])
    store = wait_until(lambda: connected(port), LONG_S)
    for name in ("info/1", "infos", "fault", "first"):
        hostile.poison(store, [f"samebits//1/{name}"], tmp_path / "canary")
    second = visits(init, 1, 2, environ=environ)
    for visit in (first, second):
        kind, facts, _ = visit.answer()
        assert kind == "joined", facts
    assert not (tmp_path / "canary").exists()


def connected(port: int) -> Any:
    with contextlib.suppress(RuntimeError):
        return hostile.connect(port)
    return None


@pytest.mark.full
def test_a_rank_without_the_key_is_refused_with_the_reason(visits: Callable[..., Any], init: str) -> None:
    first = visits(init, 0, 2, environ={"SAMEBITS_KEY": KEY}, join_timeout_s=8.0)
    second = visits(init, 1, 2, join_timeout_s=8.0)
    for visit in (first, second):
        assert "SAMEBITS_KEY" in visit.error()


def test_a_key_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    said = samebits("train", "digits", "--procs", 2, cwd=tmp_path, code=4, SAMEBITS_KEY="abc").stderr
    assert "SAMEBITS_KEY has 3 characters" in said


def test_a_message_counts_only_with_its_key_in_its_place_and_in_its_run() -> None:
    seal = Seal(KEY, "run a").within("round 1")
    message = seal.write("verdict", {"x": 1}).encode()
    assert seal.read("verdict", message) == {"x": 1}
    for other, name in (
        (Seal("another key of the same kind", seal.purpose), "verdict"),
        (seal, "stop"),
        (Seal(KEY, "run a").within("round 2"), "verdict"),
        (Seal(KEY, "run b").within("round 1"), "verdict"),
        (Seal("", seal.purpose), "verdict"),
    ):
        with pytest.raises(ForgedError):
            other.read(name, message)
    with pytest.raises(ForgedError):
        seal.read("verdict", message.replace(b"1", b"2"))
    with pytest.raises(ForgedError):
        seal.read("verdict", Seal("", seal.purpose).write("verdict", {"x": 1}).encode())
    assert KEY not in repr(seal)


@pytest.mark.full
def test_two_nodes_share_the_key_in_the_run_folder_and_strangers_do_not_count(undisturbed: str, tmp_path: Path) -> None:
    port = own_port()
    node = ("--nodes", 2, "--procs", 1, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "own")
    with slow_run(tmp_path, *node) as first:
        key = tmp_path / "run" / ".rendezvous-key"
        wait_until(lambda: first.poll() is not None or key.exists(), LONG_S)
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        store = hostile.connect(port)
        wait_until(lambda: "state/0" in " ".join(store.list_keys()), LONG_S)
        made_up = ["samebits/own/state/0", "samebits/own/state/1", "samebits/own/view/0", "samebits/own/ended"]
        hostile.poison(store, made_up, tmp_path / "canary")
        strange = start(
            "train", TINY, *SETTINGS, *slow(tmp_path), *node, "--run-dir", tmp_path / "elsewhere", cwd=tmp_path
        )  # another folder: it has no key
        said = strange.communicate(timeout=LONG_S)[1]
        assert strange.returncode == 4
        assert "cannot prove that it belongs to the run" in said
        with running(
            "train", TINY, *SETTINGS, *slow(tmp_path), *node, "--run-dir", tmp_path / "run", cwd=tmp_path
        ) as second:
            wait_until(lambda: hostile.trains(tmp_path, first), LONG_S)
            (tmp_path / "slow").unlink()
            for process in (first, second):
                output, errors = process.communicate(timeout=LONG_S)
                assert process.returncode == 0, output + errors
    assert weights(tmp_path / "run") == undisturbed
    assert not (tmp_path / "canary").exists()
    assert not key.exists()


@pytest.mark.full
def test_idle_connections_beyond_the_soft_limit_of_open_files_do_no_harm(undisturbed: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # what is started now inherits it
    try:
        run_in = slow_run(tmp_path, "--procs", 2)
        run = run_in.__enter__()
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        wait_until(lambda: hostile.trains(tmp_path, run), LONG_S)
        idlers = hostile.idle(hostile.store_port(hostile.listening(run.pid)), 600)
        (tmp_path / "slow").unlink()
        output, errors = run.communicate(timeout=LONG_S)
        for idler in idlers:
            idler.close()
        run_in.__exit__(None, None, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert run.returncode == 0, output + errors
    assert weights(tmp_path / "run") == undisturbed


@pytest.mark.full
def test_idle_connections_up_to_the_hard_limit_are_named_as_the_cause(tmp_path: Path) -> None:
    most = 300
    slowly = ("data.slow_s=0.2", f"data.slow_while={tmp_path}/slow")
    (tmp_path / "slow").touch()
    run = subprocess.Popen(
        ["bash", "-c", f"ulimit -n {most}; exec \"$@\"", "bash", *SAMEBITS, "train", TINY, *SETTINGS, *slowly,
         "checkpoint.every=1 steps", "--procs", "2", "--run-dir", tmp_path / "run"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: hostile.trains(tmp_path, run), LONG_S)
        idlers = hostile.crowd(hostile.store_port(hostile.listening(run.pid)), most, run)
        (tmp_path / "slow").unlink()
        output, errors = run.communicate(timeout=LONG_S)
        for idler in idlers:
            idler.close()
    finally:
        kill_session(run)
    assert run.returncode in (1, 3, 4, 5), output + errors
    assert "(ulimit -n)" in errors
    assert "ss -tnp" in errors
    assert "Traceback" not in errors


@pytest.mark.full
def test_the_key_is_on_no_command_line_and_in_no_file_of_the_run(tmp_path: Path) -> None:
    secret = "0123456789abcdef-not-to-be-seen"
    with slow_run(tmp_path, "--procs", 2, SAMEBITS_KEY=secret) as run:
        wait_until(lambda: hostile.trains(tmp_path, run), LONG_S)
        for process in [run.pid, *hostile.listening(run.pid)]:
            assert secret.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
        os.kill(run.pid, signal.SIGTERM)
        output, errors = run.communicate(timeout=LONG_S)
    assert secret not in output + errors
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if secret.encode() in path.read_bytes()]
