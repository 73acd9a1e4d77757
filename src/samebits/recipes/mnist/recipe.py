"""The mnist recipe: the parts that the engine trains, from the settings."""

from collections.abc import Iterable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.errors import ConfigError
from samebits.metrics.classification import Accuracy
from samebits.recipes.mnist.config import Config
from samebits.recipes.mnist.data import SCALES, TITLES, Scale, open_images
from samebits.recipes.mnist.predict import read_image
from samebits.recipes.results import ByteArray, draw_classes, draw_samples, gray_tiles, top_classes

# Two networks for small gray images.
#
# Legend: N images, H and W their height and width, 10 classes.


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


def _convolution(
    channels_in: int, channels_out: int, *, kernel: int, pool: bool = False
) -> list[nn.Module]:
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


# The training loss: cross-entropy.


def cross_entropy(logits: Tensor, batch: Batch) -> Mapping[str, Tensor]:
    """Compute the mean cross-entropy in nats of (N, 10) logits and (N,) labels."""
    return {"cross_entropy": F.cross_entropy(logits, batch.targets)}


CLASSES = [str(digit) for digit in range(NUM_CLASSES)]


def build(config: Config) -> Parts:
    """Build the parts from the settings. Reads no data yet.

    Raises:
        ConfigError: The network cannot take images of this size.
    """
    scale = SCALES[config.data.name]
    return Parts(
        model=build_model(config),
        loss=cross_entropy,
        train_data=partial(open_images, config.data, train=True),
        eval_data=partial(open_images, config.data, train=False),
        metric=partial(Accuracy, NUM_CLASSES),
        monitor=("top1", "max"),
        preprocess=partial(read_image, scale=scale),
        postprocess=partial(top_classes, classes=range(NUM_CLASSES), num_top=3),
        draw=partial(draw_classes, classes=CLASSES, tiles=partial(_tiles, scale=scale)),
        draw_samples=partial(draw_samples, tiles=partial(_tiles, scale=scale)),
        input_shape=(1, scale.size_px, scale.size_px),
        metadata={
            "classes": CLASSES,
            "mean": scale.mean,
            "std": scale.std,
            "preprocess": {
                "colors": "gray, light on dark",
                "resize_px": [scale.size_px, scale.size_px],
            },
        },
        describe={"data": TITLES[config.data.name], "model": config.model.name},
    )


def _tiles(batch: Batch, scale: Scale) -> Iterable[tuple[ByteArray, str]]:
    return zip(
        gray_tiles(batch, scale.mean, scale.std), map(str, batch.targets.tolist()), strict=True
    )
