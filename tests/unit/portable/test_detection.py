"""RoIAlign, suppression of boxes, and CTC, with their gradients, against torch's and torchvision's own in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision import ops

from samebits.portable.arithmetic import portable_arithmetic
from tests.unit.portable.against_torch import check_against_torch

GENERATOR = torch.Generator().manual_seed(0)
MAPS = torch.randn(2, 3, 12, 10, generator=GENERATOR)
PLACES = torch.rand(9, 2, generator=GENERATOR) * 14 - 2
BOXES = torch.cat([torch.arange(9)[:, None] % 2, PLACES, PLACES + torch.rand(9, 2, generator=GENERATOR) * 9], 1)
CLASSES = torch.tensor([[1, 2, 2, 3], [4, 0, 0, 0], [5, 5, 5, 0], [1, 2, 1, 2]])
TIMES, LENGTHS = torch.tensor([11, 9, 11, 3]), torch.tensor([4, 1, 3, 4])


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("sampling", [-1, 1, 3])
def test_roi_align_is_torchvisions(sampling: int, aligned: bool) -> None:
    def align(x: Tensor) -> Tensor:
        return ops.roi_align(x, BOXES.to(x.dtype), (3, 4), 0.7, sampling, aligned)

    check_against_torch(align, (MAPS,))


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9])
def test_boxes_are_suppressed_as_by_torchvision(threshold: float) -> None:
    boxes = torch.cat([BOXES[:, 1:]] * 9) + torch.rand(81, 4, generator=GENERATOR)
    scores = torch.rand(81, generator=GENERATOR)
    expected = ops.nms(boxes, scores, threshold)
    with portable_arithmetic():
        assert torch.equal(ops.nms(boxes, scores, threshold), expected)
        assert ops.nms(boxes[:0], scores[:0], threshold).shape == (0,)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("flat", [False, True])
def test_ctc_is_torchs(flat: bool, reduction: str) -> None:
    used = torch.arange(4) < LENGTHS[:, None]
    targets = CLASSES[used] if flat else CLASSES
    scores = torch.randn(11, 4, 6, generator=GENERATOR)
    # The last text does not fit into its three times.
    loss = partial(F.ctc_loss, targets=targets, input_lengths=TIMES, target_lengths=LENGTHS, zero_infinity=True)
    check_against_torch(lambda x: loss(x.log_softmax(2), reduction=reduction), (scores,))


def test_ctc_of_no_character_and_of_another_blank_is_torchs() -> None:
    scores = torch.randn(7, 2, 6, generator=GENERATOR)
    targets, lengths = torch.tensor([[0, 0], [1, 2]]), torch.tensor([0, 2])
    loss = partial(F.ctc_loss, targets=targets, input_lengths=torch.tensor([7, 5]), target_lengths=lengths, blank=5)
    check_against_torch(lambda x: loss(x.log_softmax(2)), (scores,))
