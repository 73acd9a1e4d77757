"""Run folders as a run writes them, without training."""

import hashlib
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

SETTINGS = """\
recipe: mnist
seed: 0
epochs: {epochs}
global_batch: 64
micro_batch: 8
mode: exact
precision: fp32
optim: {{name: sgd, lr: {lr}, schedule: one_cycle}}
loader: {{num_workers: auto}}
data: {{name: digits}}
model: {{name: cnn, width: 16}}
"""
STEPS_PER_EPOCH = 50


def make_run(
    run: Path,
    *,
    lr: float = 0.1,
    epochs: int = 3,
    done_epochs: int | None = None,
    top1: float = 0.9,
    lock: str = "",
    name: str = "digits",
    is_complete: bool | None = None,
) -> Path:
    """Write a run folder.

    Args:
        run: The folder.
        lr: Learning rate.
        epochs: Epochs of the settings.
        done_epochs: Epochs that are done; None: all.
        top1: Metric of the last evaluation.
        lock: Content of run.lock.
        name: Name of the recipe.
        is_complete: Whether there is a result; None: if all epochs are done.
    """
    done = epochs if done_epochs is None else done_epochs
    (run / "logs").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "config.yaml").write_text(SETTINGS.format(epochs=epochs, lr=lr))
    (run / "config.diff.yaml").write_text(f"optim: {{lr: {lr}}}\n")
    worlds = [{"size": 2, "from_step": 0, "environment": {"torch": "2.15.0"}, "code": {"code of samebits": "60d1"}}]
    environment = {"name": name, "python": "3.11.7", "command": ["samebits", "train"], "world": {"size": 2}}
    (run / "environment.json").write_text(json.dumps({**environment, "worlds": worlds}))
    (run / "run.lock").write_text(lock)
    records = [line for epoch in range(done) for line in epoch_records(epoch, epochs, top1)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    lines = [log_line(0, "INFO", f"training from step 0 of {epochs * STEPS_PER_EPOCH}, rank 0 of 2")]
    (run / "logs/rank-0.log").write_text("".join(lines))
    if done and records:
        best = {"step": records[-1]["step"], "metric": "top1", "value": top1}
        (run / "checkpoints/best.json").write_text(json.dumps(best))
    if is_complete if is_complete is not None else done == epochs:
        write_result(run, epochs, top1)
    return run


def write_result(run: Path, epochs: int, top1: float) -> None:
    """Write the result of a complete run."""
    steps = epochs * STEPS_PER_EPOCH
    result = {
        "name": "digits",
        "metrics": {"loss": 0.5, "top1": top1},
        "best": {"step": steps, "metric": "top1", "value": top1},
        "weights_sha256": hashlib.sha256(f"{top1} {epochs}".encode()).hexdigest(),
        "chain": "c" * 64,
        "root": "d" * 64,
        "steps": steps,
        "samples": steps * 64,
        "skipped_steps": [],
        "seconds": {
            "first_step": 2.0, "training": 50.0, "data_wait": 2.0, "sending": 3.0, "rank_wait": 1.0, "all": 61.0,
        },
    }  # fmt: skip
    (run / "result.json").write_text(json.dumps(result))


def epoch_records(epoch: int, epochs: int, top1: float) -> list[dict[str, Any]]:
    """The records of an epoch."""
    records: list[dict[str, Any]] = []
    for index in range(STEPS_PER_EPOCH):
        step = epoch * STEPS_PER_EPOCH + index + 1
        place = {"step": step, "epoch": step / STEPS_PER_EPOCH}
        share = step / (epochs * STEPS_PER_EPOCH)
        values = {"loss": 2.3 * (1 - share) + 0.05, "lr": 0.1 * share, "grad_norm": 1.5, "samples_per_s": 300.0}
        records.append({"kind": "train", **place, **values, "seconds": step * 0.2, "data_wait": 0.03})
        ranks = {"median_ms": 100.0, "max_ms": 120.0, "slowest": 1, "rank_0_ms": 100.0, "rank_1_ms": 120.0}
        records.append({"kind": "ranks", **place, **ranks})
    value = top1 * (epoch + 1) / epochs
    records.append({"kind": "eval", **place, "loss": 2.0 - share, "top1": value, "top1/cat": value, "top1/dog": 0.5})
    return records


def log_line(seconds: int, level: str, text: str) -> str:
    """A line of a rank's log."""
    return f"2026-11-20 10:{seconds // 60:02}:{seconds % 60:02},123 {level:<7} samebits: {text}\n"


def launcher_line(seconds: int, text: str) -> str:
    """An entry of the launcher's log."""
    return f"2026-11-20 10:{seconds // 60:02}:{seconds % 60:02} {text}\n"


def own_lock() -> str:
    """The lock of a run whose rank 0 is this process."""
    return f"process {os.getpid()} on {os.uname().nodename}\n"


def png(width: int = 8, height: int = 8, noise: bytes = b"") -> bytes:
    """A gray PNG file; noise makes it large."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(
        b"\0" + (noise[row * width : (row + 1) * width] or bytes(width)).ljust(width, b"\0") for row in range(height)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
