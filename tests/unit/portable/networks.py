"""Small networks of many kinds of layers, trained for three steps in portable arithmetic; prints the hash of each.

python -m tests.unit.portable.networks [THREADS]
"""

import hashlib
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits.portable.arithmetic import portable_arithmetic


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(7, 12), nn.LSTM(12, 8, bidirectional=True, batch_first=True)
        self.gru, self.head = nn.GRU(16, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(self.embed(words))[0])[0]).mean(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 4, 4)
        layer = nn.TransformerEncoderLayer(24, 3, 32, activation="gelu", batch_first=True, dropout=0.1)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.AvgPool2d(3, 2, 1))
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 3, 2, 1, output_padding=1), nn.BatchNorm2d(8), nn.Sigmoid())
        self.depthwise, self.head = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = self.depthwise(self.up(self.down(x)))
        wide = F.interpolate(low, scale_factor=2, mode="bilinear") + F.interpolate(low, scale_factor=2)
        return self.head(F.adaptive_avg_pool2d(wide.tanh(), 3)).mean((2, 3))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(16, 64, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(64, 64, 3, 2, 1), nn.Softplus(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(1024, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5),
    )  # fmt: skip


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer]]] = {
    "residual": (residual, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, fused=True)),
    "recurrent": (Recurrent, lambda p: torch.optim.Adam(p, 0.01, fused=True)),
    "attention": (Attention, lambda p: torch.optim.AdamW(p, 0.01, fused=True)),
    "decoder": (Decoder, lambda p: torch.optim.SGD(p, 0.05, weight_decay=1e-4, fused=True)),
}


def train(kind: str) -> str:
    """Train three steps; the SHA-256 of weights and buffers, 16 digits."""
    make, optimizer = KINDS[kind]
    torch.manual_seed(0)
    model = make()
    update = optimizer(model.parameters())
    for _ in range(3):
        x = torch.randint(0, 7, (16, 9)) if kind == "recurrent" else torch.randn(16, 3, 16, 16)
        loss = F.cross_entropy(model(x), torch.randint(0, 5, (16,)), label_smoothing=0.1)
        update.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        update.step()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    with portable_arithmetic():
        for each in KINDS:
            print(each, train(each))
