"""Small networks with what makes exactness hard, and the samples that they are trained on."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class WithBatchNorm(nn.Module):
    """Convolutions, batch norm, dropout, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(8, 6, 3, bias=False),
            nn.BatchNorm2d(6, momentum=None), nn.ReLU(), nn.Flatten(), nn.Dropout(0.4), nn.Linear(6 * 16, 5),
        )  # fmt: skip
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class WithGaps(nn.Module):
    """One part is frozen, one is never used, one is used in some micro-batches only, and weights are tied."""

    averaged_buffers = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 64, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(7, 7)
        self.sometimes = nn.Linear(7, 7)
        self.head = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.head.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int32))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        hidden = self.frozen(torch.tanh(self.first(inputs.flatten(1))))
        if inputs.sum() > 0:
            hidden = hidden + self.sometimes(hidden)
        return self.tied(torch.tanh(self.head(hidden)))


class Sometimes(nn.Module):
    """One part is used in some micro-batches only; another is an LSTM, over a picture's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = UnmovedLSTM(24, 8, batch_first=True)
        self.sometimes = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        self.rows.is_in_use = True
        hidden = self.rows(inputs.transpose(1, 2).flatten(2))[0][:, -1]
        if inputs.sum() > 0:
            hidden = hidden + self.sometimes(hidden)
        return self.head(hidden)


class UnmovedLSTM(nn.LSTM):
    """Refuses to let cuDNN change the layout of its weights once it is in use."""

    is_in_use = False

    def flatten_parameters(self) -> None:
        assert not self.is_in_use, "cuDNN would take the weights to memory of its own"


class Plain(nn.Module):
    """No batch norm and no dropout: its gradient is the same however a step is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class PartingWays(nn.Module):
    """Some samples pass its batch norm, and others don't."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs if inputs[0, 0, 0, 0] > 99 else self.norm(outputs)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": WithBatchNorm, "synchronized": WithBatchNorm, "parting ways": PartingWays, "gaps": WithGaps,
    "plain": Plain,
}  # fmt: skip


def make(name: str) -> nn.Module:
    """A network, drawn the same everywhere."""
    torch.manual_seed(0)
    return NETWORKS[name]().train()


def samples(num: int) -> tuple[Tensor, Tensor]:
    """(num, 3, 8, 8) inputs and (num,) labels below 5."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, 3, 8, 8, generator=generator), torch.randint(5, (num,), generator=generator)


def mean_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the samples."""
    return F.cross_entropy(model(inputs), labels)
