"""The pose recipe: the parts that the engine trains, from the settings."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from samebits.data.images import ByteArray, read_rgb
from samebits.data.keyed import IntArray
from samebits.data.opencv import check_portable
from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.recipes.backbones import MEAN, STD, frozen_row, initial_weights, published_info
from samebits.recipes.pose.coco_files import open_files, split_names
from samebits.recipes.pose.config import Config, LossConfig
from samebits.recipes.pose.data import STRIDES, EvalImages, Maps, TrainImages
from samebits.recipes.pose.infer import make_infer, read_image, to_prediction
from samebits.recipes.pose.metric import PoseMetric
from samebits.recipes.pose.model import build_model
from samebits.recipes.pose.skeletons import Skeleton
from samebits.recipes.pose.view import Floats
from samebits.recipes.results import draw_samples
from samebits.report.pictures import add_caption, colors, draw_sheet

# The training loss: squared error of heatmaps, and the push and pull losses of tags.
#
# Tags: Newell, Huang and Deng, "Associative embedding", NeurIPS 2017, in the form of the HigherHRNet authors'
# implementation. Everything is computed in float32, whatever the network computes in.
#
# Legend: N images, K joints, P rows for people (most of them empty), h and w height and width of a map.


def pose_loss(
    outputs: Sequence[Tensor], batch: Batch, *, config: LossConfig
) -> Mapping[str, Tensor]:
    """Compute the weighted terms of the loss, each a mean over the images.

    Args:
        outputs: (N, 2 K, h, w) and (N, K, 2h, 2w), as the network returns them.
        batch: Its targets: `heatmaps` and `masks` at both sizes, and the `index` of the joints at 1/4.

    Returns:
        heatmap0, heatmap1 (at 1/4 and 1/2), push0 and pull0.
    """
    targets = batch.targets
    num_joints = targets["heatmaps"][0].shape[1]
    terms = {}
    for stage, factor in enumerate(config.heatmap):
        found = outputs[stage][:, :num_joints]
        terms[f"heatmap{stage}"] = factor * heatmap_loss(
            found, targets["heatmaps"][stage], targets["masks"][stage]
        )
    tags = outputs[0][:, num_joints:]
    push, pull = tag_loss(tags, targets["index"], form=config.push_form)
    return {**terms, "push0": config.push * push.mean(), "pull0": config.pull * pull.mean()}


def heatmap_loss(found: Tensor, expected: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean squared error over images, joints and all pixels.

    Args:
        found: (N, K, h, w) predicted heatmaps.
        expected: (N, K, h, w) ground truth.
        mask: (N, h, w), 0 where the error does not count. The mean includes these pixels.
    """
    return ((found.float() - expected).square() * mask.unsqueeze(1)).mean()


def tag_loss(tags: Tensor, index: Tensor, *, form: Literal["exp", "max"]) -> tuple[Tensor, Tensor]:
    """Compute the push loss between people and the pull loss within each person.

    Args:
        tags: (N, K, h, w).
        index: (N, P, K, 2) int64: the index of each joint into the flattened tags of an image, and 1 if there is such a
            joint, else 0. People without joints do not count.
        form: Push of two people whose mean tags have distance d: "exp", exp(-d^2); "max", max(0, 1 - d).

    Returns:
        push: (N,) half of the mean over all pairs; 0 with fewer than two people.
        pull: (N,) squared distance to the mean tag of the person, averaged over joints, then over people; 0 without
            people.
    """
    num_pictures = len(tags)
    flat = tags.float().reshape(num_pictures, -1)
    rows = torch.arange(num_pictures, device=tags.device).view(-1, 1, 1)
    # Indexing, not gather: people may share a pixel. With deterministic algorithms, the gradient of indexing adds the
    # terms of a pixel in a fixed order, on GPUs too.
    values = flat[rows, index[..., 0]]
    weights = index[..., 1].float()
    num_joints = weights.sum(dim=2)
    exists = (num_joints > 0).float()
    # A row without a person has no joints, and 0 / 0 would be NaN.
    means = (values * weights).sum(dim=2) / num_joints.clamp(min=1)
    spread = ((values - means.unsqueeze(2)).square() * weights).sum(dim=2) / num_joints.clamp(min=1)
    num_people = exists.sum(dim=1)
    pull = spread.sum(dim=1) / num_people.clamp(min=1)

    distances = means.unsqueeze(1) - means.unsqueeze(2)
    alike = torch.exp(-distances.square()) if form == "exp" else (1 - distances.abs()).clamp(min=0)
    pairs = exists.unsqueeze(1) * exists.unsqueeze(2)
    # The diagonal contributes num_people ones.
    total = (alike * pairs).sum(dim=(1, 2)) - num_people
    push = 0.5 * total / (num_people * (num_people - 1)).clamp(min=1)
    return push, pull


# Draw people on images: one color per person, with dark outlines that are visible on every background.


# Joints with a lower score are not drawn, because refinement puts every joint somewhere. People with too few other
# joints are not drawn either. The JSON has all of them.
MIN_JOINT_SCORE = 0.1
MIN_JOINTS = 3

_DARK = (20, 20, 20)
PANEL_PX = 240
_NUM_DRAWN = 8  # images of an evaluation


def draw_people(image: Image.Image, people: Sequence[Floats], skeleton: Skeleton) -> Image.Image:
    """Draw skeletons on an image.

    Args:
        image: RGB.
        people: (K, 3) for each person: x, y in pixels of the image, and the score of the joint; 0: not drawn.

    Returns:
        A changed copy.
    """
    # Drawn twice as large and reduced, because Pillow's lines are not antialiased.
    fine = 2 if max(image.size) <= 2000 else 1
    canvas = image.convert("RGB").resize(
        (image.width * fine, image.height * fine), Image.Resampling.BICUBIC
    )
    draw = ImageDraw.Draw(canvas)
    for person, color in zip(people, colors(len(people)), strict=True):
        seen = person[:, 2] > 0
        if not seen.any():
            continue
        spots = (person[:, :2] + 0.5) * fine
        extent = float(np.ptp(spots[seen], axis=0).max())
        # Thin lines on small people, to keep them visible.
        width = min(max(3.0 * fine, extent / 40), max(canvas.size) / 110)
        limbs = [
            (tuple(spots[a]), tuple(spots[b])) for a, b in skeleton.limbs if seen[a] and seen[b]
        ]
        for extra, ink in ((max(1.5 * fine, width * 0.5), _DARK), (0, color)):
            for limb in limbs:
                draw.line(limb, ink, max(1, round(width + extra)))
            for x, y in spots[seen]:
                radius = (width * 1.5 + extra) / 2 + 0.5
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), ink)
    return canvas.resize(image.size, Image.Resampling.LANCZOS) if fine > 1 else canvas


def draw_prediction(
    path: Path, prediction: Mapping[str, Any], *, skeleton: Skeleton
) -> Image.Image:
    """Draw a prediction on its image.

    Args:
        prediction: What `infer.to_prediction` returned for it.

    Raises:
        DataError: The image can't be read.
    """
    image = Image.fromarray(read_rgb(path))
    shown = _sure(_people(prediction["people"]))
    # An image without people would look unprocessed.
    return draw_people(image, shown, skeleton) if shown else add_caption(image, "no people")


def draw_evaluation(metric: PoseMetric, samples: EvalImages, folder: Path) -> None:
    """Draw the first images of an evaluation into `people.png`, each with prediction and ground truth."""
    shown = sorted(metric.images, key=lambda each: int(each["index"]))[:_NUM_DRAWN]
    panels = []
    captions = []
    for each in shown:
        image = Image.fromarray(samples.rgb(each["index"]))
        factor = PANEL_PX / max(image.size)
        size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
        small = image.resize(size, Image.Resampling.LANCZOS)
        found = _sure(_people(each["results"]))
        there = _people(each["target"]["annotations"])
        drawn = [
            np.asarray(
                draw_people(small, [_scaled(person, factor) for person in people], metric.skeleton)
            )
            for people in (found, there)
        ]
        panels.append(np.concatenate(drawn, axis=1))
        captions.append(
            f"{len(found)} predicted, {sum((each[:, 2] > 0).any() for each in there)} ground truth"
        )
    if panels:
        title = "First images: prediction, ground truth"
        columns = min(2, len(panels))
        tile_px = (2 * PANEL_PX, PANEL_PX)
        draw_sheet(
            title, panels, captions, folder / "people.png", num_columns=columns, tile_px=tile_px
        )


def _people(entries: Sequence[Mapping[str, Any]]) -> list[Floats]:
    """Return (K, 3) for each entry in COCO's format, as `draw_people` takes them."""
    return [np.array(entry["keypoints"], np.float64).reshape(-1, 3) for entry in entries]


def _scaled(person: Floats, factor: float) -> Floats:
    return np.column_stack([(person[:, :2] + 0.5) * factor - 0.5, person[:, 2]])


def tiles(batch: Batch, skeleton: Skeleton) -> Iterator[tuple[ByteArray, str]]:
    """Yield the images (N, 3, S, S) of a batch, with the joints that the loss uses; masked areas are dark."""
    images = batch.inputs.permute(0, 2, 3, 1).numpy()
    index = batch.targets["index"].numpy()
    masks = batch.targets["masks"][0].numpy()
    for row, image in enumerate(images):
        people = [_joints(person, masks.shape[-1]) for person in index[row] if person[:, 1].any()]
        yield (
            _tile(image, masks[row], people, skeleton),
            f"{len(people)} {'person' if len(people) == 1 else 'people'}",
        )


def _joints(person: IntArray, size_px: int) -> Floats:
    """Convert a person's (K, 2) index of `index_joints` to (K, 3) for `draw_people`."""
    joints = np.zeros((len(person), 3))
    kinds, places = np.divmod(person[person[:, 1] > 0, 0], size_px**2)
    y, x = np.divmod(places, size_px)
    joints[kinds] = np.column_stack([x, y, np.ones(len(x))])
    return joints


def _tile(
    image: Maps,
    mask: Maps,
    people: Sequence[Floats],
    skeleton: Skeleton,
) -> ByteArray:
    """Draw people, in pixels of the map at 1/4, on a normalized image (S, S, 3); bytes of the tile size."""
    light = (0.35 + 0.65 * mask.repeat(STRIDES[0], axis=0).repeat(STRIDES[0], axis=1))[..., None]
    rgb = (image * np.array(STD, np.float32) + np.array(MEAN, np.float32)) * 255 * light
    small = Image.fromarray(rgb.clip(0, 255).round().astype(np.uint8)).resize((PANEL_PX, PANEL_PX))
    placed = [_scaled(person, PANEL_PX / len(mask)) for person in people]
    return np.asarray(draw_people(small, placed, skeleton))


def _sure(people: Sequence[Floats]) -> list[Floats]:
    """Remove joints with a low score, and then people with too few joints."""
    sure = [np.where(person[:, 2:] >= MIN_JOINT_SCORE, person, 0.0) for person in people]
    return [person for person in sure if np.count_nonzero(person[:, 2]) >= MIN_JOINTS]


TITLES = {"coco": "COCO keypoints", "crowdpose": "CrowdPose"}


def dataset_info(config: Config) -> Mapping[str, Any]:
    """Find published weights, if the settings name them. Raises DataError if they cannot be downloaded."""
    return published_info(config.model.name, config.model.weights)


def build(config: Config, dataset_info: Mapping[str, Any]) -> Parts:
    """Build the parts from the settings. Reads no data yet.

    Raises:
        ConfigError: `kernels` is portable, and images are not transformed portably here.
    """
    check_portable(config.kernels)
    skeleton = config.skeleton
    trained, validated = (set(split_names(config.data, train=train)) for train in (True, False))
    both = sorted((trained | ({"train", "val"} if "trainval" in trained else set())) & validated)
    model = build_model(config.model, skeleton.num_joints)
    return Parts(
        model=model,
        loss=partial(pose_loss, config=config.loss),
        train_data=partial(_open, config, train=True),
        eval_data=partial(_open, config),
        eval_sets={
            name: partial(_open, config, split) for name, split in config.data.eval_sets.items()
        },
        metric=partial(PoseMetric, skeleton),
        monitor=("AP", "max"),
        init_weights=initial_weights(config.model.weights, config.model.name, dataset_info),
        infer=make_infer(config),
        preprocess=read_image,
        postprocess=to_prediction,
        draw=draw_evaluation,  # type: ignore[arg-type]  # it also uses EvalImages.rgb
        draw_prediction=partial(draw_prediction, skeleton=skeleton),
        draw_samples=partial(
            draw_samples, tiles=partial(tiles, skeleton=skeleton), tile_px=(PANEL_PX, PANEL_PX)
        ),
        input_shape=(3, config.data.size_px, config.data.size_px),
        metadata={
            "skeleton": {"joints": skeleton.joints, "limbs": skeleton.limbs},
            "mean": MEAN,
            "std": STD,
            "preprocess": {"colors": "RGB"},
        },
        describe={
            "data": f"{TITLES[config.data.name]}, {skeleton.num_joints} joints, {config.data.size_px} px",
            "model": config.model.name
            if config.model.is_timm
            else f"HigherHRNet-W{config.model.width}",
            "frozen": frozen_row(model, weights=config.model.weights),
            "validation": f"warning: {', '.join(both)} is trained on too" if both else "",
        },
    )


def _open(
    config: Config, split: str | None = None, *, train: bool = False
) -> TrainImages | EvalImages:
    """Open the images of a split; None: that of the settings."""
    data = config.data if split is None else config.data.model_copy(update={"eval": split})
    source = open_files(data, train=train)
    if not train:
        return EvalImages(source)
    return TrainImages(source, data, channels_last=config.channels_last)
