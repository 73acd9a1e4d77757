import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samebits.data.keyed import keys
from samebits.errors import DataError
from samebits.recipes.pose.coco_files import open_files
from samebits.recipes.pose.config import DataConfig
from samebits.recipes.pose.data import Sample, TrainImages, place_sample
from samebits.recipes.pose.skeletons import SKELETONS
from samebits.recipes.pose.view import Placement

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
