"""The pose recipe: the parts that the engine trains, from the settings."""

from functools import partial

from samebits.data.opencv import check_portable
from samebits.engine.parts import Parts
from samebits.recipes.normalize import MEAN, STD
from samebits.recipes.pose.coco_files import open_files, split_names
from samebits.recipes.pose.config import Config
from samebits.recipes.pose.data import EvalImages, TrainImages
from samebits.recipes.pose.drawing import PANEL_PX, draw_evaluation, draw_prediction, tiles
from samebits.recipes.pose.infer import make_infer, read_image, to_prediction
from samebits.recipes.pose.loss import pose_loss
from samebits.recipes.pose.metric import PoseMetric
from samebits.recipes.pose.model import HigherHRNet
from samebits.recipes.results import draw_samples
from samebits.storage.pretrained import load_pretrained

TITLES = {"coco": "COCO keypoints", "crowdpose": "CrowdPose"}


def build(config: Config) -> Parts:
    """Build the parts from the settings. Reads no data yet.

    Raises:
        ConfigError: `kernels` is portable, and images are not transformed portably here.
    """
    check_portable(config.kernels)
    skeleton = config.skeleton
    trained, validated = (set(split_names(config.data, train=train)) for train in (True, False))
    both = sorted((trained | ({"train", "val"} if "trainval" in trained else set())) & validated)
    model = HigherHRNet(config.model, skeleton.num_joints)
    weights = config.model.weights
    return Parts(
        model=model,
        loss=partial(pose_loss, config=config.loss),
        train_data=partial(_open, config, train=True),
        eval_data=partial(_open, config),
        eval_sets={name: partial(_open, config, split) for name, split in config.data.eval_sets.items()},
        metric=partial(PoseMetric, skeleton),
        monitor=("AP", "max"),
        init_weights=partial(load_pretrained, path=weights.expanduser()) if weights else None,
        infer=make_infer(config),
        preprocess=read_image,
        postprocess=to_prediction,
        draw=draw_evaluation,  # type: ignore[arg-type]  # it also uses EvalImages.rgb
        draw_prediction=partial(draw_prediction, skeleton=skeleton),
        draw_samples=partial(draw_samples, tiles=partial(tiles, skeleton=skeleton), tile_px=(PANEL_PX, PANEL_PX)),
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


def _open(config: Config, split: str | None = None, *, train: bool = False) -> TrainImages | EvalImages:
    """Open the images of a split; None: that of the settings."""
    data = config.data if split is None else config.data.model_copy(update={"eval": split})
    source = open_files(data, train=train)
    if not train:
        return EvalImages(source)
    return TrainImages(source, data, channels_last=config.channels_last)
