"""Inputs of benchmarks/pose.py: synthetic maps, images and people, and pycocotools' metrics of them."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools.coco import COCO as PeersCoco
from pycocotools.cocoeval import COCOeval as PeersEvaluation

from samebits.recipes.pose.skeletons import COCO, CROWDPOSE

SIZE_PX = 512


def maps_of(num_people: int, num_tags: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make outputs of a good network: (K, H, W) heat and (K, H, W, T) tags, noisy, one joint of ten missing."""
    random = np.random.default_rng(num_people)
    heat = np.abs(random.normal(0, 0.004, (17, SIZE_PX, SIZE_PX))).astype(np.float32)
    tags = random.normal(0, 0.1, (17, SIZE_PX, SIZE_PX, num_tags)).astype(np.float32)
    columns = int(np.ceil(np.sqrt(num_people)))
    cell = SIZE_PX / columns
    for person in range(num_people):
        corner = np.array([person % columns, person // columns]) * cell
        # The first joint, with which people begin, is there: else assignments tie, and either side may choose.
        for joint in np.flatnonzero((random.random(17) > 0.1) | (np.arange(17) == 0)):
            x, y = corner + random.uniform(0.1, 0.9, 2) * cell
            height, spread = random.uniform(0.3, 0.95), 4.0
            reach = 16
            rows = slice(max(0, int(y) - reach), int(y) + reach + 1)
            across = slice(max(0, int(x) - reach), int(x) + reach + 1)
            yy, xx = np.arange(SIZE_PX)[rows, None], np.arange(SIZE_PX)[across]
            peak = (height * np.exp(-((xx - x) ** 2 + (yy - y) ** 2) / (2 * spread**2))).astype(np.float32)
            is_higher = peak > heat[joint, rows, across]
            heat[joint, rows, across] = np.maximum(heat[joint, rows, across], peak)
            tags[joint, rows, across][is_higher & (peak > 0.03)] = 3 * person + random.normal(0, 0.05, num_tags)
    return torch.from_numpy(heat), torch.from_numpy(tags)


def make_coco(folder: Path) -> None:
    """Write two images of soft noise with five people each, in the layout of COCO's training set."""
    random = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True)
    (folder / "images" / "train2017").mkdir(parents=True)
    images, people = [], []
    for number in (1, 2):
        noise = Image.fromarray(random.integers(0, 256, (30, 40, 3), np.uint8)).resize((640, 480))
        noise.save(folder / "images" / "train2017" / f"{number:012d}.jpg", quality=90)
        images.append({"id": number, "file_name": f"{number:012d}.jpg", "width": 640, "height": 480})
        for _ in range(5):
            points = random.uniform(0, 480, (17, 2))
            people.append(
                {
                    "id": len(people) + 1, "image_id": number, "category_id": 1, "iscrowd": 0, "num_keypoints": 17,
                    "keypoints": np.column_stack([points, np.full(17, 2)]).ravel().tolist(), "area": 90000.0,
                    "bbox": [0.0, 0.0, 480.0, 480.0], "segmentation": [],
                }
            )  # fmt: skip
    category = {"id": 1, "name": "person", "keypoints": list(COCO.joints), "skeleton": []}
    content = {"images": images, "annotations": people, "categories": [category]}
    (folder / "annotations" / "person_keypoints_train2017.json").write_text(json.dumps(content))


def crowd(file: Path) -> tuple[list[Any], list[Any]]:
    """Make the ground truth of 2,000 images, and predictions near most people."""
    random = np.random.default_rng(0)
    if file.is_file():
        content = json.loads(file.read_text())
        targets = {i["id"]: {"image_id": i["id"], "crowd_index": i["crowdIndex"], "annotations": []}
                   for i in content["images"]}  # fmt: skip
        for person in content["annotations"]:
            targets[person["image_id"]]["annotations"].append(dict(person))
    else:
        targets = {n: {"image_id": n, "crowd_index": random.random(), "annotations": []} for n in range(1, 2001)}
        for number in np.repeat(np.arange(1, 2001), 4).tolist():
            points = random.uniform(0, 400, (14, 2))
            targets[number]["annotations"].append(
                {"image_id": number, "category_id": 1, "iscrowd": 0, "num_keypoints": 14,
                 "keypoints": np.column_stack([points, np.full(14, 2)]).ravel().tolist(), "bbox": [0, 0, 400, 400]}
            )  # fmt: skip
    results = []
    for number, target in targets.items():
        for place, person in enumerate(target["annotations"]):
            person["id"] = len(results) * 100 + place + 1
            if random.random() < 0.15:
                continue
            joints = np.array(person["keypoints"], float).reshape(-1, 3)
            spread = random.choice([0.01, 0.03, 0.1]) * max(person["bbox"][2:])
            joints[:, :2] += random.normal(0, spread, (len(joints), 2))
            low, high = joints[:, :2].min(axis=0), joints[:, :2].max(axis=0)
            results.append(
                {"image_id": number, "category_id": 1, "keypoints": joints.ravel().tolist(),
                 "score": float(random.random()), "bbox": [*low.tolist(), *(high - low).tolist()]}
            )  # fmt: skip
    return list(targets.values()), results


def peers_stats(targets: list[Any], results: list[Any]) -> tuple[Any, Any]:
    """Compute pycocotools' metrics and precision of these images."""
    numbers = {target["image_id"] for target in targets}
    people = [dict(person) for target in targets for person in target["annotations"]]
    for place, person in enumerate(people, start=1):
        person["id"] = place
    with contextlib.redirect_stdout(io.StringIO()):
        truth = PeersCoco()
        truth.dataset = {
            "images": [{"id": number} for number in numbers], "annotations": people, "categories": [{"id": 1}],
        }  # fmt: skip
        truth.createIndex()
        found = truth.loadRes([dict(result) for result in results if result["image_id"] in numbers])
        evaluation = PeersEvaluation(truth, found, "keypoints")
        evaluation.params.kpt_oks_sigmas = np.array(CROWDPOSE.sigmas)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats, evaluation.eval["precision"]
