"""The training loss: heatmaps' squared error, and tags that are alike in a person and differ between people.

Tags: Newell, Huang and Deng, "Associative embedding", NeurIPS 2017, in the form of the HigherHRNet authors'
implementation. Everything is computed in float32, whatever the network computes in.

Legend: N images, K joints, T maps of tags (K, or 1), P people (room for them; most rows are empty), h and w a map's
height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from lockstep.data.samples import Batch
from lockstep.recipes.pose.config import LossConfig


def pose_loss(outputs: Sequence[Tensor], batch: Batch, *, config: LossConfig) -> Mapping[str, Tensor]:
    """The terms of the loss, factors applied, each a mean over the images.

    Args:
        outputs: (N, K + T, h, w) and (N, K, 2h, 2w), as the network gives them.
        batch: Its targets: `heatmaps` and `masks` for both sizes, and the `index` of the joints at 1/4, as `targets`
            makes them.
        config: The factors.

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
    """Squared error, its mean over images, joints and all pixels.

    Args:
        found: (N, K, h, w).
        expected: (N, K, h, w).
        mask: (N, h, w), 0 where nothing counts. The mean is over these pixels too.
    """
    return ((found.float() - expected).square() * mask.unsqueeze(1)).mean()


def tag_loss(tags: Tensor, index: Tensor, *, form: Literal["exp", "max"]) -> tuple[Tensor, Tensor]:
    """How alike different people's tags are, and how different the tags of one person.

    Args:
        tags: (N, T, h, w).
        index: (N, P, K, 2) int64: where a person's joints lie in an image's flattened tags, and 1 where there is such
            a joint, else 0. A person without any does not count.
        form: Push of two people whose mean tags are d apart: "exp", exp(-d^2); "max", max(0, 1 - d).

    Returns:
        push: (N,) half of its mean over all pairs; 0 where there are fewer than two people.
        pull: (N,) squared distance to the person's mean tag, its mean over joints, then over people; 0 without people.
    """
    num_pictures = len(tags)
    flat = tags.float().reshape(num_pictures, -1)
    rows = torch.arange(num_pictures, device=tags.device).view(-1, 1, 1)
    # Indexing, not gather: people may share a pixel, and the gradient of indexing adds what falls on one place in a
    # fixed order when torch is told to be deterministic, on GPUs too.
    values = flat[rows, index[..., 0]]
    weights = index[..., 1].float()
    num_joints = weights.sum(dim=2)
    exists = (num_joints > 0).float()
    means = (values * weights).sum(dim=2) / num_joints.clamp(min=1)
    spread = ((values - means.unsqueeze(2)).square() * weights).sum(dim=2) / num_joints.clamp(min=1)
    num_people = exists.sum(dim=1)
    pull = spread.sum(dim=1) / num_people.clamp(min=1)

    distances = means.unsqueeze(1) - means.unsqueeze(2)
    alike = torch.exp(-distances.square()) if form == "exp" else (1 - distances.abs()).clamp(min=0)
    pairs = exists.unsqueeze(1) * exists.unsqueeze(2)
    # Everybody is like themselves: num_people ones are on the diagonal.
    total = (alike * pairs).sum(dim=(1, 2)) - num_people
    push = 0.5 * total / (num_people * (num_people - 1)).clamp(min=1)
    return push, pull
