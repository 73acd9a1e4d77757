"""Stochastic depth for torchvision's ResNets, which have none of their own.

Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016, with the scaling in training of timm and torchvision's
`StochasticDepth`. The random numbers come from torch's generator, which is seeded for each micro-batch.
"""

from functools import partial

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import stochastic_depth


def drop_residual_blocks(model: nn.Module, probability: float) -> None:
    """Let samples skip residual branches in training. Names of parameters and results in evaluation do not change.

    Args:
        model: A ResNet of torchvision; changed in place.
        probability: Of the last block. It rises linearly from 0 at the first one.
    """
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    for index, block in enumerate(blocks):
        norm = block.bn3 if isinstance(block, Bottleneck) else block.bn2
        norm.register_forward_hook(partial(_drop, probability=probability * index / max(1, len(blocks) - 1)))


def _drop(norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, *, probability: float) -> Tensor:
    """Drop the residual branch, (N, C, H, W), of some samples."""
    dropped: Tensor = stochastic_depth(output, probability, mode="row", training=norm.training)
    return dropped
