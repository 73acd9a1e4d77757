"""Operations that gather, resize and multiply, with their gradients, against torch's own in float64."""

import hashlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.portable.arithmetic import portable_arithmetic
from tests.unit.portable.against_torch import check_against_torch

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.rand(2, 3, 7, 6, generator=GENERATOR) * 4.0 - 2.0  # normal numbers would be other ones on ARM
GRID = torch.rand(2, 5, 4, 2, generator=GENERATOR) * 2.4 - 1.2
ROWS = torch.rand(6, 8, generator=GENERATOR) + 0.5
PLACES = torch.randint(0, 6, (6, 8), generator=GENERATOR)

resize = partial(F.interpolate, IMAGES)
OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    **{
        f"{mode}, {more}": (partial(F.interpolate, mode=mode, **more), (IMAGES,))
        for mode in ("bilinear", "bicubic")
        for more in (
            {"size": (9, 13)}, {"size": (3, 4), "align_corners": True}, {"scale_factor": 1.7},
            {"size": (3, 2), "antialias": True}, {"size": (9, 4), "antialias": True},
        )
    },
    **{
        f"grid_sample, {mode}, {padding}, {corners}": (
            partial(F.grid_sample, mode=mode, padding_mode=padding, align_corners=corners), (IMAGES, GRID),
        )
        for mode in ("bilinear", "nearest")
        for padding in ("zeros", "border", "reflection")
        for corners in (False, True)
    },
    "cumprod": (lambda x: x * x.detach().cumprod(1), (ROWS,)),
    "prod": (lambda x: x.prod(1), (ROWS,)),
    "prod of all": (lambda x: x.prod(), (ROWS,)),
    **{
        f"scatter_reduce, {how}, {own}": (
            lambda x, source, how=how, own=own: x.scatter_reduce(0, PLACES, source, how, include_self=own),
            (ROWS, ROWS * 2),
        )
        for how in ("sum", "mean", "amax")
        for own in (True, False)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_torchs(name: str) -> None:
    check_against_torch(*OPERATIONS[name])


@pytest.mark.parametrize(
    ("mean", "std", "a", "b", "sha256"),
    [
        (0.0, 0.02, -0.04, 0.04, "d5133321bdacc9db"), (0.0, 1.0, 1.5, 3.0, "908239b54b221d3d"),
        (0.0, 0.02, -0.001, 0.001, "73467435ed62d2af"),
    ],
)  # fmt: skip
def test_truncated_normal_weights_are_equal_with_each_torch(
    mean: float, std: float, a: float, b: float, sha256: str
) -> None:
    torch.manual_seed(1)
    with portable_arithmetic():
        weights = torch.nn.init.trunc_normal_(torch.empty(1_000), mean, std, a, b)
    assert weights.min() >= a
    assert weights.max() <= b
    assert hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16] == sha256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_a_mask_of_any_type_is_filled_with_the_numbers_of_float32(dtype: torch.dtype) -> None:
    with portable_arithmetic():
        torch.manual_seed(0)
        expected = torch.full((1000,), 7.0).bernoulli_(0.3)
        torch.manual_seed(0)
        found = torch.full((1000,), 7.0).to(dtype).bernoulli_(0.3)
    assert found.dtype == dtype
    assert torch.equal(found.float(), expected)


def test_dropout_in_bfloat16_keeps_or_scales_each_value() -> None:
    with portable_arithmetic():
        dropped = torch.nn.Dropout(0.5)(torch.ones(1000, dtype=torch.bfloat16))
    assert sorted(dropped.unique().tolist()) == [0.0, 2.0]
