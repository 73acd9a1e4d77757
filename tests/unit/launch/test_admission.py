"""Which launchers may join a run: what is compared, and stores of other programs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore

from samebits.errors import LaunchError
from samebits.launch.nodes import auth, rendezvous
from samebits.launch.nodes.rendezvous import NodeRendezvous
from samebits.launch.start import shared_settings
from samebits.process_range import ProcessRange, RendezvousConfig
from tests.runs import own_port


def nodes(folder: Path, **changes: object) -> RendezvousConfig:
    plain = RendezvousConfig(
        ProcessRange(2, 2), "127.0.0.1:1", folder.name, 10.0, 1.0, 10.0, folder=folder, shared={"seed": "0"}
    )
    return dataclasses.replace(plain, **changes)


def refused(store: HashStore, given: RendezvousConfig) -> str:
    before = store.num_keys()
    with pytest.raises(LaunchError) as caught:
        rendezvous.check(store, given)
    assert store.num_keys() == before
    return str(caught.value)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_the_same_run_may_join_from_where_its_folder_is_mounted_elsewhere(store: HashStore, tmp_path: Path) -> None:
    rendezvous.publish(store, nodes(tmp_path / "disk" / "run"))
    (tmp_path / "mounted").symlink_to(tmp_path / "disk")
    rendezvous.check(store, nodes(tmp_path / "disk" / "run"))
    rendezvous.check(store, nodes(tmp_path / "mounted" / "run"))


def test_machines_without_a_shared_disk_have_the_folder_at_one_path(store: HashStore, tmp_path: Path) -> None:
    rendezvous.publish(store, nodes(tmp_path / "run"))
    (tmp_path / "run").rmdir()
    rendezvous.check(store, nodes(tmp_path / "run"))


def test_a_relative_folder_may_be_given_in_different_working_folders(
    store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    rendezvous.publish(store, nodes(Path("runs/two")))
    monkeypatch.chdir(tmp_path / "b")
    rendezvous.check(store, nodes(Path("runs/two")))
    assert "run folder: " in refused(store, nodes(Path("../b/runs/two")))
    # Without SAMEBITS_KEY, the key is in the run folder, which is another one.
    monkeypatch.delenv("SAMEBITS_KEY", raising=False)
    monkeypatch.setattr(auth, "GREETING_S", 0.2)
    _, file = auth.exchange_key(store, nodes(tmp_path / "a" / "runs" / "two"))
    with pytest.raises(LaunchError, match="cannot prove that it belongs to the run") as caught:
        auth.find_key(store, nodes(Path("runs/two")))
    assert "the working folders differ" in caught.value.slots["cause"]
    file.remove()


def test_what_differs_is_named(store: HashStore, tmp_path: Path) -> None:
    rendezvous.publish(store, nodes(tmp_path / "run"))
    assert "seed: 0 there, 7 here" in refused(store, nodes(tmp_path / "run", shared={"seed": "7"}))
    assert "lr: none there, 1 here" in refused(store, nodes(tmp_path / "run", shared={"seed": "0", "lr": "1"}))
    assert "--nodes: 2 there, 2:3 here" in refused(store, nodes(tmp_path / "run", size=ProcessRange(2, 3)))
    assert "run: run there, other here" in refused(store, nodes(tmp_path / "other"))
    assert "run folder: " in refused(store, nodes(tmp_path / "b" / "run"))


def test_an_id_that_the_user_gave_overrides_the_folder_but_not_the_settings(store: HashStore, tmp_path: Path) -> None:
    mine = {"run_id": "a", "has_own_id": True}
    rendezvous.publish(store, nodes(tmp_path / "run", **mine))
    rendezvous.check(store, nodes(tmp_path / "other", **mine))
    assert "seed: 0 there, 7 here" in refused(store, nodes(tmp_path / "run", shared={"seed": "7"}, **mine))
    assert "run: a there, run here" in refused(store, nodes(tmp_path / "run"))


def test_a_store_without_a_record_is_left_alone(
    store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "RECORD_S", 0.1)
    assert "does not belong to a run of samebits train --nodes" in refused(store, nodes(tmp_path / "run"))


def test_a_server_that_ends_meanwhile_is_an_error_with_a_text(tmp_path: Path) -> None:
    class Broken:
        def compare_set(self, *_: str) -> bytes:
            raise DistNetworkError("Connection reset by peer")

    with pytest.raises(LaunchError, match=r"lost the rendezvous at 127.0.0.1:1 while it joined"):
        rendezvous.admit(Broken(), nodes(tmp_path / "run"), serves=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("record", [b"", b"\xff", b"[]", b"{}", b'{"shared": 1}', 10**5 * b"["])
def test_a_damaged_record_is_an_error_with_a_text(store: HashStore, tmp_path: Path, record: bytes) -> None:
    store.set(rendezvous.OWNER, record)
    assert "is damaged" in refused(store, nodes(tmp_path / "run"))


def test_a_forged_record_cannot_write_to_the_terminal(store: HashStore, tmp_path: Path) -> None:
    rendezvous.publish(store, nodes(tmp_path / "run"))
    record = json.loads(store.get(rendezvous.OWNER))
    escape = "\x1b]0;owned\x07\nconfig"
    record |= {"user": escape, "host": escape, "shared": {escape: escape}}
    store.set(rendezvous.OWNER, json.dumps(record))
    text = refused(store, nodes(tmp_path / "run"))
    assert "\x1b" not in text
    assert "\nconfig" not in text


def test_shared_settings_follow_the_recipe_file_and_not_where_the_data_is(tmp_path: Path) -> None:
    recipe = tmp_path / "r.py"
    recipe.write_text("a = 1")
    first = shared_settings({"seed": 0, "data": {"root": "a", "size": 3}}, str(recipe))
    assert first == shared_settings({"seed": 0, "data": {"root": "b", "size": 3}}, str(recipe))
    recipe.write_text("a = 2")
    assert first != shared_settings({"seed": 0, "data": {"root": "a", "size": 3}}, str(recipe))
    assert first["setting data.size"] == "3"


def open_rendezvous(folder: Path) -> NodeRendezvous:
    return NodeRendezvous(nodes(folder, endpoint=f"127.0.0.1:{own_port()}"), lambda: None, lambda _: None)


@pytest.mark.parametrize("key", ["", "k" * 40])
def test_a_rendezvous_that_no_node_joined_leaves_no_folder_but_the_user_s_own(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMEBITS_KEY", key)
    (tmp_path / "own").mkdir()
    for name in ("made", "own"):
        met = open_rendezvous(tmp_path / name)
        assert (tmp_path / name).is_dir()
        met.end(4, "no node joined")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_a_launcher_that_fails_while_it_joins_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> None:
        raise DistNetworkError("the connection is broken")

    monkeypatch.setattr(rendezvous, "publish", lose)
    with pytest.raises(LaunchError, match="lost the rendezvous"):
        open_rendezvous(tmp_path / "run")
    assert not (tmp_path / "run").exists()
