"""The segment recipe: its networks, loss and drawings, and the parts that the engine trains from them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchvision.models.segmentation as zoo
from faster_coco_eval.core import mask as coco_mask
from PIL import Image
from torch import Tensor, nn

from samebits.data.images import ByteArray, EncodedImage
from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.metrics.segmentation import IGNORED, SegmentationMetric, label_map
from samebits.recipes.backbones import (
    MEAN,
    STD,
    Pyramid,
    freeze_parts,
    frozen_row,
    initial_weights,
    published_info,
)
from samebits.recipes.listing import listing_rows, some
from samebits.recipes.results import draw_matrix, draw_samples, draw_shares
from samebits.recipes.segment.config import MAX_PIXELS, Config, ModelConfig
from samebits.recipes.segment.data import LabeledImages, read_image
from samebits.recipes.segment.listing import list_images, open_source
from samebits.report.pictures import colors, draw_sheet

# Build networks: a U-Net, and the segmentation networks of torchvision.
#
# Legend: N images, H and W their height and width, C classes.


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
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _double(fine, coarse)) for fine, coarse in pairs
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(coarse, fine, 2, stride=2) for fine, coarse in reversed(pairs)
        )
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


class PyramidSegmenter(nn.Module):
    """Classes of pixels on the merged feature maps of a network of timm."""

    def __init__(self, name: str, width: int, num_classes: int) -> None:
        super().__init__()
        self.pyramid = Pyramid(name, width)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, C, H, W) logits of (N, 3, H, W) normalized images."""
        logits = self.head(self.pyramid(images))
        return F.interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=False)


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """Build and initialize a network on the CPU: (N, 3, H, W) -> (N, C, H, W) logits."""
    model: nn.Module
    if config.is_timm:
        model = PyramidSegmenter(config.name, config.width, num_classes)
    elif config.name == "unet":
        model = UNet(config.width, num_classes)
    else:
        build = getattr(zoo, config.name)
        # Without these arguments, torchvision downloads weights of the backbone.
        model = OnlyLogits(build(weights=None, weights_backbone=None, num_classes=num_classes))
    freeze_parts(model, config.freeze)
    return model


# The training loss: cross-entropy and the Dice loss, both without ignored pixels.
#
# Legend: N images, C classes, H and W height and width.


def segment_loss(logits: Tensor, batch: Batch, *, dice: float) -> Mapping[str, Tensor]:
    """Compute the loss of each image, and the mean over the images.

    The Dice loss is that of Milletari, Navab and Ahmadi, "V-Net", 3DV 2016, as a mean over the classes of the image.

    Args:
        logits: (N, C, H, W).
        batch: Its targets have `labels`, (N, H, W) bytes.

    Returns:
        The terms by name, scalars.
    """
    logits = logits.float()
    labels = batch.targets["labels"]
    num_images, num_classes = logits.shape[:2]
    is_counted = (labels != IGNORED).flatten(1)
    # As rows of pixels: the cross-entropy of images has no deterministic form on GPUs.
    # The label of ignored pixels is no class: they count as class 0 here, and are dropped below.
    rows = logits.permute(0, 2, 3, 1).reshape(-1, num_classes)
    chosen = labels.long().masked_fill(labels == IGNORED, 0)
    losses = F.cross_entropy(rows, chosen.flatten(), reduction="none").view(num_images, -1)
    num_pixels = is_counted.sum(dim=1).clamp(min=1)
    terms = {"cross_entropy": ((losses * is_counted).sum(dim=1) / num_pixels).mean()}
    if dice:
        counted = is_counted.unsqueeze(1)
        truth = F.one_hot(chosen.flatten(1), num_classes).transpose(1, 2) * counted
        shares = logits.softmax(dim=1).flatten(2) * counted
        overlap = (shares * truth).sum(dim=2)
        total = (shares + truth).sum(dim=2)
        is_there = truth.any(dim=2)
        scores = (2 * overlap / total.clamp(min=1e-6) * is_there).sum(dim=1) / is_there.sum(
            dim=1
        ).clamp(min=1)
        # An image without counted pixels has no class, and no loss.
        terms["dice_loss"] = dice * ((1 - scores) * is_there.any(dim=1)).mean()
    return terms


# Draw samples, an evaluation and a prediction: images with their classes in color.
#
# Legend: H and W height and width of an image.


TILE_PX = 150


def paint(pixels: ByteArray, labels: ByteArray) -> ByteArray:
    """Color the (H, W) classes of an (H, W, 3) image; the first keeps its colors, and ignored pixels are dark.

    Returns:
        (H, W, 3) bytes.
    """
    table = np.zeros((IGNORED + 1, 3), np.float32)
    table[1:IGNORED] = colors(IGNORED - 1)
    strength = np.full(IGNORED + 1, 0.6, np.float32)
    strength[0] = 0
    share = strength[labels][..., None]
    # Below a class the image is gray: its own colors would change the color of the class.
    gray = np.asarray(Image.fromarray(pixels).convert("L"), np.float32)[..., None]
    below = np.where(labels[..., None] > 0, gray, pixels)
    return (below * (1 - share) + table[labels] * share).round().astype(np.uint8)


def tiles(batch: Batch, classes: Sequence[str]) -> Iterator[tuple[ByteArray, str]]:
    """Yield the images of a batch, (h, w, 3) bytes with their labels in color, each with its classes."""
    for image, labels in zip(batch.inputs.numpy(), batch.targets["labels"].numpy(), strict=True):
        occurring = [classes[label] for label in np.unique(labels).tolist() if 0 < label < IGNORED]
        yield paint(image, labels), ", ".join(occurring) or classes[0]


def draw_evaluation(
    metric: SegmentationMetric, samples: LabeledImages, folder: Path, *, classes: Sequence[str]
) -> None:
    """Draw the images with the lowest IoU, each with prediction and ground truth, and the confusion matrix."""
    state = metric.state()
    folder.mkdir(parents=True, exist_ok=True)
    draw_matrix(state["confusion"], classes, folder)
    images = []
    captions = []
    for score, index, sketch in state["worst"]:
        predicted = np.array(sketch, np.uint8)
        size = (predicted.shape[1], predicted.shape[0])
        pixels, labels = samples.source.read(index, 0)
        small = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))
        # The nearest pixel: a mean of two classes would be another class.
        truth = np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
        images.append(np.concatenate([small, paint(small, predicted), paint(small, truth)], axis=1))
        captions.append(f"{samples.source.names[index]}, IoU {score:.3f}")
    title = "Lowest IoU: image, prediction, ground truth"
    draw_sheet(
        title, images, captions, folder / "worst.png", num_columns=2, tile_px=(3 * TILE_PX, TILE_PX)
    )


def to_prediction(logits: Tensor, *, classes: Sequence[str]) -> Mapping[str, Any]:
    """Convert (C, h, w) logits to a prediction: each class with its share of the pixels, and its mask.

    Masks have the size of the model's input, as run lengths in COCO's form.
    """
    labels = label_map(logits, (logits.shape[1], logits.shape[2])).numpy()
    found, counts = np.unique(labels, return_counts=True)
    shares = []
    masks = {}
    for label, count in sorted(
        zip(found.tolist(), counts.tolist(), strict=True), key=lambda pair: -pair[1]
    ):
        shares.append({"class": classes[label], "share": round(count / labels.size, 6)})
        # COCO's encoder takes columns first.
        region = coco_mask.encode(np.asfortranarray((labels == label).astype(np.uint8)))
        masks[classes[label]] = {"size": list(region["size"]), "counts": region["counts"].decode()}
    return {"classes": shares, "masks": masks}


def draw_prediction(
    path: Path, prediction: Mapping[str, Any], *, classes: Sequence[str]
) -> Image.Image:
    """Draw the predicted classes on an image, and below it their names with their shares.

    Raises:
        DataError: The image can't be read.
    """
    pixels = EncodedImage(path, max_pixels=MAX_PIXELS).pixels()
    size = (pixels.shape[1], pixels.shape[0])
    height, width = next(iter(prediction["masks"].values()))["size"]
    labels = np.zeros((height, width), np.uint8)
    for name, region in prediction["masks"].items():
        labels[coco_mask.decode(region) > 0] = classes.index(name)
    image = Image.fromarray(
        paint(pixels, np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST)))
    )
    palette = [(255, 255, 255), *colors(len(classes) - 1)]
    rows = [(each["class"], each["share"]) for each in prediction["classes"]]
    return draw_shares(image, [(*row, palette[classes.index(row[0])]) for row in rows])


def dataset_info(config: Config) -> Mapping[str, Any]:
    """List the classes, and the training and validation images.

    Raises:
        DataError: The images can't be found, or their masks or annotations are invalid.
    """
    published = published_info(config.model.name, config.model.weights)
    return {**published, **list_images(config.data, config.seed)}


def build(config: Config, dataset_info: Mapping[str, Any]) -> Parts:
    """Build the parts from the settings without opening an image."""
    data = config.data
    classes = list(dataset_info["classes"])
    num_without = dataset_info["num_without_mask"]
    model = build_model(config.model, len(classes))
    return Parts(
        model=model,
        loss=partial(segment_loss, dice=config.loss.dice),
        train_data=partial(_open, config, dataset_info, train=True),
        eval_data=partial(_open, config, dataset_info, train=False),
        metric=partial(SegmentationMetric, classes),
        monitor=("mIoU", "max"),
        init_weights=_weights_of(config.model, dataset_info),
        preprocess=partial(read_image, config=data),
        postprocess=partial(to_prediction, classes=classes),
        draw=partial(draw_evaluation, classes=classes),
        draw_samples=partial(
            draw_samples, tiles=partial(tiles, classes=classes), tile_px=(TILE_PX, TILE_PX)
        ),
        draw_prediction=partial(draw_prediction, classes=classes),
        input_shape=(3, *data.size_px),
        metadata={
            "classes": classes,
            "mean": MEAN,
            "std": STD,
            "preprocess": {"colors": "RGB", "resize_px": data.size_px},
        },
        describe={
            "data": f"{len(classes)} classes in {data.path(train=True) or 'synthetic shapes'}",
            "model": config.model.name,
            "classes": some(classes, 8),
            "no mask": f"{num_without:,} images are left out" if num_without else "",
            "frozen": frozen_row(model, weights=config.model.weights),
            **listing_rows(dataset_info),
        },
    )


def _open(config: Config, dataset_info: Mapping[str, Any], *, train: bool) -> LabeledImages:
    return LabeledImages(
        open_source(config.data, dataset_info, train=train), config.data, train=train
    )


def _weights_of(
    config: ModelConfig, dataset_info: Mapping[str, Any]
) -> Callable[[nn.Module], Mapping[str, str]] | None:
    load = initial_weights(config.weights, config.name, dataset_info)
    if load is None:
        return None
    # The files of torchvision have the names of the network without the wrapper.
    return lambda model: load(model.net if isinstance(model, OnlyLogits) else model)
