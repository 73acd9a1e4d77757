"""The images of a dataset, the validation split, and the model's input."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from samebits.data.keyed import keys
from samebits.data.loader import choose_num_workers
from samebits.errors import DataError
from samebits.recipes.classify.config import DataConfig, MakeConfig
from samebits.recipes.classify.data import ImageFiles, preprocess
from samebits.recipes.classify.listing import list_images, list_validation, split
from samebits.recipes.classify.make import make
from samebits.recipes.classify.rows import Files, list_folder
from tests.recipes.class_folders import opened, touch
from tests.recipes.class_folders import shapes as make_shapes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shapes(tmp_path_factory.mktemp("shapes"), 12, 90)


def read(samples: ImageFiles, indices: list[int], epoch: int = 0) -> torch.Tensor:
    chosen = np.array(indices)
    return samples.batch(chosen, keys(0, epoch, chosen)).inputs


def test_pictures_are_found_in_any_order_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(
        tmp_path, "b/2.JPG", "b/1.png", "b/deep/3.jpeg", "a/1.webp", "a/0.jpg", "a/notes.txt", "a/.hidden.jpg", "x.jpg"
    )
    expected = {"a": ["a/0.jpg", "a/1.webp"], "b": ["b/1.png", "b/2.JPG", "b/deep/3.jpeg"]}
    walk, scan = os.walk, os.scandir
    monkeypatch.setattr(os, "walk", lambda *a, **k: ((p, d[::-1], f[::-1]) for p, d, f in list(walk(*a, **k))[::-1]))
    found = list_folder(tmp_path, "data.root")
    assert found == expected
    assert list(found) == ["a", "b"]
    monkeypatch.setattr(os, "walk", walk)
    monkeypatch.setattr(os, "scandir", scan)
    assert list_folder(tmp_path, "data.root") == expected


def names(count: int) -> Files:
    return {
        name: [f"{name}/{place:05}.jpg" for place in range(count + 10 * number)] for number, name in enumerate("abc")
    }


def test_a_fraction_of_each_class_is_for_validation() -> None:
    files = names(633)
    train, held_out = split(files, 0.2, seed=0)
    for name, found in files.items():
        assert len(held_out[name]) == int(len(found) * 0.2)
        assert sorted(train[name] + held_out[name]) == found
    assert split(files, 0.2, seed=0) == (train, held_out)
    assert split(files, 0.2, seed=1) != (train, held_out)
    assert list(map(len, split({"a": ["1", "2"]}, 0.1, 0)[1].values())) == [1]


def test_files_that_come_move_few_others_between_the_parts() -> None:
    files = names(500)
    _, before = split(files, 0.2, seed=0)
    _, after = split({**files, "a": sorted([*files["a"], "a/new.jpg"])}, 0.2, seed=0)
    assert len(set(before["a"]) ^ set(after["a"])) <= 2
    assert before["b"] == after["b"]


def test_the_full_set_of_flowers_holds_out_731() -> None:
    counts = {"daisy": 633, "dandelion": 898, "roses": 641, "sunflowers": 699, "tulips": 799}
    files = {name: [f"{name}/{place}.jpg" for place in range(count)] for name, count in counts.items()}
    assert sum(map(len, split(files, 0.2, seed=3)[1].values())) == 731


def test_the_reference_split_can_be_given_as_csv_files(repo: Path, parity_folder: Path, tmp_path: Path) -> None:
    recorded = json.loads((parity_folder / "flowers_split.json").read_text())["flower_photos"]
    root = repo.parent / "shared" / "data" / "flower_photos"
    if not root.is_dir():
        pytest.skip("../shared/data/flower_photos is missing")
    val = set(recorded["val"])
    parts: dict[str, list[str]] = {"train": [], "val": []}
    for name, files in list_folder(root, "data.root").items():
        parts["train"] += [f"{root / file},{name}" for file in files if file not in val]
        parts["val"] += [f"{root / file},{name}" for file in files if file in val]
    for part, lines in parts.items():
        (tmp_path / f"{part}.csv").write_text("\n".join(["path,label", *lines]))
    lists = {part: tmp_path / f"{part}.csv" for part in ("train", "val")}
    found = list_images(DataConfig(train=lists["train"], eval=lists["val"], images=root), seed=0)
    assert {name: place for place, name in enumerate(found["classes"])} == {
        name: int(place) for place, name in recorded["class_indices"].items()
    } or dict(zip(found["classes"], range(5), strict=True)) == recorded["class_indices"]
    assert sum(map(len, found["train"].values())) == 640
    assert {str(Path(path).relative_to(root)) for paths in found["held_out"].values() for path in paths} == val


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([], "contains no class folders"),
        (["a.jpg", "b.jpg"], "2 images outside of class folders"),
        (["a/1.jpg", "b/notes.txt"], "class folder .*b contains no images"),
        (["a/1.jpg", "a/2.jpg"], "only one class: a\n.*\n.*fix +Add images of another class"),
        (["flowers/a/1.jpg", "flowers/b/2.jpg", "LICENSE.txt"], "If the classes are a, b, name .*: .*/flowers\n"),
        (["a/1.jpg", "a/old/2.jpg"], "fix +Add images of another class"),
        (["set/a/b/1.jpg", "set/c/2.jpg", "set/3.jpg"], "If the classes are a, c, name .*/set\n"),
        (["train/a/1.jpg", "val/a/1.jpg"], "look like a split"),
        (["a/1.jpg", "a/2.jpg", "b/1.jpg"], "class b has only one image"),
    ],
)
def test_a_folder_that_does_not_fit_is_explained(tmp_path: Path, files: list[str], text: str) -> None:
    touch(tmp_path, *files)
    with pytest.raises(DataError) as caught:
        list_images(DataConfig(root=tmp_path), seed=0)
    assert_says(caught.value, text)


def assert_says(error: DataError, text: str) -> None:
    import re

    assert re.search(text, str(error)), str(error)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere can't be read: No such file"):
        list_images(DataConfig(root=tmp_path / "nowhere"), seed=0)
    with pytest.raises(DataError, match="no dataset is set"):
        list_images(DataConfig(), seed=0)


def test_a_class_only_in_the_validation_images_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "train/daisy/1.jpg", "train/roses/1.jpg", "eval/daisy/2.jpg", "eval/rosas/2.jpg")
    with pytest.raises(DataError) as caught:
        list_images(DataConfig(train=tmp_path / "train", eval=tmp_path / "eval"), seed=0)
    assert_says(caught.value, "class rosas is in .*eval, but not among the training images")
    assert caught.value.slots["allowed"] == "daisy, roses"
    assert caught.value.slots["fix"] == "Rename the class to roses."


def test_chosen_classes_stand_in_the_order_that_was_given(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{name}/{place}.jpg" for name in "abc" for place in range(3)))
    found = list_images(DataConfig(root=tmp_path, classes=("c", "a")), seed=0)
    assert found["classes"] == list(found["train"]) == ["c", "a"]
    with pytest.raises(DataError, match="no class d"):
        list_images(DataConfig(root=tmp_path, classes=("a", "d")), seed=0)
    assert list(list_validation(tmp_path, DataConfig(classes=("c", "a")), ["c", "a"])[0]) == ["c", "a"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "names no images"),
        ("path,label\n", "names no images"),
        ("path,label\na.jpg,daisy\nb.jpg\n", r"list\.csv:3 is not of the form path,label"),
        ("a.jpg,daisy\n\nmissing.jpg,daisy\n", r"list\.csv:3 names a missing image"),
        ("a.jpg,\n", r"list\.csv:1 is not of the form"),
        ("a.jpg,daisy,1\n", r"list\.csv:1 is not of the form"),
    ],
)
def test_a_csv_file_that_does_not_fit_is_named_with_its_line(tmp_path: Path, content: str, text: str) -> None:
    touch(tmp_path, "a.jpg")
    (tmp_path / "list.csv").write_text(content)
    with pytest.raises(DataError) as caught:
        list_images(DataConfig(train=tmp_path / "list.csv", eval=tmp_path / "list.csv"), seed=0)
    assert_says(caught.value, text)


def test_a_sample_does_not_depend_on_what_else_is_read(shapes: Path) -> None:
    samples = opened(shapes)
    together = read(samples, [5, 40, 7, 7])
    assert together.dtype == torch.uint8
    assert together.shape == (4, 32, 32, 3)
    for place, index in enumerate([5, 40, 7, 7]):
        assert torch.equal(read(samples, [index])[0], together[place])
    assert not torch.equal(read(samples, [5], epoch=1), read(samples, [5]))


def test_scaled_decoding_keeps_the_same_part_of_the_picture(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        noise = np.random.default_rng(3).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        large = Image.fromarray(noise).resize((1600, 1200), Image.Resampling.BICUBIC)
        large.save(tmp_path / name / "0.jpg", quality=95)
    scaled, whole = opened(tmp_path), opened(tmp_path, scaled_decode=False)
    for epoch in range(8):
        first, second = read(scaled, [0], epoch).float(), read(whole, [0], epoch).float()
        assert 10 * torch.log10(255**2 / ((first - second) ** 2).mean()) > 32


def test_evaluation_sees_what_the_tutorials_transform_gives(shapes: Path) -> None:
    samples = opened(shapes, train=False, size_px=56, eval_resize_px=64)
    theirs = v2.Compose(
        [
            v2.Resize(64), v2.CenterCrop(56), v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )  # fmt: skip
    chosen = np.arange(4)
    ours = samples.finish(samples.batch(chosen, keys(0, 0, chosen))).inputs
    assert ours.shape == (4, 3, 56, 56)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    for place in range(4):
        expected = theirs(Image.open(samples.files[place]))
        assert (ours[place] - expected).abs().mean() < 0.01
        assert torch.equal(preprocess(samples.files[place], DataConfig(size_px=56, eval_resize_px=64)), ours[place])


def test_workers_are_chosen_by_the_cores_that_are_left(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, gpu = opened(shapes), torch.device("cuda")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert choose_num_workers("auto", samples, CPU, num_ranks_here=1) == 8
    assert choose_num_workers("auto", samples, CPU, num_ranks_here=4) == 2
    assert choose_num_workers("auto", samples, CPU, num_ranks_here=8) == 0
    assert choose_num_workers("auto", samples, gpu, num_ranks_here=4) == 3
    assert choose_num_workers("auto", samples, gpu, num_ranks_here=16) == 1
    assert choose_num_workers(5, samples, CPU, num_ranks_here=8) == 5
    assert choose_num_workers("auto", range(3), CPU, num_ranks_here=1) == 0


def test_a_picture_that_has_gone_since_it_was_listed_is_named(shapes: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jpg is missing"):
        ImageFiles(shapes, {"a": ["gone.jpg"]}, ["a"], DataConfig(), train=True)


def test_synthetic_images_are_the_same_each_time_and_distinguishable(shapes: Path, tmp_path: Path) -> None:
    text = make(MakeConfig(num_per_class=2, size_px=90), tmp_path)
    assert text.startswith("10 images of 5 shapes")
    for path in tmp_path.rglob("*.jpg"):
        assert path.read_bytes() == (shapes / path.relative_to(tmp_path)).read_bytes()
