"""Masks and regions that would train something else than the user sees; the segment recipe."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.nn import functional as F

from samebits.data.samples import Batch
from samebits.errors import DataError
from samebits.metrics.segmentation import IGNORED
from samebits.recipes.segment.config import MODELS, Config, DataConfig, MakeConfig, ModelConfig
from samebits.recipes.segment.listing import list_images, open_source
from samebits.recipes.segment.make import make
from samebits.recipes.segment.recipe import UNet, build, build_model, dataset_info, segment_loss
from tests.recipes.coco_regions import write_coco
from tests.recipes.evaluated import evaluated


def listed(root: Path, **settings: Any) -> dict[str, Any]:
    return dict(list_images(DataConfig(root=root, **settings), 0))


def masks(root: Path, num: int = 6, size: tuple[int, int] = (64, 48), step: int = 1) -> Path:
    """Images and masks of three classes: a rectangle, a disk and a line of one pixel."""
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    for number in range(num):
        mask = Image.new("L", size)
        draw = ImageDraw.Draw(mask)
        draw.rectangle((8, 8, 28 + number, 30), fill=step)
        draw.ellipse((30, 20, 46, 36), fill=2 * step)
        draw.line((3, 3, 50, 10), fill=step)
        mask.save(root / f"masks/{number}.png")
        Image.new("RGB", size).save(root / f"images/{number}.jpg")
    return root


def turn(path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.open(path).copy().save(path, exif=exif)


@pytest.mark.parametrize(("orientation", "size"), [(3, (64, 48)), (2, (64, 48)), (6, (48, 48))])
def test_an_image_turned_by_exif_to_its_own_size_is_refused(
    tmp_path: Path, orientation: int, size: tuple[int, int]
) -> None:
    root = masks(tmp_path / "a", size=size)
    turn(root / "images/3.jpg", orientation)
    with pytest.raises(DataError, match=r"masks/3\.png may be upright, or turned as its image is stored") as caught:
        listed(root)
    assert "mogrify -auto-orient" in caught.value.slots["fix"]
    turn(root / "masks/3.png", orientation)  # image and mask are turned alike
    assert listed(root)["values"] == [0, 1, 2]


def test_the_size_decides_whether_a_mask_fits_an_image_turned_by_90_degrees(tmp_path: Path) -> None:
    root = masks(tmp_path / "a")
    turn(root / "images/3.jpg", 6)
    with pytest.raises(DataError, match=r"masks/3\.png is 64x48, but its image is 48x64") as caught:
        listed(root)
    assert caught.value.slots["cause"] == "the image is turned by its EXIF orientation (6), and the mask is not"
    path = root / "masks/3.png"
    Image.open(path).transpose(Image.Transpose.ROTATE_270).save(path)
    info = listed(root)
    source = open_source(DataConfig(root=root), info, train="3" in info["train"])
    index = info["train" if "3" in info["train"] else "held_out"].index("3")
    assert source.read(index, 0)[1].shape == (64, 48)


def test_swapped_sizes_without_exif_are_not_blamed_on_exif(tmp_path: Path) -> None:
    root = masks(tmp_path / "a")
    Image.open(root / "masks/3.png").transpose(Image.Transpose.ROTATE_90).save(root / "masks/3.png")
    with pytest.raises(DataError, match=r"masks/3\.png is 48x64, but its image is 64x48") as caught:
        listed(root)
    assert caught.value.slots["cause"] == "the mask has width and height swapped"


def as_jpeg(quality: int) -> Callable[[Image.Image], Image.Image]:
    def save(mask: Image.Image) -> Image.Image:
        file = io.BytesIO()
        mask.save(file, "JPEG", quality=quality)
        return Image.open(io.BytesIO(file.getvalue()))

    return save


def enlarged(mask: Image.Image) -> Image.Image:
    return mask.resize((mask.width * 2, mask.height * 2), Image.Resampling.BILINEAR)


def reduced(mask: Image.Image) -> Image.Image:
    return mask.reduce(2)


@pytest.mark.parametrize("change", [as_jpeg(50), as_jpeg(80), as_jpeg(95), enlarged, reduced])
@pytest.mark.parametrize("step", [30, 127])
def test_masks_resized_or_saved_with_loss_are_refused(tmp_path: Path, step: int, change: Any) -> None:
    root = masks(tmp_path / "a", step=step)
    assert listed(root)["values"] == [0, step, 2 * step]
    for path in (root / "masks").iterdir():
        changed = change(Image.open(path))
        changed.save(path)
        Image.new("RGB", changed.size).save(root / f"images/{path.stem}.jpg")
    with pytest.raises(DataError, match="have values that no region has") as caught:
        listed(root)
    assert "JPEG" in caught.value.slots["cause"]
    assert listed(root, values=(0, step, 2 * step))["train"]  # the user's choice


def test_many_classes_and_thin_ones_are_no_loss(tmp_path: Path) -> None:
    root = masks(tmp_path / "a", num=40)
    for number in range(40):
        values = np.zeros((48, 64), np.uint8)
        values[5:9, 5:9], values[20, 3:30] = number + 1, 60 + number // 2
        Image.fromarray(values).save(root / f"masks/{number}.png")
    assert len(listed(root)["classes"]) == 61


@pytest.mark.parametrize(
    ("values", "problem", "cause"),
    [
        (np.array([[-1, 0], [1, 2]], np.int32), "has the value -1", "pixels without a class"),
        (np.array([[70_000, 0], [1, 2]], np.int32), "has the value 70000", None),
        (np.array([[0.5, 0], [1, 2]], np.float32), "has floating-point numbers, not classes", None),
    ],
)
def test_a_value_that_can_not_be_a_class_is_named_with_its_cause(
    tmp_path: Path, values: Any, problem: str, cause: str | None
) -> None:
    root = masks(tmp_path / "a")
    (root / "masks/2.png").unlink()
    Image.fromarray(values).save(root / "masks/2.tif")
    Image.new("RGB", (2, 2)).save(root / "images/2.jpg")
    with pytest.raises(DataError) as caught:
        listed(root)
    assert problem in caught.value.what
    assert (cause or "") in caught.value.slots.get("cause", "")


def test_a_split_with_a_single_class_is_refused(tmp_path: Path) -> None:
    root = masks(tmp_path / "a")
    for name in listed(root)["held_out"]:
        Image.new("L", (64, 48)).save(root / f"masks/{name}.png")
    with pytest.raises(DataError, match="the validation images have only the class 0"):
        listed(root)


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    make(MakeConfig(num_images=10, size_px=48), tmp_path / "made")
    return write_coco(tmp_path / "made")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_coco_file_without_regions_of_the_classes_is_refused(coco: Path) -> None:
    used = listed(coco)["held_out"]
    edit(coco, lambda content: drop_regions(content, used))
    with pytest.raises(DataError, match="the validation images have only the class background"):
        listed(coco)
    edit(coco, lambda content: content["annotations"].clear())
    with pytest.raises(DataError, match="the training images have only the class background") as caught:
        listed(coco)
    assert "mIoU 1" in caught.value.slots["cause"]


def drop_regions(content: dict[str, Any], names: list[str]) -> None:
    ids = {image["id"] for image in content["images"] if image["file_name"] in names}
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] not in ids]


def test_names_with_the_separator_of_windows_are_found(coco: Path) -> None:
    before = listed(coco)
    edit(
        coco,
        lambda content: [each.update(file_name=each["file_name"].replace("/", "\\")) for each in content["images"]],
    )
    assert listed(coco) == before
    edit(coco, lambda content: content["images"][0].update(file_name="..\\a.jpg"))
    with pytest.raises(DataError, match="file_name of image"):
        listed(coco)


BAD_REGIONS = {
    "two points": [[1, 2, 3, 4]], "none": [], "text": "polygon", "far outside": [[0, 0, 1e6, 0, 5, 9]],
    "run lengths of another size": {"size": [5, 5], "counts": [25]},
}  # fmt: skip


def read_all(root: Path) -> None:
    info = listed(root)
    for train in (True, False):
        source = open_source(DataConfig(root=root), info, train=train)
        for index in range(len(source.names)):
            source.read(index, 0)


@pytest.mark.parametrize("case", BAD_REGIONS)
def test_a_bad_region_is_named(coco: Path, case: str) -> None:
    edit(coco, lambda content: content["annotations"][0].update(segmentation=BAD_REGIONS[case]))
    number = json.loads(coco.read_text())["annotations"][0]["id"]
    with pytest.raises(DataError, match=f"annotation {number} (is|does not fit)") as caught:
        read_all(coco)
    assert caught.value.slots["fix"] == "Correct the annotation file."


def test_files_left_out_and_images_in_both_sets_are_counted(tmp_path: Path, coco: Path) -> None:
    root = masks(tmp_path / "a")
    (root / "images/7.heic").write_bytes(b"")
    (root / "masks/@eaDir").mkdir()
    (root / "masks/@eaDir/0.png").write_bytes((root / "masks/0.png").read_bytes())
    for data in ({"train": root, "eval": root}, {"train": coco, "eval": coco, "images": coco.parent}):
        config = Config.model_validate({"recipe": "segment", "data": data})
        rows = build(config, list_images(config.data, 0)).describe
        num = 6 if data["train"] == root else 10
        assert rows["validation"] == f"warning: {num} of {num} images are training images too"
        assert rows.get("left out", "") == ("2 files .heic" if num == 6 else "")
    assert "warnings" not in listed(root) or not listed(root)["warnings"]


def test_a_damaged_image_or_mask_is_named(tmp_path: Path) -> None:
    for name in ("images/1.jpg", "masks/2.png"):
        root = masks(tmp_path / Path(name).stem)
        (root / name).write_bytes((root / name).read_bytes()[:60])
        with pytest.raises(DataError, match=name) as caught:
            read_all(root)
        assert caught.value.slots["fix"]


def config_of(**settings: Any) -> Config:
    data = {"name": "shapes", "size_px": [64, 64], "num_train": 8, "num_eval": 6, **settings.pop("data", {})}
    model = {"width": 4, **settings.pop("model", {})}
    return Config.model_validate_json(json.dumps({"recipe": "segment", "data": data, "model": model, **settings}))


def test_the_unet_has_the_parameters_of_the_reference() -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in UNet(64, 1).parameters()) == 31_037_633


@pytest.mark.parametrize("name", [*MODELS[:1], *(pytest.param(name, marks=pytest.mark.full) for name in MODELS[1:])])
def test_each_network_returns_logits_of_the_images_size(name: str) -> None:
    model = build_model(ModelConfig(name=name, width=4), 3).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 32, 64)).shape == (1, 3, 32, 64)


def test_the_loss_is_the_mean_over_images_without_ignored_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 8, 8, generator=generator, dtype=torch.float64).float().requires_grad_()
    labels = torch.randint(4, (3, 8, 8), generator=generator, dtype=torch.uint8)
    labels[0, :5], labels[2] = IGNORED, IGNORED
    terms = segment_loss(logits, Batch(None, {"labels": labels}, torch.arange(3)), dice=2.0)
    each = [F.cross_entropy(logits[i : i + 1], labels[i : i + 1].long(), ignore_index=IGNORED) for i in (0, 1)]
    torch.testing.assert_close(terms["cross_entropy"], (each[0] + each[1]) / 3)
    probabilities = logits[1].softmax(0)
    truth = F.one_hot(labels[1].long(), 4).permute(2, 0, 1)
    dice = 2 * (probabilities * truth).sum((1, 2)) / (probabilities + truth).sum((1, 2))
    alone = segment_loss(logits[1:2], Batch(None, {"labels": labels[1:2]}, torch.arange(1)), dice=2.0)
    torch.testing.assert_close(alone["dice_loss"], 2 * (1 - dice.mean()))
    sum(terms.values()).backward()
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[2].any()
    assert not logits.grad[0, :, :5].any()


def test_an_evaluation_and_a_prediction_are_drawn(tmp_path: Path) -> None:
    config = config_of()
    parts = build(config, json.loads(json.dumps(dataset_info(config))))
    metric = evaluated(parts)
    assert 0 <= metric.result()["mIoU"] <= 1
    parts.draw(metric, parts.eval_data(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"worst.png", "confusion.png"}
    path = tmp_path / "image.png"
    pixels, labels = parts.eval_data().source.read(0, 0)
    Image.fromarray(pixels).resize((90, 120)).save(path)
    inputs = parts.preprocess(path)
    assert inputs.shape == parts.input_shape
    logits = F.one_hot(torch.from_numpy(labels).long(), 4).permute(2, 0, 1).float()
    prediction = json.loads(json.dumps(parts.postprocess(logits)))
    assert sum(row["share"] for row in prediction["classes"]) == pytest.approx(1)
    assert prediction["classes"][0]["class"] == "background"
    assert {row["class"] for row in prediction["classes"]} == {parts.metadata["classes"][i] for i in np.unique(labels)}
    drawn = parts.draw_prediction(path, prediction)
    assert drawn.height > 120
    shape, background = np.argwhere(labels > 0).mean(0) * (120 / 64, 90 / 64), (2, 2)
    y, x = shape.astype(int).tolist()
    if labels[int(y * 64 / 120), int(x * 64 / 90)]:
        assert drawn.getpixel((x, y)) != Image.open(path).getpixel((x, y))
    assert drawn.getpixel(background) == Image.open(path).getpixel(background)
