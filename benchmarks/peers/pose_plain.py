"""HigherHRNet's method written plainly: one joint, one person, one pixel window after another.

benchmarks/pose.py compares with this code; Samebits's results must equal its results. The algorithms are those of the
reference implementation: max-pooling for the suppression, an assignment in Python, a search over whole maps for every
joint of every person, a gaussian pasted joint by joint. The code is our own.
"""

from __future__ import annotations

import random
from typing import Any

import cv2
import numpy as np
import pycocotools.mask as mask_api
import torch
import torch.nn.functional as F
import torchvision.transforms.functional as TF


def group(heat: torch.Tensor, tags: torch.Tensor, order: Any, max_people: int = 30, threshold: float = 0.1) -> Any:
    """(K, H, W) heat, (K, H, W, T) tags -> (P, K, 3 + T) people, adjusted and refined, and their scores."""
    num_joints, height, width = heat.shape
    pooled = F.max_pool2d(heat[None], 5, 1, 2)[0]
    peaks = heat * (pooled == heat).float()
    values, places = peaks.view(num_joints, -1).topk(max_people, dim=1)
    flat_tags = tags.view(num_joints, height * width, -1)
    found_tags = torch.stack([flat_tags[:, :, t].gather(1, places) for t in range(flat_tags.shape[2])], dim=2).numpy()
    spots = torch.stack([places % width, places // width], dim=2).numpy()
    people = _match(found_tags, spots, values.numpy(), order, max_people, threshold)
    for person in people:
        _adjust(person, heat.numpy())
    scores = [float(person[:, 2].mean()) for person in people]
    for person in people:
        _refine(person, heat.numpy(), tags.numpy())
    return people, scores


def _match(tags: Any, spots: Any, values: Any, order: Any, max_people: int, threshold: float) -> Any:
    num_joints, size = len(values), 3 + tags.shape[2]
    people: dict[float, Any] = {}
    members: dict[float, list[Any]] = {}
    for joint in order:
        rows = np.concatenate([spots[joint], values[joint][:, None], tags[joint]], axis=1)
        rows = rows[rows[:, 2] > threshold]
        own_tags = tags[joint][: len(rows)]
        if not len(rows):
            continue
        pairs = {}
        known = list(people)[:max_people]
        if known:
            means = np.array([np.mean(members[key], axis=0) for key in known])
            distances = np.linalg.norm(rows[:, None, 3:] - means[None], axis=2)
            cost = np.round(distances) * 100 - rows[:, 2:3]
            if len(rows) > len(known):
                cost = np.concatenate([cost, np.full((len(rows), len(rows) - len(known)), 1e10)], axis=1)
            for row, column in enumerate(hungarian(cost.tolist())):
                if column < len(known) and distances[row, column] < 1:
                    pairs[row] = known[column]
        for row, values_of in enumerate(rows):
            if row in pairs:
                people[pairs[row]][joint] = values_of
                members[pairs[row]].append(own_tags[row])
            else:
                key = own_tags[row][0]
                people.setdefault(key, np.zeros((num_joints, size), np.float32))[joint] = values_of
                members[key] = [own_tags[row]]
    return np.array(list(people.values()), np.float32).reshape(-1, num_joints, size)


def hungarian(cost: list[list[float]]) -> list[int]:
    """Return the column of each row with the minimal sum of costs; at least as many columns as rows."""
    num_rows, num_columns = len(cost), len(cost[0])
    row_price, column_price = [0.0] * (num_rows + 1), [0.0] * (num_columns + 1)
    owner = [0] * (num_columns + 1)
    for row in range(1, num_rows + 1):
        owner[0] = row
        at = 0
        least, before = [float("inf")] * (num_columns + 1), [0] * (num_columns + 1)
        used = [False] * (num_columns + 1)
        while True:
            used[at] = True
            step, following = float("inf"), 0
            for column in range(1, num_columns + 1):
                if used[column]:
                    continue
                slack = cost[owner[at] - 1][column - 1] - row_price[owner[at]] - column_price[column]
                if slack < least[column]:
                    least[column], before[column] = slack, at
                if least[column] < step:
                    step, following = least[column], column
            for column in range(num_columns + 1):
                if used[column]:
                    row_price[owner[column]] += step
                    column_price[column] -= step
                else:
                    least[column] -= step
            at = following
            if owner[at] == 0:
                break
        while at:
            owner[at] = owner[before[at]]
            at = before[at]
    columns = [0] * num_rows
    for column in range(1, num_columns + 1):
        if owner[column]:
            columns[owner[column] - 1] = column - 1
    return columns


def _quarter(heat: Any, x: int, y: int) -> tuple[float, float]:
    height, width = heat.shape
    right = heat[y, min(x + 1, width - 1)] > heat[y, max(x - 1, 0)]
    below = heat[min(y + 1, height - 1), x] > heat[max(y - 1, 0), x]
    return x + 0.5 + (0.25 if right else -0.25), y + 0.5 + (0.25 if below else -0.25)


def _adjust(person: Any, heat: Any) -> None:
    for joint, values in enumerate(person):
        if values[2] > 0:
            person[joint, :2] = _quarter(heat[joint], int(values[0]), int(values[1]))


def _refine(person: Any, heat: Any, tags: Any) -> None:
    own = [tags[joint, int(y), int(x)] for joint, (x, y, score) in enumerate(person[:, :3]) if score > 0]
    mean = np.mean(own, axis=0)
    candidates = []
    for joint in range(len(person)):
        distance = ((tags[joint] - mean[None, None]) ** 2).sum(axis=2) ** 0.5
        y, x = np.unravel_index(np.argmax(heat[joint] - np.round(distance)), distance.shape)
        candidates.append((*_quarter(heat[joint], int(x), int(y)), heat[joint, y, x]))
    for joint, candidate in enumerate(candidates):
        if candidate[2] > 0 and person[joint, 2] == 0:
            person[joint, :3] = candidate


class Targets:
    """Heat maps and indices of one output."""

    def __init__(self, size: int, num_joints: int, sigma: float, max_people: int = 30) -> None:
        self.size, self.num_joints, self.sigma, self.max_people = size, num_joints, sigma, max_people
        offsets = np.arange(0, 6 * sigma + 3, 1, float)
        center = 3 * sigma + 1
        self.patch = np.exp(-((offsets - center) ** 2 + (offsets[:, None] - center) ** 2) / (2 * sigma**2))

    def heatmaps(self, joints: Any) -> Any:
        """(P, K, 3) joints in pixels of the map -> (K, size, size)."""
        maps, size, reach = np.zeros((self.num_joints, self.size, self.size), np.float32), self.size, 3 * self.sigma
        for person in joints:
            for joint, point in enumerate(person):
                if point[2] <= 0:
                    continue
                x, y = int(point[0]), int(point[1])
                if x < 0 or y < 0 or x >= size or y >= size:
                    continue
                left, top = int(np.round(x - reach - 1)), int(np.round(y - reach - 1))
                right, bottom = int(np.round(x + reach + 2)), int(np.round(y + reach + 2))
                x_from, x_to = max(0, left), min(right, size)
                y_from, y_to = max(0, top), min(bottom, size)
                patch = self.patch[y_from - top : y_to - top, x_from - left : x_to - left]
                maps[joint, y_from:y_to, x_from:x_to] = np.maximum(maps[joint, y_from:y_to, x_from:x_to], patch)
        return maps

    def index(self, joints: Any) -> Any:
        """(P, K, 3) joints -> (max_people, K, 2): places in the flattened maps."""
        index = np.zeros((self.max_people, self.num_joints, 2))
        for number, person in enumerate(joints):
            place = 0
            for joint, point in enumerate(person):
                x, y = int(point[0]), int(point[1])
                if point[2] > 0 and x >= 0 and y >= 0 and x < self.size and y < self.size:
                    index[number][place] = (joint * self.size**2 + y * self.size + x, 1)
                    place += 1
        return index


def sample(path: str, joints: Any, people: Any, mirrored: Any, size: int = 512, sigma: float = 2.0) -> Any:
    """Image file, (P, K, 3) joints and annotations -> image, heatmaps, masks and index, placed at random."""
    image = cv2.cvtColor(cv2.imread(path, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION), cv2.COLOR_BGR2RGB)
    height, width = image.shape[:2]
    mask = mask_of(people, height, width)
    scale = min(height, width) / 200 * random.uniform(0.75, 1.5)
    turn = np.deg2rad(random.uniform(-30, 30))
    center = np.array([width / 2, height / 2]) + [random.randint(-int(40 * scale), int(40 * scale)) for _ in range(2)]
    outputs = []
    is_mirrored = random.random() < 0.5
    for side in (size // 4, size // 2):
        matrix = _matrix(center, scale, turn, side)
        warped = cv2.warpAffine((mask * 255).astype(np.uint8), matrix, (side, side)) / 255
        warped = (warped > 0.5).astype(np.float32)
        placed = joints.copy()
        points = placed[:, :, :2].reshape(-1, 2)
        ones = np.ones((len(points), 1))
        placed[:, :, :2] = np.dot(np.concatenate([points, ones], axis=1), matrix.T).reshape(placed[:, :, :2].shape)
        outputs.append([placed, warped])
    image = cv2.warpAffine(image, _matrix(center, scale, turn, size), (size, size))
    if is_mirrored:
        image = image[:, ::-1] - np.zeros_like(image)
        for side, output in zip((size // 4, size // 2), outputs, strict=True):
            output[1] = output[1][:, ::-1] - np.zeros_like(output[1])
            output[0] = output[0][:, mirrored]
            output[0][:, :, 0] = side - output[0][:, :, 0] - 1
    tensor = TF.normalize(TF.to_tensor(image), mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    makers = [Targets(side, joints.shape[1], sigma) for side in (size // 4, size // 2)]
    heatmaps = [maker.heatmaps(placed) for maker, (placed, _) in zip(makers, outputs, strict=True)]
    index = [maker.index(placed).astype(np.int32) for maker, (placed, _) in zip(makers, outputs, strict=True)]
    return tensor, heatmaps, [warped for _, warped in outputs], index


def mask_of(people: Any, height: int, width: int) -> Any:
    """True outside of crowds and of people without keypoints."""
    found = np.zeros((height, width))
    for person in people:
        if person["iscrowd"]:
            found += mask_api.decode(mask_api.frPyObjects(person["segmentation"], height, width))
        elif person["num_keypoints"] == 0:
            for runs in mask_api.frPyObjects(person["segmentation"], height, width):
                found += mask_api.decode(runs)
    return found < 0.5


def _matrix(center: Any, scale: float, turn: float, side: int) -> Any:
    factor = side / (200 * scale)
    cos, sin = np.cos(turn), np.sin(turn)
    linear = factor * np.array([[cos, sin], [-sin, cos]])
    return np.column_stack([linear, side / 2 - linear @ center])
