"""The text recipe: the parts that the engine trains, from the settings."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from samebits.data.names import overlap_rows
from samebits.data.opencv import check_portable
from samebits.data.samples import Batch, Samples
from samebits.data.sources.plain_text import escape_invisible
from samebits.engine.parts import Parts
from samebits.metrics.text import TextMetric
from samebits.module.freeze import freeze
from samebits.recipes.results import ByteArray, Tiles, draw_samples, draw_worst, gray_tiles
from samebits.recipes.text.alphabet import BLANK, Alphabet
from samebits.recipes.text.config import HEIGHT_PX, Config, DataConfig
from samebits.recipes.text.data import LineImages, ground_truths
from samebits.recipes.text.decode import read
from samebits.recipes.text.files import SelectedLines, check_images, choose, find_alphabet
from samebits.recipes.text.labels import padded_row
from samebits.recipes.text.loss import ctc
from samebits.recipes.text.model import build_model
from samebits.recipes.text.predict import draw_prediction, read_line, to_prediction
from samebits.storage.pretrained import load_pretrained

_SHEET: dict[str, Any] = {"num_columns": 3, "tile_px": (320, 2 * HEIGHT_PX)}


def dataset_info(config: Config) -> Mapping[str, Any]:
    """Find the alphabet, check that all images exist, and count the lines left out.

    Raises:
        DataError: Labels can't be found or read, or images are missing.
    """
    alphabet = find_alphabet(config.data)
    for name in config.data.eval_sets:
        check_images(choose(_with_set(config, name), alphabet, train=False))
    splits = {"training": choose(config, alphabet, train=True), "validation": choose(config, alphabet, train=False)}
    for lines in splits.values():
        check_images(lines)
    return {
        "alphabet": alphabet.characters,
        "left_out": _left_out(splits),
        "padded": "\n".join(dict.fromkeys(filter(None, (padded_row(lines.labels) for lines in splits.values())))),
        "warnings": overlap_rows(splits["training"].names(), splits["validation"].names()),
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
    freeze(model, config.model.freeze)
    read_texts = partial(read, alphabet=alphabet, beam_width=config.decode.beam_width)
    widths = config.data.widths
    shown = str(widths[0]) if len(widths) == 1 else f"{len(widths)} widths from {widths[0]} to {widths[-1]}"
    seen = "".join(sign for sign in alphabet.characters[:20] if escape_invisible(sign) == sign)
    unseen = [text for sign in alphabet.characters if (text := escape_invisible(sign)) != sign]
    named = f"; invisible: {' '.join(unseen[:20])}" if unseen else ""
    weights = config.model.weights
    tiles = partial(_tiles, data=config.data, alphabet=alphabet)
    return Parts(
        model=model,
        loss=ctc,
        train_data=partial(_open_lines, config, alphabet, train=True),
        eval_data=partial(_open_lines, config, alphabet, train=False),
        eval_sets={
            name: partial(_open_lines, _with_set(config, name), alphabet, train=False) for name in config.data.eval_sets
        },
        metric=partial(TextMetric, read_texts, partial(ground_truths, alphabet=alphabet)),
        monitor=("line_accuracy", "max"),
        init_weights=None if weights is None else partial(load_pretrained, path=weights),
        preprocess=partial(read_line, config=config),
        postprocess=partial(to_prediction, alphabet=alphabet, config=config.decode),
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
            "alphabet": f"{len(alphabet):,} characters: {seen}{' ...' * (len(alphabet) > 20)}{named}",
            **({"left out": dataset_info["left_out"]} if dataset_info.get("left_out") else {}),
            **dataset_info.get("warnings", {}),
            **({"labels": dataset_info["padded"]} if dataset_info.get("padded") else {}),
        },
    )


def _tiles(batch: Batch, data: DataConfig, alphabet: Alphabet) -> Iterable[tuple[ByteArray, str]]:
    return zip(gray_tiles(batch, data.mean, data.std), ground_truths(batch, alphabet), strict=True)


def _draw_worst(metric: TextMetric, samples: Samples, folder: Path, *, tiles: Tiles) -> None:
    """Draw the lines with the most errors as `worst.png`, each with ground truth and prediction."""
    rows = metric.state()["worst"]
    worst = [(index, f"ground truth {truth}\nprediction {text or '(empty)'}") for _, index, truth, text in rows]
    if worst:
        title = "Validation lines with the most errors"
        draw_worst(title, worst, samples, folder / "worst.png", tiles=tiles, **_SHEET)


def _open_lines(config: Config, alphabet: Alphabet, *, train: bool) -> LineImages:
    return LineImages(choose(config, alphabet, train=train), config.data, train=train)


def _with_set(config: Config, name: str) -> Config:
    """Return settings in which a set of data.eval_sets is data.eval: all lines of its file."""
    data = config.data.model_copy(update={"eval": config.data.eval_sets[name], "val_fraction": None})
    return config.model_copy(update={"data": data})


def _left_out(parts: Mapping[str, SelectedLines]) -> str:
    lines = []
    for name, chosen in parts.items():
        counts = {
            "with characters that are not in the alphabet": chosen.num_unknown,
            "too long for their time steps": chosen.num_too_long,
        }
        parts_of_row = [f"{count:,} line{'s' if count > 1 else ''} {why}" for why, count in counts.items() if count]
        if chosen.labels.num_gaps:
            parts_of_row.append(f"{chosen.labels.num_gaps:,} index labels without a character")
        if parts_of_row:
            lines.append(f"{name}: {', '.join(parts_of_row)}")
    return "\n".join(lines)
