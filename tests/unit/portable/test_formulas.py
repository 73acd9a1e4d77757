"""Operations in portable arithmetic, with their gradients, against torch's own in float64."""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits.portable.arithmetic import portable_arithmetic
from tests.unit.portable.against_torch import check_against_torch

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(6, 8, generator=GENERATOR)
SHARES = torch.rand(6, 8, generator=GENERATOR) * 0.8 + 0.1
ORDER = torch.tensor([4, 2, 0, 1, 5, 3])
TWICE = torch.tensor([4, 2, 4, 1, 5, 2])
FACTORS = torch.randn(2, 3, 4, generator=GENERATOR)

FORMULAS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "glu": (F.glu, (ROWS,)),
    "celu": (lambda x: F.celu(x, 1.3), (ROWS,)),
    "hardshrink": (F.hardshrink, (ROWS,)),
    "softshrink": (F.softshrink, (ROWS,)),
    "softplus": (lambda x: F.softplus(x, 2.5, 3.0), (ROWS,)),
    "xlogy": (torch.xlogy, (SHARES, SHARES.flip(0))),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), (ROWS, SHARES)),
    "tan": (torch.tan, (SHARES,)),
    "a power of a number": (lambda x: 0.9**x, (ROWS,)),
    "a whole power": (lambda x: x**4 + x**5, (ROWS,)),
    "a power of tensors": (lambda x, y: x**y, (SHARES, ROWS)),
    "addmv": (lambda x, y: torch.addmv(y[0, :6], x, y[1], beta=0.5, alpha=2), (ROWS, ROWS.flip(0))),
    "vdot": (lambda x: torch.vdot(x[0], x[1]), (ROWS,)),
    "bilinear": (F.bilinear, (ROWS, ROWS.flip(0), torch.randn(3, 8, 8, generator=GENERATOR))),
    "affine_grid": (lambda x: F.affine_grid(x, [2, 1, 4, 5], align_corners=False), (FACTORS[:, :2, :3],)),
    "affine_grid of volumes": (lambda x: F.affine_grid(x, [2, 1, 3, 4, 5], align_corners=True), (FACTORS,)),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), (ROWS, SHARES[:, :1])),
    "nansum": (lambda x: torch.nansum(x.where(x > 0, torch.nan), 1), (ROWS,)),
    "std_mean": (lambda x: torch.std_mean(x, 1)[0], (ROWS,)),
    "index_copy": (lambda x, y: x.index_copy(0, ORDER, y), (ROWS, SHARES)),
    "index_fill": (lambda x: x.index_fill(0, ORDER[:2], 0.5), (ROWS,)),
    "put": (lambda x, y: x.put(TWICE, y[0, :6], accumulate=True), (ROWS, SHARES)),
    "take": (lambda x: x.take(TWICE), (ROWS,)),
    "masked_scatter": (lambda x, y: x.masked_scatter(ROWS > 0, y), (ROWS, SHARES)),
}  # fmt: skip


def test_recurrent_layers_take_packed_sequences() -> None:
    layer, x = nn.LSTM(4, 5, bidirectional=True), torch.randn(9, 3, 4, generator=GENERATOR)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([9, 7, 2]))
    expected = layer(packed)[0].data
    with portable_arithmetic():
        found = layer(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([9, 7, 2])))[0].data
    assert torch.allclose(found, expected, atol=1e-5)


def test_exponential_numbers_have_the_moments_of_their_distribution() -> None:
    torch.manual_seed(0)
    with portable_arithmetic():
        numbers = torch.empty(50_000).exponential_(2.0)
        assert F.gumbel_softmax(ROWS).sum().item() == pytest.approx(6, abs=1e-4)
    assert numbers.min() >= 0
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.01)
    assert numbers.var().item() == pytest.approx(0.25, abs=0.02)


BEYOND = torch.tensor([-707.0, -300.0, -151.0, 151.0, 300.0, 709.0, 709.75, math.inf, -math.inf, -1e4, 1e4]).double()


@pytest.mark.parametrize(
    "function",
    [
        torch.exp, torch.expm1, torch.sigmoid, torch.tanh, torch.nn.functional.softplus,
        lambda x: torch.softmax(x / 3, 0), lambda x: torch.softmax(torch.stack([x.clamp(max=500.0), -x.abs()]), 0),
        lambda x: x.abs() ** 120.5, lambda x: 1e200 * x.abs() ** -70.3, lambda x: 2.0 ** (x.clamp(-1000, 1000)),
    ],
)  # fmt: skip
def test_float64_has_the_range_of_torchs(function: Callable[[Tensor], Tensor]) -> None:
    expected = function(BEYOND)
    with portable_arithmetic():
        found = function(BEYOND)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, equal_nan=True)


GENERATOR.manual_seed(0)  # tests/lab/portable_operations.py hashes these operations on other processors
IMAGES = torch.rand(2, 3, 7, 6, generator=GENERATOR) * 4.0 - 2.0  # normal numbers would be other ones on ARM
GRID = torch.rand(2, 5, 4, 2, generator=GENERATOR) * 2.4 - 1.2
POSITIVE = torch.rand(6, 8, generator=GENERATOR) + 0.5
PLACES = torch.randint(0, 6, (6, 8), generator=GENERATOR)

GATHERING: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
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
    "cumprod": (lambda x: x * x.detach().cumprod(1), (POSITIVE,)),
    "prod": (lambda x: x.prod(1), (POSITIVE,)),
    "prod of all": (lambda x: x.prod(), (POSITIVE,)),
    **{
        f"scatter_reduce, {how}, {own}": (
            lambda x, source, how=how, own=own: x.scatter_reduce(0, PLACES, source, how, include_self=own),
            (POSITIVE, POSITIVE * 2),
        )
        for how in ("sum", "mean", "amax")
        for own in (True, False)
    },
}  # fmt: skip


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


VALUES = {d: torch.randn(2, 4, *[7, 6, 5][:d], generator=GENERATOR) for d in (1, 2, 3)}
MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def weights(*size: int) -> Tensor:
    return torch.randn(*size, generator=GENERATOR)


Operation = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def over(d: int) -> dict[str, Operation]:
    """Operations over d dimensions."""
    x, whole = (VALUES[d],), {"ceil_mode": True, "padding": 1}

    def of(name: str) -> Any:
        return getattr(F, f"{name}{d}d")

    convolve = partial(of("conv"), stride=2, padding=1, dilation=2)
    turned = partial(of("conv_transpose"), stride=2, padding=1, output_padding=1)
    return {
        "convolution": (convolve, (x[0], weights(3, 4, *[3, 2, 2][:d]), weights(3))),
        "grouped": (partial(of("conv"), groups=2), (x[0], weights(6, 2, *[2, 3, 1][:d]))),
        "transposed": (turned, (x[0], weights(4, 3, *[3, 2, 2][:d]), weights(3))),
        "grouped transposed": (partial(of("conv_transpose"), groups=2), (x[0], weights(4, 3, *[2] * d))),
        "max": (partial(of("max_pool"), kernel_size=3, stride=2, padding=1), x),
        "average": (partial(of("avg_pool"), kernel_size=2), x),
        "average at the edge": (partial(of("avg_pool"), kernel_size=3, stride=2, **whole), x),
        "average inside": (partial(of("avg_pool"), kernel_size=3, stride=2, count_include_pad=False, **whole), x),
        "average of one sample": (partial(of("avg_pool"), kernel_size=3, stride=2, **whole), (x[0][0],)),
        "adaptive average": (partial(of("adaptive_avg_pool"), output_size=3), x),
        "adaptive average of one sample": (partial(of("adaptive_avg_pool"), output_size=3), (x[0][0],)),
        "adaptive max": (partial(of("adaptive_max_pool"), output_size=3), x),
        "lp": (partial(of("lp_pool"), norm_type=2, kernel_size=2), (x[0].abs() + 0.1,)),
        **{
            f"{mode} padding": (partial(F.pad, pad=[1, 2, 2, 1, 0, 1][: 2 * d], mode=mode), x)
            for mode in ("reflect", "replicate", "circular", "constant")
        },
        **{
            f"{mode} by {scale}": (partial(F.interpolate, scale_factor=scale, mode=mode), x)
            for mode in ("nearest", "nearest-exact", MODES[d], "area")
            for scale in (1.6, 0.6)
        },
    }


POOLING: dict[str, Operation] = {f"{name}, {d}": each for d in (1, 2, 3) for name, each in over(d).items()} | {
    "unfold": (partial(F.unfold, kernel_size=3, padding=1), (VALUES[2],)),
    "fold": (partial(F.fold, output_size=(7, 6), kernel_size=2), (weights(2, 8, 30),)),
    "unfold of a tensor": (lambda x: x.unfold(2, 3, 2), (VALUES[1],)),
}


X, ONE = torch.randn(2, 4, 7, 6, generator=GENERATOR), torch.tensor(0.7)
EMPTY, FIRST = torch.ones(5, 0), torch.tensor(0)
PAIR = torch.tensor([[0], [1]])
FILTERS = torch.randn(4, 2, 3, 2, generator=GENERATOR)

UNUSUAL: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "sum of one": (lambda x: x.sum(0), (ONE,)),
    "mean of one": (lambda x: x.mean(-1, keepdim=True), (ONE,)),
    "prod of one": (lambda x: x.prod(0, keepdim=True), (ONE,)),
    "cumsum of one": (lambda x: x.cumsum(0).add_(1.0) * x, (ONE,)),
    "cummax of one": (lambda x: x.cummax(0)[0], (ONE,)),
    "norm of one": (lambda x: x.norm(2, 0), (ONE,)),
    "logsumexp of one": (lambda x: x.logsumexp(0), (ONE,)),
    "softmax of one": (lambda x: x.softmax(0) * x, (ONE,)),
    "gather of one": (lambda x: x.gather(0, FIRST), (ONE,)),
    "index_select of one": (lambda x: x.index_select(0, FIRST[None]), (ONE,)),
    "index_add to one": (lambda x, y: x.index_add(0, FIRST[None], y), (ONE, ONE * 2)),
    "scatter_add to one": (lambda x, y: x.scatter_add(0, FIRST, y), (ONE, ONE * 2)),
    "softmax of none": (lambda x: x.softmax(-1), (EMPTY,)),
    "log_softmax of none": (lambda x: x.log_softmax(-1), (EMPTY,)),
    "cumsum of none": (lambda x: x.cumsum(-1), (EMPTY,)),
    "places in the second dimension": (lambda x: x[:, [3, 0, 0]], (X,)),
    "places in the first and last": (lambda x: x[[1, 1], :, :, [5, 0]], (X,)),
    "places written": (lambda x, y: x.clone().index_put_((PAIR, torch.tensor([2, 0])), y), (X, X[:, :2])),
    "take from the end": (lambda x: x.take(torch.tensor([-7, 3, -7])), (X,)),
    "put from the end": (lambda x, y: x.put(torch.tensor([-7, 3, -7]), y, accumulate=True), (X, X[0, 0, 0, :3])),
    "conv2d, valid": (lambda x, w: F.conv2d(x, w, stride=2, padding="valid", groups=2), (X, FILTERS)),
    "conv2d, same": (lambda x, w: F.conv2d(x, w, padding="same", groups=2), (X, FILTERS)),
    "conv1d, valid": (lambda x, w: F.conv1d(x, w, padding="valid"), (X[0], FILTERS[:, :, 0].repeat(1, 4, 1)[:, :7])),
    "conv3d, valid": (lambda x, w: F.conv3d(x, w, padding="valid"), (X[:, None], FILTERS[:, :1, None])),
    "conv_transpose2d, wide": (
        lambda x, w: F.conv_transpose2d(x, w, stride=(3, 2), padding=1, output_padding=(2, 3), dilation=4),
        (X, FILTERS),
    ),
    "conv_transpose3d, wide": (
        lambda x, w: F.conv_transpose3d(x, w, stride=(1, 3, 2), output_padding=(1, 2, 3), dilation=4),
        (X[:, None, :2], FILTERS[:1, :, None]),
    ),
}  # fmt: skip


CASES = {
    name: (*each, tolerance)
    for operations, tolerance in ((FORMULAS, 2e-5), (GATHERING, 2e-5), (POOLING, 4e-5), (UNUSUAL, 1e-4))
    for name, each in operations.items()
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(name: str) -> None:
    check_against_torch(*CASES[name])


def test_places_behind_the_end_are_refused() -> None:
    with portable_arithmetic(), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        torch.zeros(4).put(torch.tensor([4]), torch.ones(1), accumulate=True)
