"""Pose: grouping, targets, a training sample and evaluation, compared with the reference's algorithms.

    python -m benchmarks.pose
    python -m benchmarks.pose --only grouping --rounds 9
    python -m benchmarks.pose --coco DIR --crowdpose FILE    # the datasets

Both do the same work on the same data in the same process, in turns, on one thread. Their results are compared before
they are timed. In a round each runs equally often, and its fastest run counts, because other work on the machine only
adds time. Prints medians of the rounds, and the median of the rounds' ratios.

Grouping: maps of 512 x 512 pixels, 17 joints, one tag map and two (with that of the mirrored image), adjusted and
refined, one joint of ten missing. Targets: both outputs of a 512 px input. A sample: read, warped, mirrored,
normalized, with targets, in a batch as the reference's loader makes it; of a synthetic image without the dataset.
Evaluation: 2,000 images of CrowdPose, or as many synthetic ones, compared with pycocotools.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import pose_plain as plain
from benchmarks.peers.pose_work import SIZE_PX, crowd, make_coco, maps_of, peers_stats
from samebits.data.keyed import keys
from samebits.recipes.pose.coco_files import open_files
from samebits.recipes.pose.config import DataConfig, TestConfig
from samebits.recipes.pose.data import TrainImages, draw_heatmaps, index_joints
from samebits.recipes.pose.group import group_people
from samebits.recipes.pose.metric import CROWDPOSE_AREA, CROWDPOSE_GROUPS, keypoint_scores
from samebits.recipes.pose.skeletons import COCO, CROWDPOSE

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data" / "pose"


@dataclass(frozen=True)
class Race:
    """Two implementations of one task, with the ratio that is the goal."""

    name: str
    plain: Callable[[], Any]
    ours: Callable[[], Any]
    bar: float


def grouping_races() -> list[Race]:
    races = []
    for num_tags in (1, 2):
        for num_people, bar in ((1, 10.0), (10, 10.0), (30, 10.0)):
            heat, tags = maps_of(num_people, num_tags)
            own_tags = tags.permute(3, 0, 1, 2).contiguous()
            theirs, their_scores = plain.group(heat, tags, COCO.order)
            people, scores = group_people(heat, own_tags, COCO.order, TestConfig())
            assert len(people) == num_people, f"{len(people)} people found of {num_people}"
            assert np.abs(people - theirs).max() <= 1e-5
            assert np.abs(scores - their_scores).max() <= 1e-6
            races.append(
                Race(
                    f"grouping, {num_people} people, {num_tags} tag map{'s' * (num_tags > 1)}",
                    lambda heat=heat, tags=tags: plain.group(heat, tags, COCO.order),
                    lambda heat=heat, tags=own_tags: group_people(heat, tags, COCO.order, TestConfig()),
                    bar,
                )
            )
    return races


def target_races() -> list[Race]:
    races = []
    for num_people, bar in ((1, 3.0), (10, 3.0), (30, 15.0)):
        random = np.random.default_rng(num_people)
        unit = random.uniform(0, 1, (num_people, 17, 2))
        visible = random.integers(0, 3, (num_people, 17, 1)).astype(float)
        outputs = [(size, np.concatenate([unit * size, visible], axis=2)) for size in (SIZE_PX // 4, SIZE_PX // 2)]
        makers = {size: plain.Targets(size, 17, 2.0) for size, _ in outputs}

        def theirs(outputs: Any = outputs, makers: Any = makers) -> Any:
            return [(makers[size].heatmaps(joints), makers[size].index(joints)) for size, joints in outputs]

        # Tags are at 1/4 only, so ours needs one index; the reference makes both.
        def ours(outputs: Any = outputs) -> Any:
            heatmaps = [draw_heatmaps(joints, 2.0, size) for size, joints in outputs]
            return heatmaps, index_joints(outputs[0][1], outputs[0][0], 30)

        expected, (heatmaps, index) = theirs(), ours()
        assert all(np.abs(a - b[0]).max() <= 1e-6 for a, b in zip(heatmaps, expected, strict=True))
        assert np.array_equal(index, expected[0][1].astype(np.int64))
        races.append(Race(f"targets, {num_people} people", theirs, ours, bar))
    return races


def sample_races(root: Path, scratch: Path) -> list[Race]:
    if not (root / "images" / "train2017").is_dir():
        make_coco(scratch)
        root = scratch
    config = DataConfig(name="coco", root=root, size_px=SIZE_PX)
    source = open_files(config, train=True)
    pictures = TrainImages(source, config)
    examples = [source.example(index, 0) for index in range(len(source))]
    truths = [source.ground_truth(index) for index in range(len(source))]
    files = [str(root / "images" / "train2017" / truth["file_name"]) for truth in truths]
    content = json.loads((root / "annotations" / "person_keypoints_train2017.json").read_text())
    people = [
        [person for person in content["annotations"] if person["image_id"] == truth["image_id"]] for truth in truths
    ]
    for example, known in zip(examples, people, strict=True):
        expected = plain.mask_of(known, *example.rgb.shape[:2])
        assert np.array_equal(expected, np.ones_like(expected) if example.mask is None else example.mask > 0)
    numbers = np.arange(len(source))

    def theirs() -> Any:
        samples = [
            plain.sample(file, example.joints, known, list(COCO.mirrored))
            for file, example, known in zip(files, examples, people, strict=True)
        ]
        return torch.utils.data.default_collate(samples)

    def ours() -> Any:
        return pictures.batch(numbers, keys(0, 0, numbers))

    return [Race(f"training sample ({len(source)} pictures)", theirs, ours, 1.7)]


def evaluation_races(file: Path) -> list[Race]:
    targets, results = crowd(file)
    as_coco = replace(CROWDPOSE, name="coco")
    for target in targets:
        for person in target["annotations"]:
            person["area"] = person["bbox"][2] * person["bbox"][3] * CROWDPOSE_AREA
    groups = {
        name: [t for t in targets if low <= t["crowd_index"] < high] for name, (low, high) in CROWDPOSE_GROUPS.items()
    }

    def with_groups() -> Any:
        stats = peers_stats(targets, results)
        return stats, {name: peers_stats(group, results) for name, group in groups.items()}

    ours, theirs = keypoint_scores(targets, results, as_coco), peers_stats(targets, results)[0]
    difference = max(abs(a - b) for a, b in zip(ours.values(), theirs, strict=True))
    assert difference <= 1e-9, difference
    crowd_scores, (_, expected) = keypoint_scores(targets, results, CROWDPOSE), with_groups()
    for name, (_, precision) in expected.items():
        assert crowd_scores[name] == round(float(np.mean(precision[:, :, :, 0])), 4)
    count = f"{len(targets):,} pictures"
    return [
        Race(f"evaluation, {count}", lambda: peers_stats(targets, results),
             lambda: keypoint_scores(targets, results, as_coco), 2.0),
        Race("  with easy, medium, hard", with_groups, lambda: keypoint_scores(targets, results, CROWDPOSE), 2.0),
    ]  # fmt: skip


def race(each: Race, num_rounds: int) -> None:
    """Time both in turns, equally often per round; the fastest run of a round counts."""
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    each.ours()
    began = time.perf_counter()
    each.plain()
    num_runs = max(1, min(50, int(0.3 / (time.perf_counter() - began))))
    for _ in range(num_rounds):
        for name, values in times.items():
            run, fastest = getattr(each, name), float("inf")
            for _ in range(num_runs):
                began = time.perf_counter()
                run()
                fastest = min(fastest, time.perf_counter() - began)
            values.append(fastest)
    ratio = statistics.median(a / b for a, b in zip(times["plain"], times["ours"], strict=True))
    plain_ms, ours_ms = (statistics.median(values) * 1000 for values in times.values())
    verdict = "" if ratio >= each.bar else "   below the bar"
    print(
        f"| {each.name:<34} | {plain_ms:9.2f} | {ours_ms:9.2f} | {ratio:6.1f} | {each.bar:5.1f} |{verdict}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["grouping", "targets", "sample", "evaluation"])
    parser.add_argument("--coco", type=Path, default=BESIDE / "coco", help="COCO with images/train2017")
    parser.add_argument("--crowdpose", type=Path, default=BESIDE / "crowdpose" / "json" / "crowdpose_val.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("one thread; times in ms, medians of", arguments.rounds, "rounds")
    print(f"| {'':<34} | {'plain':>9} | {'Samebits':>9} | {'ratio':>6} | {'goal':>5} |")
    print(f"|{'-' * 36}|{'-' * 10}:|{'-' * 10}:|{'-' * 7}:|{'-' * 6}:|")
    with tempfile.TemporaryDirectory() as scratch:
        makers = {
            "grouping": grouping_races,
            "targets": target_races,
            "sample": lambda: sample_races(arguments.coco, Path(scratch) / "coco"),
            "evaluation": lambda: evaluation_races(arguments.crowdpose),
        }
        for name, make in makers.items():
            if arguments.only in (None, name):
                for each in make():
                    race(each, arguments.rounds)


if __name__ == "__main__":
    main()
