"""Grouping equals the reference's at every stage; and what it does at the edges of its input."""

from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.recipes.pose.config import TestConfig as InferenceConfig
from samebits.recipes.pose.group import (
    SCORE,
    TAGS,
    adjust,
    assign,
    assignment_cost,
    find_peaks,
    group_people,
    match,
    refine,
    tag_distances,
    top_k,
)
from samebits.recipes.pose.skeletons import COCO

CASES = [
    "coco_5", "coco_6_flip_nms3", "coco_one_joint", "cp_3", "cp_40_people", "cp_8_flip", "cp_border", "cp_close_tags",
    "cp_none",
]  # fmt: skip
# Their assignments have ties that the reference's own solver breaks differently from version to version.
TIED = {"cp_40_people", "coco_6_flip_nms3"}


class Case:
    """One case of pose_group.npz."""

    def __init__(self, path: Path, name: str) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            self.arrays = {key.split("/", 1)[1]: arrays[key] for key in arrays.files if key.startswith(name + "/")}
        if not self.arrays:
            pytest.skip(f"{name} is only in ../shared/parity")
        self.heat = torch.from_numpy(self.arrays["det"][0])
        self.tags = torch.from_numpy(self.arrays["tag"][0]).permute(3, 0, 1, 2).contiguous()
        self.num_tags = len(self.tags)

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    def param(self, name: str) -> Any:
        return self.arrays[f"param/{name}"].item()

    @property
    def order(self) -> list[int]:
        return self.arrays["param/joint_order"][: self.param("num_joints")].tolist()

    @property
    def match_settings(self) -> dict[str, Any]:
        return {
            "max_people": self.param("max_num_people"),
            "tag_threshold": self.param("tag_threshold"),
        }

    def settings(self, *, adjust: bool = True, refine: bool = True) -> InferenceConfig:
        return InferenceConfig(
            max_people=self.param("max_num_people"),
            detection_threshold=self.param("detection_threshold"), tag_threshold=self.param("tag_threshold"),
            nms_kernel=self.param("nms_kernel"), adjust=adjust, refine=refine,
        )  # fmt: skip

    def peaks(self) -> list[np.ndarray[Any, Any]]:
        found = find_peaks(self.heat, self.param("detection_threshold"), self.param("nms_kernel"))
        return top_k(self.heat, self.tags, found, self.param("max_num_people"))

    def people(self, name: str) -> np.ndarray[Any, Any]:
        """(P, K, 3 + T); the reference gives an array of shape (0,) if it detects no people."""
        return self.arrays[name].reshape(-1, len(self.heat), TAGS + self.num_tags)


@cache
def load(path: Path, name: str) -> Case:
    return Case(path, name)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, parity_folder: Path) -> Case:
    return load(parity_folder / "pose_group.npz", request.param)


@pytest.fixture(params=[name for name in CASES if name not in TIED])
def clear_case(request: pytest.FixtureRequest, parity_folder: Path) -> Case:
    return load(parity_folder / "pose_group.npz", request.param)


@pytest.fixture(params=sorted(TIED))
def tied_case(request: pytest.FixtureRequest, parity_folder: Path) -> Case:
    return load(parity_folder / "pose_group.npz", request.param)


def test_the_peaks_left_by_suppression_are_the_references(case: Case) -> None:
    found = find_peaks(case.heat, 0.1, case.param("nms_kernel"))
    joint, y, x = np.unravel_index(found.numpy(), case.heat.shape)
    assert np.array_equal(np.column_stack([np.zeros_like(joint), joint, y, x]), case["nms_nonzero"])


def test_all_positive_peaks_are_as_many_as_the_references(case: Case) -> None:
    found = find_peaks(case.heat, 0.0, case.param("nms_kernel")).numpy()
    counts = np.bincount(found // case.heat[0].numel(), minlength=len(case.heat))
    assert np.array_equal(counts[None], case["nms_count"])


def test_the_highest_peaks_of_each_joint_are_the_references(case: Case) -> None:
    for joint, found in enumerate(case.peaks()):
        sure = case["top_k/val_k"][0, joint] > 0.1
        assert np.array_equal(found[:, SCORE], case["top_k/val_k"][0, joint][sure])
        assert np.array_equal(found[:, :SCORE], case["top_k/loc_k"][0, joint][sure])
        assert np.array_equal(found[:, TAGS:], case["top_k/tag_k"][0, joint][sure])


def test_peaks_are_joined_to_the_references_people(clear_case: Case) -> None:
    people = match(clear_case.peaks(), clear_case.order, **clear_case.match_settings)
    assert np.array_equal(people, clear_case.people("match"))


def test_where_the_assignment_ties_ours_costs_what_the_references_costs(tied_case: Case) -> None:
    settings, peaks = tied_case.match_settings, tied_case.peaks()
    people = tied_case.people("match")
    num_compared = 0
    for number, joint in enumerate(tied_case.order):
        found, before = peaks[joint], people[:, tied_case.order[:number]]
        taken = before[:, :, SCORE] > 0
        # People appear in the order in which they are found, so those without an earlier joint begin here or later.
        known = min(int(taken.any(axis=1).sum()), settings["max_people"])
        if not known or not len(found):
            continue
        means = before[:known, :, TAGS:].sum(axis=1) / taken[:known].sum(axis=1)[:, None]
        distances = tag_distances(found, means)
        cost = assignment_cost(distances, found)
        rows = {tuple(row): place for place, row in enumerate(found.tolist())}
        taken_by = {
            person: rows[tuple(people[person, joint].tolist())]
            for person in range(known)
            if people[person, joint, SCORE] > 0
        }
        # The reference's other pairs are not known, as too far apart they were parted again: the best there are.
        near = distances < settings["tag_threshold"]
        rest = np.delete(np.delete(cost, list(taken_by.values()), axis=0), list(taken_by), axis=1)
        theirs = sum(cost[row, person] for person, row in taken_by.items()) + sum(
            rest[pair] for pair in assign(rest, np.zeros(rest.shape, bool))
        )
        assert sum(cost[pair] for pair in assign(cost, near)) == pytest.approx(theirs, abs=1e-3)
        num_compared += 1
    assert num_compared > 10


def test_joints_are_moved_as_the_references(case: Case) -> None:
    assert np.abs(adjust(case.people("match"), case.heat) - case.people("adjust")).max(initial=0) <= 1e-5


@pytest.mark.parametrize("is_adjusted", [False, True])
def test_missing_joints_are_filled_as_the_references(case: Case, is_adjusted: bool) -> None:
    start = case.people(f"parse_adjust{int(is_adjusted)}_refine0")
    filled = refine(start, case.heat, case.tags)
    assert np.abs(filled - case.people(f"parse_adjust{int(is_adjusted)}_refine1")).max(initial=0) <= 1e-5


@pytest.mark.parametrize("is_adjusted", [False, True])
@pytest.mark.parametrize("is_refined", [False, True])
def test_people_and_scores_are_the_references(clear_case: Case, is_adjusted: bool, is_refined: bool) -> None:
    config = clear_case.settings(adjust=is_adjusted, refine=is_refined)
    people, scores = group_people(clear_case.heat, clear_case.tags, clear_case.order, config)
    ending = f"adjust{int(is_adjusted)}_refine{int(is_refined)}"
    assert people.shape == clear_case.people(f"parse_{ending}").shape
    assert np.abs(people - clear_case.people(f"parse_{ending}")).max(initial=0) <= 1e-5
    assert np.abs(scores - clear_case[f"scores_{ending}"]).max(initial=0) <= 1e-6


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(0, 10_000),
)  # fmt: skip
def test_of_the_cheapest_assignments_the_most_lasting_is_taken(tags: list[int], people: list[int], seed: int) -> None:
    scores = np.random.default_rng(seed).integers(1, 4, len(tags)) / 4
    found = np.array([[0, 0, score, tag] for tag, score in zip(tags, scores, strict=True)], np.float32)
    distances = tag_distances(found, np.array(people, np.float32)[:, None])
    cost, near = assignment_cost(distances, found), distances < 1
    few, many = sorted((len(tags), len(people)))
    choices = [
        list(zip(range(few), order, strict=True)) if len(tags) == few else list(zip(order, range(few), strict=True))
        for order in permutations(range(many), few)
    ]
    rated = [(round(sum(cost[pair] for pair in pairs), 6), -sum(near[pair] for pair in pairs)) for pairs in choices]
    ours = assign(cost, near)
    assert (round(sum(cost[pair] for pair in ours), 6), -sum(near[pair] for pair in ours)) == min(rated)


def test_no_people_are_detected_on_empty_maps() -> None:
    people, scores = group_people(torch.zeros(17, 32, 48), torch.zeros(1, 17, 32, 48), COCO.order, InferenceConfig())
    assert people.shape == (0, 17, 4)
    assert scores.shape == (0,)


def test_nan_maps_give_no_people_and_no_crash() -> None:
    maps = torch.full((17, 16, 16), float("nan"))
    people, _ = group_people(maps, maps[None], COCO.order, InferenceConfig())
    assert len(people) == 0


def test_tags_that_are_no_numbers_leave_every_peak_alone() -> None:
    heat = torch.zeros(17, 16, 16)
    heat[:, 4, 4] = 0.5
    tags = torch.full((1, 17, 16, 16), float("nan"))
    people, _ = group_people(heat, tags, COCO.order, InferenceConfig(refine=False))
    assert (people[:, :, SCORE] > 0).sum() == 17


def test_equal_neighbors_are_all_peaks() -> None:
    heat = torch.zeros(1, 8, 8)
    heat[0, 3, 3:5] = 0.7
    assert find_peaks(heat, 0.1, 5).tolist() == [3 * 8 + 3, 3 * 8 + 4]


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), kernel=st.sampled_from([1, 3, 5, 7]), levels=st.sampled_from([3, 1000]))
def test_peaks_are_those_of_max_pooling(seed: int, kernel: int, levels: int) -> None:
    random = torch.Generator().manual_seed(seed)
    height, width = torch.randint(1, 14, (2,), generator=random).tolist()
    heat = torch.randint(0, levels, (2, height, width), generator=random) / levels
    pooled = torch.nn.functional.max_pool2d(heat[None], kernel, 1, kernel // 2)[0]
    expected = ((pooled == heat) & (heat > 0.1)).flatten().nonzero()[:, 0]
    assert find_peaks(heat, 0.1, kernel).tolist() == expected.tolist()


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), num_tags=st.sampled_from([1, 2]))
def test_a_missing_joint_is_where_heat_less_distance_is_highest(seed: int, num_tags: int) -> None:
    random = np.random.default_rng(seed)
    num_joints, height, width = 3, int(random.integers(2, 9)), int(random.integers(2, 9))
    # Few levels, so that there are ties; some maps stay below, some reach above what counts as hot.
    heat = (random.integers(-2, 5, (num_joints, height, width)) / 20).astype(np.float32)
    tags = random.integers(0, 6, (num_tags, num_joints, height, width)).astype(np.float32) / 2
    people = np.zeros((2, num_joints, TAGS + num_tags), np.float32)
    people[:, 0, SCORE] = 0.5
    people[:, 0, TAGS:] = random.integers(0, 6, (2, num_tags)) / 2
    filled = refine(people, torch.from_numpy(heat), torch.from_numpy(tags))
    for person in range(2):
        for joint in (1, 2):
            distance = np.sqrt(((tags[:, joint] - people[person, 0, TAGS:, None, None]) ** 2).sum(0))
            place = np.unravel_index(np.argmax(heat[joint] - np.round(distance)), (height, width))
            assert filled[person, joint, SCORE] == max(heat[joint][place], 0)
            if heat[joint][place] > 0:
                assert np.abs(filled[person, joint, :SCORE] - np.array(place[::-1]) - 0.5).tolist() == [0.25, 0.25]


def test_the_limit_on_people_bounds_peaks_of_a_joint_but_not_people() -> None:
    heat, tags = torch.zeros(2, 40, 40), torch.zeros(1, 2, 40, 40)
    heat[0, 5, ::8], heat[1, 20, ::8] = 0.5, 0.5
    tags[0, 0], tags[0, 1] = torch.arange(40.0) * 3, 1000 + torch.arange(40.0) * 3
    people, _ = group_people(heat, tags, (0, 1), InferenceConfig(max_people=4, refine=False))
    assert len(people) == 8


@pytest.mark.gpu
def test_a_gpu_finds_the_same_people(clear_case: Case) -> None:
    maps, how = (clear_case.heat, clear_case.tags), (clear_case.order, clear_case.settings())
    here = group_people(*maps, *how)
    there = group_people(*(each.cuda() for each in maps), *how)
    assert here[0].shape == there[0].shape
    assert np.abs(here[0] - there[0]).max(initial=0) <= 1e-5
    assert np.abs(here[1] - there[1]).max(initial=0) <= 1e-6
