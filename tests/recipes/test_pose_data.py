"""Samples of pose equal the official ones; views, targets, faults of annotation files and images, and their errors."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from faster_coco_eval.core import mask as coco_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from samebits.data.keyed import keys
from samebits.errors import DataError
from samebits.recipes.pose.coco_files import open_files
from samebits.recipes.pose.config import DataConfig
from samebits.recipes.pose.data import EvalImages, Sample, TrainImages, draw_heatmaps, index_joints, place_sample
from samebits.recipes.pose.infer import prepare
from samebits.recipes.pose.skeletons import COCO, CROWDPOSE, SKELETONS
from samebits.recipes.pose.view import ImageView, Placement, draw_placement, view
from tests.recipes.pose_faults import FAULTS
from tests.synthetic_people import write_coco

CASES = [(case, index) for case, count in (("crowdpose", 2), ("coco", 4)) for index in range(count)]


def _empty(config: DataConfig) -> Sample:
    size, num_joints = config.size_px, config.skeleton.num_joints
    return Sample(
        image=np.empty((size, size, 3), np.float32),
        heatmaps=[np.zeros((num_joints, size // step, size // step), np.float32) for step in (4, 2)],
        masks=[np.empty((size // step, size // step), np.float32) for step in (4, 2)],
        index=np.empty((config.max_people, num_joints, 2), np.int64),
    )


@pytest.mark.parametrize(("name", "index"), CASES)
@pytest.mark.parametrize("kind", ["aug", "plain"])
def test_a_sample_is_the_official_one(parity_folder: Path, pose_folder: Path, name: str, index: int, kind: str) -> None:
    arrays = np.load(parity_folder / "pose_dataset.npz")

    def field(field_name: str) -> Any:
        return arrays[f"{name}_{kind}/{index}/{field_name}"]

    def bits(field_name: str) -> Any:
        shape = field(f"{field_name}_shape")
        return np.unpackbits(field(field_name))[: shape.prod()].reshape(shape)

    config = DataConfig(name=name, root=pose_folder / name)
    source = open_files(config, train=True)
    assert source.ground_truth(index)["image_id"] == field("image_id")
    example = source.example(index, 0)
    assert np.allclose(example.rgb.reshape(-1, 3).mean(axis=0), field("picture_rgb_mean"), atol=0.5)
    mask = np.ones(example.rgb.shape[:2]) if example.mask is None else example.mask / 255
    assert np.array_equal(mask, bits("mask_source"))
    x, y, scale, rotation, size, *matrix = field("affine")[-1].tolist()
    placement = Placement((x, y), scale, rotation, bool(field("flip")))
    assert np.allclose(placement.matrix(int(size)).reshape(-1), matrix, atol=1e-9)
    sample = _empty(config)
    place_sample(example, placement, config, sample)
    picture = sample.image.transpose(2, 0, 1)
    assert (np.abs(picture[:, 5::16, 3::16] - field("image")) < 0.05).mean() >= 0.99
    assert np.allclose(picture.mean(axis=(1, 2)), field("image_mean"), atol=0.01)
    for stage in (0, 1):
        assert np.array_equal(sample.heatmaps[stage], field(f"heatmaps{stage}"))
        assert (sample.masks[stage] == bits(f"mask{stage}")).mean() >= 0.999
    assert np.array_equal(sample.index, field("index0"))


def test_every_map_of_joints_has_the_size_of_the_batch(pose_folder: Path) -> None:
    config = DataConfig(name="crowdpose", root=pose_folder / "crowdpose", size_px=128, max_people=6)
    data = TrainImages(open_files(config, train=True), config)
    batch = data.batch(np.arange(2), keys(0, 0, np.arange(2)))
    assert batch.inputs.shape == (2, 3, 128, 128)
    assert [tuple(maps.shape) for maps in batch.targets["heatmaps"]] == [(2, 14, 32, 32), (2, 14, 64, 64)]
    assert [tuple(mask.shape) for mask in batch.targets["masks"]] == [(2, 32, 32), (2, 64, 64)]
    assert batch.targets["index"].shape == (2, 6, 14, 2)
    assert batch.targets["index"][..., 0].max() < 14 * 32 * 32


def test_a_sample_follows_from_its_key_alone(pose_folder: Path) -> None:
    config = DataConfig(name="coco", root=pose_folder / "coco", size_px=128)
    data = TrainImages(open_files(config, train=True), config)
    order, epoch_keys = np.array([3, 0, 2]), keys(7, 1, np.arange(4))
    together = data.batch(order, epoch_keys[order])
    for row, index in enumerate(order):
        alone = data.batch(np.array([index]), epoch_keys[[index]])
        assert torch.equal(alone.inputs[0], together.inputs[row])
        assert torch.equal(alone.targets["heatmaps"][1][0], together.targets["heatmaps"][1][row])
    other = data.batch(order, keys(7, 2, order))
    assert not torch.equal(other.inputs, together.inputs)


def test_images_in_a_zip_file_have_to_be_unpacked(pose_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(pose_folder / "coco", tmp_path / "coco")
    folder = tmp_path / "coco/images/val2017"
    shutil.make_archive(str(folder), "zip", folder)
    shutil.rmtree(folder)
    with pytest.raises(DataError, match="there is no folder of images") as error:
        open_files(DataConfig(name="coco", root=tmp_path / "coco"), train=False)
    assert error.value.slots["given"] == f"{folder}.zip, which is not read"
    assert error.value.slots["fix"] == f"Unpack the images into {folder}."


def test_crowdpose_as_it_ships_is_trained_on_train_and_val(pose_folder: Path, tmp_path: Path) -> None:
    content = json.loads((pose_folder / "crowdpose/json/crowdpose_trainval.json").read_text())
    shutil.copytree(pose_folder / "crowdpose/images", tmp_path / "images")
    (tmp_path / "json").mkdir()
    for place, name in enumerate(("train", "val")):
        image = content["images"][place]
        people = [entry for entry in content["annotations"] if entry["image_id"] == image["id"]]
        part = {**content, "images": [image], "annotations": people}
        (tmp_path / f"json/crowdpose_{name}.json").write_text(json.dumps(part))
    source = open_files(DataConfig(name="crowdpose", root=tmp_path), train=True)
    whole = open_files(DataConfig(name="crowdpose", root=pose_folder / "crowdpose"), train=True)
    assert [source.ground_truth(index) for index in range(2)] == [whole.ground_truth(index) for index in range(2)]
    assert np.array_equal(source.example(1, 0).rgb, whole.example(1, 0).rgb)


def test_the_truth_of_an_evaluation_is_the_file(pose_folder: Path) -> None:
    content = json.loads((pose_folder / "coco/annotations/person_keypoints_val2017.json").read_text())
    source = open_files(DataConfig(name="coco", root=pose_folder / "coco"), train=False)
    truths = [source.ground_truth(index) for index in range(len(source))]
    assert [truth["image_id"] for truth in truths] == [image["id"] for image in content["images"]]
    people = {entry["id"]: entry for truth in truths for entry in truth["annotations"]}
    assert len(people) == len(content["annotations"])
    for entry in content["annotations"]:
        for field in ("image_id", "category_id", "keypoints", "num_keypoints", "bbox", "iscrowd", "area"):
            assert people[entry["id"]][field] == entry[field]


def test_settings_that_do_not_fit_are_refused() -> None:
    assert set(SKELETONS) == {"coco", "crowdpose"}
    base = copy.deepcopy(DataConfig().model_dump())
    for change in ({"size_px": 100}, {"min_scale": 2.0}):
        with pytest.raises(ValueError, match=r"multiple of 32|at most max_scale"):
            DataConfig.model_validate({**base, **change})


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A dataset of two synthetic images in COCO's format."""
    write_coco(tmp_path, 0, 2, 64)
    return tmp_path


def _annotations(root: Path) -> Path:
    return root / "annotations/person_keypoints_val2017.json"


def _open(root: Path, name: str = "coco") -> Any:
    return open_files(DataConfig(name=name, root=root), train=False)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_annotation_file_that_is_not_what_it_claims_is_explained(small: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    content = json.loads(_annotations(small).read_text())
    change(content)
    _annotations(small).write_text(json.dumps(content))
    with pytest.raises(DataError) as error:
        _open(small)
    assert re.search(said, str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is not JSON"), ("[]", "contains a list"), ("\x00\x01", "is not JSON")]
)
def test_a_file_that_is_no_annotation_file_is_named(small: Path, text: str, said: str) -> None:
    _annotations(small).write_text(text)
    with pytest.raises(DataError, match=said):
        _open(small)


def test_a_file_without_what_a_split_is_made_of_is_named(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    _annotations(small).write_text(json.dumps(content | {"annotations": []}))
    with pytest.raises(DataError, match=r"split val2017 of coco has no image with people(.|\n)*val2017\.json"):
        open_files(DataConfig(name="coco", root=small, train="val2017"), train=True)


def test_training_needs_no_areas(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    for entry in content["annotations"]:
        del entry["area"]
    _annotations(small).write_text(json.dumps(content))
    assert len(open_files(DataConfig(name="coco", root=small, train="val2017"), train=True)) == 2


def test_names_may_begin_at_their_folder(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    for image in content["images"]:
        image["file_name"] = f"./{image['file_name']}"
    _annotations(small).write_text(json.dumps(content))
    folder = EvalImages(_open(small)).rgb(0)
    for image in content["images"]:
        image["file_name"] = image["file_name"].removeprefix("./")
    _annotations(small).write_text(json.dumps(content))
    assert np.array_equal(EvalImages(_open(small)).rgb(0), folder)


def test_crowdposes_missing_split_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    config = DataConfig(name="crowdpose", root=tmp_path)
    with pytest.raises(DataError, match="no annotations of split trainval of crowdpose"):
        open_files(config, train=True)
    (tmp_path / "json").mkdir()
    (tmp_path / "json/crowdpose_train.json").write_text("{}")
    with pytest.raises(DataError, match=r"crowdpose_train\.json has no list of images"):
        open_files(config, train=True)


def test_a_split_that_is_not_there_is_named_with_those_that_are(small: Path) -> None:
    with pytest.raises(DataError, match="no annotations of split nowhere") as error:
        open_files(DataConfig(name="coco", root=small, eval="nowhere"), train=False)
    assert "person_keypoints_val2017.json" in str(error.value)
    with pytest.raises(DataError, match="is not a folder"):
        _open(small / "other")


def test_a_picture_of_another_size_than_annotated_is_refused(small: Path) -> None:
    path = next((small / "images/val2017").glob("*.jpg"))
    Image.new("RGB", (80, 64)).save(path)
    with pytest.raises(DataError, match=r"80x64, but 64x64 in its annotation") as error:
        EvalImages(_open(small)).rgb(0 if path.stem.endswith("1") else 1)
    assert str(path) in str(error.value)
    assert "EXIF" not in str(error.value)


def test_a_picture_that_was_annotated_as_exif_turns_it_is_explained(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    content["images"][0].update(width=48)
    _annotations(small).write_text(json.dumps(content))
    path, exif = small / "images/val2017" / content["images"][0]["file_name"], Image.Exif()
    for orientation, cause in ((6, "EXIF rotation"), (1, "width and height swapped"), (3, "width and height swapped")):
        exif[0x0112] = orientation
        Image.new("RGB", (64, 48)).save(path, exif=exif)
        with pytest.raises(DataError, match=r"64x48, but 48x64 in its annotation") as caught:
            EvalImages(_open(small)).rgb(0)
        assert cause in caught.value.slots["cause"]


def test_an_image_is_read_as_stored_whatever_its_exif_orientation(small: Path) -> None:
    path = small / "images/val2017/000000000001.jpg"
    upright = Image.open(path)
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    upright.save(path, exif=exif, quality=100)
    stored = np.asarray(Image.open(path))
    assert np.array_equal(EvalImages(_open(small)).rgb(0), stored)


def test_crowds_and_people_without_keypoints_are_not_trained_on(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    empty = {"image_id": 1, "category_id": 1, "keypoints": [0] * 51, "num_keypoints": 0, "area": 9.0}
    inside = [64 * 20, 64 * 4, 64 * 40]  # column by column: four columns from the 20th
    content["annotations"] += [
        {**empty, "id": 1, "iscrowd": 1, "bbox": [20, 0, 4, 64], "segmentation": {"size": [64, 64], "counts": inside}},
        {**empty, "id": 2, "iscrowd": 0, "bbox": [40, 10, 8, 8], "segmentation": [[40, 10, 48, 10, 48, 18, 40, 18]]},
        {**empty, "id": 3, "iscrowd": 0, "bbox": [2, 50, 5, 5]},
    ]
    stripes = [64 * 60, *[1] * 254, 2]  # more runs than fit a byte: the last four columns, row by row, from outside
    content["annotations"].append(
        {**empty, "id": 4, "iscrowd": 1, "bbox": [60, 0, 4, 64], "segmentation": {"size": [64, 64], "counts": stripes}}
    )
    packed = np.zeros((64, 64), np.uint8, order="F")
    packed[30:33, 50:57] = 1
    region = {"size": [64, 64], "counts": coco_mask.encode(packed)["counts"].decode()}
    content["annotations"].append({**empty, "id": 5, "iscrowd": 1, "bbox": [50, 30, 7, 3], "segmentation": region})
    _annotations(small).write_text(json.dumps(content))
    example = _open(small).example(0, 0)
    expected = np.full((64, 64), 255)
    expected[::2, 60:] = 0
    expected[-1, -1] = 0
    expected[:, 20:24] = 0
    expected[10:18, 40:48] = 0
    expected[50:55, 2:7] = 0
    expected[30:33, 50:57] = 0
    assert np.array_equal(example.mask, expected)
    num_people = len([entry for entry in content["annotations"] if entry["image_id"] == 1 and not entry["iscrowd"]])
    assert len(example.joints) == num_people


@pytest.mark.parametrize(
    ("region", "said"),
    [
        ({"size": [64, 80], "counts": [64 * 80]}, "80x64"),
        ({"size": [64, 64], "counts": [10, 20]}, "add up to 30"),
        ({"size": [64, 64], "counts": "zz"}, "decoded 20 pixels"),
        ({"size": [64, 64], "counts": "a" * 99}, "malformed"),
        ({"size": [64, 64], "counts": "é\ud800"}, "not COCO's text"),
        ([[0, 0, 1e12, 0, 5, 5]], "far outside"),
    ],
)
def test_regions_that_do_not_fit_the_picture_are_refused(small: Path, region: Any, said: str) -> None:
    content = json.loads(_annotations(small).read_text())
    content["annotations"][0].update(iscrowd=1, segmentation=region)
    _annotations(small).write_text(json.dumps(content))
    with pytest.raises(DataError, match="does not fit its image") as error:
        _open(small).example(0, 0)
    assert said in str(error.value)


def test_pictures_without_people_are_evaluated_but_not_trained_on(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    content["annotations"] = [entry for entry in content["annotations"] if entry["image_id"] == 2]
    _annotations(small).write_text(json.dumps(content))
    config = DataConfig(name="coco", root=small, train="val2017")
    assert len(open_files(config, train=False)) == 2
    assert len(open_files(config, train=True)) == 1
    alone = TrainImages(open_files(config, train=True), config.model_copy(update={"size_px": 64}))
    assert alone.batch(np.array([0]), keys(0, 0, np.array([0]))).inputs.shape == (1, 3, 64, 64)


def test_views_have_the_references_sizes_and_matrices(parity_folder: Path) -> None:
    with np.load(parity_folder / "pose_geometry.npz", allow_pickle=False) as arrays:
        columns, rows = arrays["multi_scale/columns"].tolist(), arrays["multi_scale/rows"]
    assert len(rows) > 100
    for row in rows:
        fact = dict(zip(columns, row.tolist(), strict=True))
        seen = view(
            int(fact["w"]), int(fact["h"]), size_px=int(fact["input_size"]), scale=fact["scale"],
            min_scale=fact["min_scale"],
        )  # fmt: skip
        assert (seen.width, seen.height) == (fact["resized_w"], fact["resized_h"])
        assert seen.center == (fact["center_x"], fact["center_y"])
        corners = np.array([[0, 0], [seen.width, 0], [0, seen.height]], np.float64)
        inverse = row[columns.index("inv00") :].reshape(2, 3)
        expected = corners @ inverse[:, :2].T + inverse[:, 2]
        # The reference solves for its matrix in float32 points.
        assert np.abs(seen.to_image(corners, seen.width, seen.height) - expected).max() <= 1e-4 * max(seen.width, 1)


def test_points_of_a_map_go_back_as_the_references(parity_folder: Path) -> None:
    with np.load(parity_folder / "pose_geometry.npz", allow_pickle=False) as arrays:
        back = {key.split("/")[1]: arrays[key] for key in arrays.files if key.startswith("back/")}
    width, height = back["heatmap_size"].tolist()
    seen = ImageView(width * 2, height * 2, tuple(back["center"].tolist()), back["scale"][0] * 200 / (width * 2))
    ours = seen.to_image(back["points"][:, :, :2].astype(np.float64), width, height)
    assert np.abs(ours - back["out"][:, :, :2]).max() <= 1e-3


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([64, 96, 128]), st.sampled_from([0.5, 1.0, 2.0]))
def test_a_pixel_is_where_the_view_maps_it(width: int, height: int, size_px: int, scale: float) -> None:
    seen = view(width, height, size_px=size_px, scale=scale, min_scale=min(scale, 1.0))
    if max(seen.width, seen.height) > 1000:
        return
    ramps = torch.zeros(3, height, width, dtype=torch.uint8)
    ramps[0] = torch.arange(width).clamp(max=255)
    ramps[1] = torch.arange(height)[:, None].clamp(max=255)
    ramps[2] = 255
    sampled = seen.sample(ramps).numpy().astype(float)
    y, x = np.mgrid[: seen.height, : seen.width]
    there = seen.to_image(np.stack([x, y], axis=-1).astype(float), seen.width, seen.height)
    inside = (there >= 0).all(axis=-1) & (there[..., 0] <= width - 1) & (there[..., 1] <= height - 1)
    assert (sampled[2][inside] == 255).all()
    for axis in (0, 1):
        assert np.abs(sampled[axis] - there[..., axis].clip(0, 255))[inside].max(initial=0) <= 0.51


@pytest.mark.gpu
def test_a_gpu_samples_and_looks_as_a_cpu() -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (90, 130, 3), np.uint8)
    seen = view(130, 90, size_px=64, scale=1.0, min_scale=1.0)
    picture = prepare(rgb)
    assert (seen.sample(picture).int() - seen.sample(picture.cuda()).cpu().int()).abs().max() <= 1


HEATS = ("heat_a", "heat_b", "heat_c", "heat_d", "heat_none", "heat_edges", "heat_frac_sigma")
INDICES = ("a", "b", "c", "d", "none", "edges")


@pytest.fixture
def recorded(parity_folder: Path) -> dict[str, np.ndarray]:
    return dict(np.load(parity_folder / "pose_targets.npz"))


@pytest.mark.parametrize("case", HEATS)
def test_heat_maps_are_the_official_ones(recorded: dict[str, np.ndarray], case: str) -> None:
    size, sigma = int(recorded[f"{case}/res"]), float(recorded[f"{case}/sigma"])
    maps = draw_heatmaps(recorded[f"{case}/joints"], sigma if sigma > 0 else size / 64, size)
    assert np.array_equal(maps, recorded[f"{case}/out"])


@pytest.mark.parametrize("case", INDICES)
def test_indices_are_the_official_ones(recorded: dict[str, np.ndarray], case: str) -> None:
    fields = {name: recorded[f"index_{case}_tpj1/{name}"] for name in ("joints", "res", "max_people")}
    index = index_joints(fields["joints"], int(fields["res"]), int(fields["max_people"]))
    assert np.array_equal(index, recorded[f"index_{case}_tpj1/out"])


def _joints(*people: list[tuple[float, float, float]]) -> npt.NDArray[np.float64]:
    return np.array(people, dtype=np.float64)


def test_of_too_many_people_those_with_most_joints_have_tags_and_all_have_peaks() -> None:
    crowd = _joints(
        [(1, 1, 2), (2, 2, 0), (3, 3, 0)], [(5, 1, 2), (6, 2, 2), (7, 3, 2)], [(9, 1, 2), (10, 2, 0), (50, 3, 2)],
        [(12, 1, 2), (13, 2, 2), (14, 3, 0)],
    )  # fmt: skip
    index = index_joints(crowd, 16, 2)
    assert index[..., 1].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert index[0, 0, 0] == 1 * 16 + 5
    assert index[1, 0, 0] == 1 * 16 + 12
    assert [draw_heatmaps(crowd, 1.0, 16)[0, 1, x] for x in (1, 5, 9, 12)] == [1, 1, 1, 1]


def test_a_joint_far_outside_or_nowhere_leaves_no_trace() -> None:
    away = _joints([(1e30, -1e30, 2), (5, 5, 0), (-1, 3, 1)])
    assert not draw_heatmaps(away, 2.0, 16).any()
    assert not index_joints(away, 16, 3).any()


@settings(max_examples=80, deadline=None)
@given(
    st.tuples(st.floats(10, 600), st.floats(10, 600)),
    st.floats(0.3, 8),
    st.floats(-180, 180),
    st.booleans(),
    st.lists(st.tuples(st.floats(-100, 700), st.floats(-100, 700)), min_size=1, max_size=6),
)
def test_points_come_back_through_the_inverse_map(
    center: tuple[float, float], scale: float, rotation: float, mirrored: bool, points: list[tuple[float, float]]
) -> None:
    placement = Placement(center, scale, rotation, mirrored)
    placed = placement.points(np.array(points), 256)
    if mirrored:
        placed[:, 0] = 255 - placed[:, 0]
    matrix = np.vstack([placement.matrix(256), [0, 0, 1]])
    back = np.column_stack([placed, np.ones(len(points))]) @ np.linalg.inv(matrix).T
    assert np.allclose(back[:, :2], points, atol=1e-6)


def test_matrices_are_the_official_ones(parity_folder: Path) -> None:
    for row in np.load(parity_folder / "pose_geometry.npz")["train/rows"]:
        placement = Placement((row[0], row[1]), row[2], row[3])
        assert np.abs(placement.matrix(int(row[4])) - row[5:].reshape(2, 3)).max() < 1e-9


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("rotation", [0.0, 25.0, -140.0])
def test_joints_move_with_the_pixels(mirrored: bool, rotation: float) -> None:
    picture = np.zeros((150, 200, 3), np.uint8)
    spots = np.array([[60, 40], [130, 90], [90, 120]])
    for place, (x, y) in enumerate(spots):
        picture[y - 2 : y + 3, x - 2 : x + 3, place] = 255
    placement = Placement((100, 75), 0.9, rotation, mirrored)
    warped = placement.warp(picture, 128)
    for place, (x, y) in enumerate(placement.points(spots.astype(float), 128)):
        weights = warped[..., place].astype(float)
        rows, columns = np.mgrid[:128, :128]
        assert (weights * columns).sum() / weights.sum() == pytest.approx(x, abs=0.2)
        assert (weights * rows).sum() / weights.sum() == pytest.approx(y, abs=0.2)


@pytest.mark.parametrize("skeleton", [COCO, CROWDPOSE], ids=lambda skeleton: skeleton.name)
def test_in_a_mirrored_picture_left_is_right(skeleton) -> None:
    joints = np.zeros((1, skeleton.num_joints, 3))
    joints[0, :, 0] = np.arange(skeleton.num_joints)
    joints[0, :, 2] = 2
    placement = Placement((50, 50), 0.5, is_mirrored=True)
    straight = Placement((50, 50), 0.5).joints(joints, 100, skeleton)[0]
    mirrored = placement.joints(joints, 100, skeleton)[0]
    for place, name in enumerate(skeleton.joints):
        twin = name.replace("left", "#").replace("right", "left").replace("#", "right")
        assert mirrored[place, 0] == pytest.approx(99 - straight[skeleton.joints.index(twin), 0])
    assert [skeleton.mirrored[place] for place in skeleton.mirrored] == list(range(skeleton.num_joints))


def test_placements_follow_from_the_key_and_stay_in_their_bounds() -> None:
    config = DataConfig(name="coco", max_rotation_deg=20, min_scale=0.5, max_scale=2.0, max_shift_px=30, flip=0.3)
    placements = [draw_placement(640, 400, key, config) for key in range(2000)]
    assert placements[:50] == [draw_placement(640, 400, key, config) for key in range(50)]
    scales = np.array([placement.scale for placement in placements]) / 2.0
    assert 0.5 <= scales.min() < 0.52
    assert 1.97 < scales.max() <= 2.0
    turns = np.array([placement.rotation_deg for placement in placements])
    assert -20 <= turns.min() < -19.5
    assert 19.5 < turns.max() <= 20
    shifts = np.array([placement.center for placement in placements]) - (320, 200)
    assert (np.abs(shifts) <= 30 * 2.0 * scales[:, None]).all()
    assert abs(shifts.mean()) < 3
    assert np.mean([placement.is_mirrored for placement in placements]) == pytest.approx(0.3, abs=0.04)
