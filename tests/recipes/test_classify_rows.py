"""Images in rows for the classify recipe: tar shards, Parquet files, and a CSV file as root."""

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from samebits.data.keyed import keys
from samebits.errors import ConfigError, DataError
from samebits.recipes.classify.config import Config
from samebits.recipes.classify.recipe import build, dataset_info

NUM = 12
NAMES = ("cat", "dog", "owl")


def image(index: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 16), (index * 20, 60, 90)).save(file, "PNG")
    return file.getvalue()


def write_tar(folder: Path) -> Path:
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as archive:
            for index in range(shard * 6, shard * 6 + 6):
                for ending, content in (("png", image(index)), ("cls", NAMES[index % 3].encode())):
                    entry = tarfile.TarInfo(f"{index:04}.{ending}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    return folder / "train-{0..1}.tar"


def write_parquet(folder: Path) -> Path:
    folder.mkdir()
    table = pyarrow.table(
        {"img": [{"bytes": image(i), "path": None} for i in range(NUM)], "label": [i % 3 for i in range(NUM)]}
    )
    info = {"info": {"features": {"label": {"names": list(NAMES), "_type": "ClassLabel"}}}}
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), folder / "a.parquet")
    return folder


def write_csv(folder: Path) -> Path:
    folder.mkdir()
    lines = []
    for index in range(NUM):
        (folder / f"{index}.png").write_bytes(image(index))
        lines.append(f"{index}.png,{NAMES[index % 3]}\n")
    (folder / "all.csv").write_text("".join(lines))
    return folder / "all.csv"


WRITERS: dict[str, Callable[[Path], Path]] = {
    "tar": write_tar, "parquet": write_parquet, "csv": write_csv,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(path: Path, **data: Any) -> Config:
    settings = {"recipe": "classify", "data": {"root": str(path), "size_px": 16, **data}, "model": {"name": "resnet18"}}
    config = Config.model_validate_json(json.dumps(settings))
    config.check_inputs()
    return config


@pytest.mark.parametrize("form", WRITERS)
def test_every_form_gives_the_same_classes_and_images(form: str, tmp_path: Path) -> None:
    config = config_of(WRITERS[form](tmp_path / form))
    info = json.loads(json.dumps(dataset_info(config)))
    assert info["classes"] == list(NAMES)
    parts = build(config, info)
    shades = []
    for samples in (parts.train_data(), parts.eval_data()):
        indices = np.arange(len(samples))
        batch = samples.batch(indices, keys(0, 0, indices))
        reds = (batch.inputs[:, 8, 8, 0].int() // 20).tolist()
        shades += zip(reds, batch.targets.tolist(), strict=True)
        assert samples.files
    assert sorted(shades) == [(index, index % 3) for index in range(NUM)]


def test_unreadable_rows_are_left_out_and_a_row_without_an_image_is_named(tmp_path: Path) -> None:
    content: list[Any] = [{"bytes": image(i)} for i in range(NUM)]
    content[4], content[5] = {"bytes": b"no image"}, {"bytes": None}
    table = pyarrow.table({"image": content, "label": [str(i % 3) for i in range(NUM)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    info = dataset_info(config_of(tmp_path / "a.parquet", on_error="skip"))
    assert list(info["skipped"]) == ["4", "5"]
    config = config_of(tmp_path / "a.parquet")
    samples = build(config, dataset_info(config)).train_data()
    indices = np.arange(len(samples))
    with pytest.raises(DataError, match=r"row [45] of .*a\.parquet is not"):
        samples.batch(indices, keys(0, 0, indices))


def test_numbers_of_classes_are_in_numerical_order_and_classes_select(tmp_path: Path) -> None:
    numbers = [10, 9, 2] * 4
    table = pyarrow.table({"image": [image(i) for i in range(NUM)], "label": numbers, "other": numbers})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert dataset_info(config_of(tmp_path))["classes"] == ["2", "9", "10"]
    assert dataset_info(config_of(tmp_path, columns=["image", "other"], classes=["10", "2"]))["classes"] == ["10", "2"]


def test_a_dataset_of_save_to_disk_is_refused_and_read_as_parquet(tmp_path: Path) -> None:
    import datasets  # takes a second

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))})
    rows = {"image": [{"bytes": image(i), "path": None} for i in range(NUM)], "label": [i % 3 for i in range(NUM)]}
    one = datasets.Dataset.from_dict(rows, features=features)
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "splits"))
    for name in ("one", "splits"):
        with pytest.raises(ConfigError, match="save_to_disk, which is not read") as caught:
            dataset_info(config_of(tmp_path / name))
        assert f'load_from_disk("{tmp_path / name}").to_parquet("train.parquet")' in caught.value.slots["fix"]
    one.to_parquet(str(tmp_path / "parquet" / "a.parquet"))
    info = dataset_info(config_of(tmp_path / "parquet"))
    assert info["classes"] == list(NAMES)
    assert info["train"] == dataset_info(config_of(write_parquet(tmp_path / "own")))["train"]


def write_shard(path: Path, labels: list[bytes]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as file:
        for index, label in enumerate(labels):
            for ending, content in (("png", image(index)), ("cls", label)):
                info = tarfile.TarInfo(f"{path.stem}{index:03}.{ending}")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))


def test_numbers_and_names_mixed_are_refused_unless_all_are_listed(tmp_path: Path) -> None:
    write_shard(tmp_path / "rows" / "0.tar", [b"0", b"1"] * 2)
    write_shard(tmp_path / "rows" / "1.tar", [b"cat", b"dog\n"] * 2)
    with pytest.raises(DataError, match="has both numbers and names as classes") as error:
        dataset_info(config_of(tmp_path / "rows"))
    assert error.value.slots["given"] == "row 0: 0\nrow 4: cat"
    assert dataset_info(config_of(tmp_path / "rows", classes=["dog", "1"]))["classes"] == ["dog", "1"]
    for number, labels in enumerate(([0, 1] * 2, ["cat", "dog"] * 2)):
        table = pyarrow.table({"image": [image(i) for i in range(4)], "label": labels})
        (tmp_path / "files").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, tmp_path / "files" / f"{number}.parquet")
    with pytest.raises(DataError, match="has both numbers and names as classes"):
        dataset_info(config_of(tmp_path / "files"))


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_rows_of_class_minus_one_are_refused_or_left_out(form: str, tmp_path: Path) -> None:
    labels = [0, 1, -1, 10, 9, 2] * 2
    if form == "tar":
        write_shard(tmp_path / "a.tar", [str(label).encode() for label in labels])
    else:
        table = pyarrow.table({"image": [image(i) for i in range(12)], "label": labels})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"class -1 in .* looks like the mark of images without a class"):
        dataset_info(config_of(tmp_path / f"a.{form}"))
    kept = dataset_info(config_of(tmp_path / f"a.{form}", classes=["0", "1", "2", "9", "10"]))
    assert kept["classes"] == ["0", "1", "2", "9", "10"]
    assert "2" not in kept["train"]["0"]


def test_a_class_in_another_encoding_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", ["Gänse".encode("cp1252"), "Gähse".encode("cp1252")] * 2)
    with pytest.raises(DataError, match=r"row 0 of .* has a class that is not understood") as error:
        dataset_info(config_of(tmp_path / "a.tar"))
    assert "UTF-8" in error.value.slots["allowed"]


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "list": ({"image": [image(0)], "label": [[1, 2]]}, {}, "row 0 of", "a list"),
    "float": ({"image": [image(0)], "label": [0.5]}, {}, "row 0 of", "a float: 0.5"),
    "none": ({"image": [image(0)] * 2, "label": ["a", None]}, {}, "row 1 of", "a NoneType: None"),
    "unknown": ({"x": [image(0)], "label": ["a"]}, {}, "the column of images in", "columns: x, label"),
    "columns": ({"image": [image(0)], "y": ["a"]}, {"columns": ["image", "z"]}, "has no column z", "columns: image, y"),
}


@pytest.mark.parametrize("case", BAD)
def test_rows_that_are_not_understood_are_named(case: str, tmp_path: Path) -> None:
    columns, settings, problem, given = BAD[case]
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises((DataError, ConfigError)) as caught:
        dataset_info(config_of(tmp_path, **settings))
    assert problem in caught.value.what
    assert caught.value.slots["given"] == given
    assert caught.value.slots["fix"]


@pytest.mark.parametrize("write", [write_tar, write_parquet])
@pytest.mark.parametrize(("one", "other"), [("train-0", "test-0"), ("TRAIN_00", "validation_00"), ("train0", "val0")])
def test_files_of_two_sets_are_not_merged(write: Callable[[Path], Path], one: str, other: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "rows")
    folder = folder if folder.is_dir() else folder.parent  # a pattern
    ending = next(path.suffix for path in sorted(folder.iterdir()) if path.suffix in (".tar", ".parquet"))
    content = next(path for path in sorted(folder.iterdir()) if path.suffix == ending).read_bytes()
    for path in list(folder.iterdir()):
        path.unlink()
    for name in (one, other):
        (folder / f"{name}{ending}").write_bytes(content)
    with pytest.raises(ConfigError, match="files of several sets: ") as caught:
        dataset_info(config_of(folder))
    assert caught.value.slots["fix"].startswith(f"Set data.train='{folder}/{one.rstrip('_-0').lower()}")
    halves = {"root": None, "train": f"{folder}/{one[:3]}*{ending}", "eval": f"{folder}/{other[:3]}*{ending}"}
    assert dataset_info(config_of(tmp_path, **halves))["held_out"]


@pytest.mark.timeout(60)
def test_a_fifo_among_the_files_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="not a regular file"):
        dataset_info(config_of(tmp_path))
