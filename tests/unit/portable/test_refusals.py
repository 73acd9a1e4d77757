"""Operations without a portable form are refused by name before they compute."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from samebits.config.schema import RunConfig
from samebits.errors import ConfigError
from samebits.parallel.coroutines import Coroutines
from samebits.portable.arithmetic import portable_arithmetic, use_portable_arithmetic
from samebits.portable.mode import PortableMode, listed_operations

X = torch.linspace(0.1, 2.0, 64).view(1, 1, 8, 8)
ROWS = X.view(8, 8)
REFUSED: dict[str, Callable[[], object]] = {
    "logcumsumexp": lambda: ROWS.logcumsumexp(1),
    "cumprod with a gradient": lambda: ROWS.clone().requires_grad_().cumprod(1),
    "cholesky": lambda: torch.linalg.cholesky(ROWS @ ROWS.T + torch.eye(8)),
    "eigh": lambda: torch.linalg.eigh(ROWS @ ROWS.T),
    "svd": lambda: torch.linalg.svd(ROWS),
    "qr": lambda: torch.linalg.qr(ROWS),
    "inverse": lambda: torch.linalg.inv(ROWS + torch.eye(8)),
    "solve": lambda: torch.linalg.solve(torch.eye(8), ROWS),
    "fft": lambda: torch.fft.fft(ROWS),
    "rfft": lambda: torch.fft.rfft2(ROWS),
    "stft": lambda: torch.stft(ROWS, 4, return_complex=True),
    "complex product": lambda: (ROWS + 0j) @ (ROWS + 0j),
    "float64 convolution": lambda: F.conv2d(X.double(), X.double()),
    "3-norm": lambda: torch.linalg.vector_norm(ROWS, 3),
    "bicubic grid_sample": lambda: F.grid_sample(X, torch.zeros(1, 4, 4, 2), "bicubic", align_corners=False),
    "fractional pooling": lambda: F.fractional_max_pool2d(X, 2, output_size=3),
    "atan2": lambda: torch.atan2(ROWS, ROWS),
    "acos": lambda: torch.acos(ROWS - 1.0),
    "lgamma": lambda: torch.lgamma(ROWS),
    "digamma": lambda: torch.digamma(ROWS),
    "matrix exponential": lambda: torch.linalg.matrix_exp(ROWS),
    "determinant": lambda: torch.linalg.det(ROWS + torch.eye(8)),
    "max_unpool2d": lambda: F.max_unpool2d(*F.max_pool2d(X, 2, return_indices=True), 2),
    "3d sampling": lambda: F.grid_sample(X[None], torch.zeros(1, 2, 2, 2, 3), align_corners=False),
    "sparse product": lambda: torch.sparse.mm(ROWS.to_sparse(), ROWS),
    "polygamma": lambda: torch.polygamma(1, ROWS),
    "erfcx": lambda: torch.special.erfcx(ROWS),
    "pdist": lambda: F.pdist(ROWS),
    "segments": lambda: torch.segment_reduce(ROWS, "sum", lengths=torch.tensor([3, 5])),
    "index_reduce": lambda: ROWS.index_reduce(0, torch.zeros(8, dtype=torch.int64), ROWS, "prod"),
    "gamma": lambda: torch._standard_gamma(ROWS),
    "binomial": lambda: torch.binomial(ROWS, ROWS * 0.1),
    "erfinv": lambda: torch.erfinv(ROWS - 1.0),
    "logit": lambda: torch.logit(ROWS * 0.4),
    "sinh": lambda: torch.sinh(ROWS),
    "cross product": lambda: torch.linalg.cross(ROWS[:, :3], ROWS[:, :3]),
    "outer product": lambda: torch.addr(ROWS, ROWS[0], ROWS[0]),
    "largest norms": lambda: torch.renorm(ROWS, 2, 0, 1.0),
    "rounding to decimals": lambda: torch.round(ROWS, decimals=2),
    "bessel": lambda: torch.special.i0(ROWS),
    "cdist": lambda: torch.cdist(ROWS, ROWS),
    "multinomial": lambda: torch.multinomial(ROWS, 2),
    "poisson": lambda: torch.poisson(ROWS),
    "scatter with a product": lambda: ROWS.scatter(0, torch.zeros(1, 8, dtype=torch.int64), ROWS, reduce="multiply"),
    "scatter_reduce": lambda: ROWS.scatter_reduce(0, torch.zeros(8, 8, dtype=torch.int64), ROWS, "prod"),
    "weighted bincount": lambda: torch.bincount(torch.zeros(8, dtype=torch.int64), ROWS[0]),
    "histogram": lambda: torch.histc(ROWS),
}


@pytest.mark.parametrize("make", [pytest.param(each, id=name) for name, each in REFUSED.items()])
def test_an_operation_is_refused_with_its_name_and_place(make: Callable[[], object]) -> None:
    with portable_arithmetic(), pytest.raises(ConfigError, match=r"aten::\w+.* has no portable form") as error:
        make()
    assert "test_refusals.py" in error.value.slots["where"]
    make()  # outside, torch computes it


class Rare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.logcumsumexp(1)


def test_the_error_names_the_line_of_the_module() -> None:
    with portable_arithmetic(), pytest.raises(ConfigError) as error:
        nn.Sequential(nn.Linear(8, 8), Rare())(ROWS)
    assert "return x.logcumsumexp(1)" in error.value.slots["where"]
    assert error.value.slots["cause"].startswith("The module Rare calls it.")
    assert error.value.slots["fix"] == "Use another operation, or set kernels=auto."


def test_all_operations_of_a_run_are_listed_at_once() -> None:
    mode = PortableMode(lists=True)
    with portable_arithmetic(mode):
        found = nn.Sequential(nn.Linear(8, 8), Rare())(torch.linalg.vector_norm(ROWS, 3) * ROWS)
    assert found.shape == (8, 8)  # as torch computes them
    listed = listed_operations()
    assert {each["what"].partition(" ")[0] for each in listed["refused"]} >= {
        "aten::logcumsumexp", "aten::linalg_vector_norm",
    }  # fmt: skip
    assert listed["portable"] >= 3


@pytest.fixture
def switched_on() -> Iterator[None]:
    use_portable_arithmetic(True)
    yield
    use_portable_arithmetic(False)


def test_a_process_leaves_portable_arithmetic_as_it_was_before(switched_on: None) -> None:
    use_portable_arithmetic(True)  # again changes nothing
    with pytest.raises(ConfigError):
        ROWS.logcumsumexp(1)
    use_portable_arithmetic(False)
    assert ROWS.logcumsumexp(1).shape == (8, 8)
    assert torch.backends.mkldnn.is_available() == torch._C._get_mkldnn_enabled()


def test_threads_of_micro_batches_compute_in_portable_arithmetic(switched_on: None) -> None:
    def body() -> bool:
        with pytest.raises(ConfigError):
            ROWS.logcumsumexp(1)
        return True

    threads = Coroutines(lambda: lambda: None)
    assert threads.run([body, body], lambda values: None) == [True, True]
    use_portable_arithmetic(False)
    assert threads.run([lambda: ROWS.logcumsumexp(1).numel()] * 2, lambda values: None) == [64, 64]


@pytest.mark.parametrize("first", [0, 1])
def test_switches_are_reset_by_whichever_thread_is_last(first: int) -> None:
    attention = torch.backends.cuda
    before = (attention.flash_sdp_enabled(), attention.math_sdp_enabled())
    entered = threading.Barrier(3)
    leave = [threading.Event(), threading.Event()]

    def compute(number: int) -> None:
        with portable_arithmetic():
            entered.wait(60)
            assert leave[number].wait(60)

    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(compute, number) for number in range(2)]
        entered.wait(60)
        assert not attention.flash_sdp_enabled()
        for number in (first, 1 - first):
            leave[number].set()
            ends[number].result(60)
    assert (attention.flash_sdp_enabled(), attention.math_sdp_enabled()) == before


@pytest.mark.parametrize("other", [{"compile": True}, {"precision": "tf32", "device": "cuda"}])
def test_settings_that_round_in_other_ways_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="kernels=portable cannot be combined with"):
        RunConfig(recipe="x", kernels="portable", **other)


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("sum", ROWS.bfloat16()), ("matmul", ROWS.bfloat16()), ("softmax", ROWS.bfloat16()), ("exp", ROWS.half()),
        ("layer_norm", ROWS.bfloat16()),
    ],
)  # fmt: skip
def test_narrow_types_compute_in_float32_and_keep_their_type(name: str, x: Tensor) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda x: x.sum(1), "matmul": lambda x: x @ x, "softmax": partial(torch.softmax, dim=1),
        "exp": torch.exp, "layer_norm": lambda x: F.layer_norm(x, (8,)),
    }  # fmt: skip
    with portable_arithmetic():
        found = functions[name](x)
        wide = functions[name](x.float())
    assert found.dtype == x.dtype
    assert torch.equal(found, wide.to(x.dtype))


def test_gradients_are_those_of_torch() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.GELU(), nn.ConvTranspose2d(4, 2, 3, 2), nn.Hardswish(),
        nn.AvgPool2d(2), nn.Mish(), nn.Flatten(), nn.LayerNorm(32), nn.ELU(), nn.PReLU(), nn.Linear(32, 3),
    )  # fmt: skip
    x, y = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])

    def gradients(loss: Tensor) -> Tensor:
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])

    with portable_arithmetic():
        found = gradients(F.cross_entropy(model(x), y))
    assert torch.allclose(found, gradients(F.cross_entropy(model(x), y)), rtol=1e-3, atol=1e-5)
