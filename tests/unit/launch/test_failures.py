"""The cause of a failed start, as the launcher and its workers report it, and functions handed to other processes."""

import hashlib
import io
import json
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from samebits.cli.main import run
from samebits.cluster.connecting import is_lost_peer
from samebits.cluster.env import RankAssignment
from samebits.errors import ConfigError, DataError, SamebitsError, SampleError, TrainError, cannot_write
from samebits.launch.failures import ErrorReport, ProcessFailure, explain, root_cause
from samebits.launch.subcommand import CALL_SHA256, launch, read_call
from samebits.launch.supervisor import Supervisor
from samebits.launch.worker import _report


def report(time: float, *, consequence: bool = False, ours: bool = False, text: str = "text") -> ErrorReport:
    return ErrorReport(time, text, 3 if ours else 1, ours, consequence, not ours)


def failed(rank: int, code: int, report: ErrorReport | None, killed_by_launcher: bool = False) -> ProcessFailure:
    return ProcessFailure(rank, 10 + rank, code, report, killed_by_launcher=killed_by_launcher)


# The place of the cause, and how each rank has failed.
CAUSES: dict[str, tuple[Any, ...]] = {
    "the earliest error": (1, (1, report(2.0)), (1, report(1.0))),
    "no lost connection, even if it is earlier": (1, (1, report(1.0, consequence=True)), (1, report(2.0))),
    "a killed process, and not the errors of its peers": (
        2, (1, report(1.0)), (1, report(1.1, consequence=True)), (-signal.SIGKILL, None),
    ),
    "never what the launcher killed": (1, (-signal.SIGKILL, None, True), (1, report(5.0, consequence=True))),
    "what had reported its error when the launcher killed it": (
        1, (1, report(6.0, consequence=True)), (-signal.SIGKILL, report(5.0), True),
    ),
    "an error rather than an abort": (1, (-signal.SIGABRT, None), (1, report(5.0))),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_one_of_several_failures_is_the_cause(case: str) -> None:
    place, *ranks = CAUSES[case]
    failures = [failed(rank, *how) for rank, how in enumerate(ranks)]
    assert root_cause(failures) is failures[place]


EXPLAINED: dict[str, tuple[ProcessFailure, list[str], int, bool | None]] = {
    "any other error": (
        failed(1, 1, report(1.0, text="Traceback: oops")),
        ["rank 1 (host a, pid 11) failed", "Traceback: oops"], 1, None,
    ),
    "a kill": (
        failed(1, -9, None), ["rank 1 (host a, pid 11) was killed by signal 9 (SIGKILL)", "names pid 11"], 4, True,
    ),
    "a bus error": (failed(0, -signal.SIGBUS, None), ["/dev/shm"], 4, None),
    "an end without a message, even with exit code 0": (failed(0, 0, None), ["without an error message"], 4, None),
}  # fmt: skip


@pytest.mark.parametrize("case", EXPLAINED)
def test_a_failure_is_explained_with_its_rank_and_what_is_known(case: str) -> None:
    failure, texts, exit_code, may_pass = EXPLAINED[case]
    cause = explain(failure, "a", "out of memory: the kernel's log names pid 11" if failure.exit_code == -9 else "")
    assert [text for text in texts if text not in cause.text] == []
    assert (cause.exit_code, cause.may_pass if may_pass is not None else None) == (exit_code, may_pass)


def test_an_error_for_users_is_shown_unchanged() -> None:
    cause = explain(failed(1, 3, report(1.0, ours=True, text="data error: x\n  where  y")), "a")
    assert (cause.text, cause.exit_code, cause.may_pass) == ("data error: x\n  where  y", 3, False)


def test_a_closed_connection_is_a_lost_peer_and_a_fault_in_the_data_is_not() -> None:
    assert is_lost_peer(RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711"))
    assert not is_lost_peer(BrokenPipeError(32, "Broken pipe"))
    assert not is_lost_peer(DataError("a Gloo file is cut off"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def reported(folder: Path, error: SamebitsError) -> dict[str, object]:
    here = RankAssignment(1, 2, 1, 2, "tcp://h:1", "torchrun")
    with (folder / "rank-1-0.part").open("w") as file:
        _report(file, here, error)
    return json.loads((folder / "rank-1-0.json").read_text())


def test_an_error_that_names_the_ranks_at_fault_is_not_given_another_rank(tmp_path: Path) -> None:
    named = reported(tmp_path, TrainError("loss is not finite", where="rank 0 (host a, pid 7)\nsamples 1 2"))
    assert named["text"] == "training error: loss is not finite\n  where  rank 0 (host a, pid 7)\n         samples 1 2"
    assert "rank 1 (host " in str(reported(tmp_path, TrainError("loss is not finite", where="samples 1 2"))["text"])


@pytest.mark.parametrize("debug", ["0", "1"])
def test_debug_shows_the_traceback_of_an_error_for_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    monkeypatch.setenv("SAMEBITS_DEBUG", debug)
    try:
        raise SampleError("sample 7 of Blobs raised OSError") from OSError("cannot read 7.png")
    except SampleError as error:
        report = reported(tmp_path, error)
    assert (report["exit_code"], report["may_pass"]) == (3, True)
    assert str(report["text"]).startswith("data error: ") is (debug == "0")
    assert ("OSError: cannot read 7.png" in str(report["text"])) is (debug == "1")


ERROR = str(cannot_write("runs/classify-0001/checkpoints/step-000001", OSError(28, "No space left on device")))
TRACEBACK = "Traceback (most recent call last):\n" + "  File a.py, line 1, in f " + "with a long line " * 6


@pytest.mark.parametrize(
    ("text", "is_terminal", "is_wrapped"), [(ERROR, True, True), (ERROR, False, False), (TRACEBACK, True, False)]
)
def test_an_error_of_a_rank_is_wrapped_between_words_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_terminal: bool, is_wrapped: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "70")
    Supervisor(tmp_path, 1.0, tmp_path / "logs", lambda: signal.SIGINT.name).report(text)
    shown = stream.getvalue().replace("\x1b[2K", "").lstrip("\r")
    assert shown.split() == text.split()
    assert (max(map(len, shown.splitlines())) <= 70) == is_wrapped
    if is_wrapped:
        assert "\n       " in shown  # what follows a slot is indented
    assert text in (tmp_path / "logs" / "launcher.log").read_text(encoding="utf-8")


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("sha256", [None, "", "0" * 64])
def test_a_file_of_somebody_else_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sha256: str | None
) -> None:
    monkeypatch.delenv(CALL_SHA256, raising=False)
    if sha256 is not None:
        monkeypatch.setenv(CALL_SHA256, sha256)
    (tmp_path / "call").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    assert run(["call", str(tmp_path / "call")]) == 2
    assert "was not written by samebits.launch" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()


def test_the_file_of_the_parent_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "call").write_bytes(b"content")
    monkeypatch.setenv(CALL_SHA256, hashlib.sha256(b"content").hexdigest())
    assert read_call(tmp_path / "call") == b"content"
    with pytest.raises(ConfigError):
        read_call(tmp_path / "call")


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="a int cannot be launched"):
        launch(3, procs=2)  # type: ignore[arg-type]
