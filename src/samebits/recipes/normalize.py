"""Normalization of bytes: (byte / 255 - mean) / std, with the mean and standard deviation of ImageNet."""

import torch
from torch import Tensor

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def normalize(pixels: Tensor) -> Tensor:
    """Normalize (..., 3, H, W) uint8 (red, green, blue) to float32 of the same shape, on the same device."""
    mean = torch.tensor(MEAN, device=pixels.device).mul_(255).view(3, 1, 1)
    std = torch.tensor(STD, device=pixels.device).mul_(255).view(3, 1, 1)
    return pixels.to(torch.float32).sub_(mean).div_(std)
