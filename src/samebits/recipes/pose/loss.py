"""The training loss: squared error of heatmaps, and the push and pull losses of tags.

Tags: Newell, Huang and Deng, "Associative embedding", NeurIPS 2017, in the form of the HigherHRNet authors'
implementation. Everything is computed in float32, whatever the network computes in.

Legend: N images, K joints, P rows for people (most of them empty), h and w height and width of a map.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from samebits.data.samples import Batch
from samebits.recipes.pose.config import LossConfig


def pose_loss(outputs: Sequence[Tensor], batch: Batch, *, config: LossConfig) -> Mapping[str, Tensor]:
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
        terms[f"heatmap{stage}"] = factor * heatmap_loss(found, targets["heatmaps"][stage], targets["masks"][stage])
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
