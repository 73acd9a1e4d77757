"""Single values, empty tensors, places from the end, and arguments that torch lets stand for several."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.portable.arithmetic import portable_arithmetic
from tests.unit.portable.against_torch import check_against_torch

GENERATOR = torch.Generator().manual_seed(0)
X, ONE = torch.randn(2, 4, 7, 6, generator=GENERATOR), torch.tensor(0.7)
EMPTY, FIRST = torch.ones(5, 0), torch.tensor(0)
ROWS = torch.tensor([[0], [1]])
FILTERS = torch.randn(4, 2, 3, 2, generator=GENERATOR)

OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
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
    "places written": (lambda x, y: x.clone().index_put_((ROWS, torch.tensor([2, 0])), y), (X, X[:, :2])),
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


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_of_unusual_arguments_are_torchs(name: str) -> None:
    check_against_torch(*OPERATIONS[name], tolerance=1e-4)


def test_places_behind_the_end_are_refused() -> None:
    with portable_arithmetic(), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        torch.zeros(4).put(torch.tensor([4]), torch.ones(1), accumulate=True)
