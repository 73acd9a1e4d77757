"""Benchmarks of the text recipe: CTC and decoding, and training from synthetic lines to real plates.

python benchmarks/text.py ctc            # loss and gradient at 6,736 classes, compared with torch's
python benchmarks/text.py decode         # 1,000 lines of 71 steps, compared with a loop over characters
python benchmarks/text.py lines          # from scratch on synthetic lines, on 2 processes
python benchmarks/text.py plates --data DIR    # 1,000 plates, with and without synthetic lines first
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

import samebits
from samebits.data.samples import with_channels_last
from samebits.recipes.text.alphabet import Alphabet
from samebits.recipes.text.loss import ctc_loss
from samebits.recipes.text.model import crnn, fast

NUM_CLASSES, NUM_STEPS = 6736, 71
Curve = list[tuple[float, float]]


def ctc(num_lines: int, num_rounds: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(num_lines, NUM_STEPS, NUM_CLASSES, generator=rng)
    classes = torch.randint(1, NUM_CLASSES, (num_lines, 10), generator=rng)
    lengths, steps = torch.full((num_lines,), 10), torch.full((num_lines,), NUM_STEPS)

    def theirs(values: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(values.log_softmax(dim=2).transpose(0, 1), classes, steps, lengths)

    def ours(values: torch.Tensor) -> torch.Tensor:
        return (ctc_loss(values, classes, lengths) / lengths).mean()

    def run(loss: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> tuple[float, float, torch.Tensor]:
        values = values.clone().requires_grad_()
        start = time.perf_counter()
        value = loss(values)
        value.backward()
        assert values.grad is not None
        return time.perf_counter() - start, value.item(), values.grad

    exact = run(theirs, logits.double())
    rounds = [(run(theirs, logits), run(ours, logits)) for _ in range(num_rounds)]
    ratio = statistics.median(left[0] / right[0] for left, right in rounds)
    print(f"CTC with gradient, {num_lines} lines, T={NUM_STEPS}, {NUM_CLASSES:,} classes, {num_threads} threads")
    for place, name in enumerate(("torch", "samebits")):
        seconds = statistics.median(pair[place][0] for pair in rounds)
        far = float((rounds[0][place][2] - exact[2]).abs().max())
        print(
            f"  {name:9} {seconds * 1000:7.1f} ms   loss {rounds[0][place][1]:.6f}, gradient off by {far:.1e} at most"
        )
    print(f"  median of {num_rounds} rounds' ratios {ratio:.2f}; loss in float64 {exact[1]:.6f}")


def decode(num_rounds: int) -> None:
    rng = np.random.default_rng(0)
    alphabet = Alphabet("".join(chr(0x4E00 + place) for place in range(NUM_CLASSES - 1)))
    # Ten characters a line, each over a few steps, blanks between.
    paths = np.where(rng.random((1000, NUM_STEPS)) < 0.7, 0, rng.integers(1, NUM_CLASSES, (1000, NUM_STEPS)))
    paths = np.repeat(paths, 2, axis=1)[:, :NUM_STEPS]
    tensor = torch.from_numpy(paths)

    def loop() -> list[str]:
        # As it is copied from tutorial to tutorial: one character at a time, out of a tensor.
        texts = []
        for path in tensor:
            characters = []
            for step in range(len(path)):
                if path[step] != 0 and not (step > 0 and path[step - 1] == path[step]):
                    characters.append(alphabet.characters[path[step] - 1])
            texts.append("".join(characters))
        return texts

    def over_lists() -> list[str]:
        texts = []
        for path in tensor.tolist():
            characters = []
            for step, name in enumerate(path):
                if name != 0 and not (step > 0 and path[step - 1] == name):
                    characters.append(alphabet.characters[name - 1])
            texts.append("".join(characters))
        return texts

    def ours() -> list[str]:
        return alphabet.decode_paths(tensor.numpy())

    ways = {"loop over a tensor": loop, "loop over lists": over_lists, "samebits": ours}
    texts = {name: way() for name, way in ways.items()}
    assert len({tuple(lines) for lines in texts.values()}) == 1, "the strings differ"
    rounds = [{name: _seconds(way) for name, way in ways.items()} for _ in range(num_rounds)]
    print(f"decoding 1,000 lines of {NUM_STEPS} steps, {NUM_CLASSES:,} classes: equal strings")
    for name in ways:
        ratio = statistics.median(times[name] / times["samebits"] for times in rounds)
        seconds = statistics.median(times[name] for times in rounds)
        print(f"  {name:19} {seconds * 1000:8.2f} ms   {ratio:7.1f} x Samebits's time")


def networks(num_lines: int, num_rounds: int) -> None:
    """Return CPU time, which other work on the machine affects less than elapsed time."""
    torch.set_num_threads(1)
    inputs = with_channels_last(torch.randn(num_lines, 1, 32, 160))
    classes, lengths = torch.randint(1, 60, (num_lines, 6)), torch.full((num_lines,), 6)
    models = {"crnn, width 64": crnn(60), "crnn, width 16": crnn(60, 16, 96), "fast, width 16": fast(60, 16, 96)}
    models |= {"fast, width 24": fast(60, 24, 96)}

    def step(model: torch.nn.Module, is_bf16: bool) -> float:
        start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            logits = model(inputs)
        (ctc_loss(logits.float(), classes, lengths) / lengths).mean().backward()
        return time.process_time() - start

    cases: dict[tuple[str, bool], list[float]] = {(name, is_bf16): [] for name in models for is_bf16 in (False, True)}
    for model in models.values():
        model.to(memory_format=torch.channels_last)
    for number in range(num_rounds + 1):
        for name, is_bf16 in cases:
            seconds = step(models[name], is_bf16)
            if number:  # the first round is for warming up
                cases[name, is_bf16].append(seconds)
    print(f"CPU time of a training step on {num_lines} lines of 160 x 32, 60 classes, 1 thread; median of {num_rounds}")
    for name, model in models.items():
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        fp32, bf16 = (statistics.median(cases[name, is_bf16]) * 1000 for is_bf16 in (False, True))
        print(f"  {name}  {num_parameters:>9,} parameters   fp32 {fp32:6.0f} ms   bf16 {bf16:6.0f} ms")


def _seconds(way: Callable[[], Any]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def lines(out: Path, fonts: Path | None, num_train: int, settings: Sequence[str]) -> None:
    """From scratch on synthetic lines of digits and Latin letters."""
    given: dict[str, Any] = {"epochs": 10, "data.made.num_train": num_train // 10, "data.made.num_eval": 1000}
    if fonts is not None:
        given["data.made.fonts"] = fonts
    run = samebits.train("text", {**given, **_parsed(settings)}, procs=2, run_dir=out / "lines")
    _report("synthetic lines from scratch", run)
    kinds = ("seen_fonts_accuracy", "unseen_fonts_accuracy")
    curves = {kind.removesuffix("_accuracy").replace("_", " "): _curve(run, kind) for kind in kinds}
    draw_curves("Made-up lines read without an error, over seconds of training", curves, out / "text-lines-curve.png")


def plates(
    out: Path, data: Path, fonts: Path | None, num_made: int, weights: Path | None, settings: Sequence[str]
) -> None:
    """800 of 1,000 plates for training, 200 for validation; from scratch, and after synthetic lines.

    Without weights of a run on other synthetic lines, one on the plates' own characters is trained first.
    """
    out.mkdir(parents=True, exist_ok=True)
    if weights is None:
        weights = _made_first(out, data, fonts, num_made, settings)
    given = {"data.root": data, **_parsed(settings)}
    runs = {
        "plates alone": samebits.train("text/plates", given, procs=2, run_dir=out / "plates-alone"),
        "synthetic lines first": samebits.train(
            "text/plates", {**given, "model.weights": weights}, procs=2, run_dir=out / "plates-after"
        ),
    }
    for name, run in runs.items():
        _report(name, run)
    curves = {name: _curve(run, "line_accuracy") for name, run in runs.items()}
    title = "200 validation plates read without an error, over seconds of training on 800"
    draw_curves(title, curves, out / "text-plates-curve.png")


def _made_first(out: Path, data: Path, fonts: Path | None, num_made: int, settings: Sequence[str]) -> Path:
    texts = [line.split(maxsplit=1)[1].strip() for line in (data / "labels_text.txt").read_text("utf-8").splitlines()]
    alphabet = out / "plates.txt"
    alphabet.write_text("".join(sorted(set("".join(texts)))), encoding="utf-8")
    given: dict[str, Any] = {"epochs": 1, "data.alphabet": alphabet, "data.width": 128, "data.made.num_train": num_made}
    given |= {"data.made.num_eval": 500, "data.made.min_length": 7, "data.made.max_length": 7, **_parsed(settings)}
    if fonts is not None:
        given["data.made.fonts"] = fonts
    _report("synthetic lines", samebits.train("text", given, procs=2, run_dir=out / "made-first"))
    return out / "made-first" / "weights.safetensors"


def _parsed(settings: Sequence[str]) -> dict[str, Any]:
    pairs = [text.split("=", 1) for text in settings]
    return {name: json.loads(value) if value[:1].isdigit() else value for name, value in pairs}


def _report(name: str, run: samebits.Run) -> None:
    seconds = run.result["seconds"]
    figures = ", ".join(f"{metric} {value:.4f}" for metric, value in run.metrics.items())
    best = run.result["best"]
    print(f"{name}: {figures}")
    print(f"  best {best['metric']} {best['value']:.4f} after step {best['step']:,}; above: last weights")
    told = f"{run.result['samples']:,} lines in {seconds['training']:.0f} s of training, {seconds['all']:.0f} s in all"
    print(f"  {told}, {run.result['samples_per_s']:.0f} lines/s", flush=True)


def _curve(run: samebits.Run, metric: str) -> Curve:
    """Return (seconds of training, value) at each evaluation."""
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    times = {record["step"]: record["seconds"] for record in records if record["kind"] == "train"}
    steps = sorted(times)
    found: Curve = []
    for record in records:
        if record["kind"] == "eval" and metric in record:
            before = [step for step in steps if step <= record["step"]]
            found.append((times[before[-1]] if before else 0.0, record[metric]))
    return found


def draw_curves(title: str, curves: dict[str, Curve], path: Path) -> None:
    """Draw accuracies from 0 to 100% over seconds as a PNG file."""
    width, height, left, top, right, bottom = 760, 380, 60, 40, 20, 44
    colours = [(33, 102, 172), (178, 24, 43), (90, 90, 90)]
    image = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    longest = max((curve[-1][0] for curve in curves.values() if curve), default=1.0) or 1.0

    def place(seconds: float, share: float) -> tuple[float, float]:
        x = left + (width - left - right) * seconds / longest
        return x, top + (height - top - bottom) * (1 - share)

    draw.text((left, 12), title, (34, 34, 34), font)
    for percent in (0, 25, 50, 75, 90, 95, 100):
        _, y = place(0, percent / 100)
        draw.line((left, y, width - right, y), (225, 225, 225))
        draw.text((left - 8, y), f"{percent}%", (120, 120, 120), font, anchor="rm")
    for part in range(5):
        seconds = longest * part / 4
        draw.text((place(seconds, 0)[0], height - bottom + 8), f"{seconds:.0f} s", (120, 120, 120), font, anchor="ma")
    for number, (name, curve) in enumerate(curves.items()):
        points = [place(*point) for point in curve]
        if len(points) > 1:
            draw.line(points, colours[number], 2)
        for x, y in points:
            draw.ellipse((x - 2, y - 2, x + 2, y + 2), colours[number])
        last = f"{name}: {curve[-1][1]:.1%}" if curve else name
        draw.text((width - right - 8, height - bottom - 44 + 18 * number), last, colours[number], font, anchor="ra")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ctc", "decode", "networks", "lines", "plates"])
    parser.add_argument("settings", nargs="*", help="key=value for the runs")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--lines", type=int, default=32, help="lines per batch (ctc, networks)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fonts", type=Path, help="folder with fonts; default: the machine's")
    parser.add_argument("--num", type=int, default=130_000, help="synthetic training lines")
    parser.add_argument("--weights", type=Path, help="weights of a run on synthetic lines, from which plates start")
    parser.add_argument("--data", type=Path, help="folder with labels_text.txt and images/ of the plates")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-text"), help="folder for runs and curves")
    given = parser.parse_intermixed_args()
    if given.what == "ctc":
        ctc(given.lines, given.rounds, given.threads)
    elif given.what == "decode":
        decode(given.rounds)
    elif given.what == "networks":
        networks(given.lines, given.rounds)
    elif given.what == "lines":
        lines(given.out, given.fonts, given.num, given.settings)
    elif given.data is None:
        parser.error("plates needs --data")
    else:
        plates(given.out, given.data.resolve(), given.fonts, given.num, given.weights, given.settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
