"""A synthetic dataset of text lines on disk: images, labels and the alphabet."""

from __future__ import annotations

import shlex
from pathlib import Path

from PIL import Image

from samebits.data.keyed import DATA, key
from samebits.errors import DataError
from samebits.recipes.text.alphabet import Alphabet, read_alphabet
from samebits.recipes.text.config import LATIN, MakeConfig
from samebits.recipes.text.data import TRAINING, VALIDATION
from samebits.recipes.text.fonts import find_fonts, split_fonts
from samebits.recipes.text.lines import LineRenderer

_PER_FOLDER = 10_000  # file systems are slow with more files in a folder


def make(config: MakeConfig, out: Path) -> str:
    """Write `train.tsv`, with `num_eval` also `val.tsv` in unseen fonts, `alphabet.txt` and the images.

    Args:
        config: Number and appearance of the lines.
        out: An empty folder.

    Returns:
        A summary for the user, with the command that trains on it.

    Raises:
        DataError: There are no fonts, too few for a split, or the alphabet can't be read.
    """
    alphabet = Alphabet(LATIN) if config.alphabet is None else read_alphabet(config.alphabet)
    seen, unseen = split_fonts(find_fonts(config.fonts, alphabet.characters), config.unseen if config.num_eval else 0.0)
    if config.num_eval and not unseen:
        raise DataError(
            f"num_eval={config.num_eval} requires at least two fonts, because validation lines are in unseen fonts",
            fix="Add fonts, or set num_eval=0.",
        )
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
    validation = f"data.eval={out / 'val.tsv'}" if config.num_eval else "data.val_fraction=0.1"
    settings = [f"data.train={out / 'train.tsv'}", validation, f"data.alphabet={out / 'alphabet.txt'}"]
    others = f", {config.num_eval:,} in {len(unseen)} others" if config.num_eval else ""
    return f"{config.num:,} lines in {len(seen)} fonts{others}\n{shlex.join(['samebits', 'train', 'text', *settings])}"


def _write(maker: LineRenderer, out: Path, name: str, number: int, seed: int, purpose: int) -> str:
    """Write the image of a line, and return its line of the label file."""
    image, text = maker.line(key(seed, DATA, number), purpose)
    file = Path(name, f"{number // _PER_FOLDER:03d}", f"{number:07d}.png")
    (out / file).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(out / file)
    return f"{file}\t{text}\n"
