"""Two networks for small gray images.

Legend: N images, H and W their height and width, 10 classes.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from samebits.errors import ConfigError
from samebits.recipes.mnist.config import Config

NUM_CLASSES = 10


class Cnn(nn.Module):
    """Five convolutions with batch norm, two poolings, the mean over the image, dropout and a linear classifier.

    70,586 parameters at width 16.

    Args:
        width: Channels of the first convolution; the others have 2, 2, 4 and 4 times as many.
        dropout: Dropout probability before the classifier.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(1, width, kernel=5, pool=True),
            *_convolution(width, 2 * width, kernel=3),
            *_convolution(2 * width, 2 * width, kernel=3, pool=True),
            *_convolution(2 * width, 4 * width, kernel=3),
            *_convolution(4 * width, 4 * width, kernel=3),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(4 * width, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, 10) logits of (N, 1, H, W) normalized images of any size."""
        # mean() instead of adaptive pooling, whose gradient on GPUs adds up in no fixed order.
        features = self.features(images).mean(dim=(2, 3))
        logits: Tensor = self.classifier(self.dropout(features))
        return logits


def _convolution(channels_in: int, channels_out: int, *, kernel: int, pool: bool = False) -> list[nn.Module]:
    # No bias: batch norm would subtract it again. Pooling before batch norm, which then has a quarter of the work.
    convolution = nn.Conv2d(channels_in, channels_out, kernel, padding=kernel // 2, bias=False)
    pooling = [nn.MaxPool2d(2)] if pool else []
    return [convolution, *pooling, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True)]


class TutorialNet(nn.Module):
    """The network of the hand-written MNIST job of many tutorials: 21,840 parameters, 28x28 only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, 10) logits of (N, 1, 28, 28) normalized images."""
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        # reshape, not view: the features may be in channels-last memory format.
        x = F.relu(self.fc1(x.reshape(-1, 320)))
        x = F.dropout(x, training=self.training)
        logits: Tensor = self.fc2(x)
        return logits


def build_model(config: Config) -> nn.Module:
    """Build the network of the settings, on the CPU.

    Raises:
        ConfigError: model.name=tutorial with the 8x8 digits; it takes 28x28 only.
    """
    if config.model.name == "tutorial":
        if config.data.name != "mnist":
            raise ConfigError(
                "model.name=tutorial takes images of 28x28, but data.name=digits has 8x8",
                fix="Set model.name=cnn or data.name=mnist.",
            )
        return TutorialNet()
    return Cnn(config.model.width, config.model.dropout)
