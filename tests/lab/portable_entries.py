"""How many entries of the factors of products a grid of 20 bits loses, in a step of five networks.

    python -m tests.lab.portable_entries

An entry is lost if it is not zero and below half of 2**-20 of the largest one of its grid. The last columns are the
largest share of lost entries of one factor, and the share of the sum of magnitudes that all lost entries have.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

from samebits.portable import convolution, products
from samebits.portable.arithmetic import portable_arithmetic
from samebits.portable.grid import grid
from tests.unit.portable.networks import KINDS


class Counted:
    """`grid`, which counts what it loses."""

    def __init__(self) -> None:
        self.entries = self.lost = 0
        self.worst = self.size = self.lost_size = 0.0

    def __call__(self, x: Tensor, bits: int, dims: range) -> tuple[Tensor, Tensor]:
        up, down = grid(x, bits, dims)
        is_lost = (x != 0) & ((x * up).round() == 0)
        entries, lost = int((x != 0).sum()), int(is_lost.sum())
        self.entries, self.lost = self.entries + entries, self.lost + lost
        self.worst = max(self.worst, lost / max(entries, 1))
        self.size += x.abs().double().sum().item()
        self.lost_size += x[is_lost].abs().double().sum().item()
        return up, down


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """The networks, with an input of each."""
    vit = models.VisionTransformer(32, 8, 3, 4, 64, 128, num_classes=10)
    return {
        "ResNet-18, 64 px": (models.resnet18(num_classes=10), torch.randn(4, 3, 64, 64)),
        "ViT, 32 px": (vit, torch.randn(16, 3, 32, 32)),
        "MobileNetV3 small, 64 px": (models.mobilenet_v3_small(num_classes=10), torch.randn(4, 3, 64, 64)),
        "decoder": (KINDS["decoder"][0](), torch.randn(16, 3, 32, 32)),
        "recurrent": (KINDS["recurrent"][0](), torch.randint(0, 7, (16, 9))),
    }


def main() -> None:
    print("| network | entries | lost | worst factor | share of the magnitudes |\n|---|---|---|---|---|")
    torch.manual_seed(0)
    for name, (model, x) in networks().items():
        counted = Counted()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True)
        convolution.grid = products.grid = counted  # type: ignore[assignment]
        with portable_arithmetic():
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(x), torch.arange(len(x)) % 5).backward()
                optimizer.step()
        lost, size = counted.lost / counted.entries, counted.lost_size / counted.size
        print(f"| {name} | {counted.entries:,} | {lost:.1e} | {counted.worst:.1e} | {size:.1e} |", flush=True)


if __name__ == "__main__":
    main()
