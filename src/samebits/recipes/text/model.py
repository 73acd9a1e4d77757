"""Networks for text lines: convolutions, then LSTMs.

Legend: N lines, V views of one line, H = 32 and W their height and width, T time steps, C classes, blank first.
"""

from typing import Any

from torch import Tensor, nn

from samebits.recipes.text.config import ModelConfig


class Reader(nn.Module):
    """Convolutions that reduce the height to one, then recurrent layers: (N, 1, 32, W) -> (N, T, C) logits.

    Args:
        cnn: (N, 1, 32, W) -> (N, F, 1, T).
        rnn: (N, T, F) -> (N, T, C).
    """

    def __init__(self, cnn: nn.Module, rnn: nn.Module) -> None:
        super().__init__()
        self.cnn, self.rnn = cnn, rnn

    def forward(self, lines: Tensor) -> Tensor:
        """Compute (N, T, C) logits of (N, 1, 32, W), or (N, V, T, C) of V views per line, (N, V, 1, 32, W)."""
        if lines.dim() == 5:
            logits: Tensor = self(lines.flatten(0, 1))
            return logits.view(*lines.shape[:2], *logits.shape[1:])
        features = self.cnn(lines).squeeze(2)
        read: Tensor = self.rnn(features.transpose(1, 2))
        return read


class BidirectionalLSTM(nn.Module):
    """An LSTM in both directions and a linear layer on both: (N, T, F) -> (N, T, num_out).

    Args:
        num_hidden: Hidden values of the LSTM, in each direction.
    """

    def __init__(self, num_in: int, num_hidden: int, num_out: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(num_in, num_hidden, bidirectional=True, batch_first=True)
        self.embedding = nn.Linear(2 * num_hidden, num_out)

    def forward(self, features: Tensor) -> Tensor:
        """(N, T, F) -> (N, T, num_out)."""
        hidden, _ = self.rnn(features)
        out: Tensor = self.embedding(hidden)
        return out


def crnn(num_classes: int, width: int = 64, num_hidden: int = 256) -> Reader:
    """Build CRNN (Shi, Bai and Yao, 2015, table 1) with the tensor names of the reference implementation.

    11,767,888 parameters at 6,736 classes; T = W // 4 + 1.

    Args:
        width: Channels of the first convolution; 64 in the paper.
        num_hidden: Hidden size of each LSTM, per direction.
    """
    channels = [width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width, 8 * width]
    cnn = nn.Sequential()
    for index, (num_in, num_out) in enumerate(zip([1, *channels], channels, strict=False)):
        is_last = index == 6
        convolution = nn.Conv2d(num_in, num_out, 2 if is_last else 3, padding=0 if is_last else 1)
        nn.init.normal_(convolution.weight, 0.0, 0.02)
        cnn.add_module(f"conv{index}", convolution)
        if index in (2, 4, 6):
            norm = nn.BatchNorm2d(num_out)
            nn.init.normal_(norm.weight, 1.0, 0.02)
            cnn.add_module(f"batchnorm{index}", norm)
        cnn.add_module(f"relu{index}", nn.ReLU(inplace=True))
        if index in (0, 1):
            cnn.add_module(f"pooling{index}", nn.MaxPool2d(2, 2))
        elif index in (3, 5):  # halves the height, and adds one to the width
            cnn.add_module(f"pooling{(index + 1) // 2}", nn.MaxPool2d((2, 2), (2, 1), (0, 1)))
    rnn = nn.Sequential(
        BidirectionalLSTM(8 * width, num_hidden, num_hidden), BidirectionalLSTM(num_hidden, num_hidden, num_classes)
    )
    return Reader(cnn, rnn)


def fast(num_classes: int, width: int = 24, num_hidden: int = 96) -> Reader:
    """Build a network for CPUs: early strides, batch norm after each convolution, one recurrent layer. T = W // 4.

    Args:
        width: Channels of the first convolution; the later ones have 2, 4, 4, 4 and 8 times as many.
        num_hidden: Hidden size of the LSTM, per direction.
    """
    cnn = nn.Sequential(
        *_convolution(1, width, (3, 3), stride=(2, 2), padding=(1, 1)),  # 16 x W / 2
        *_convolution(width, 2 * width, (3, 3), padding=(1, 1)),
        nn.MaxPool2d(2, 2),  # 8 x W / 4
        *_convolution(2 * width, 4 * width, (3, 3), padding=(1, 1)),
        nn.MaxPool2d((2, 1), (2, 1)),  # 4 x W / 4
        *_convolution(4 * width, 4 * width, (3, 3), padding=(1, 1)),
        *_convolution(4 * width, 4 * width, (3, 3), padding=(1, 1)),
        *_convolution(4 * width, 8 * width, (4, 3), padding=(0, 1)),  # 1 x W / 4
    )
    return Reader(cnn, BidirectionalLSTM(8 * width, num_hidden, num_classes))


def _convolution(num_in: int, num_out: int, kernel: tuple[int, int], **more: Any) -> list[nn.Module]:
    convolution = nn.Conv2d(num_in, num_out, kernel, bias=False, **more)
    return [convolution, nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)]


def build_model(config: ModelConfig, num_classes: int) -> Reader:
    """Build the network of the settings, on the CPU."""
    kind = {"crnn": crnn, "fast": fast}[config.name]
    return kind(num_classes, config.width, config.num_hidden)
