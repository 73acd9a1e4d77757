"""Doors through which a script reaches torch and Python: each leads to portable arithmetic, or to a refusal by name."""

import math
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import cos

import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from samebits.config.schema import OptimConfig
from samebits.errors import ConfigError
from samebits.optim import schedule
from samebits.portable import floats
from samebits.portable.arithmetic import portable_arithmetic


@pytest.fixture
def portable() -> Iterator[None]:
    with portable_arithmetic():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_of_narrow_models_are_updated(portable: None, dtype: torch.dtype, affine: bool) -> None:
    norm = nn.BatchNorm1d(4, affine=affine).to(dtype)
    for _ in range(50):
        norm(torch.randn(64, 4).to(dtype) * 3 + 5)
    assert norm.running_mean.dtype == dtype
    assert norm.running_mean.tolist() == pytest.approx([5] * 4, abs=0.5)
    assert norm.running_var.tolist() == pytest.approx([9] * 4, abs=2)


def test_narrow_inputs_update_wide_statistics(portable: None) -> None:
    norm = nn.BatchNorm1d(4)
    out = norm(torch.full((8, 4), 2.0).bfloat16())
    assert out.dtype == torch.bfloat16
    assert norm.running_mean.dtype == torch.float32
    assert norm.running_mean.tolist() == pytest.approx([0.2] * 4)


MEANS, STDS = torch.full((20_000,), 100.0), torch.full((20_000,), 3.0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.normal(MEANS, 3.0), lambda: torch.normal(MEANS, STDS), lambda: torch.normal(100.0, STDS),
        lambda: torch.normal(100.0, 3.0, (20_000,)), lambda: torch.empty(20_000).normal_(100.0, 3.0),
        lambda: torch.normal(MEANS, 3.0, out=torch.empty(0)),
    ],
)  # fmt: skip
def test_normal_numbers_are_drawn_around_their_mean(portable: None, draw: Callable[[], Tensor]) -> None:
    drawn = draw()
    assert (MEANS == 100.0).all()
    assert (STDS == 3.0).all()
    assert drawn.mean().item() == pytest.approx(100, abs=0.2)
    assert drawn.std().item() == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.bernoulli(x, 0.3), lambda x: x.clone().bernoulli_(0.3), lambda x: torch.bernoulli(x),
        lambda x: torch.zeros(20_000).bernoulli_(x), lambda x: torch.zeros(20_000, dtype=torch.int64).bernoulli_(0.3),
    ],
)  # fmt: skip
def test_bernoulli_numbers_leave_the_probabilities_alone(portable: None, draw: Callable[[Tensor], Tensor]) -> None:
    x = torch.full((20_000,), 0.3)
    drawn = draw(x)
    assert torch.equal(x, torch.full((20_000,), 0.3))
    assert drawn.double().mean().item() == pytest.approx(0.3, abs=0.02)
    assert set(drawn.unique().tolist()) == {0, 1}


@pytest.mark.parametrize("std", [-1.0, -1e-30])
def test_negative_deviations_are_refused_as_by_torch(portable: None, std: float) -> None:
    with pytest.raises(RuntimeError, match="normal expects"):
        torch.empty(3).normal_(0.0, std)
    with pytest.raises(RuntimeError, match="normal expects"):
        torch.normal(torch.zeros(3), torch.full((3,), std))


@pytest.mark.parametrize("name", ["mul", "exp", "product", "view"])
def test_an_operation_of_another_library_is_refused_whatever_its_name(name: str) -> None:
    library = torch.library.Library("others", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * 0 + 5, "CPU")
    operation = getattr(torch.ops.others, name)
    with portable_arithmetic(), pytest.raises(ConfigError, match=f"others::{name} has no portable form"):
        operation(torch.ones(3))
    assert operation(torch.ones(3)).tolist() == [5, 5, 5]


def test_einsum_does_not_depend_on_installed_packages() -> None:
    was_on = torch.backends.opt_einsum.enabled
    with portable_arithmetic():
        assert not torch.backends.opt_einsum.enabled
    assert torch.backends.opt_einsum.enabled == was_on


def test_roots_of_float64_are_within_one_place_and_are_pythons_operations(portable: None) -> None:
    values = [2.0, 1e300, 1e-300, 5e-324, 0.1, 3.0, 4.0, 1.0 - 2.0**-53, 1.7e308]
    for value, found in zip(values, torch.tensor(values, dtype=torch.float64).sqrt().tolist(), strict=True):
        mantissa, exponent = math.frexp(value)
        mantissa, exponent = (mantissa / 2, exponent + 1) if exponent % 2 else (mantissa, exponent)
        (root,) = struct.unpack("f", struct.pack("f", math.sqrt(struct.unpack("f", struct.pack("f", mantissa))[0])))
        for _ in range(2):
            root = (root + mantissa / root) * 0.5
        assert found == math.ldexp(root, exponent // 2)
        assert found == pytest.approx(math.sqrt(value), rel=2.0**-52)


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf])
def test_roots_of_borders_are_exact(portable: None, value: float) -> None:
    found = torch.tensor([value, -1.0, math.nan], dtype=torch.float64).sqrt()
    assert math.copysign(1.0, found[0].item()) == math.copysign(1.0, value)
    assert found[0] == value
    assert found[1:].isnan().all()


@pytest.mark.parametrize("bounds", [(0, 1, 0.01), (0, 10, 0.1), (0.05, 77, 0.3), (5.0, -2.0, -0.7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_range_is_a_product_and_a_sum(portable: None, bounds: tuple[float, float, float], dtype: torch.dtype) -> None:
    start, end, step = bounds
    found = torch.arange(*bounds, dtype=dtype)
    expected = [i * step + start for i in range(math.ceil((end - start) / step))]
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float64).to(dtype))
    assert torch.equal(torch.arange(7), torch.tensor([0, 1, 2, 3, 4, 5, 6]))


@pytest.mark.parametrize("gamma", [0.174, 0.513, 0.659, 1.0])
def test_the_factor_of_many_milestones_is_rounded_once(gamma: float) -> None:
    config = OptimConfig(schedule="multi_step", gamma=gamma, milestones=list(range(1, 15)), warmup_epochs=0)
    expected = Fraction(gamma) ** 14
    assert schedule.factor(20, 30, 1, config) == expected.numerator / expected.denominator


def test_denormal_numbers_are_kept() -> None:
    with portable_arithmetic():
        with pytest.raises(ConfigError, match=r"torch.set_flush_denormal\(True\) has no portable form"):
            torch.set_flush_denormal(True)
        assert torch.set_flush_denormal(False)
        assert (torch.tensor(1e-40) * 1).item() > 0


FLAG = """
import threading, torch
from samebits.errors import ConfigError
from samebits.portable.arithmetic import portable_arithmetic
LARGE = torch.full((1 << 20,), 1e-40)
torch.set_num_threads(2)
torch.set_flush_denormal({flag})
{before}
def compute():
    with portable_arithmetic():
        {inside}
        return bool((LARGE * 1 > 0).all())  # in both threads
try:
    print({run})
except ConfigError as error:
    print(error)
"""
OTHER_THREAD = """
kept = []
def thread():
    torch.set_flush_denormal(True)
    begin.wait()
    kept.append(compute())
begin = threading.Event()
other = threading.Thread(target=thread)
other.start()
"""
REFUSED = "config error: a thread of torch computes without denormal numbers"


@pytest.mark.parametrize(
    ("flag", "before", "inside", "run", "expected"),
    [
        # torch starts its second thread inside, without the flag.
        (True, "", "", "compute()", "True"),
        (True, "LARGE * 1", "", "compute()", REFUSED),
        (False, "LARGE * 1", "", "compute()", "True"),
        # Its second thread has the flag and waits until there are two again.
        (True, "LARGE * 1; torch.set_num_threads(1)", "", "compute()", "True"),
        (True, "LARGE * 1; torch.set_num_threads(1)", "torch.set_num_threads(2)", "compute()", REFUSED),
        # The flag of another thread of the script, which enters later.
        (
            False,
            OTHER_THREAD,
            "if not begin.is_set(): begin.set(); other.join()",
            "(compute(), *kept)",
            "(True, True)",
        ),
    ],
)
def test_a_flag_from_before_is_taken_back_or_refused(
    flag: bool, before: str, inside: str, run: str, expected: str
) -> None:
    code = FLAG.format(flag=flag, before=before, inside=inside or "pass", run=run)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith(expected), done.stderr


REST = [7.5, -7.5, 1e30, 3e-39, 1e-45, -2.0, 0.3, 5e-40]


@pytest.mark.parametrize("name", ["fmod", "remainder", "floor_divide"])
@pytest.mark.parametrize("divisor", [2.0, -0.7, 1e-40, 3e-45, 1e-3])
def test_rests_of_divisions_are_exact_with_denormal_numbers(portable: None, name: str, divisor: float) -> None:
    x, y = torch.tensor(REST), torch.full((), divisor).repeat(len(REST))
    found = getattr(torch, name)(x, y)
    for a, b, each in zip(x.tolist(), y.tolist(), found.tolist(), strict=True):
        rest = math.fmod(a, b)
        if name == "fmod":
            assert each == rest
        elif name == "remainder":
            assert each == (
                struct.unpack("f", struct.pack("f", rest + b))[0] if rest and (rest < 0) != (b < 0) else rest
            )
        elif abs(a / b) < 2**20:
            assert each == a // b


def test_signs_of_what_is_no_number_do_not_count(portable: None) -> None:
    nan = torch.tensor([math.nan, -math.nan])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.copysign(torch.tensor([-2.0, 2.0]).to(dtype), nan.to(dtype)).tolist() == [2, 2]
        assert not nan.to(dtype).signbit().any()
        zeros = torch.tensor([0.0, -0.0]).to(dtype)
        assert torch.fmax(zeros, zeros.flip(0)).signbit().tolist() == [False, True]
        assert torch.fmin(zeros, torch.tensor([math.nan, 1.0]).to(dtype)).tolist() == [0, 0]


COMPLEX = torch.tensor([1 + 2j, 3 - 1j])


@pytest.mark.parametrize(
    "compute",
    [
        lambda: COMPLEX * COMPLEX, lambda: COMPLEX / 2, lambda: torch.ones(2) * 1j, lambda: COMPLEX.reciprocal(),
        lambda: COMPLEX.abs(), lambda: COMPLEX.sgn(), lambda: COMPLEX.sum(), lambda: torch.ones(2) / COMPLEX,
        lambda: torch.ones(2) ** COMPLEX, lambda: COMPLEX.clone().mul_(2.0),
    ],
)  # fmt: skip
def test_arithmetic_of_complex_numbers_is_refused(portable: None, compute: Callable[[], Tensor]) -> None:
    with pytest.raises(ConfigError, match="has no portable form"):
        compute()


@pytest.mark.parametrize("mixing", [v2.MixUp, v2.CutMix])
def test_mixed_images_are_portable(portable: None, mixing: type[nn.Module]) -> None:
    torch.manual_seed(0)
    images, labels = mixing(alpha=0.4, num_classes=5)(torch.rand(8, 3, 16, 16), torch.arange(8) % 5)
    assert images.shape == (8, 3, 16, 16)
    assert torch.allclose(labels.sum(1), torch.ones(8))


@pytest.mark.parametrize(("a", "b"), [(0.2, 0.2), (2.0, 5.0), (0.7, 3.0)])
def test_beta_numbers_have_the_moments_of_their_distribution(portable: None, a: float, b: float) -> None:
    torch.manual_seed(0)
    drawn = torch.distributions.Beta(torch.full((20_000,), a), torch.full((20_000,), b)).sample()
    assert drawn.mean().item() == pytest.approx(a / (a + b), abs=0.01)
    assert drawn.var().item() == pytest.approx(a * b / (a + b) ** 2 / (a + b + 1), abs=0.01)


@pytest.mark.parametrize(("row", "column"), [(1e38, 1e-30), (1e-30, 1e38), (3e-20, 1e20)])
def test_finite_products_stay_finite_whatever_the_order_of_scales(portable: None, row: float, column: float) -> None:
    a, b = torch.full((1, 4096), row), torch.full((4096, 1), column)
    assert (a @ b).item() == pytest.approx(4096 * row * column, rel=1e-5)
    convolved = nn.functional.conv2d(a.view(1, 4096, 1, 1), b.view(1, 4096, 1, 1))
    assert convolved.item() == (a @ b).item()


@pytest.mark.parametrize("size", [1e-18, 1e-20, 1e-30, 1e-40])
def test_norms_of_small_gradients_are_not_zero(portable: None, size: float) -> None:
    x = nn.Parameter(torch.zeros(1000))
    x.grad = torch.full((1000,), size)
    assert nn.utils.clip_grad_norm_([x], 1e30).item() == pytest.approx(size * 1000**0.5, rel=1e-3)
    assert torch.linalg.vector_norm(x.grad).item() == pytest.approx(size * 1000**0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: math.log(10**400), 921.0340371976183), (lambda: math.sin(1e300), -0.8178819121159085),
        (lambda: math.cos(1e22), 0.5232147853951389), (lambda: math.sin(1e-60), 1e-60),
        (lambda: math.tan(1.5707963267948966), 1.633123935319537e16), (lambda: math.exp(-745.1), 5e-324),
        (lambda: math.log(8, 2), 3.0), (lambda: math.pow(4.0, 0.5), 2.0), (lambda: math.pow(-2.0, -3), -0.125),
        (lambda: math.pow(0.0, 0.0), 1.0), (lambda: math.tanh(1e-200), 1e-200), (lambda: math.log2(2.0**-1074), -1074),
        (lambda: math.log10(1000), 3.0), (lambda: math.hypot(3.0, 4.0), 5.0), (lambda: math.atan2(0.0, -1.0), math.pi),
        (lambda: math.acos(-1), math.pi), (lambda: math.asin(-1), -math.pi / 2), (lambda: math.expm1(-900), -1.0),
        (lambda: math.cosh(0.0), 1.0), (lambda: math.log1p(1e-300), 1e-300), (lambda: math.atan(1e-310), 1e-310),
    ],
)  # fmt: skip
def test_functions_of_python_are_rounded_once_at_borders(
    portable: None, call: Callable[[], float], expected: float
) -> None:
    assert call() == pytest.approx(expected, rel=2.0**-52, abs=0)


@pytest.mark.parametrize("name", sorted({*floats._functions()} - {"acosh", "atan2", "hypot", "pow"}))
def test_functions_of_python_are_those_of_math(name: str) -> None:
    for i in range(1, 200):
        x = i / 200.5 if name in ("asin", "acos", "atanh") else 1.1 ** (i - 100) % 150
        assert floats._rounded(name, x) == pytest.approx(getattr(math, name)(x), rel=2.0**-45, abs=1e-14)


def test_names_imported_before_are_covered_too() -> None:
    original = cos
    with portable_arithmetic():
        assert cos is not original
        assert cos(0.7) == floats.cos(0.7)
        random.seed(0)
        assert random.gauss() == pytest.approx(0.9417154046806644)
    assert cos is original


PLACES, VALUES = torch.arange(400_000) * 7 % 50, torch.arange(400_000.0)


def written_by_brackets() -> Tensor:
    x = torch.zeros(50)
    x[PLACES] = VALUES
    return x


WRITES: dict[str, Callable[[], Tensor]] = {
    "brackets": written_by_brackets,
    "index_put": lambda: torch.zeros(50).index_put((PLACES,), VALUES),
    "index_copy": lambda: torch.zeros(50).index_copy(0, PLACES, VALUES),
    "index_copy_": lambda: torch.zeros(50).index_copy_(0, PLACES, VALUES),
    "scatter": lambda: torch.zeros(50).scatter(0, PLACES, VALUES),
}


@pytest.mark.parametrize("is_switched_off", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_of_several_writes_to_one_place_the_last_stays(name: str, is_switched_off: bool) -> None:
    last = torch.zeros(50)
    last[PLACES[-50:]] = VALUES[-50:]
    torch.set_num_threads(4)
    with portable_arithmetic():
        if is_switched_off:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(WRITES[name](), last) for _ in range(20))


@pytest.mark.parametrize("modes", [(), (False,), (True,), (True, False)])
@pytest.mark.parametrize("was_on", [False, True])
def test_the_deterministic_mode_is_afterwards_as_it_was_set_last(was_on: bool, modes: tuple[bool, ...]) -> None:
    torch.use_deterministic_algorithms(was_on)
    with portable_arithmetic():
        for each in modes:
            torch.use_deterministic_algorithms(each)
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == [was_on, *modes][-1]
