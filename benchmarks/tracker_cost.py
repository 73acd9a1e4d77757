"""Cost of trackers that raise, hang or fill the disk: step time with and without them, and the weights.

    python -m benchmarks.tracker_cost [--rounds 21] [--block-s 2]

For each fault, two equal jobs take turns in one process, block by block: one without a tracker, one with the faulty
one and a record for each step. The run folder is on a file system of its own (tmpfs, 256 MB; needs root), so that
"fills" takes all that it may. Prints medians over the rounds, the median of the rounds' ratios, the same for the
training process's CPU time, which other work on the machine affects less, how long the end of the run waited for the
tracker, and whether both jobs have the same weights.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.small_networks import job_of
from samebits.cluster.world import alone
from samebits.config.sections import ReportConfig
from samebits.engine.output.reports import Reports
from samebits.engine.step import run_step
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import weights_sha256

TRACKER = """
import time
import samebits

class Faulty(samebits.Tracker):
    def start(self, run):
        self.folder = run.folder
    def log(self, step, values):
        {fault}
    def finish(self, outcome, result):
        pass
"""
FAULTS = {
    "raises": "raise RuntimeError('no network')",
    "hangs": "time.sleep(10**6)",
    "fills": "(self.folder / f'{step}.bin').write_bytes(bytes(20_000_000))",
}


@contextmanager
def small_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="samebits-trackers-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            # A tracker's process that was killed may take a moment to leave its folder.
            for _ in range(100):
                if subprocess.run(["umount", folder], capture_output=True).returncode == 0:
                    break
                time.sleep(0.1)
            else:
                subprocess.run(["umount", folder], check=True)


class Training:
    """A job with its reports, trained in blocks.

    Args:
        model: A network of `small_networks.SHAPES`.
        folder: Its run folder.
        tracker: A tracker's file, or none.
    """

    def __init__(self, model: str, folder: Path, tracker: Path | None) -> None:
        folder.mkdir()
        (folder / "config.yaml").write_text("recipe: bench\n", encoding="utf-8")
        names = (str(tracker),) if tracker is not None else ()
        report = ReportConfig(every_steps=1, tensorboard=False, trackers=names)
        torch.manual_seed(0)
        self.job = job_of(model, alone("cpu"), num_samples=320, global_batch=64, report=report)
        self.loader, self.steps = self.job.open_loader()
        self.reports = Reports(self.job, RunFolder(folder))
        self.reports.start(self.job)

    def block(self, num_steps: int) -> tuple[float, float]:
        """Train some steps, and return wall-clock and CPU seconds per step."""
        self.reports.resume(self.job)
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            step = next(self.steps)
            result = run_step(self.job, step, self.loader, 0.0)
            self.job.progress.step += 1
            self.reports.step(self.job, step, result)
        return (time.perf_counter() - start) / num_steps, (time.process_time() - cpu_start) / num_steps

    def end(self) -> float:
        """End the run, and return how long that took in seconds."""
        self.reports.trackers.outcome = "done"
        start = time.perf_counter()
        self.loader.close()
        self.reports.close()
        return time.perf_counter() - start


def measure(fault: str, model: str, rounds: int, block_s: float) -> None:
    said = io.StringIO()
    with small_disk() as disk, contextlib.redirect_stdout(said):
        (disk / "faulty.py").write_text(TRACKER.format(fault=FAULTS[fault]), encoding="utf-8")
        plain, tracked = Training(model, disk / "plain", None), Training(model, disk / "tracked", disk / "faulty.py")
        num_steps = max(1, int(block_s / plain.block(5)[0]))
        tracked.block(5)
        started = time.perf_counter()
        rows = []
        for number in range(rounds):
            # Who comes first takes turns too.
            pair = {each: each.block(num_steps) for each in ((plain, tracked) if number % 2 else (tracked, plain))}
            rows.append([*pair[plain], *pair[tracked]])
        took_s = time.perf_counter() - started
        plain.end()
        end_s = tracked.end()
        is_equal = weights_sha256(plain.job.state()) == weights_sha256(tracked.job.state())
    reason = next((line for line in said.getvalue().splitlines() if "failed, and the run" in line), "no failure")
    off, off_cpu, on, on_cpu = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
    ratio = statistics.median(row[2] / row[0] for row in rows)
    cpu_ratio = statistics.median(row[3] / row[1] for row in rows)
    print(
        f"{fault:7} {off:8.2f} {on:8.2f}  {ratio:6.3f}  {off_cpu:8.2f} {on_cpu:8.2f}  {cpu_ratio:6.3f}"
        f"  {end_s:5.2f} of {took_s / 2:.0f}  {'equal' if is_equal else 'DIFFER'}\n        {reason.partition(': ')[2]}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--block-s", type=float, default=2.0)
    parser.add_argument("--model", default="cnn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("samebits").addHandler(logging.NullHandler())
    print(f"torch {torch.__version__}, {arguments.model}, 1 process, 1 thread, a record for each step")
    print("              step, ms              CPU time, ms             end of the run,")
    print("fault        off       on   ratio       off       on   ratio  seconds        weights")
    for fault in FAULTS:
        measure(fault, arguments.model, arguments.rounds, arguments.block_s)


if __name__ == "__main__":
    main()
