"""Operations that are a few others, with their gradients, against torch's own in float64."""

import math
from collections.abc import Callable

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

OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
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


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_torchs(name: str) -> None:
    check_against_torch(*OPERATIONS[name])


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
