"""Draw people on images: one color per person, with dark outlines that are visible on every background."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from samebits.data.images import read_rgb
from samebits.data.samples import Batch
from samebits.recipes.normalize import MEAN, STD
from samebits.recipes.pose.data import STRIDES, EvalImages
from samebits.recipes.pose.metric import PoseMetric
from samebits.recipes.pose.skeletons import Skeleton
from samebits.report.pictures import add_caption, colors, draw_sheet

Points = npt.NDArray[np.float64]

# Joints with a lower score are not drawn, because refinement puts every joint somewhere. People with too few other
# joints are not drawn either. The JSON has all of them.
MIN_JOINT_SCORE = 0.1
MIN_JOINTS = 3

_DARK = (20, 20, 20)
PANEL_PX = 240


def draw_people(image: Image.Image, people: Sequence[Points], skeleton: Skeleton) -> Image.Image:
    """Draw skeletons on an image.

    Args:
        image: RGB.
        people: (K, 3) for each person: x, y in pixels of the image, and the score of the joint; 0: not drawn.

    Returns:
        A changed copy.
    """
    # Drawn twice as large and reduced, because Pillow's lines are not antialiased.
    fine = 2 if max(image.size) <= 2000 else 1
    canvas = image.convert("RGB").resize((image.width * fine, image.height * fine), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(canvas)
    for person, color in zip(people, colors(len(people)), strict=True):
        seen = person[:, 2] > 0
        if not seen.any():
            continue
        spots = (person[:, :2] + 0.5) * fine
        extent = float(np.ptp(spots[seen], axis=0).max())
        # Thin lines on small people, to keep them visible.
        width = min(max(3.0 * fine, extent / 40), max(canvas.size) / 110)
        limbs = [(tuple(spots[a]), tuple(spots[b])) for a, b in skeleton.limbs if seen[a] and seen[b]]
        for extra, ink in ((max(1.5 * fine, width * 0.5), _DARK), (0, color)):
            for limb in limbs:
                draw.line(limb, ink, max(1, round(width + extra)))
            for x, y in spots[seen]:
                radius = (width * 1.5 + extra) / 2 + 0.5
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), ink)
    return canvas.resize(image.size, Image.Resampling.LANCZOS) if fine > 1 else canvas


def draw_prediction(path: Path, prediction: Mapping[str, Any], *, skeleton: Skeleton) -> Image.Image:
    """Draw a prediction on its image.

    Args:
        prediction: What `infer.to_prediction` returned for it.

    Raises:
        DataError: The image can't be read.
    """
    people = [np.array(person["keypoints"], np.float64).reshape(-1, 3) for person in prediction["people"]]
    image, shown = Image.fromarray(read_rgb(path)), _sure(people)
    # An image without people would look unprocessed.
    return draw_people(image, shown, skeleton) if shown else add_caption(image, "no people")


def draw_evaluation(metric: PoseMetric, samples: EvalImages, folder: Path) -> None:
    """Draw the first images of an evaluation into `people.png`: prediction, ground truth and heatmaps."""
    shown = sorted((each for each in metric.images if each["sketch"] is not None), key=lambda each: int(each["index"]))
    panels, captions = [], []
    for each in shown:
        image = Image.fromarray(samples.rgb(each["index"]))
        factor = PANEL_PX / max(image.size)
        size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
        small = image.resize(size, Image.Resampling.LANCZOS)
        found = _sure([np.array(result["keypoints"]).reshape(-1, 3) for result in each["results"]])
        there = [np.array(person["keypoints"], np.float64).reshape(-1, 3) for person in each["target"]["annotations"]]
        drawn = [
            np.asarray(draw_people(small, [_scaled(person, factor) for person in people], metric.skeleton))
            for people in (found, there)
        ]
        panels.append(np.concatenate([*drawn, _warm(small, np.array(each["sketch"], np.uint8))], axis=1))
        captions.append(f"{len(found)} predicted, {sum((each[:, 2] > 0).any() for each in there)} ground truth")
    if panels:
        title, columns = "First images: prediction, ground truth, heatmaps", min(2, len(panels))
        tile_px = (3 * PANEL_PX, PANEL_PX)
        draw_sheet(title, panels, captions, folder / "people.png", num_columns=columns, tile_px=tile_px)


def _scaled(person: Points, factor: float) -> Points:
    return np.column_stack([(person[:, :2] + 0.5) * factor - 0.5, person[:, 2]])


def tiles(batch: Batch, skeleton: Skeleton) -> Iterator[tuple[npt.NDArray[np.uint8], str]]:
    """Yield the images (N, 3, S, S) of a batch, with the joints that the loss uses; masked areas are dark."""
    images, index = batch.inputs.permute(0, 2, 3, 1).numpy(), batch.targets["index"].numpy()
    masks = batch.targets["masks"][0].numpy()
    for row, image in enumerate(images):
        people = [_joints(person, masks.shape[-1]) for person in index[row] if person[:, 1].any()]
        yield _tile(image, masks[row], people, skeleton), f"{len(people)} {'person' if len(people) == 1 else 'people'}"


def _joints(person: npt.NDArray[np.int64], size_px: int) -> Points:
    """Convert a person's (K, 2) index of `index_joints` to (K, 3) for `draw_people`."""
    joints = np.zeros((len(person), 3))
    kinds, places = np.divmod(person[person[:, 1] > 0, 0], size_px**2)
    y, x = np.divmod(places, size_px)
    joints[kinds] = np.column_stack([x, y, np.ones(len(x))])
    return joints


def _tile(
    image: npt.NDArray[np.float32], mask: npt.NDArray[np.float32], people: Sequence[Points], skeleton: Skeleton
) -> npt.NDArray[np.uint8]:
    """Draw people, in pixels of the map at 1/4, on a normalized image (S, S, 3); bytes of the tile size."""
    light = (0.35 + 0.65 * mask.repeat(STRIDES[0], axis=0).repeat(STRIDES[0], axis=1))[..., None]
    rgb = (image * np.array(STD, np.float32) + np.array(MEAN, np.float32)) * 255 * light
    small = Image.fromarray(rgb.clip(0, 255).round().astype(np.uint8)).resize((PANEL_PX, PANEL_PX))
    placed = [_scaled(person, PANEL_PX / len(mask)) for person in people]
    return np.asarray(draw_people(small, placed, skeleton))


def _sure(people: Sequence[Points]) -> list[Points]:
    """Remove joints with a low score, and then people with too few joints."""
    sure = [np.where(person[:, 2:] >= MIN_JOINT_SCORE, person, 0.0) for person in people]
    return [person for person in sure if np.count_nonzero(person[:, 2]) >= MIN_JOINTS]


def _warm(image: Image.Image, heat: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Draw the heatmap in warm colors over the image in dark gray."""
    glow = np.asarray(Image.fromarray(heat).resize(image.size, Image.Resampling.BILINEAR), np.float32)[..., None] / 255
    dim = np.asarray(image.convert("L"), np.float32)[..., None] * 0.45
    hot = np.concatenate([np.minimum(1, 3 * glow), np.clip(3 * glow - 1, 0, 1), np.clip(3 * glow - 2, 0, 1)], axis=2)
    warm: npt.NDArray[np.uint8] = (dim * (1 - np.minimum(1, 2 * glow)) + 255 * hot).clip(0, 255).astype(np.uint8)
    return warm
