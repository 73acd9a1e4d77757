"""The text recipe's network and loss on a GPU: deterministic, and near the CPU's figures."""

import pytest
import torch

from samebits.recipes.text.loss import ctc_loss
from samebits.recipes.text.recipe import crnn, fast

pytestmark = pytest.mark.gpu


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@pytest.mark.usefixtures("deterministic")
def test_losses_and_gradients_have_the_same_bits_each_time_and_are_the_cpu_s() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 71, 6736, generator=rng)
    # Classes that come more than once in a text are where an atomic addition would show.
    classes, lengths = torch.randint(1, 4, (16, 10), generator=rng), torch.full((16,), 10)
    found = []
    for device in ("cuda", "cuda", "cpu"):
        values = logits.to(device).requires_grad_()
        losses = ctc_loss(values, classes.to(device), lengths.to(device))
        losses.sum().backward()
        found.append((losses.detach().cpu(), values.grad.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", [crnn, fast])
def test_a_network_s_gradients_have_the_same_bits_each_time(kind: object) -> None:
    torch.manual_seed(0)
    model = (crnn if kind is crnn else fast)(60, 8, 16).cuda()
    lines = torch.randn(8, 1, 32, 160, device="cuda")
    classes, lengths = torch.randint(1, 60, (8, 6), device="cuda"), torch.full((8,), 6, device="cuda")
    found = []
    for _ in range(2):
        model.zero_grad()
        ctc_loss(model(lines), classes, lengths).sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))
