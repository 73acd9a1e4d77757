"""Random crops are distributed as in torchvision, and resized without loss of quality."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from samebits.data.crop import Box, RandomBoxes, center_square, fitting_scale, resized, resized_shorter
from samebits.data.keyed import keys

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def boxes(number: int, size: tuple[int, int], seed: int = 0, **options: tuple[float, float]) -> list[Box]:
    drawn = RandomBoxes(keys(seed, 0, np.arange(number)), **{"area": AREA, "ratio": RATIO, **options})
    return [drawn.box(place, size) for place in range(number)]


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**32))
def test_a_box_lies_inside_its_picture(width: int, height: int, seed: int) -> None:
    for box in boxes(5, (width, height), seed):
        assert box.left >= 0
        assert box.top >= 0
        assert 1 <= box.width <= width - box.left
        assert 1 <= box.height <= height - box.top


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(8, 256), st.floats(1, 3), st.integers(0, 2**32))
def test_a_box_fits_the_picture_that_is_read_smaller(
    width: int, height: int, target_px: int, margin: float, seed: int
) -> None:
    box = boxes(1, (width, height), seed)[0]
    scale = fitting_scale(min(box.width, box.height), target_px, margin=margin)
    at = box.at(scale)
    assert scale == 1 or min(at.width, at.height) >= target_px
    assert at.left + at.width <= -(-width // scale)
    assert at.top + at.height <= -(-height // scale)


def test_boxes_are_distributed_as_torchvisions() -> None:
    width, height, number = 300, 200, 4000
    image = torch.empty(3, height, width)
    torch.manual_seed(0)
    theirs = (
        np.array([v2.RandomResizedCrop.get_params(image, AREA, RATIO) for _ in range(number)])
        if hasattr(v2.RandomResizedCrop, "get_params")
        else np.array(
            [list(v2.RandomResizedCrop(10, AREA, RATIO).make_params([image]).values()) for _ in range(number)]
        )
    )
    ours = np.array([(box.top, box.left, box.height, box.width) for box in boxes(number, (width, height))])
    for column in range(4):
        both = np.sort(np.concatenate([ours[:, column], theirs[:, column]]))
        steps = [np.searchsorted(np.sort(values[:, column]), both, side="right") / number for values in (ours, theirs)]
        # Kolmogorov and Smirnov's distance; 0.0437 is exceeded once in a thousand times.
        assert np.abs(steps[0] - steps[1]).max() < 0.0437


def test_a_picture_too_long_for_any_try_gives_its_middle() -> None:
    for box in boxes(20, (2000, 10), area=(0.9, 1.0)):
        assert (box.top, box.height, box.width) == (0, 10, round(10 * RATIO[1]))
        assert abs(box.left + box.width / 2 - 1000) <= 1


def test_a_box_follows_from_its_own_key_alone() -> None:
    every = boxes(9, (640, 480))
    drawn = RandomBoxes(keys(0, 0, np.array([7, 2])), area=AREA, ratio=RATIO)
    assert [drawn.box(0, (640, 480)), drawn.box(1, (640, 480))] == [every[7], every[2]]


def psnr(first: np.ndarray, second: np.ndarray) -> float:
    error = float(np.mean((first.astype(float) - second.astype(float)) ** 2))
    return 10 * math.log10(255**2 / max(error, 1e-9))


def picture(height: int, width: int) -> np.ndarray:
    noise = np.random.default_rng(1).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize(("height", "width"), [(240, 320), (700, 500), (90, 60)])
def test_a_part_is_resized_as_pillow_does_it(height: int, width: int) -> None:
    pixels = picture(height, width)
    box = Box(width // 5, height // 7, width // 2, height // 2)
    ours = resized(np.array(pixels), box, 128, 96).numpy()
    part = Image.fromarray(pixels).crop((box.left, box.top, box.left + box.width, box.top + box.height))
    assert psnr(ours, np.asarray(part.resize((96, 128), Image.Resampling.BILINEAR))) > 50


def test_a_part_may_be_mirrored() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    box = Box(11, 7, 64, 48)
    expected = resized(pixels, box, 40, 40)
    mirrored = resized(pixels, box, 40, 40, mirrored=True)
    assert (mirrored.flip(1).int() - expected.int()).abs().max() <= 1  # weights are rounded the other way about


@pytest.mark.parametrize(("height", "width"), [(240, 320), (333, 250), (100, 400)])
def test_evaluation_sees_what_torchvisions_transform_gives(height: int, width: int) -> None:
    pixels = picture(height, width)
    ours = center_square(resized_shorter(np.array(pixels), 64), 56).numpy()
    theirs = v2.Compose([v2.Resize(64), v2.CenterCrop(56)])(Image.fromarray(pixels))
    assert psnr(ours, np.asarray(theirs)) > 50


def test_where_the_middle_reaches_beyond_the_picture_it_is_black() -> None:
    square = center_square(torch.full((3, 9, 3), 7, dtype=torch.uint8), 5)
    assert square.shape == (5, 5, 3)
    assert (square[1:4] == 7).all()
    assert (square[[0, 4]] == 0).all()
