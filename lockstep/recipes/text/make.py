"""A training set of synthetic lines on disk: images, labels and the alphabet."""

from __future__ import annotations

import shlex
from pathlib import Path

from PIL import Image

from lockstep.data.keyed import DATA, key
from lockstep.errors import DataError
from lockstep.recipes.text.alphabet import Alphabet, read_alphabet
from lockstep.recipes.text.config import LATIN, MakeConfig
from lockstep.recipes.text.data import TRAINING, VALIDATION
from lockstep.recipes.text.fonts import find_fonts, split_fonts
from lockstep.recipes.text.lines import LineRenderer

_PER_FOLDER = 10_000  # file systems and people are slow with more


def make(config: MakeConfig, out: Path) -> str:
    """Write `train.tsv`, with `num_eval` also `val.tsv` in fonts of its own, `alphabet.txt` and the images.

    Args:
        config: How many lines, and how they look.
        out: An empty folder.

    Returns:
        What there is now, and how to train on it.

    Raises:
        DataError: There are no fonts, or not two to tell apart, or the alphabet cannot be read.
    """
    alphabet = Alphabet(LATIN) if config.alphabet is None else read_alphabet(config.alphabet)
    seen, unseen = split_fonts(find_fonts(config.fonts, alphabet.characters), config.unseen if config.num_eval else 0.0)
    if config.num_eval and not unseen:
        raise DataError("num_eval needs two fonts at least: validation lines are in fonts of their own")
    (out / "alphabet.txt").write_text(alphabet.characters + "\n", encoding="utf-8")
    parts = [("train", config.num, seen, TRAINING), ("val", config.num_eval, unseen, VALIDATION)]
    for name, num_lines, fonts, purpose in parts:
        if not num_lines:
            continue
        maker = LineRenderer(
            fonts=fonts,
            characters=alphabet.characters,
            min_length=config.min_length,
            max_length=config.max_length,
            style=config.style,
            height_px=config.height_px,
        )
        labels = [_write(maker, out, name, number, config.seed, purpose) for number in range(num_lines)]
        (out / f"{name}.tsv").write_text("".join(labels), encoding="utf-8")
    held_out = f"data.eval={out / 'val.tsv'}" if config.num_eval else "data.val_fraction=0.1"
    words = [f"data.train={out / 'train.tsv'}", held_out, f"data.alphabet={out / 'alphabet.txt'}"]
    evaluated = f", {config.num_eval:,} in {len(unseen)} others" if config.num_eval else ""
    return f"{config.num:,} lines in {len(seen)} fonts{evaluated}\n{shlex.join(['lockstep', 'train', 'text', *words])}"


def _write(maker: LineRenderer, out: Path, name: str, number: int, seed: int, purpose: int) -> str:
    """Draw a line into its file; gives its line of labels."""
    picture, text = maker.line(key(seed, DATA, number), purpose)
    file = Path(name, f"{number // _PER_FOLDER:03d}", f"{number:07d}.png")
    (out / file).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(out / file)
    return f"{file}\t{text}\n"
