"""Tar shards and their index."""

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from samebits.data.samples import DatasetSamples
from samebits.data.sources import tar_shards
from samebits.data.sources.tar_shards import TarShards
from samebits.errors import DataError
from tests.unit.data.sources.source_files import to_json, write_tar


def png(red: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (red, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_files_with_one_name_up_to_the_first_dot_are_a_sample_wherever_they_are(tmp_path: Path) -> None:
    members = [
        ("./b/2.jpg.txt", b"two"),
        ("a.v1/1.txt", b"one"),
        ("b/2.CLS", b"2"),
        ("__meta__", b"{}"),
        ("b/._2.txt", b"of a Mac"),
        ("a.v1/1.cls", b"1"),
    ]
    shards = TarShards(write_tar(tmp_path / "x.tar", members))
    assert [shards[0], shards[1]] == [
        {"__key__": "b/2", "jpg.txt": "two", "cls": 2},
        {"__key__": "a.v1/1", "txt": "one", "cls": 1},
    ]
    assert len(shards) == 2
    assert [shards[-2], shards[-1]] == [shards[0], shards[1]]
    for index in (2, -3):
        with pytest.raises(IndexError, match="of 2"):
            shards[index]


def test_values_are_decoded_by_their_extension(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    file = io.BytesIO()
    np.save(file, array)
    members = [
        ("0.png", png(7)),
        ("0.seg.png", png(9)),
        ("0.cls", b" 5\n"),
        ("0.txt", "é".encode()),
        ("0.json", to_json({"a": [1, None]})),
        ("0.npy", file.getvalue()),
        ("0.bin", b"\0\1"),
    ]
    sample = TarShards(write_tar(tmp_path / "x.tar", members))[0]
    assert sample["png"].shape == (3, 4, 3)
    assert sample["png"][0, 0].tolist() == [7, 0, 0]
    assert sample["seg.png"][0, 0].tolist() == [9, 0, 0]
    assert (sample["cls"], sample["txt"], sample["json"], sample["bin"]) == (5, "é", {"a": [1, None]}, b"\0\1")
    assert np.array_equal(sample["npy"], array)


def test_columns_make_a_tuple_and_take_the_first_alternative_that_is_there(tmp_path: Path) -> None:
    members = [("0.png", png(1)), ("0.cls", b"0"), ("1.cls", b"1"), ("1.jpg", b"a"), ("1.png", png(2))]
    shards = TarShards(write_tar(tmp_path / "x.tar", members), ("JPG;png", "cls"), decode={"jpg": bytes})
    assert shards[1] == (b"a", 1)
    assert shards[0][0].shape == (3, 4, 3)
    with pytest.raises(DataError, match=r"sample 0 of .*x\.tar has no \.jpg file") as error:
        TarShards(tmp_path / "x.tar", ("jpg", "cls"))
    assert ".png .cls" in str(error.value)


class Trap:
    """A pickle of this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("extension", ["pkl", "pickle", "pyd", "pth", "pt", "npz", "ten"])
def test_a_pickle_stays_bytes(tmp_path: Path, extension: str) -> None:
    content = pickle.dumps(Trap(tmp_path / "ran"))
    shards = TarShards(write_tar(tmp_path / "x.tar", [(f"0.{extension}", content)]))
    assert shards[0][extension] == content
    assert not (tmp_path / "ran").exists()


def test_an_array_of_objects_is_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.array([Trap(tmp_path / "ran")], dtype=object), allow_pickle=True)
    shards = TarShards(write_tar(tmp_path / "x.tar", [("0.npy", file.getvalue())]))
    with pytest.raises(DataError, match=r"0\.npy in .*x\.tar cannot be decoded as \.npy"):
        shards[0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cls", b"1" * 100),
        ("cls", b"one"),
        ("json", b"[" * 100_000),
        ("json", b"{"),
        ("txt", b"\xff"),
        (
            "npy",
            b"\x93NUMPY\1\0v\0{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999,), }" + b" " * 50 + b"\n",
        ),
        ("jpg", b"\xff\xd8\xff"),
    ],
)
def test_a_damaged_value_is_named_with_its_shard(tmp_path: Path, name: str, content: bytes) -> None:
    shards = TarShards(write_tar(tmp_path / "x.tar", [(f"a/0.{name}", content)]))
    with pytest.raises(DataError, match=rf"a/0\.{name} in .*x\.tar"):
        shards[0]


def test_an_error_of_the_users_decoder_names_the_value(tmp_path: Path) -> None:
    shards = TarShards(
        write_tar(tmp_path / "x.tar", [("0.bin", b"1")]), decode={"bin": lambda content: content.nothing}
    )
    with pytest.raises(AttributeError, match="nothing") as error:
        shards[0]
    assert error.value.__notes__ == [f"while decoding 0.bin in {tmp_path}/x.tar"]


LONG = "d" * 90 + "/" + "n" * 150


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_both_forms_are_read(tmp_path: Path, form: int) -> None:
    members = [(f"{LONG}é.cls", b"1"), (f"{LONG}é.txt", b"x"), ("s.cls", b"2"), ("s.txt", b"y")]
    shards = TarShards(write_tar(tmp_path / "x.tar", members, form))
    assert [shards[0]["__key__"], shards[1]["__key__"]] == [f"{LONG}é", "s"]
    assert [shards[0]["cls"], shards[1]["txt"]] == [1, "y"]


names = st.text(st.characters(codec="utf-8", exclude_characters="./\0"), min_size=1, max_size=120)


@settings(max_examples=40)
@given(keys=st.lists(names, min_size=1, max_size=6, unique=True), form=st.sampled_from([0, 1, 2]), data=st.data())
def test_every_file_of_an_archive_of_any_form_is_found(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], form: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    keys = [key for key in keys if len(key.encode()) < 90 or form]
    contents = {key: data.draw(st.binary(max_size=1500)) for key in keys} or {"k": b""}
    write_tar(folder / "x.tar", [(f"{key}.bin", content) for key, content in contents.items()], form)
    shards = TarShards(folder / "x.tar", index_dir=folder)
    assert {sample["__key__"]: sample["bin"] for sample in map(shards.__getitem__, range(len(shards)))} == contents


def test_a_shard_that_changes_during_training_is_an_error(tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / f"{name}.tar", [("0.cls", b"1")]) for name in "ab"]
    shards = TarShards(tmp_path)
    write_tar(paths[0], [("0.cls", b"2"), ("1.cls", b"3")])
    assert shards[1]["cls"] == 1
    with pytest.raises(DataError, match=r"a\.tar has changed since it was indexed"):
        shards[0]
    os.truncate(paths[1], 512)  # opened before: the content is gone
    with pytest.raises(DataError, match=r"b\.tar has changed since it was indexed"):
        shards[1]


def test_shards_reach_a_started_process(tmp_path: Path) -> None:
    shards = TarShards(write_tar(tmp_path / "a.tar", [("0.cls", b"4")]), ("cls",))
    assert shards[0] == (4,)
    assert pickle.loads(pickle.dumps(shards))[0] == (4,)


def test_images_train_through_a_transform(tmp_path: Path) -> None:
    from torchvision.transforms import v2

    shards = TarShards(
        write_tar(
            tmp_path / "x.tar",
            [
                (f"{index}.{kind}", content)
                for index in range(4)
                for kind, content in (("png", png(index)), ("cls", b"%d" % index))
            ],
        ),
        ("png", "cls"),
        transform=lambda sample: (v2.functional.to_image(sample[0]), sample[1]),
    )
    indices = np.array([2, 0])
    batch = DatasetSamples(shards).batch(indices, np.array([1, 2], np.uint64))
    assert batch.inputs.shape == (2, 3, 3, 4)
    assert batch.inputs[:, 0, 0, 0].tolist() == [2, 0]
    assert torch.equal(batch.targets, torch.tensor([2, 0]))


def index_files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("*.npz")}


def test_the_index_is_made_once_and_again_only_for_a_changed_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [write_tar(tmp_path / f"{name}.tar", [(f"{name}.cls", b"1")]) for name in "ab"]
    made: list[str] = []
    build = tar_shards.build_index
    monkeypatch.setattr(tar_shards, "build_index", lambda path: (made.append(Path(path).name), build(path))[1])
    folder = tmp_path / "index"
    for _ in range(2):
        assert [sample["__key__"] for sample in TarShards(shards, index_dir=folder)] == ["a", "b"]
    assert made == ["a.tar", "b.tar"]
    write_tar(shards[1], [("c.cls", b"1"), ("d.cls", b"2")])
    assert [sample["__key__"] for sample in TarShards(shards, index_dir=folder)] == ["a", "c", "d"]
    assert made == ["a.tar", "b.tar", "b.tar"]
    assert len(list(folder.glob("*.npz"))) == 2


@pytest.mark.parametrize("position", [0, 100, -100, -1])
def test_a_damaged_index_is_made_again(tmp_path: Path, position: int) -> None:
    shard = write_tar(tmp_path / "a.tar", [("0.cls", b"1"), ("0.txt", b"x")])
    expected = TarShards(shard, index_dir=tmp_path)[0]
    (file,) = tmp_path.glob("*.npz")
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[position] ^= 1
    for content in (bytes(damaged), whole[:position] if position > 0 else b"", bytes(len(whole)), b""):
        file.write_bytes(content)
        assert TarShards(shard, index_dir=tmp_path)[0] == expected


def test_a_folder_for_indexes_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shard = write_tar(tmp_path / "a.tar", [("0.cls", b"1")])
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(DataError, match="every user can write to it"):
        TarShards(shard, index_dir=folder)
    # The default folder is a convenience: without it the index is made each time.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(TarShards(shard)) == 1
    assert "indexes of tar shards are not kept" in caplog.text


def test_the_default_folder_is_in_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    TarShards(write_tar(tmp_path / "a.tar", [("0.cls", b"1")]))
    assert len(index_files(tmp_path / "cache" / "samebits" / "tar-index")) == 1
    assert [path.name for path in tmp_path.glob("*.tar*")] == ["a.tar"]
