"""The operations that `kernels.py` compares, each on inputs that are the same on every processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch chooses its kernels when it is imported, after the variables are set
    from torch import Tensor

BACKWARD = ", backward"
Operations = Iterator[tuple[str, "Callable[[], list[Tensor]]"]]


@cache
def _generator() -> Any:
    import numpy as np

    return np.random.default_rng(0)


def draw(*shape: int) -> Tensor:
    """Draw numbers by numpy's integers and one rounding: the same on every processor."""
    import torch

    return torch.from_numpy((2 * _generator().random(shape) - 1).astype("float32"))


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], list[Tensor]]:
    """Return a function that returns the gradients of an operation."""
    import torch

    def run() -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        output = function(*leaves)
        weights = torch.arange(output.numel(), dtype=torch.float32).remainder(7).sub(3).view(output.shape)
        return list(torch.autograd.grad(output, leaves, weights))

    return run


def both(name: str, function: Callable[..., Tensor], *inputs: Tensor) -> Operations:
    """Yield an operation and its backward pass."""
    yield name, lambda: [function(*inputs)]
    yield f"{name}{BACKWARD}", gradients(function, *inputs)


def last(values: Tensor) -> Tensor:
    """Return pictures in the memory format that training uses."""
    import torch

    return values.contiguous(memory_format=torch.channels_last)


def operations() -> Operations:
    """Yield the name of each operation, and a function that returns its results."""
    yield from layers()
    yield from elementwise()
    yield from updates_and_random_numbers()


def layers() -> Operations:
    """Yield the layers and losses of networks."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    for name, shape, weight, options in (
        ("conv2d 3x3, 32 to 32", (4, 32, 14, 14), (32, 32, 3, 3), {"padding": 1}),
        ("conv2d 3x3 stride 2, 64 to 128", (2, 64, 14, 14), (128, 64, 3, 3), {"padding": 1, "stride": 2}),
        ("conv2d 1x1, 64 to 128", (4, 64, 14, 14), (128, 64, 1, 1), {}),
        ("conv2d 7x7 stride 2, 3 to 32", (2, 3, 48, 48), (32, 3, 7, 7), {"padding": 3, "stride": 2}),
        ("conv2d 3x3, 1 to 16 (digits)", (32, 1, 8, 8), (16, 1, 3, 3), {"padding": 1}),
        ("conv2d 3x3, depthwise 32", (4, 32, 14, 14), (32, 1, 3, 3), {"padding": 1, "groups": 32}),
    ):
        yield from both(name, lambda x, w, o=options: F.conv2d(x, w, **o), last(draw(*shape)), last(draw(*weight)))
    yield from both("linear, 512 to 1000", F.linear, draw(16, 512), draw(1000, 512), draw(1000))
    yield from both("linear, 64 to 10", F.linear, draw(32, 64), draw(10, 64), draw(10))
    yield from both("batched matmul", torch.bmm, draw(4, 32, 48), draw(4, 48, 40))
    yield from both(
        "batch norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        last(draw(8, 32, 14, 14)),
        draw(32),
        draw(32),
    )
    yield from both("layer norm", lambda x, w, b: F.layer_norm(x, (192,), w, b), draw(64, 192), draw(192), draw(192))
    yield from both("group norm", lambda x, w, b: F.group_norm(x, 4, w, b), draw(4, 32, 14, 14), draw(32), draw(32))
    yield from both("softmax", lambda x: F.softmax(x, 1), draw(32, 1000))
    yield from both("log_softmax", lambda x: F.log_softmax(x, 1), draw(32, 10))
    labels = torch.arange(32) % 10
    yield from both("cross_entropy", lambda x: F.cross_entropy(x, labels), draw(32, 10))
    yield from both("attention", F.scaled_dot_product_attention, *(draw(2, 4, 49, 32) for _ in range(3)))
    lengths = torch.full((4,), 30), torch.full((4,), 6)
    targets = torch.arange(24).view(4, 6) % 19 + 1
    yield from both("ctc_loss", lambda x: F.ctc_loss(F.log_softmax(x, 2), targets, *lengths), draw(30, 4, 20))
    torch.manual_seed(0)
    lstm = nn.LSTM(32, 24, batch_first=True)
    for parameter in lstm.parameters():
        parameter.data = draw(*parameter.shape)
    yield from both("lstm", lambda x: lstm(x)[0], draw(4, 20, 32))
    yield from both("max pooling", lambda x: F.max_pool2d(x, 2), last(draw(4, 32, 14, 14)))
    yield from both("average pooling", lambda x: F.adaptive_avg_pool2d(x, 1), last(draw(4, 32, 14, 14)))
    yield from both("bilinear resize", lambda x: F.interpolate(x, (20, 20), mode="bilinear"), last(draw(4, 32, 14, 14)))


def elementwise() -> Operations:
    """Yield reductions and functions of single values."""
    import torch
    import torch.nn.functional as F

    wide = draw(64, 3000)
    for name, reduce in (
        ("sum", torch.sum), ("mean", torch.mean), ("vector norm", torch.linalg.vector_norm), ("variance", torch.var),
        ("sum of columns", lambda x: x.sum(0)), ("sum of rows", lambda x: x.sum(1)),
    ):  # fmt: skip
        yield name, lambda function=reduce: [function(wide)]
    for name, unary in (
        ("exp", torch.exp), ("log", lambda x: (x + 2).log()), ("tanh", torch.tanh), ("sigmoid", torch.sigmoid),
        ("gelu", F.gelu), ("silu", F.silu), ("erf", torch.erf), ("sin", torch.sin),
        ("pow 0.7", lambda x: (x + 2) ** 0.7),
        ("sqrt", lambda x: (x + 2).sqrt()), ("rsqrt", lambda x: (x + 2).rsqrt()), ("divide", lambda x: x / (x + 2)),
        ("relu, add, multiply", lambda x: F.relu(x) * x + x),
    ):  # fmt: skip
        yield from both(name, unary, wide)


def updates_and_random_numbers() -> Operations:
    """Yield optimizers and generators."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    for name, make in (
        ("SGD with momentum", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-4)),
        ("Adam", lambda p: torch.optim.Adam(p, 0.01)), ("AdamW", lambda p: torch.optim.AdamW(p, 0.01)),
    ):  # fmt: skip
        start, gradient = draw(5000), draw(5000)

        def steps(make: Any = make, start: Tensor = start, gradient: Tensor = gradient) -> list[Tensor]:
            weights = nn.Parameter(start.clone())
            optimizer = make([weights])
            for _ in range(3):
                weights.grad = gradient.clone()
                optimizer.step()
            return [weights.detach()]

        yield f"{name}, 3 steps", steps

    def seeded(function: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            torch.manual_seed(5)
            return [function()]

        return run

    yield "random numbers: uniform", seeded(lambda: torch.rand(1000))
    yield "random numbers: normal", seeded(lambda: torch.randn(1000))
    yield "random numbers: permutation", seeded(lambda: torch.randperm(1000))
    yield "random numbers: dropout", seeded(lambda: F.dropout(torch.ones(1000), 0.3))
