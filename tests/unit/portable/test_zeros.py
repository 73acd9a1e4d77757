"""Which of two zeros an operation chooses depends on vector instructions and threads: in portable arithmetic it is +0.

On ARM processors, relu(-0) is +0 where vector instructions compute it, and -0 behind them; on x86-64 it is -0.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from samebits.portable.arithmetic import portable_arithmetic

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CHOICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "relu": lambda x, _: x.relu(),
    "relu, in place": lambda x, _: F.relu(x, inplace=True),
    "relu6": lambda x, _: F.relu6(x),
    "hardtanh": lambda x, _: F.hardtanh(x, 0.0, 1.0),
    "softshrink": lambda x, _: F.softshrink(x),
    "clamp": lambda x, _: x.clamp(0.0, 1.0),
    "clamp, in place": lambda x, _: x.clamp_(0.0, 1.0),
    "clamp, lower": lambda x, _: x.clamp(min=0.0),
    "clamp, upper": lambda x, _: x.clamp(max=-0.0),
    "clamp, tensors": lambda x, y: x.clamp(y, y + 1.0),
    "clamp, lower tensor": lambda x, y: x.clamp(min=y),
    "clamp, upper tensor": lambda x, y: x.clamp(max=y),
    "clamp, into": lambda x, y: torch.clamp(x, 0.0, 1.0, out=y),
    "max": lambda x, _: x.max(),
    "min": lambda x, _: x.min(),
    "amax": lambda x, y: torch.stack([x, y]).amax(0),
    "amin": lambda x, y: torch.stack([x, y]).amin(0),
    "aminmax": lambda x, y: torch.stack(torch.aminmax(torch.stack([x, y]), dim=0)),
}


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    with portable_arithmetic():
        yield


@pytest.mark.parametrize("choose", CHOICES.values(), ids=list(CHOICES))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_chosen_zero_is_positive(choose: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    positive = torch.zeros(67, dtype=dtype)  # some values are behind the vectors
    negative = -positive
    for pair in ((negative, positive), (positive, negative), (negative, negative)):
        found = choose(*(each.clone() for each in pair))
        assert found.eq(0.0).all()
        assert not found.signbit().any()


def test_no_number_of_threads_changes_a_zero() -> None:
    positive = torch.zeros(100_003)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(torch.maximum(positive, -positive).view(torch.int32))
    assert all(torch.equal(each, found[0]) for each in found)


def test_other_values_and_types_stay() -> None:
    values = torch.tensor([-torch.inf, -1.0, -1e-45, 1e-45, 2.0, torch.inf, torch.nan])
    assert torch.equal(values.clamp(-9.0, 9.0)[1:5].view(torch.int32), values[1:5].view(torch.int32))
    assert values.relu()[-1].isnan()
    assert torch.equal(
        torch.maximum(torch.tensor([True, False]), torch.tensor([False, False])), torch.tensor([True, False])
    )
    assert torch.arange(-3, 3).clamp(min=0).tolist() == [0, 0, 0, 0, 1, 2]
    low, high = torch.aminmax(torch.arange(5))
    assert (low.item(), high.item()) == (0, 4)


def test_gradients_pass_where_they_passed() -> None:
    x = torch.tensor([-1.0, -0.0, 0.0, 2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(x.relu().sum(), x)
    assert gradient.tolist() == [0.0, 0.0, 0.0, 1.0]
    (gradient,) = torch.autograd.grad(x.clamp(-0.5, 1.0).sum(), x)
    assert gradient.tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_softshrink_takes_its_bound_in_float32(dtype: torch.dtype) -> None:
    """Narrow types are widened first; torch 2.15 rounds the bound to them, 2.10 does not."""
    x = torch.arange(-600, 601).div(200).to(dtype)
    bound = 0.0131
    wide = x if dtype == torch.float64 else x.float()
    shrunk = torch.where(wide > bound, wide - bound, torch.where(wide < -bound, wide + bound, 0.0))
    assert torch.equal(F.softshrink(x, bound), shrunk.to(dtype))


def test_softshrink_keeps_what_is_not_finite_and_has_torchs_default() -> None:
    x = torch.tensor([-torch.inf, -0.75, 0.25, torch.inf, torch.nan])
    assert F.softshrink(x)[:4].tolist() == [-torch.inf, -0.25, 0.0, torch.inf]
    assert F.softshrink(x)[4].isnan()
