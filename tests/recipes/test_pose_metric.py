"""Figures of pose, as the official programs count them, and drawings of people."""

import contextlib
import gzip
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools.coco import COCO as PeersCoco
from pycocotools.cocoeval import COCOeval as PeersEvaluation

from samebits.data.samples import Batch
from samebits.errors import DataError
from samebits.recipes.pose.infer import Detections, coco_results, to_prediction
from samebits.recipes.pose.metric import COCO_NAMES, PoseMetric, keypoint_scores, run_evaluation
from samebits.recipes.pose.recipe import draw_evaluation, draw_people, draw_prediction
from samebits.recipes.pose.skeletons import COCO, CROWDPOSE, SKELETONS, Skeleton
from samebits.report.pictures import colors

CASES = ["crowdpose_first200", "crowdpose_all", "coco_sample", "coco_150"]
NAMES = {"AP_M": "APM", "AP_L": "APL", "AR_M": "AR/M", "AR_L": "AR/L", "AR50": "AR/50", "AR75": "AR/75"}


class Official:
    """One case of pose_eval."""

    def __init__(self, parity_folder: Path, pose_folder: Path, name: str) -> None:
        found = _read(parity_folder / f"pose_eval_{name}_dt.json.gz")
        self.facts = json.loads((parity_folder / "pose_eval.json").read_text())[name]
        with np.load(parity_folder / "pose_eval.npz", allow_pickle=False) as arrays:
            self.arrays = {key.split("/", 1)[1]: arrays[key] for key in arrays.files if key.startswith(name + "/")}
        self.skeleton = SKELETONS[name.split("_")[0]]
        truth = {
            "coco_sample": pose_folder / "coco/annotations/person_keypoints_val2017.json",
            "coco_150": parity_folder / "pose_eval_coco_150_gt.json.gz",
        }.get(name, pose_folder / "crowdpose/json/crowdpose_val.json")
        self.targets = as_targets(_read(truth), 200 if name.endswith("first200") else None)
        self.results = [with_box(result) for result in found]


def _read(path: Path) -> Any:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def as_targets(file: dict[str, Any], limit: int | None = None) -> list[dict[str, Any]]:
    """An annotation file in the form that batches carry."""
    targets = {
        image["id"]: {"image_id": image["id"], "crowd_index": image.get("crowdIndex"), "annotations": []}
        for image in file["images"][:limit]
    }
    for person in file["annotations"]:
        if person["image_id"] in targets:
            targets[person["image_id"]]["annotations"].append(person)
    return list(targets.values())


def with_box(result: dict[str, Any]) -> dict[str, Any]:
    points = np.array(result["keypoints"]).reshape(-1, 3)[:, :2]
    low, high = points.min(axis=0), points.max(axis=0)
    return {**result, "bbox": [*low.tolist(), *(high - low).tolist()]}


@cache
def _official(parity_folder: Path, pose_folder: Path, name: str) -> Official:
    return Official(parity_folder, pose_folder, name)


@pytest.fixture(params=CASES)
def official(request: pytest.FixtureRequest, parity_folder: Path) -> Official:
    # One case needs no data set, and is in every clone.
    needs_data = request.param != "coco_150"
    pose_folder = request.getfixturevalue("pose_folder") if needs_data else Path()
    return _official(parity_folder, pose_folder, request.param)


def test_figures_are_the_official_tools(official: Official) -> None:
    figures = keypoint_scores(official.targets, official.results, official.skeleton)
    expected = dict(zip(official.facts["names"], official.facts["stats"], strict=True))
    del_unused = {NAMES.get(name, name): value for name, value in expected.items() if name != "unused"}
    assert figures == {name: pytest.approx(value, abs=1e-9) for name, value in del_unused.items()}


def test_similarities_and_curves_are_the_official_tools(official: Official) -> None:
    evaluation = run_evaluation(official.targets, official.results, official.skeleton)
    assert np.abs(evaluation.eval["precision"][:, :, 0, :, 0] - official.arrays["precision"]).max() <= 1e-9
    assert np.abs(evaluation.eval["recall"][:, 0, :, 0] - official.arrays["recall"]).max() <= 1e-9
    images = [key for key in official.arrays if key.startswith("oks/")]
    assert images
    for key in images:
        ours = np.array(evaluation.ious[int(key.removeprefix("oks/")), 1])
        assert np.abs(ours - official.arrays[key]).max() <= 1e-9


def test_the_spread_of_joints_is_the_official_one(official: Official) -> None:
    assert official.skeleton.sigmas == pytest.approx(official.facts["sigmas"], abs=1e-12)


def made_up(seed: int, skeleton: Skeleton, num_pictures: int) -> tuple[list[dict[str, Any]], list[Detections]]:
    """Pictures with people, crowds, people without joints, and guesses near them, beside them and with tied scores."""
    random = np.random.default_rng(seed)
    targets, found = [], []
    for number in random.permutation(1000)[:num_pictures].tolist():
        people, guesses = [], []
        for _ in range(random.integers(0, 5)):
            size = float(random.uniform(10, 200))
            points = random.uniform(0, size, (skeleton.num_joints, 2)) + random.uniform(0, 300, 2)
            seen = random.integers(0, 3, skeleton.num_joints) * (random.random() > 0.15)
            people.append(
                {
                    "id": len(people), "image_id": number, "category_id": 1, "iscrowd": int(random.random() < 0.1),
                    "keypoints": np.column_stack([points * (seen > 0)[:, None], seen]).ravel().tolist(),
                    "num_keypoints": int((seen > 0).sum()), "area": size * size / 2,
                    "bbox": [*points.min(axis=0).tolist(), size, size],
                }
            )  # fmt: skip
            for _ in range(random.integers(0, 3)):
                near = points + random.normal(0, size * float(random.choice([0.01, 0.05, 0.3])), points.shape)
                guesses.append(np.column_stack([near, np.full(len(near), 0.5)]))
        targets.append({"image_id": number, "crowd_index": float(random.random()), "annotations": people})
        joints = np.array(guesses).reshape(-1, skeleton.num_joints, 3)
        scores = random.integers(1, 5, len(joints)) / 8
        found.append(Detections(joints, scores))
    return targets, found


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000))
def test_cocos_figures_equal_pycocotools_to_the_last_digits(seed: int) -> None:
    targets, found = made_up(seed, COCO, 12)
    results = [r for target, each in zip(targets, found, strict=True) for r in coco_results(each, target["image_id"])]
    if not results or not any(target["annotations"] for target in targets):
        return
    ours = keypoint_scores(targets, results, COCO)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = PeersCoco()
        people = [dict(person) for target in targets for person in target["annotations"]]
        for place, person in enumerate(people, start=1):
            person["id"] = place
        truth.dataset = {
            "images": [{"id": target["image_id"]} for target in targets], "annotations": people,
            "categories": [{"id": 1, "name": "person"}],
        }  # fmt: skip
        truth.createIndex()
        evaluation = PeersEvaluation(truth, truth.loadRes(results), "keypoints")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    assert list(ours) == list(COCO_NAMES)
    assert list(ours.values()) == pytest.approx(evaluation.stats.tolist(), abs=1e-9)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([COCO, CROWDPOSE]))
def test_metrics_do_not_depend_on_which_rank_evaluated_what(seed: int, num_ranks: int, skeleton: Skeleton) -> None:
    targets, found = made_up(seed, skeleton, 10)
    alone = PoseMetric(skeleton)
    alone.add(found, Batch(None, targets, torch.arange(10)))
    ranks = [PoseMetric(skeleton) for _ in range(num_ranks)]
    for place in np.random.default_rng(seed).permutation(10).tolist():
        ranks[place % num_ranks].add([found[place]], Batch(None, [targets[place]], torch.tensor([place])))
    merged = PoseMetric(skeleton)
    for rank in reversed(ranks):
        merged.merge(json.loads(json.dumps(rank.state())))
    assert merged.num_samples == 10
    assert merged.result() == alone.result()
    assert json.dumps(merged.state()) == json.dumps(alone.state())


def test_no_detections_are_an_ap_of_0() -> None:
    targets, _ = made_up(3, COCO, 6)
    assert keypoint_scores(targets, [], COCO)["AP"] == 0


def test_no_ground_truth_is_an_ap_of_minus_1_as_in_cocos_own_evaluation() -> None:
    targets = [{"image_id": 5, "crowd_index": 0.9, "annotations": []}]
    assert set(keypoint_scores(targets, [], COCO).values()) == {-1.0}
    assert set(keypoint_scores(targets, [], CROWDPOSE).values()) == {-1.0}


def test_a_perfect_answer_is_an_ap_of_1_even_with_an_annotation_numbered_0() -> None:
    targets, _ = made_up(11, COCO, 8)
    assert any(person["id"] == 0 for target in targets for person in target["annotations"])
    results = [
        with_box({"image_id": t["image_id"], "category_id": 1, "keypoints": person["keypoints"], "score": 1.0})
        for t in targets
        for person in t["annotations"]
        if person["num_keypoints"] and not person["iscrowd"]
    ]
    assert keypoint_scores(targets, results, COCO)["AP"] == pytest.approx(1, abs=1e-6)


def test_two_pictures_of_one_number_are_refused() -> None:
    targets, found = made_up(3, COCO, 1)
    metric = PoseMetric(COCO)
    metric.add(found, Batch(None, targets, torch.tensor([0])))
    with pytest.raises(DataError, match="evaluated twice"):
        metric.add(found, Batch(None, targets, torch.tensor([1])))


def test_the_evaluation_leaves_the_annotations_as_they_were() -> None:
    targets, found = made_up(5, CROWDPOSE, 6)
    before = json.dumps(targets)
    metric = PoseMetric(CROWDPOSE)
    metric.add(found, Batch(None, targets, torch.arange(6)))
    metric.result()
    assert json.dumps(targets) == before


def _person(left: float, score: float = 0.9) -> Any:
    """Joints in a zigzag from (left, 40) to (left + 32, 140)."""
    places = np.arange(17)
    return np.column_stack([left + 32 * (places % 2), 40 + 6.0 * places, np.full(17, score)])


def _pixels(image: Image.Image) -> Any:
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("ground", [(255, 255, 255), (0, 0, 0), (255, 140, 0), (128, 128, 128)])
def test_every_joint_shows_on_any_ground(ground: tuple[int, int, int]) -> None:
    person = _person(60)
    drawn = _pixels(draw_people(Image.new("RGB", (200, 200), ground), [person], COCO))
    for x, y, _ in person:
        around = drawn[int(y) - 3 : int(y) + 4, int(x) - 3 : int(x) + 4]
        assert np.abs(around - ground).max() > 80


def test_each_person_has_a_color_of_their_own() -> None:
    drawn = _pixels(draw_people(Image.new("RGB", (300, 200)), [_person(40), _person(200)], COCO))
    first, second = colors(2)
    assert np.abs(drawn[40, 40] - first).max() < 25
    assert np.abs(drawn[40, 200] - second).max() < 25
    assert np.abs(np.array(first) - second).max() > 100
    assert len(set(colors(30))) == 30


def test_missing_joints_and_their_limbs_are_left_out() -> None:
    person = _person(60)
    person[8:, 2] = 0
    drawn = _pixels(draw_people(Image.new("RGB", (200, 200)), [person], COCO))
    assert drawn[30:90].any()
    assert not drawn[100:].any()


def test_the_picture_itself_is_not_changed() -> None:
    image = Image.new("RGB", (200, 200))
    draw_people(image, [_person(60)], COCO)
    assert not np.asarray(image).any()


def test_a_file_is_drawn_with_its_answer_and_without_what_is_unsure(tmp_path: Path) -> None:
    path = tmp_path / "street.png"
    Image.new("RGB", (300, 200)).save(path)
    people = np.stack([_person(40), _person(200, score=0.02)])
    facts = to_prediction(Detections(people, np.array([0.9, 0.02])))
    drawn = _pixels(draw_prediction(path, facts, skeleton=COCO))
    assert drawn.shape == (200, 300, 3)
    assert drawn[:, :150].any()
    assert not drawn[:, 150:].any()


def test_an_image_without_people_has_a_caption(tmp_path: Path) -> None:
    path = tmp_path / "empty.png"
    Image.new("RGB", (300, 200)).save(path)
    facts = to_prediction(Detections(np.zeros((0, 17, 3)), np.zeros(0)))
    drawn = _pixels(draw_prediction(path, facts, skeleton=COCO))
    assert not drawn[:200].any()
    assert (drawn[200:] < 100).any()
    assert (drawn[200:] == 255).any()


class Dark:
    """Samples that are dark gray."""

    def rgb(self, index: int) -> Any:
        return np.full((200, 300, 3), 40 + index, np.uint8)


def test_an_evaluation_is_drawn_as_found_and_there(tmp_path: Path) -> None:
    metric = PoseMetric(COCO)
    people = [
        {"keypoints": _person(40).ravel().tolist(), "num_keypoints": 17, "area": 900.0, "bbox": [0, 0, 50, 50],
         "iscrowd": 0, "category_id": 1, "id": 1},
    ]  # fmt: skip
    targets = [{"image_id": number, "annotations": people, "crowd_index": None} for number in (7, 8, 9)]
    found = [Detections(_person(200)[None], np.ones(1))] * 3
    metric.add(found, Batch(None, targets, torch.arange(3)))
    draw_evaluation(metric, Dark(), tmp_path)
    sheet = _pixels(Image.open(tmp_path / "people.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["people.png"]
    # Panels of 240x160 px from (24, 94) on: what was found is right in the first, what is there left in the next.
    found_panel, there_panel = (sheet[95:253, 24 + 240 * n : 264 + 240 * n] for n in range(2))

    def is_colored(part: Any) -> bool:
        return bool((part.max(axis=2) - part.min(axis=2) > 100).any())

    assert is_colored(found_panel[:, 120:])
    assert not is_colored(found_panel[:, :100])
    assert is_colored(there_panel[:, :100])
    assert not is_colored(there_panel[:, 120:])


def test_an_evaluation_of_no_image_draws_nothing(tmp_path: Path) -> None:
    draw_evaluation(PoseMetric(COCO), Dark(), tmp_path)
    assert not list(tmp_path.iterdir())
