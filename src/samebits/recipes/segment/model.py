"""Build networks: a U-Net, and the segmentation networks of torchvision.

Legend: N images, H and W their height and width, C classes.
"""

from itertools import pairwise

import torch
import torchvision.models.segmentation as zoo
from torch import Tensor, nn

from samebits.recipes.segment.config import ModelConfig

_NUM_LEVELS = 4


class UNet(nn.Module):
    """The U-Net with batch norm and padding, so that the result has the size of the image.

    Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015.
    At width 64 it has as many parameters as github.com/milesial/Pytorch-UNet: 31,037,633 for one class.

    Args:
        width: Channels of the finest level; each coarser one has twice as many.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(_NUM_LEVELS + 1)]
        self.stem = _double(3, width)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), _double(fine, coarse)) for fine, coarse in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(coarse, fine, 2, stride=2) for fine, coarse in reversed(pairs))
        self.join = nn.ModuleList(_double(coarse, fine) for fine, coarse in reversed(pairs))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, C, H, W) logits of (N, 3, H, W) normalized images; H and W are multiples of 16."""
        levels = [self.stem(images)]
        for down in self.down:
            levels.append(down(levels[-1]))
        features = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            features = join(torch.cat([levels.pop(), up(features)], dim=1))
        logits: Tensor = self.head(features)
        return logits


def _double(channels_in: int, channels_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        # No bias: batch norm would subtract it again.
        convolution = nn.Conv2d(channels, channels_out, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class OnlyLogits(nn.Module):
    """A segmentation network of torchvision, which returns a dict, with its logits as the only output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, C, H, W) logits of (N, 3, H, W) normalized images."""
        logits: Tensor = self.net(images)["out"]
        return logits


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """Build and initialize a network on the CPU: (N, 3, H, W) -> (N, C, H, W) logits."""
    if config.name == "unet":
        return UNet(config.width, num_classes)
    build = getattr(zoo, config.name)
    # Without these arguments, torchvision downloads weights of the backbone.
    return OnlyLogits(build(weights=None, weights_backbone=None, num_classes=num_classes))
