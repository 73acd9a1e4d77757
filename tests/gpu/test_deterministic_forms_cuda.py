"""Gradients that torch refuses on a GPU in deterministic mode: equal bits each time, and near the CPU's."""

import pytest
import torch

from samebits.module.determinism import set_kernels, use_deterministic_forms
from tests.unit.module.test_deterministic_forms import CASES, X

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_same_bits_each_time_and_are_the_cpu_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = []
    for device in ("cpu", "cuda", "cuda"):
        set_kernels(torch.get_num_threads(), torch.device(device))
        x = X.to(device).requires_grad_()
        CASES[name](x).square().sum().backward()
        found.append(x.grad.cpu())
    use_deterministic_forms(False)
    assert torch.equal(found[1], found[2])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
