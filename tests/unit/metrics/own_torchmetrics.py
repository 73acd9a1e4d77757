"""Metrics derived from torchmetrics' class, which takes seconds to import."""

import torch
from torchmetrics import Metric, MetricCollection, PearsonCorrCoef, classification


class Scaled(Metric):  # type: ignore[misc]
    """Sums of floats of very different sizes, whose rounding depends on the order of the sum."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(2), dist_reduce_fx="sum")
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        scale = 10.0 ** (targets[0] * 4 - 6)
        self.total += torch.stack([outputs.sum() * scale, outputs.square().sum()])
        self.largest = torch.maximum(self.largest, outputs.max())

    def compute(self) -> dict[str, torch.Tensor]:
        return {"first": self.total[0], "second": self.total[1], "largest": self.largest}


class Mean(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")


class Offset(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("offset", torch.ones(()), dist_reduce_fx="sum")


class Whole(Scaled):
    full_state_update = True


class Count(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.count = self.count + len(outputs)

    def compute(self) -> torch.Tensor:
        return self.count


REFUSED = {
    "list": classification.BinaryAUROC, "mean": Mean, "offset": Offset, "full state": Whole,
    "no reduction": PearsonCorrCoef, "composed": lambda: Scaled() + Scaled(),
}  # fmt: skip
NAMED = {
    "a function": classification.BinaryAccuracy,
    "an object": classification.BinaryAccuracy(),
    "a collection": lambda: MetricCollection([classification.BinaryAccuracy()], prefix="val_"),
}


def several(num_classes: int) -> dict[str, Metric]:
    """Metrics of integer counts, of float sums, and of maxima."""
    return {
        "accuracy": classification.MulticlassAccuracy(num_classes, average="micro"),
        "f1": classification.MulticlassF1Score(num_classes, average=None),
        "auroc": classification.MulticlassAUROC(num_classes, thresholds=20),
        "scaled": Scaled(),
    }
