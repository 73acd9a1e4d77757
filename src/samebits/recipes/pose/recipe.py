"""The pose recipe: the parts that the engine trains, from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import nn

from samebits.engine.parts import Parts
from samebits.recipes.normalize import MEAN, STD
from samebits.recipes.pose.coco_files import open_files, split_names
from samebits.recipes.pose.config import Config
from samebits.recipes.pose.data import EvalImages, TrainImages
from samebits.recipes.pose.drawing import draw_evaluation, draw_prediction, draw_samples
from samebits.recipes.pose.infer import make_infer, read_image, to_prediction
from samebits.recipes.pose.loss import pose_loss
from samebits.recipes.pose.metric import PoseMetric
from samebits.recipes.pose.model import HigherHRNet
from samebits.storage.pretrained import load_pretrained

TITLES = {"coco": "COCO keypoints", "crowdpose": "CrowdPose"}


def build(config: Config) -> Parts:
    """Build the parts from the settings. Reads no data yet."""
    skeleton = config.skeleton
    trained, validated = (set(split_names(config.data, train=train)) for train in (True, False))
    both = sorted((trained | ({"train", "val"} if "trainval" in trained else set())) & validated)
    model = HigherHRNet(config.model, skeleton.num_joints)
    return Parts(
        model=model,
        loss=partial(pose_loss, config=config.loss),
        train_data=partial(open_train_images, config),
        eval_data=partial(open_eval_images, config),
        eval_sets={name: partial(_open_set, config, split) for name, split in config.data.eval_sets.items()},
        metric=partial(PoseMetric, skeleton),
        monitor=("AP", "max"),
        init_weights=partial(load_weights, path=config.model.weights) if config.model.weights else None,
        infer=make_infer(config),
        preprocess=read_image,
        postprocess=to_prediction,
        draw=draw_evaluation,  # type: ignore[arg-type]  # it also uses EvalImages.rgb
        draw_prediction=partial(draw_prediction, skeleton=skeleton),
        draw_samples=partial(draw_samples, skeleton=skeleton),
        input_shape=(3, config.data.size_px, config.data.size_px),
        metadata={
            "skeleton": {"joints": skeleton.joints, "limbs": skeleton.limbs},
            "mean": MEAN,
            "std": STD,
            "preprocess": {"colors": "RGB"},
        },
        describe={
            "data": f"{TITLES[config.data.name]}, {skeleton.num_joints} joints, {config.data.size_px} px",
            "model": f"HigherHRNet-W{config.model.width}",
            **({"validation": f"warning: {', '.join(both)} is trained on too"} if both else {}),
        },
    )


def open_train_images(config: Config) -> TrainImages:
    """Open the training images.

    Raises:
        DataError: Files are missing or invalid.
    """
    return TrainImages(
        open_files(config.data, train=True),
        config.data,
        tag_per_joint=config.model.tag_per_joint,
        channels_last=config.channels_last,
    )


def open_eval_images(config: Config) -> EvalImages:
    """Open the validation images.

    Raises:
        DataError: Files are missing or invalid.
    """
    return EvalImages(open_files(config.data, train=False))


def _open_set(config: Config, split: str) -> EvalImages:
    return EvalImages(open_files(config.data.model_copy(update={"eval": split}), train=False))


def load_weights(model: nn.Module, path: Path) -> Mapping[str, str]:
    """Load pretrained weights: of a HigherHRNet, or of a classifier with the same trunk (HRNet on ImageNet).

    Raises:
        CheckpointError: The file can't be read, or has no weights for this network.
    """
    return load_pretrained(model, path.expanduser())
