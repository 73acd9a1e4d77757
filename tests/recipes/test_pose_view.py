"""Views of an image: sizes and positions equal the reference's, and map pixels correctly."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.recipes.pose.infer import prepare
from samebits.recipes.pose.view import ImageView, view


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
