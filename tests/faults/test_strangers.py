"""Launchers at one address: those of another run are refused, and do not affect the first run."""

import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests import warm_start
from tests.runs import LONG_S, SAMEBITS, TINY, environment, kill_session, own_port, result, wait_until

SETTINGS = (
    "data.num_samples=96", "epochs=1", "report.tensorboard=false", "checkpoint.every=2 steps",
    "cluster.node_timeout_s=12", "cluster.last_call_s=0.5", "cluster.join_timeout_s=100",
)  # fmt: skip
SHIFTED = Path(__file__).with_name("shifted_clock.py")


class Launcher:
    """One `samebits train --nodes`, in a session of its own."""

    def __init__(self, name: str, folder: Path, port: int, words: tuple[object, ...], command: list[str]) -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "said").open("w") as said:
            self.process = warm_start.popen(
                [*command, "train", str(TINY), *SETTINGS, "--procs", "1", "--rdzv-endpoint", f"127.0.0.1:{port}",
                 *map(str, words)],
                cwd=self.folder, env=environment(), stdout=said, stderr=said, start_new_session=True, text=True,
            )  # fmt: skip

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def code(self) -> int:
        return self.process.wait(LONG_S)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """Starts launchers at one port: launch(name, *words)."""
    port = own_port()
    begun: list[Launcher] = []

    def begin(name: str, *words: object, command: list[str] | None = None, to: int | None = None) -> Launcher:
        begun.append(Launcher(name, tmp_path, to or port, words, command or SAMEBITS))
        if len(begun) == 1:
            wait_until(lambda: _listens(to or port) or begun[0].process.poll() is not None)
        return begun[-1]

    yield begin
    for launcher in begun:
        kill_session(launcher.process)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.full
def test_a_run_of_another_folder_is_refused_by_the_first_one(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    words = ("--nodes", 2, "--run-dir")
    first = launch("a", *words, tmp_path / "one" / "run-0001")
    strangers = [launch("b", *words, tmp_path / "two" / "run-0001"), launch("c", *words, tmp_path / "run-0002")]
    for stranger, differs in zip(strangers, ("run folder: ", "run: run-0001 there, run-0002 here"), strict=True):
        assert stranger.code() == 4, stranger.said()
        text = stranger.said()
        assert "another run uses the rendezvous at 127.0.0.1:" in text
        assert differs in text
        assert f"pid {first.process.pid}, run folder {tmp_path / 'one' / 'run-0001'}" in text
        assert "Give this run another port" in text
        assert "Traceback" not in text
    second = launch("d", *words, tmp_path / "one" / "run-0001")
    assert (first.code(), second.code()) == (0, 0), first.said() + second.said()
    assert result(tmp_path / "one" / "run-0001")["worlds"][-1]["size"] == 2


def test_a_node_with_other_settings_is_refused_by_their_names(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    words = ("--nodes", 2, "--run-dir", tmp_path / "run")
    first = launch("a", *words)
    other = launch("b", *words, "seed=7", "report.every_steps=3")
    fewer = launch("c", "--nodes", 3, "--run-dir", tmp_path / "run")
    assert other.code() == 4
    assert "setting seed: 0 there, 7 here" in other.said()
    assert "setting report.every_steps: null there, 3 here" in other.said()
    assert fewer.code() == 4
    assert "--nodes: 2 there, 3 here" in fewer.said()
    assert first.process.poll() is None, first.said()


@pytest.mark.full
def test_runs_with_ids_of_their_own_share_a_port(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    first = launch("a", "--nodes", 2, "--run-dir", tmp_path / "one", "--rdzv-id", "one")
    pair = [launch(name, "--nodes", 2, "--run-dir", tmp_path / "two", "--rdzv-id", "two") for name in ("b", "c")]
    for launcher in pair:
        assert launcher.code() == 0, launcher.said()
    other = launch("d", "--nodes", 2, "--run-dir", tmp_path / "two", "--rdzv-id", "two", "seed=7")
    assert other.code() == 4
    assert "setting seed: 0 there, 7 here" in other.said()
    assert first.process.poll() is None, first.said()


@pytest.mark.full
def test_a_store_of_torchrun_is_recognized_and_left_alone(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    from torch.distributed import TCPStore

    # As torchrun's agent serves it.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False, multi_tenant=True)
    store.set("torch.rendezvous.samebits", "state")
    before = sorted(store.list_keys())
    stranger = launch("a", "--nodes", 2, "--run-dir", tmp_path / "run", to=store.port)
    assert stranger.code() == 4, stranger.said()
    text = stranger.said()
    assert f"the store at 127.0.0.1:{store.port} does not belong to a run of samebits train --nodes" in text
    assert "Choose another port" in text
    assert "Traceback" not in text
    assert sorted(store.list_keys()) == before


@pytest.mark.full
def test_a_node_whose_clock_is_wrong_takes_part(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    words = ("--nodes", 2, "--run-dir", tmp_path / "run")
    first = launch("a", *words)
    shifted = launch("b", *words, command=[sys.executable, str(SHIFTED), "3600"])
    assert (first.code(), shifted.code()) == (0, 0), first.said() + shifted.said()
    assert result(tmp_path / "run")["worlds"][-1]["size"] == 2
