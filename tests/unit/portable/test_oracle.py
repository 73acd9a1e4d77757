"""Portable arithmetic against an oracle in plain integers: equal in every bit, borders included.

ORACLE=10000 pytest tests/unit/portable/test_oracle.py compares that many cases, in about a minute.
"""

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from samebits.portable import floats, functions, products, randomness, reductions
from samebits.portable.arithmetic import portable_arithmetic
from samebits.portable.convolution import convolve, input_gradient, weight_gradient
from samebits.portable.grid import exact_sum
from samebits.portable.products import INT8, int8_kernels, matmul, product, write_digits
from tests.unit.portable import oracle
from tests.unit.portable.oracle_functions import FUNCTIONS

SHARE = int(os.environ.get("ORACLE", "500")) // 100  # a hundredth of the cases
VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, -0.0, 1.0, 2.0**-126, 2.0**-149, -(2.0**-149), 2.0**127, 1.5 * 2.0**-80, 2.0**-100]
)


def floats32(*shape: int | st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    sizes = st.tuples(*(st.just(each) if isinstance(each, int) else each for each in shape))
    return sizes.flatmap(lambda size: arrays.arrays(np.float32, size, elements=VALUES))


def same(found: Tensor, expected: object) -> bool:
    """Equal bits, zeros included."""
    return found.numpy().tobytes() == np.array(expected, np.float32).tobytes()


@settings(max_examples=20 * SHARE)
@given(data=st.data())
def test_a_product_is_the_oracles(data: st.DataObject) -> None:
    m, k, n = (data.draw(st.integers(1, most)) for most in (4, 12, 4))
    a, b = data.draw(floats32(m, k)), data.draw(floats32(k, n))
    assert same(matmul(torch.from_numpy(a), torch.from_numpy(b)), oracle.product(a.tolist(), b.T.tolist()))


@pytest.mark.parametrize("k", [1, 8_192, 8_193, 200_000])
def test_a_long_product_is_the_oracles(k: int) -> None:
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal((2, k)).astype(np.float32) for _ in range(2))
    # All of one sign and the largest: the sum of integers needs all bits.
    b[1] = a[1] = 1.0 - 2.0**-24
    assert same(matmul(torch.from_numpy(a), torch.from_numpy(b.T.copy())), oracle.product(a.tolist(), b.tolist()))


@settings(max_examples=10 * SHARE)
@given(data=st.data())
def test_a_convolution_is_the_oracles(data: st.DataObject) -> None:
    stride, padding, dilation, kernel = (data.draw(st.integers(*each)) for each in ((1, 2), (0, 2), (1, 2), (1, 3)))
    size = data.draw(st.integers(dilation * (kernel - 1) + 1, 6))
    x, w = data.draw(floats32(2, 2, size, size)), data.draw(floats32(3, 2, kernel, kernel))
    found = convolve(
        torch.from_numpy(x), torch.from_numpy(w), (stride,) * 2, (padding,) * 2, (dilation,) * 2, 1
    ).contiguous()  # fmt: skip
    expected = oracle.convolve(x, w, stride, padding, dilation)
    assert same(found, expected)
    g = np.resize(x, expected.shape)
    geometry = ((stride,) * 2, (padding,) * 2, (dilation,) * 2, 1)
    of_input = input_gradient(torch.from_numpy(g), torch.from_numpy(w), (size, size), *geometry)
    of_weight = weight_gradient(torch.from_numpy(g), torch.from_numpy(x), (kernel, kernel), *geometry)
    expected_input, expected_weight = oracle.gradients(g, x, w, stride, padding, dilation)
    assert same(of_input.contiguous(), expected_input)
    assert same(of_weight, expected_weight)


@pytest.mark.parametrize("name", FUNCTIONS)
@np.errstate(all="ignore")  # float32 overflows in the oracle too
def test_a_function_is_the_oracles(name: str) -> None:
    rng = np.random.default_rng(len(name))
    # Any bits, numbers as networks have them, and borders: zeros, denormals, the largest, infinities and NaN.
    any_bits = rng.integers(0, 2**32, 2 * SHARE, dtype=np.uint32).view(np.float32)
    usual = (rng.standard_normal(2 * SHARE) * 10.0 ** rng.integers(-6, 3, 2 * SHARE)).astype(np.float32)
    ends = [0.0, 2.0**-149, 2.0**-126, 2.0**-12, 1.0, 4.0, 88.7, 150.0, 2.0**20, 3.4028235e38, math.inf, math.nan]
    x = np.concatenate([any_bits, usual, np.float32(ends), -np.float32(ends)])
    found = getattr(functions, name)(torch.from_numpy(x)).numpy()
    expected = np.array([FUNCTIONS[name](float(each)) for each in x], np.float64).astype(np.float32)
    differs = (found.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(found) & np.isnan(expected))
    assert not x[differs].tolist()


@settings(max_examples=20 * SHARE)
@given(values=floats32(st.integers(1, 40)))
def test_a_sum_is_the_oracles(values: np.ndarray) -> None:
    assert exact_sum(torch.from_numpy(values), (0,)).item() == oracle.exact_sum(values.tolist())


@settings(max_examples=10 * SHARE)
@given(values=floats32(st.integers(1, 40)))
@np.errstate(all="ignore")
def test_means_and_norms_are_the_oracles(values: np.ndarray) -> None:
    x = torch.from_numpy(values)
    assert same(reductions.mean(x), oracle.exact_sum(values.tolist()) / len(values))
    squares = [float(each) * float(each) for each in values]
    assert same(reductions.norm(x), np.float32(math.sqrt(np.float32(oracle.exact_sum(squares, np.float64)))))


@pytest.mark.parametrize("k", [1, 200_000])
def test_a_long_sum_is_the_oracles(k: int) -> None:
    values = np.random.default_rng(k).standard_normal(k).astype(np.float32)
    assert exact_sum(torch.from_numpy(values), (0,)).item() == oracle.exact_sum(values.tolist())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinity_and_nan_come_out_as_nan_in_their_row_only(bad: float) -> None:
    a = torch.ones(3, 5)
    a[1, 2] = bad
    found = matmul(a, torch.ones(5, 2))
    assert found[1].isnan().all()
    assert not found[[0, 2]].isnan().any()
    assert exact_sum(a, (1,))[1].isnan()


def test_digits_of_eight_bits_give_the_bits_of_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-(2**20), 2**20 + 1, size, generator=generator).float() for size in ((64, 96), (96, 32)))
    a[0], b[:, 0] = 2.0**20, -(2.0**20)
    left, right = torch.empty(64, INT8, 96, dtype=torch.int8), torch.empty(INT8, 96, 32, dtype=torch.int8)
    write_digits(a, torch.ones(1, 1), INT8, left.unbind(1))
    write_digits(b, torch.ones(1, 1), INT8, right.unbind()[::-1])
    assert torch.equal(product(left, right), a.double() @ b.double())


def test_this_processors_int8_unit_is_tested_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with int8_kernels():
        wrong = torch._int_mm
        monkeypatch.setattr(torch, "_int_mm", lambda a, b: wrong(a, b).clamp(-32_768, 32_767))
        assert not products._is_exact("cpu")  # as without VNNI, where sums of two products saturate


@given(key=st.integers(-(2**63), 2**63 - 1), n=st.integers(1, 50))
def test_random_bits_are_the_oracles(key: int, n: int) -> None:
    class Fixed:
        def __call__(self, *_: object, **__: object) -> Tensor:
            return torch.tensor(key)

    original = torch.randint
    try:
        torch.randint = Fixed()  # type: ignore[assignment]
        (bits,) = randomness._hashes(n, torch.device("cpu"), None)
    finally:
        torch.randint = original
    assert bits.tolist() == [oracle.random_bits(key & (2**64 - 1), i) for i in range(n)]


def test_drawn_numbers_have_the_moments_of_their_distribution() -> None:
    torch.manual_seed(0)
    normal, uniform = randomness.normal(torch.empty(200_000)), randomness.uniform(torch.empty(200_000), -1, 3)
    assert normal.mean().item() == pytest.approx(0, abs=0.01)
    assert normal.std().item() == pytest.approx(1, abs=0.01)
    assert normal.pow(4).mean().item() == pytest.approx(3, abs=0.1)
    assert (uniform.mean().item(), uniform.min().item() >= -1, uniform.max().item() < 3) == (
        pytest.approx(1, abs=0.02), True, True,
    )  # fmt: skip
    assert randomness.permutation(1_000, torch.device("cpu")).sort().values.tolist() == list(range(1_000))


@pytest.mark.parametrize("p", [0.5, 0.25])
def test_dropout_does_not_depend_on_what_memory_held(p: float) -> None:
    def drawn(before: float) -> Tensor:
        torch.manual_seed(0)
        with portable_arithmetic():
            return torch.full((4_000,), before).bernoulli_(p)

    assert torch.equal(drawn(0.0), drawn(math.nan))
    assert drawn(0.0).mean().item() == pytest.approx(p, abs=0.05)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("exp", -87, 88), ("log", 1e-30, 1e30), ("sigmoid", -87, 87), ("tanh", -10, 10), ("erf", -5, 5),
        ("sin", -1e4, 1e4), ("cos", -1e4, 1e4), ("log1p", -0.99, 100), ("expm1", -10, 10),
    ],
)  # fmt: skip
def test_functions_have_the_error_of_one_rounding(name: str, low: float, high: float) -> None:
    x = torch.linspace(low, high, 100_001)
    found, expected = getattr(functions, name)(x).double(), getattr(torch, name)(x.double())
    error = ((found - expected).abs() / expected.abs().clamp(min=2.0**-126)).max().item()
    assert error < 6.2e-8  # half a last place of float32 is 5.96e-8


@pytest.mark.parametrize("x", [0.0, -0.0, 5e-324, -1e-20, 2.0**-40, 1e-5, -0.7, 2.3, 5.95, -6.0, math.inf])
def test_erf_of_python_floats_is_rounded_once(x: float) -> None:
    found, expected = floats.erf(x), math.erf(x)
    assert found in (expected, math.nextafter(expected, math.inf), math.nextafter(expected, -math.inf))
    assert math.copysign(1.0, found) == math.copysign(1.0, x)


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos"])
@given(x=st.floats(1e-3, 700))
def test_python_floats_are_rounded_once(name: str, x: float) -> None:
    found, expected = getattr(floats, name)(x), getattr(math, name)(x)
    assert found in (expected, math.nextafter(expected, math.inf), math.nextafter(expected, -math.inf))


@settings(max_examples=10 * SHARE)
@given(values=floats32(st.integers(1, 40)), size=st.integers(-300, 0))
def test_a_sum_of_float64_is_the_oracles(values: np.ndarray, size: int) -> None:
    wide = values.astype(np.float64) * 2.0**size
    assert exact_sum(torch.from_numpy(wide), (0,)).item() == oracle.exact_sum(wide.tolist(), np.float64)
