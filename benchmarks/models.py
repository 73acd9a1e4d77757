"""Rebuild the four models of docs/publish.md, and compare their hashes with the page.

    python -m benchmarks.models                                          digits and lines, which need no files
    python -m benchmarks.models mnist --mnist DIR
    python -m benchmarks.models flowers --flowers flower_photos          TensorFlow's folder, unpacked
    python -m benchmarks.models digits --procs 3                         any number of processes: the same hash
    python -m benchmarks.models lines --write                            train and write the page's line

Each model is trained in portable arithmetic in a temporary folder. Its line on the page has the digest of its data, so
that other data is told from another result. --runs DIR compares runs that exist (DIR/digits) instead of training.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from samebits.provenance.record import sha256_of_json
from samebits.provenance.run_files import RunFiles

PAGE = Path(__file__).resolve().parents[1] / "docs" / "publish.md"
CLASSES = ("daisy", "dandelion", "roses", "sunflowers", "tulips")
# The settings after `samebits train`, as on the page.
MODELS = {
    "digits": ["digits"],
    "mnist": ["mnist", "kernels=portable", "max_steps=40"],
    "flowers": ["classify", "data.root=flowers", "data.train_px=48", "data.size_px=64", "data.eval_resize_px=64",
                "epochs=4", "kernels=portable"],
    "lines": ["text", "data.train=lines/labels.tsv", "data.val_fraction=0.1", "data.width=96", "global_batch=32",
              "micro_batch=16", "epochs=4", "kernels=portable"],
}  # fmt: skip


class Line(NamedTuple):
    """What the page states of a model."""

    data: str  #: Digest of samples and of the sizes of the files.
    weights: str  #: SHA-256 of the weights.
    metric: str  #: On the validation set; as text.


def draw_lines(folder: Path) -> None:
    """Draw 1,000 pictures of five digits with the font that comes with Pillow, as in the README of the text recipe."""
    from PIL import Image, ImageDraw, ImageFont

    folder.mkdir()
    font = ImageFont.load_default(24)
    with open(folder / "labels.tsv", "w", encoding="utf-8") as labels:
        for number in range(1000):
            text = "".join(random.Random(number).choices("0123456789", k=5))
            image = Image.new("L", (96, 32), 230)
            ImageDraw.Draw(image).text((6, 2), text, 30, font)
            image.save(folder / f"{number}.png")
            labels.write(f"{number}.png\t{text}\n")


def link_flowers(source: Path, folder: Path) -> None:
    """Link the first 160 photos of each class, by name, of the 3,670 that TensorFlow's flower_photos has."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for photo in sorted((source / name).glob("*.jpg"))[:160]:
            (folder / name / photo.name).symlink_to(photo.resolve())


def train(name: str, folder: Path, options: argparse.Namespace) -> Path:
    """Train a model in a folder, and return its run folder."""
    words = list(MODELS[name])
    if name == "lines":
        draw_lines(folder / "lines")
    if name == "flowers":
        link_flowers(options.flowers, folder / "flowers")
    if name == "mnist" and options.mnist is not None:
        words.append(f"data.root={options.mnist.resolve()}")
    command = [sys.executable, "-m", "samebits", "train", *words, "--procs", str(options.procs), "--run-dir", "run"]
    done = subprocess.run(command, cwd=folder, stdout=None if options.verbose else subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"models: {name} ended with exit code {done.returncode}; --verbose shows its output")
    return folder / "run"


def line_of(run: Path) -> Line:
    """Return what the page states of a run."""
    files = RunFiles(run)
    name = files.result["best"]["metric"]
    metric = f"{'top-1' if name == 'top1' else name.replace('_', ' ')} {100 * files.result['metrics'][name]:.2f}%"
    return Line(sha256_of_json(files.record.data)[:16], files.record.weights_sha256, metric)


def on_page(name: str) -> Line | None:
    """Return what the page states of a model; None if it has no line."""
    found = re.search(rf"^\| {name} \| `(\w+)` \| `(\w+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else Line(*found.groups())


def write(name: str, line: Line) -> None:
    """Write the line of a model into the page."""
    text, new = PAGE.read_text(encoding="utf-8"), f"| {name} | `{line.data}` | `{line.weights}` | {line.metric} |"
    PAGE.write_text(re.sub(rf"^\| {name} \| `.*$", new, text, flags=re.MULTILINE), encoding="utf-8")


def verdict(name: str, line: Line) -> str:
    """Compare a rebuilt model with the page."""
    stated = on_page(name)
    if stated is None:
        return "not on the page"
    if line.weights == stated.weights:
        return "equal"
    cause = "other data" if line.data != stated.data else "equal data"
    return f"DIFFERS from {stated.weights} ({cause}: {line.data}, on the page {stated.data})"


def main() -> None:
    """Rebuild models, and end with exit code 1 if one differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["digits", "lines"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--mnist", type=Path, help="folder with MNIST's .gz files; otherwise they are downloaded")
    parser.add_argument("--flowers", type=Path, help="folder flower_photos")
    parser.add_argument("--procs", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="folder with runs to compare, by name")
    parser.add_argument("--write", action="store_true", help="write the lines into the page")
    parser.add_argument("--verbose", action="store_true", help="show the output of training")
    options = parser.parse_args()
    if unknown := set(options.names) - set(MODELS):
        parser.error(f"no model is called {', '.join(sorted(unknown))}")
    if "flowers" in options.names and options.flowers is None and options.runs is None:
        parser.error("flowers needs --flowers DIR")
    verdicts = []
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            run = options.runs / name if options.runs else train(name, Path(folder), options)
            line = line_of(run)
        if options.write:
            write(name, line)
        verdicts.append(verdict(name, line))
        print(f"{name:<8} {line.weights}  {line.metric:<22} {verdicts[-1]}", flush=True)
    sys.exit(int(any(each != "equal" for each in verdicts)))


if __name__ == "__main__":
    main()
