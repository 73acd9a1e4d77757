"""The text recipe: the parts that the engine trains, from the settings."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samebits.data.keyed import IntArray, KeyArray
from samebits.data.names import overlap_rows
from samebits.data.opencv import check_portable
from samebits.data.samples import Batch, Samples
from samebits.data.sources.plain_text import escape_invisible
from samebits.engine.parts import Parts
from samebits.metrics.text import TextMetric
from samebits.recipes.backbones import (
    Pyramid,
    freeze_parts,
    frozen_row,
    initial_weights,
    published_info,
)
from samebits.recipes.results import ByteArray, Tiles, draw_samples, draw_worst, gray_tiles
from samebits.recipes.text.alphabet import BLANK, Alphabet
from samebits.recipes.text.config import HEIGHT_PX, Config, DataConfig, ModelConfig
from samebits.recipes.text.files import (
    SelectedLines,
    check_images,
    choose,
    find_alphabet,
    turned_rows,
)
from samebits.recipes.text.images import jitter_line, normalize, stretch
from samebits.recipes.text.labels import padded_row
from samebits.recipes.text.loss import ctc
from samebits.recipes.text.predict import draw_prediction, read, read_line, to_prediction

# Dataset of text lines: images with labels.
#
# Legend: N lines of a batch, H = 32 and W their height and width in pixels, L characters of the longest.


def targets(labels: Sequence[IntArray]) -> dict[str, Tensor]:
    """Collate N labels of (length,) classes: `classes` (N, L) int64, padded by 0, and `lengths` (N,)."""
    lengths = torch.tensor([len(label) for label in labels], dtype=torch.int64)
    classes = torch.zeros(len(labels), max(1, int(lengths.max())), dtype=torch.int64)
    for row, label in zip(classes, labels, strict=True):
        row[: len(label)] = torch.from_numpy(label)
    return {"classes": classes, "lengths": lengths}


def ground_truths(batch: Batch, alphabet: Alphabet) -> list[str]:
    """Decode the N labels of a batch."""
    pairs = zip(
        batch.targets["classes"].cpu().numpy(), batch.targets["lengths"].tolist(), strict=True
    )
    return [alphabet.decode(classes[:length]) for classes, length in pairs]


class LineImages(Samples):
    """Images in files or in LMDB, each stretched to the width of its group."""

    def __init__(self, chosen: SelectedLines, config: DataConfig, *, train: bool) -> None:
        self._chosen = chosen
        self._config = config
        self._jitter = config.jitter if train else 0.0
        #: (N,) width group of each line; None if there is one width. The lines of a batch share one group.
        self.groups: IntArray | None = chosen.groups
        labels = chosen.labels.path
        self.files = [labels / "data.mdb" if labels.is_dir() else labels]

    def __len__(self) -> int:
        return len(self._chosen.rows)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Load a batch: inputs (N, 1, 32, W) float32, targets as `targets` returns them."""
        # A sheet of training samples may mix groups: all lines then have the largest width.
        width_px = self._config.widths[
            0 if self.groups is None else int(self.groups[indices].max())
        ]
        images = []
        for index, key in zip(indices.tolist(), keys.tolist(), strict=True):
            image = self._chosen.image(index)
            if self._jitter:
                rng = np.random.default_rng(key)
                images.append(jitter_line(image, width_px, self._jitter, rng))
            else:
                images.append(stretch(image, width_px))
        labels = [self._chosen.label(index) for index in indices.tolist()]
        inputs = normalize(images, self._config.mean, self._config.std)
        return Batch(inputs, targets(labels), torch.from_numpy(indices))


# Networks for text lines: convolutions, then LSTMs.
#
# Legend: N lines, V views of one line, H = 32 and W their height and width, T time steps, C classes, blank first.


class Reader(nn.Module):
    """Convolutions that reduce the height to one, then recurrent layers: (N, 1, 32, W) -> (N, T, C) logits.

    Args:
        cnn: (N, 1, 32, W) -> (N, F, 1, T).
        rnn: (N, T, F) -> (N, T, C).
    """

    def __init__(self, cnn: nn.Module, rnn: nn.Module) -> None:
        super().__init__()
        self.cnn = cnn
        self.rnn = rnn

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
        BidirectionalLSTM(8 * width, num_hidden, num_hidden),
        BidirectionalLSTM(num_hidden, num_hidden, num_classes),
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


def _convolution(
    num_in: int, num_out: int, kernel: tuple[int, int], **more: Any
) -> list[nn.Module]:
    convolution = nn.Conv2d(num_in, num_out, kernel, bias=False, **more)
    return [convolution, nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)]


class LineFeatures(nn.Module):
    """The merged feature maps of a network of timm, averaged over the height: (N, 1, 32, W) -> (N, F, 1, W // 4)."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.pyramid = Pyramid(name, width)

    def forward(self, lines: Tensor) -> Tensor:
        """(N, 1, 32, W) -> (N, F, 1, W // 4)."""
        features: Tensor = self.pyramid(lines.expand(-1, 3, -1, -1))
        return features.mean(dim=2, keepdim=True)


def build_model(config: ModelConfig, num_classes: int) -> Reader:
    """Build the network of the settings, on the CPU."""
    if config.is_timm:
        features = LineFeatures(config.name, config.width)
        return Reader(features, BidirectionalLSTM(config.width, config.num_hidden, num_classes))
    kind = {"crnn": crnn, "fast": fast}[config.name]
    return kind(num_classes, config.width, config.num_hidden)


_SHEET: dict[str, Any] = {"num_columns": 3, "tile_px": (320, 2 * HEIGHT_PX)}


def dataset_info(config: Config) -> Mapping[str, Any]:
    """Find the alphabet, check that all images exist, and count the lines left out.

    Raises:
        DataError: Labels can't be found or read, or images are missing.
    """
    alphabet = find_alphabet(config.data)
    for name in config.data.eval_sets:
        check_images(choose(_with_set(config, name), alphabet, train=False))
    splits = {
        "training": choose(config, alphabet, train=True),
        "validation": choose(config, alphabet, train=False),
    }
    for lines in splits.values():
        check_images(lines)
    return {
        **published_info(config.model.name, config.model.weights),
        "alphabet": alphabet.characters,
        "left_out": _left_out(splits),
        "padded": "\n".join(
            dict.fromkeys(filter(None, (padded_row(lines.labels) for lines in splits.values())))
        ),
        "warnings": {
            **overlap_rows(splits["training"].names(), splits["validation"].names()),
            **turned_rows(splits["training"]),
        },
    }


def build(config: Config, dataset_info: Mapping[str, Any]) -> Parts:
    """Build the parts from the settings. Reads no data yet.

    Raises:
        ConfigError: `model.freeze` matches no parameter, or `kernels` is portable, and images are not transformed
            portably here.
    """
    check_portable(config.kernels)
    alphabet = Alphabet(dataset_info["alphabet"])
    model = build_model(config.model, alphabet.num_classes)
    freeze_parts(model, config.model.freeze)
    read_texts = partial(read, alphabet=alphabet)
    widths = config.data.widths
    shown = (
        str(widths[0])
        if len(widths) == 1
        else f"{len(widths)} widths from {widths[0]} to {widths[-1]}"
    )
    unseen = [text for sign in alphabet.characters if (text := escape_invisible(sign)) != sign]
    named = f"; invisible: {' '.join(unseen[:20])}" if unseen else ""
    tiles = partial(_tiles, data=config.data, alphabet=alphabet)
    return Parts(
        model=model,
        loss=ctc,
        train_data=partial(_open_lines, config, alphabet, train=True),
        eval_data=partial(_open_lines, config, alphabet, train=False),
        eval_sets={
            name: partial(_open_lines, _with_set(config, name), alphabet, train=False)
            for name in config.data.eval_sets
        },
        metric=partial(TextMetric, read_texts, partial(ground_truths, alphabet=alphabet)),
        monitor=("line_accuracy", "max"),
        init_weights=initial_weights(config.model.weights, config.model.name, dataset_info),
        preprocess=partial(read_line, config=config),
        postprocess=partial(to_prediction, alphabet=alphabet),
        draw=partial(_draw_worst, tiles=tiles),
        draw_samples=partial(draw_samples, tiles=tiles, **_SHEET),
        draw_prediction=draw_prediction,
        input_shape=(1, HEIGHT_PX, widths[-1]),
        metadata={
            "alphabet": alphabet.characters,
            "blank": BLANK,
            "mean": config.data.mean,
            "std": config.data.std,
            "preprocess": {"colors": "gray", "resize_px": [HEIGHT_PX, widths[-1]]},
        },
        describe={
            "data": f"images of text lines, {shown} x {HEIGHT_PX} px",
            "model": config.model.name,
            "frozen": frozen_row(model, weights=config.model.weights),
            "alphabet": f"{len(alphabet):,} characters: {escape_invisible(alphabet.characters[:20])}"
            f"{' ...' * (len(alphabet) > 20)}{named}",
            "left out": dataset_info.get("left_out", ""),
            **dataset_info.get("warnings", {}),
            "labels": dataset_info.get("padded", ""),
        },
    )


def _tiles(batch: Batch, data: DataConfig, alphabet: Alphabet) -> Iterable[tuple[ByteArray, str]]:
    return zip(gray_tiles(batch, data.mean, data.std), ground_truths(batch, alphabet), strict=True)


def _draw_worst(metric: TextMetric, samples: Samples, folder: Path, *, tiles: Tiles) -> None:
    """Draw the lines with the most errors as `worst.png`, each with ground truth and prediction."""
    rows = metric.state()["worst"]
    worst = [
        (index, f"ground truth {truth}\nprediction {text or '(empty)'}")
        for _, index, truth, text in rows
    ]
    if worst:
        title = "Validation lines with the most errors"
        draw_worst(title, worst, samples, folder / "worst.png", tiles=tiles, **_SHEET)


def _open_lines(config: Config, alphabet: Alphabet, *, train: bool) -> LineImages:
    return LineImages(choose(config, alphabet, train=train), config.data, train=train)


def _with_set(config: Config, name: str) -> Config:
    """Return settings in which a set of data.eval_sets is data.eval: all lines of its file."""
    data = config.data.model_copy(
        update={"eval": config.data.eval_sets[name], "val_fraction": None}
    )
    return config.model_copy(update={"data": data})


def _left_out(parts: Mapping[str, SelectedLines]) -> str:
    lines = []
    for name, chosen in parts.items():
        counts = (
            (chosen.num_unknown, "with characters that are not in the alphabet"),
            (chosen.num_too_long, "too long for their time steps"),
        )
        parts_of_row = [
            f"{count:,} line{'s' if count > 1 else ''} {why}" for count, why in counts if count
        ]
        if chosen.labels.num_gaps:
            parts_of_row.append(f"{chosen.labels.num_gaps:,} index labels without a character")
        if parts_of_row:
            lines.append(f"{name}: {', '.join(parts_of_row)}")
    return "\n".join(lines)
