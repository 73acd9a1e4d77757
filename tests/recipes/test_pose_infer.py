"""The test path equals the reference's, with known people painted as the network's output; `eval` from end to end."""

import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from samebits.data.samples import Batch
from samebits.recipes.pose.config import Config
from samebits.recipes.pose.config import TestConfig as InferenceConfig
from samebits.recipes.pose.group import group_people
from samebits.recipes.pose.infer import (
    coco_results,
    forward_views,
    make_infer,
    make_views,
    prepare,
    read_image,
    to_prediction,
)
from samebits.recipes.pose.metric import PoseMetric
from samebits.recipes.pose.model import HigherHRNet
from samebits.recipes.pose.skeletons import COCO
from tests.recipes.pose_valid import Valid, config_of, paint_quickly
from tests.runs import samebits

CASES = [
    f"{name}_scales{num_scales}_project{project}"
    for name in ("crowdpose", "coco")
    for num_scales in (1, 3)
    for project in (1, 0)
]
STATS = {
    "AP": "AP", "Ap .5": "AP50", "AP .75": "AP75", "AP (M)": "APM", "AP (L)": "APL", "AR": "AR", "AR .5": "AR/50",
    "AR .75": "AR/75", "AR (M)": "AR/M", "AR (L)": "AR/L", "AP (easy)": "AP_easy", "AP (medium)": "AP_medium",
    "AP (hard)": "AP_hard",
}  # fmt: skip


@cache
def _valid(parity_folder: Path, pose_folder: Path, name: str) -> Valid:
    return Valid(parity_folder, pose_folder, name)


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.full] * ("scales3" in name)) for name in CASES])
def valid(request: pytest.FixtureRequest, parity_folder: Path, pose_folder: Path) -> Valid:
    return _valid(parity_folder, pose_folder, request.param)


def test_the_network_paints_as_the_fixtures_painter(parity_folder: Path, pose_folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("paint", parity_folder / "paint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    valid = _valid(parity_folder, pose_folder, "crowdpose_scales3_project1")
    _, width, height, *_, a, b, c, d, e, f = valid.arrays["1/scales"][-1].tolist()
    for flip in (None, valid.facts["flip_index"]):
        asked = (valid.arrays["1/people"], np.array([[a, b, c], [d, e, f]]), int(width), int(height), 2, flip)
        for theirs, ours in zip(module.paint(*asked, tag_step=3.0), paint_quickly(*asked, tag_step=3.0), strict=True):
            assert np.array_equal(theirs, ours)


@pytest.mark.one_in(2)
def test_maps_and_people_are_the_references(valid: Valid) -> None:
    # The last picture has the most people. All go through the test below.
    for number in [valid.numbers[-1]] if len(valid.facts["scale_factor"]) == 1 else [0]:
        expected = {key.split("/", 1)[1]: valid.arrays[key] for key in valid.arrays if key.startswith(f"{number}/")}
        picture = prepare(valid.rgb(number))
        views, base = make_views(picture, 512, valid.facts["scale_factor"])
        assert [base.width, base.height] == expected["base_size"].tolist()
        sizes = [[seen.width, seen.height] for seen in views.values()]
        assert sizes == expected["scales"][:, 1:3].tolist()
        project_to = base if valid.facts["project2image"] else None
        heat, tags = forward_views(valid.model(number), picture, views, project_to, mirrored=valid.skeleton.mirrored)
        assert (1, *heat.shape) == tuple(expected["heat/shape"])
        _same_sample(heat, expected, "heat")
        _same_sample(tags.permute(1, 2, 3, 0), expected, "tags")
        people, scores = group_people(heat, tags, valid.skeleton.order, InferenceConfig())
        assert np.abs(people - expected["grouped"]).max() <= 0.01
        assert np.abs(scores - expected["scores"]).max() <= 1e-4


def test_people_are_put_back_into_the_picture_as_the_references(valid: Valid) -> None:
    for number, found in zip(valid.numbers, valid.found(), strict=True):
        assert np.abs(found.joints - valid.arrays[f"{number}/final"][:, :, :3]).max() <= 0.01


def test_results_in_cocos_form_are_the_references(valid: Valid) -> None:
    results = [
        result
        for number, found in zip(valid.numbers, valid.found(), strict=True)
        for result in coco_results(found, int(valid.arrays[f"{number}/image_id"]))
    ]
    assert [result["image_id"] for result in results] == valid.arrays["results/image_id"].tolist()
    for name, tolerance in (("keypoints", 0.01), ("bbox", 0.02), ("score", 1e-4)):
        ours = np.array([result[name] for result in results])
        assert np.abs(ours - valid.arrays[f"results/{name}"]).max() <= tolerance


@pytest.mark.one_in(2)
def test_the_whole_path_gives_the_references_statistics(valid: Valid) -> None:
    metric = PoseMetric(valid.skeleton)
    targets = [valid.target(number) for number in valid.numbers]
    metric.add(valid.found(), Batch(None, targets, torch.tensor(list(valid.numbers))))
    figures = metric.result()
    assert {STATS[name]: pytest.approx(value, abs=1e-6) for name, value in valid.facts["stats"].items()} == figures


@pytest.mark.parametrize("name", ["coco_scales1_project1", "crowdpose_scales1_project1"])
def test_pictures_are_sampled_as_the_reference_samples_them(parity_folder: Path, pose_folder: Path, name: str) -> None:
    valid = _valid(parity_folder, pose_folder, name)
    for number in valid.numbers:
        picture = prepare(valid.rgb(number))
        views, _ = make_views(picture, 512, [1])
        pixels = views[1].sample(picture).permute(1, 2, 0).numpy()[3::16, 5::16].astype(int)
        # Decoders of JPEG differ by a level or two.
        assert (np.abs(pixels - valid.arrays[f"{number}/resized_rgb"]) <= 2).mean() >= 0.99


def _same_sample(ours: Tensor, expected: Mapping[str, Any], name: str) -> None:
    sample = ours.reshape(-1)[:: int(expected[f"{name}/step"])]
    assert np.abs(sample.numpy() - expected[f"{name}/sample"]).max() <= 1e-4
    assert ours.double().sum().item() == pytest.approx(float(expected[f"{name}/sum"]), rel=1e-6)


class Flat(nn.Module):
    """A network that finds one person: a peak of each joint in the middle of what it is shown."""

    def __init__(self, num_joints: int, num_tags: int) -> None:
        super().__init__()
        self.num_joints, self.num_tags = num_joints, num_tags

    def forward(self, images: Tensor) -> list[Tensor]:
        number, _, height, width = images.shape
        coarse = torch.zeros(number, self.num_joints + self.num_tags, height // 4, width // 4)
        fine = torch.zeros(number, self.num_joints, height // 2, width // 2)
        fine[:, :, height // 4 - 1 : height // 4 + 1, width // 4 - 1 : width // 4 + 1] = 1
        return [coarse, fine]


@pytest.mark.parametrize("size", [(1, 1), (7, 200), (160, 120), (65, 64)])
@pytest.mark.parametrize("scales", [[1.0], [0.5, 1.0, 2.0]])
def test_a_picture_of_any_size_is_looked_at(size: tuple[int, int], scales: list[float]) -> None:
    config = config_of({"data": {"size_px": 64}, "test": {"scales": scales}})
    found = make_infer(config)(Flat(17, 17), [prepare(np.zeros((size[1], size[0], 3), np.uint8))])
    assert len(found) == 1
    assert np.isfinite(found[0].joints).all()


def test_pictures_of_different_sizes_are_answered_one_by_one() -> None:
    infer = make_infer(config_of({"data": {"size_px": 64}}))
    sizes = [(64, 64), (128, 64), (64, 192)]
    pictures = [prepare(np.zeros((height, width, 3), np.uint8)) for width, height in sizes]
    together = infer(Flat(17, 17), pictures)
    for (width, height), picture, found in zip(sizes, pictures, together, strict=True):
        assert np.array_equal(infer(Flat(17, 17), picture[None])[0].joints, found.joints)
        middle = np.array([width, height]) / 2
        assert np.abs(found.joints[0, :, :2] - middle).max() <= 2.5


def test_an_answer_is_plain_json_in_cocos_form() -> None:
    found = make_infer(config_of({"data": {"size_px": 64}}))(
        Flat(17, 17), prepare(np.zeros((64, 64, 3), np.uint8))[None]
    )[0]
    people = json.loads(json.dumps(to_prediction(found)))["people"]
    assert len(people) == 1
    assert len(people[0]["keypoints"]) == 51
    assert people[0]["category_id"] == 1


@pytest.mark.parametrize(
    ("name", "number"), [("000000000785.png", 785), ("COCO_val2014_000000000785.png", 785), ("street.png", "street")]
)
def test_a_users_image_is_identified_by_its_number(tmp_path: Path, name: str, number: int | str) -> None:
    Image.new("RGB", (70, 64)).save(tmp_path / name)
    picture = read_image(tmp_path / name)
    # As predict does it: a batch of one, plain values in a list.
    batch = {"rgb": picture["rgb"][None], "image_id": [picture["image_id"]]}
    found = make_infer(config_of({"data": {"size_px": 64}}))(Flat(17, 17), batch)
    assert to_prediction(found[0])["people"][0]["image_id"] == number


@pytest.mark.parametrize(
    ("scales", "why"),
    [([0.5, 2], "scale 1"), ([1, 1], "duplicate"), ([0.7, 1], "half the smallest"), ([], "at least 1")],
)
def test_scales_that_do_not_go_together_are_refused(scales: list[float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config_of({"test": {"scales": scales}})


def test_mirroring_swaps_sides() -> None:
    class Lopsided(Flat):
        """Sees only joint 5, in the left half of what it is shown."""

        def forward(self, images: Tensor) -> list[Tensor]:
            coarse, fine = super().forward(images)
            fine.zero_()
            fine[:, 5, 8, 8] = 1
            return [coarse, fine]

    config = config_of({"data": {"size_px": 64}, "test": {"refine": False, "project": False}})
    found = make_infer(config)(Lopsided(17, 17), prepare(np.zeros((64, 64, 3), np.uint8))[None])[0]
    left, right = found.joints[0, 5], found.joints[0, COCO.mirrored[5]]
    assert left[0] < 32 < right[0]
    assert left[0] + right[0] == pytest.approx(64, abs=2.5)


SETTINGS: dict[str, Any] = {
    "data": {"name": "coco", "size_px": 64},
    "model": {"width": 4, "num_modules": [1, 1, 1], "num_blocks": 1, "stem_width": 8, "stem_blocks": 1,
              "deconv_blocks": 1},
    "test": {"flip": True, "scales": [0.5, 1], "max_people": 3, "refine": False},
}  # fmt: skip


def _overrides(root: Path) -> list[str]:
    pairs = [f"{group}.{name}={json.dumps(value)}" for group, each in SETTINGS.items() for name, value in each.items()]
    return [*pairs, f"data.root={root}"]


def _write_coco(root: Path, config: Config, model: HigherHRNet) -> tuple[list[dict[str, Any]], list[Any]]:
    """Pictures of noise; as people every other one of those that this model finds there. Targets, and what is found."""
    folder = root / "images" / "val2017"
    folder.mkdir(parents=True)
    (root / "annotations").mkdir()
    random, infer = np.random.default_rng(0), make_infer(config)
    targets, found, people = [], [], []
    for number, (width, height) in enumerate([(90, 64), (64, 64), (70, 110)], start=11):
        name = f"{number:012d}.png"
        rgb = random.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(rgb).save(folder / name)
        with torch.inference_mode():
            found.append(infer(model.eval(), [prepare(rgb)])[0])
        own = [
            {
                "id": 100 * number + place, "image_id": number, "category_id": 1, "iscrowd": 0,
                "keypoints": np.column_stack([joints[:, :2], 2 * (joints[:, 2] > 0)]).ravel().tolist(),
                "num_keypoints": int((joints[:, 2] > 0).sum()), "area": 2000.0, "bbox": [0.0, 0.0, 50.0, 50.0],
                "segmentation": [],
            }
            for place, joints in enumerate(found[-1].joints[::2])
        ]  # fmt: skip
        people += own
        targets.append({"image_id": number, "file_name": name, "width": width, "height": height, "annotations": own})
    images = [{"id": t["image_id"], **{key: t[key] for key in ("file_name", "width", "height")}} for t in targets]
    category = {"id": 1, "name": "person", "keypoints": list(COCO.joints), "skeleton": []}
    content = {"images": images, "annotations": people, "categories": [category]}
    (root / "annotations" / "person_keypoints_val2017.json").write_text(json.dumps(content))
    return targets, found


@pytest.mark.full
def test_an_official_checkpoint_is_evaluated_with_the_same_figures_on_two_processes(tmp_path: Path) -> None:
    config = Config.model_validate({"recipe": "pose", **SETTINGS})
    torch.manual_seed(1)
    model = HigherHRNet(config.model, COCO.num_joints)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() > 1:  # the official initialisation is so small that nothing is found
                tensor.normal_(0, (1 / tensor[0].numel()) ** 0.5)
    targets, found = _write_coco(tmp_path, config, model)
    metric = PoseMetric(COCO)
    metric.add(found, Batch(None, targets, torch.arange(len(targets))))
    expected = metric.result()
    assert 0.05 < expected["AP"] < 0.95  # else it would say little
    # As HigherHRNet's training writes it.
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"epoch": 300, "state_dict": state, "perf": 0.67}, tmp_path / "official.pth")
    done = samebits(
        "eval", "official.pth", "--preset", "pose/coco_w32_512", *_overrides(tmp_path), "--procs", 2, "--json",
        cwd=tmp_path,
    )  # fmt: skip
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures == pytest.approx(expected, abs=1e-6)
