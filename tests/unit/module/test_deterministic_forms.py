"""The forms that replace torch's kernels on a GPU, here in the place of those of the CPU."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from samebits.module import determinism
from samebits.module.determinism import use_deterministic_forms

X = torch.randn(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))
GRID = torch.rand(2, 5, 6, 2, generator=torch.Generator().manual_seed(1)) * 2.4 - 1.2
TARGET = torch.randint(0, 3, (2, 9, 7), generator=torch.Generator().manual_seed(2))

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": lambda x: torch.ops.aten.upsample_bilinear2d(x, (13, 18), False),
    "bilinear, corners": lambda x: torch.ops.aten.upsample_bilinear2d(x, (13, 18), True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2.5, mode="bicubic"),
    "adaptive pooling": lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
    "grid_sample": lambda x: F.grid_sample(x, GRID.to(x.device), align_corners=False),
    "grid_sample, border": lambda x: F.grid_sample(x, GRID.to(x.device), padding_mode="border", align_corners=True),
    "grid_sample, places": lambda x: F.grid_sample(X.to(x.device), GRID.to(x.device) + x.mean(), align_corners=False),
    "nll_loss": lambda x: F.nll_loss(x, TARGET.to(x.device), weight=x.new_tensor([1.0, 2.0, 0.5])),
    "nll_loss, sums": lambda x: F.cross_entropy(x, TARGET.to(x.device), ignore_index=1, reduction="sum"),
}


@pytest.fixture
def forms() -> Iterator[None]:
    use_deterministic_forms(False)
    yield
    use_deterministic_forms(False)


def gradient(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    x = X.to(dtype).requires_grad_()
    y = function(x)
    weights = torch.arange(y.numel(), dtype=dtype).view(y.shape).remainder_(7.0)
    (grad,) = torch.autograd.grad((y * weights).sum(), x)
    return grad


@pytest.mark.usefixtures("forms")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name: str) -> None:
    expected = gradient(CASES[name], torch.float32)
    use_deterministic_forms(True, "CPU")
    found = gradient(CASES[name], torch.float32)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5 * expected.abs().max().item())


@pytest.mark.usefixtures("forms")
def test_cudnn_s_gradients_are_those_of_grid_sample() -> None:
    g = torch.ones(2, 3, 5, 6)
    expected = torch.ops.aten.grid_sampler_2d_backward(g, X, GRID, 0, 0, True, (True, True))
    use_deterministic_forms(True, "CPU")
    found = torch.ops.aten.cudnn_grid_sampler_backward(X, GRID, g)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("forms")
def test_gradients_of_bfloat16_stay_bfloat16() -> None:
    use_deterministic_forms(True, "CPU")
    assert gradient(CASES["bicubic"], torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.usefixtures("forms")
def test_arguments_without_a_form_are_refused_in_torch_s_words() -> None:
    use_deterministic_forms(True, "CPU")
    with pytest.raises(RuntimeError, match=r"grid_sampler_2d_backward .*does not have a deterministic implementation"):
        gradient(lambda x: F.grid_sample(x, GRID.to(x.device), mode="bicubic", align_corners=False), torch.float32)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_on_a_gpu_they_are_replaced(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    replaced: list[bool] = []
    monkeypatch.setattr(determinism, "use_deterministic_forms", replaced.append)
    determinism.set_kernels(torch.get_num_threads(), torch.device(device))
    assert replaced == [device == "cuda"]
