"""The text recipe: the parts that the engine trains, from the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from samebits.data.names import overlap_rows
from samebits.data.sources.plain_text import escape_invisible
from samebits.engine.parts import Parts
from samebits.metrics.text import TextMetric
from samebits.module.freeze import freeze
from samebits.recipes.text.alphabet import BLANK, Alphabet
from samebits.recipes.text.config import HEIGHT_PX, Config
from samebits.recipes.text.data import LineImages, ground_truths
from samebits.recipes.text.decode import read
from samebits.recipes.text.drawing import draw_samples, draw_worst
from samebits.recipes.text.files import SelectedLines, check_images, choose, find_alphabet
from samebits.recipes.text.labels import padded_row
from samebits.recipes.text.loss import ctc
from samebits.recipes.text.model import build_model
from samebits.recipes.text.predict import draw_prediction, read_line, to_prediction
from samebits.storage.pretrained import load_pretrained


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
        ConfigError: `model.freeze` matches no parameter.
    """
    alphabet = Alphabet(dataset_info["alphabet"])
    model = build_model(config.model, alphabet.num_classes)
    freeze(model, config.model.freeze)
    read_texts = partial(read, alphabet=alphabet, beam_width=config.decode.beam_width)
    widths = config.data.widths
    shown = str(widths[0]) if len(widths) == 1 else f"{len(widths)} widths from {widths[0]} to {widths[-1]}"
    weights = config.model.weights
    return Parts(
        model=model,
        loss=ctc,
        train_data=partial(_open_lines, config, alphabet, train=True),
        eval_data=partial(_open_lines, config, alphabet, train=False),
        eval_sets={name: partial(_open_set, config, alphabet, name) for name in config.data.eval_sets},
        metric=partial(TextMetric, read_texts, partial(ground_truths, alphabet=alphabet)),
        monitor=("line_accuracy", "max"),
        init_weights=None if weights is None else partial(load_pretrained, path=weights),
        preprocess=partial(read_line, config=config),
        postprocess=partial(to_prediction, alphabet=alphabet, config=config.decode),
        draw=partial(draw_worst, data=config.data),
        draw_samples=partial(draw_samples, data=config.data, read_truths=partial(ground_truths, alphabet=alphabet)),
        draw_prediction=draw_prediction,
        input_shape=(1, HEIGHT_PX, config.data.widths[-1]),
        metadata=_metadata(config, alphabet),
        describe={
            "data": f"images of text lines, {shown} x {HEIGHT_PX} px",
            "model": config.model.name,
            "alphabet": f"{len(alphabet):,} characters: {_shortened(alphabet.characters)}",
            **({"left out": dataset_info["left_out"]} if dataset_info.get("left_out") else {}),
            **dataset_info.get("warnings", {}),
            **({"labels": dataset_info["padded"]} if dataset_info.get("padded") else {}),
        },
    )


def _metadata(config: Config, alphabet: Alphabet) -> Mapping[str, Any]:
    data = config.data
    steps = {"colors": "gray", "resize_px": [HEIGHT_PX, data.widths[-1]]}
    return {
        "alphabet": alphabet.characters,
        "blank": BLANK,
        "mean": data.mean,
        "std": data.std,
        "preprocess": steps,
    }


def _open_lines(config: Config, alphabet: Alphabet, *, train: bool) -> LineImages:
    return LineImages(choose(config, alphabet, train=train), config.data, train=train)


def _open_set(config: Config, alphabet: Alphabet, name: str) -> LineImages:
    """Open a set of data.eval_sets: all lines of its file, like a data.eval of that name."""
    config = _with_set(config, name)
    return LineImages(choose(config, alphabet, train=False), config.data, train=False)


def _with_set(config: Config, name: str) -> Config:
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


def _shortened(characters: Sequence[str]) -> str:
    unseen = [shown for sign in characters if (shown := escape_invisible(sign)) != sign]
    first = "".join(sign for sign in characters[:20] if escape_invisible(sign) == sign)
    named = f"; invisible: {' '.join(unseen[:20])}" if unseen else ""
    return first + (" ..." if len(characters) > 20 else "") + named
