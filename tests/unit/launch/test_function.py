"""A pickled function is called only if the parent of the process has written it."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import pytest

from samebits.cli.main import run
from samebits.errors import ConfigError
from samebits.launch.subcommand import CALL_SHA256, launch, read_call


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
