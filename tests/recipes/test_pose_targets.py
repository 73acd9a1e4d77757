from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.recipes.pose.config import DataConfig
from samebits.recipes.pose.data import draw_heatmaps, index_joints
from samebits.recipes.pose.skeletons import COCO, CROWDPOSE
from samebits.recipes.pose.view import Placement, draw_placement

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
