"""Data that is well formed and means something else than a recipe reads: refused with the place, or named."""

import json
import logging
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from samebits.data.samples import Batch
from samebits.errors import DataError
from samebits.metrics.segmentation import SegmentationMetric
from samebits.metrics.text import TextMetric
from samebits.recipes.mnist.data import open_images
from samebits.recipes.pose.coco_files import read_annotations
from samebits.recipes.pose.skeletons import COCO
from samebits.recipes.segment.config import DataConfig
from samebits.recipes.segment.listing import list_images
from samebits.recipes.text.config import Config as TextConfig
from samebits.recipes.text.recipe import dataset_info as text_info
from samebits.storage.pretrained import load_pretrained
from tests.recipes.class_folders import found, touch


def list_folders(root: Path, **data: Any) -> dict[str, Any]:
    return found(root=root, on_error="stop", **data)


@pytest.mark.parametrize("names", [("train", "car"), ("cats", "test_tube"), ("evaluation", "part")])
def test_a_class_may_have_such_a_name(tmp_path: Path, names: tuple[str, ...]) -> None:
    touch(tmp_path, *(f"{name}/2024/{number}.jpg" for name in (*names, "bird") for number in range(2)))
    assert len(list_folders(tmp_path)["classes"]) == 3


def write_csv(root: Path, lines: list[str], files: list[str]) -> Path:
    touch(root, *files)
    (root / "list.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root / "list.csv"


FILES = [f"{kind}{number}.jpg" for kind in "ab" for number in range(3)]


@pytest.mark.parametrize("header", [[], ["image_id,dx"], ["path,label"], ["ID,Class"]])
def test_ids_without_an_ending_and_any_header(tmp_path: Path, header: list[str]) -> None:
    path = write_csv(tmp_path, [*header, *(f"{name[:-4]},{name[0]}" for name in FILES)], FILES)
    listed = list_folders(path)
    assert sorted(name for part in ("train", "held_out") for each in listed[part].values() for name in each) == FILES


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
@pytest.mark.parametrize("name", ["Blüte", "é/ä"])
def test_names_in_another_unicode_form_are_found(tmp_path: Path, forms: tuple[Any, Any], name: str) -> None:
    listed, stored = (unicodedata.normalize(form, name) for form in forms)
    path = write_csv(tmp_path, [f"{listed}{each},{each[0]}" for each in FILES], [f"{stored}{each}" for each in FILES])
    assert len(list_folders(path)["classes"]) == 2


COLORS = [(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0)]


def palette_masks(root: Path, palette_of: Callable[[list[int]], list[int] | None]) -> Path:
    """Masks of a background and two of three classes; each shows its values in the palette of a function."""
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    for number in range(6):
        Image.new("RGB", (64, 48), (number, 0, 0)).save(root / f"images/{number}.png")
        mask = np.zeros((48, 64), np.uint8)
        mask[4:20, 4:40], mask[24:44, 10:60] = 1 + number % 3, 1 + (number + 1) % 3
        used = np.unique(mask).tolist()
        chosen = palette_of(used)
        image = Image.fromarray(mask if chosen is None else np.searchsorted(used, mask).astype(np.uint8), "P")
        image.putpalette([value for each in chosen or range(4) for value in COLORS[each]])
        image.save(root / f"masks/{number}.png")
    return root


@pytest.mark.parametrize("order", [lambda used: used, lambda used: used[::-1]], ids=["few colors", "another order"])
def test_masks_with_a_palette_each_are_refused(tmp_path: Path, order: Callable[[list[int]], list[int]]) -> None:
    root = palette_masks(tmp_path / "a", order)
    with pytest.raises(DataError, match=r"have palettes of their own: value \d has several colors") as caught:
        list_images(DataConfig(root=root), 0)
    assert "0: #" in caught.value.slots["given"]
    assert list_images(DataConfig(root=root, values=(0, 1, 2)), 0)["values"] == [0, 1, 2]


def test_masks_with_one_palette_are_classes(tmp_path: Path) -> None:
    root = palette_masks(tmp_path / "a", lambda used: None)
    assert list_images(DataConfig(root=root), 0)["values"] == [0, 1, 2, 3]


def test_palettes_of_training_and_validation_masks_are_compared(tmp_path: Path) -> None:
    train = palette_masks(tmp_path / "a", lambda used: None)
    shutil.copytree(train, tmp_path / "b")
    for path in (tmp_path / "b/masks").iterdir():
        image = Image.open(path)
        image.putpalette([value for color in reversed(COLORS) for value in color])
        image.save(path)
    with pytest.raises(DataError, match="palettes of their own"):
        list_images(DataConfig(train=train, eval=tmp_path / "b"), 0)


def coco_file(root: Path, change: Callable[[list[float], int], list[float]]) -> Path:
    (root / "images").mkdir(parents=True)
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    content["categories"].append({"id": 2, "name": "b"})
    for number in range(4):
        Image.new("RGB", (64, 48)).save(root / f"images/{number}.png")
        content["images"].append({"id": number, "file_name": f"{number}.png", "width": 64, "height": 48})
        for kind in (1, 2):
            x, y = 4 + 28 * (kind - 1), 6 + number
            region = change([x, y, x + 24, y, x + 24, y + 20, x, y + 20], kind)
            entry = {
                "id": 2 * number + kind,
                "image_id": number,
                "category_id": kind,
                "iscrowd": 0,
                "bbox": [0, 0, 9, 9],
            }
            content["annotations"].append({**entry, "segmentation": [region]})
    (root / "a.json").write_text(json.dumps(content))
    return root / "a.json"


def relative(region: list[float], kind: int) -> list[float]:
    return [value / (64, 48)[index % 2] for index, value in enumerate(region)]


def relative_in_b(region: list[float], kind: int) -> list[float]:
    return relative(region, kind) if kind == 2 else region


def far(region: list[float], kind: int) -> list[float]:
    return [value + 100 for value in region]


@pytest.mark.parametrize("change", [relative, relative_in_b, far])
def test_regions_without_a_pixel_are_refused(tmp_path: Path, change: Callable[..., list[float]]) -> None:
    path = coco_file(tmp_path / "a", change)
    with pytest.raises(DataError, match=r"no region of . in .*a\.json covers a pixel of its image") as caught:
        list_images(DataConfig(root=path, images=tmp_path / "a/images"), 0)
    assert "left, top, right, bottom" in caught.value.slots["given"]


def test_regions_in_pixels_are_classes(tmp_path: Path) -> None:
    path = coco_file(tmp_path / "a", lambda region, kind: region)
    assert list_images(DataConfig(root=path, images=tmp_path / "a/images"), 0)["classes"] == ["background", "a", "b"]


def people(root: Path, change: Callable[[float], float], joints: list[str] | None) -> Path:
    points = [value for joint in range(17) for value in (change(20 + joint), change(60 + joint), 2)]
    category = {"id": 1, "name": "person", **({} if joints is None else {"keypoints": joints})}
    person = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 50, 40, 40], "area": 900, "iscrowd": 0}
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 100, "height": 100}],
        "categories": [category],
        "annotations": [{**person, "keypoints": points, "num_keypoints": 17}],
    }
    (root / "people.json").write_text(json.dumps(content))
    return root / "people.json"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda value: 2 * value, r"\d+ of 17 keypoints in .* lie outside of their images"),
        (lambda value: value - 90, "17 of 17 keypoints in .* lie outside of their images"),
        (lambda value: value / 100, "the keypoints in .* are not in pixels of the images"),
    ],
    ids=["twice as far", "outside", "fractions"],
)
def test_keypoints_that_are_no_pixels_of_their_image_are_refused(
    tmp_path: Path, change: Callable[[float], float], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        read_annotations(people(tmp_path, change, list(COCO.joints)), COCO)


def test_keypoints_without_names_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "samebits"):
        read_annotations(people(tmp_path, lambda value: value, None), COCO)
    assert "the category person does not name its keypoints, which are taken as nose, left_eye" in caplog.text


@pytest.mark.parametrize(("num_turned", "warned"), [(12, "12 of 12"), (8, "8 of 12"), (2, "")])
def test_lines_higher_than_wide_are_named(tmp_path: Path, num_turned: int, warned: str) -> None:
    for number in range(12):
        Image.new("L", (20, 60) if number < num_turned else (60, 20)).save(tmp_path / f"{number}.png")
    (tmp_path / "lines.tsv").write_text("".join(f"{number}.png\tabc{number}\n" for number in range(12)))
    data = {"train": f"{tmp_path}/lines.tsv", "eval": f"{tmp_path}/lines.tsv", "images": tmp_path}
    rows = text_info(TextConfig.model_validate({"recipe": "text", "data": data}))["warnings"]
    assert rows.get("images", "").startswith(
        f"warning: {warned} images of lines are higher than wide" if warned else ""
    )
    assert bool(warned) == ("images" in rows)


def test_files_of_mnist_may_have_a_dot(tmp_path: Path) -> None:
    from samebits.recipes.mnist.config import DataConfig as MnistConfig

    for part, count in (("train", 3), ("t10k", 2)):
        (tmp_path / f"{part}-images.idx3-ubyte").write_bytes(
            bytes([0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(count * 784)
        )
        (tmp_path / f"{part}-labels.idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, count]) + bytes(count))
    config = MnistConfig(name="mnist", root=tmp_path, download=False)
    assert [len(open_images(config, train=train)) for train in (True, False)] == [3, 2]


@pytest.mark.parametrize("names", [["model_ema"], ["state_dict_ema"], ["model_ema", "ema"]])
def test_an_average_beside_the_weights_is_named(tmp_path: Path, names: list[str]) -> None:
    state = nn.Linear(2, 2).state_dict()
    torch.save({"model": state, **dict.fromkeys(names, state)}, tmp_path / "w.pth")
    rows = load_pretrained(nn.Linear(2, 2), tmp_path / "w.pth")
    assert rows["average"].startswith(f"warning: the file has {', '.join(names)} too, which is not taken")
    torch.save({"model": state, "ema": 0.99}, tmp_path / "w.pth")
    assert "average" not in load_pretrained(nn.Linear(2, 2), tmp_path / "w.pth")


@pytest.mark.parametrize(("shift", "warns"), [(5.0, True), (0.0, False)])
def test_a_segmentation_of_one_class_is_named(shift: float, warns: bool) -> None:
    metric = SegmentationMetric(["ground", "disk"])
    mask = torch.zeros(8, 8, dtype=torch.uint8)
    mask[:4] = 1
    logits = torch.stack([torch.where(mask == 0, 1.0, 0.0) + shift, torch.where(mask == 1, 1.0, 0.0)])[None]
    metric.add(logits, Batch(torch.zeros(1), {"masks": [mask]}, torch.tensor([0])))
    texts = ["100.00% of the pixels are predicted as ground, as 50.00% of them are"]
    assert metric.warnings() == (texts if warns else [])


@pytest.mark.parametrize(("read", "warns"), [("", True), ("zz", True), ("a", False), ("ab", False)])
def test_lines_that_are_not_read_are_named(read: str, warns: bool) -> None:
    metric = TextMetric(lambda outputs: [read] * 3, lambda batch: ["ab"] * 3)
    metric.add(None, Batch(torch.zeros(3), None, torch.arange(3)))
    assert bool(metric.warnings()) == warns
