"""How fast a run is, what slows it down, how much of the device it uses, and whether its loss grows."""

import ctypes
import math
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from samebits.config.interval import parse_steps
from samebits.data.division import num_micro_batches
from samebits.report.format import counted

# Whether the training loss grows over many steps, as it does with too high a learning rate.


# steps
_MIN_BLOCK = 4
_MAX_BLOCK = 50
_NUM_HIGH = 2  # blocks, so that a single one, such as one after a change of the learning rate, does not count
_NOTABLE = 0.5  # of the first loss


class LossTrend:
    """Averages the loss over blocks of a run's steps, and notices once that it grows."""

    def __init__(self, num_steps: int) -> None:
        self._size = block_size(num_steps)
        self.start(0, None)

    def start(self, step: int, first_loss: float | None) -> None:
        """Start training, or resume it after so many steps of a run that began with `first_loss`."""
        self._begin = step
        self._first = first_loss
        self._is_said = False
        self._means: list[float] = []
        self._losses: list[float] = []

    def add(self, loss: float) -> str | None:
        """Add the next step's mean loss, if it is finite; return a notice, once, if the loss grows."""
        self._losses.append(loss)
        if self._is_said or len(self._losses) < self._size:
            return None
        finite = [each for each in self._losses if math.isfinite(each)]
        self._losses = []
        # A block without a finite loss is the highest of all, not an unknown one.
        self._means.append(math.fsum(finite) / len(finite) if finite else math.inf)
        low = grows_from(self._means, self._first)
        if low is None:
            return None
        self._is_said = True
        return f"the training loss grows: from {self._block(low)} to {self._block(len(self._means) - 1)}"

    def _block(self, place: int) -> str:
        first = self._begin + place * self._size
        return f"{self._means[place]:.4g} in steps {first + 1:,}-{first + self._size:,}"


def block_size(num_steps: int) -> int:
    """Return the number of steps to average over: a tenth of the run, from 4 to 50."""
    return min(max(num_steps // 10, _MIN_BLOCK), _MAX_BLOCK)


def grows_from(means: Sequence[float], first: float | None = None) -> int | None:
    """Return the block with the lowest mean if the last two blocks are far above it; else None.

    Far is half of the first loss, at which nothing was learned. Noise is much less, also at the end of a run, where the
    loss is low and a batch may have twice the loss of another.
    """
    before = means[:-_NUM_HIGH]
    high = means[-_NUM_HIGH:]
    if not before:
        return None
    low = min(range(len(before)), key=before.__getitem__)
    # Of a resumed run, the first loss is that of the whole run: its own first block may be low already.
    scale = max(abs(means[0] if first is None else first), abs(before[low]))
    # Of both blocks the lower one, so that a single high block gives no notice.
    return low if min(high) - before[low] > _NOTABLE * scale else None


# How fast a run is, what slows it down, and how much of the device it uses.


# Throughput of a run in samples per second.


class Rate:
    """Samples per second over the last `window_s` seconds of training, without evaluation and checkpoints."""

    def __init__(
        self, window_s: float = 10.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._window_s = window_s
        self._clock = clock
        self._last = clock()
        self._steps: deque[tuple[float, int]] = deque()
        self._seconds = 0.0
        self._num_samples = 0

    def resume(self) -> None:
        """Continue after a pause: the time since the last step does not count."""
        self._last = self._clock()

    def add(self, num_samples: int) -> None:
        """Count a completed step of `num_samples` samples."""
        now = self._clock()
        self._steps.append((now - self._last, num_samples))
        self._seconds += now - self._last
        self._num_samples += num_samples
        self._last = now
        # One step stays, however long it is: a slow model has steps longer than the window.
        while len(self._steps) > 1 and self._seconds - self._steps[0][0] >= self._window_s:
            seconds, samples = self._steps.popleft()
            self._seconds -= seconds
            self._num_samples -= samples

    @property
    def samples_per_s(self) -> float:
        """Samples per second; 0 before the first step."""
        return self._num_samples / self._seconds if self._seconds > 0 else 0.0

    def seconds_for(self, num_samples: int) -> float | None:
        """Return how long `num_samples` take at this rate, seconds; None before the first step."""
        return num_samples / self.samples_per_s if self.samples_per_s > 0 else None


# The share of training time that waits for data, and advice where it is large.


LOADING_WINDOW_S = 20.0
NOTABLE_LOADING = 0.2


class DataWait:
    """Measures data waiting from the training time and the waiting time of this process so far."""

    def __init__(self) -> None:
        self._last = self._window = (0.0, 0.0)
        self._said = False

    def start(self, seconds: float, waited_s: float) -> None:
        """Start or resume training at these totals."""
        # At a resume, training and waiting so far belong to another process: only differences from here on count.
        self._last = self._window = (seconds, waited_s)

    def share(self, seconds: float, waited_s: float) -> float:
        """Return the share of training time since the last call that waited for data."""
        share = _share(self._last, (seconds, waited_s))
        self._last = (seconds, waited_s)
        return share

    def notice(self, seconds: float, waited_s: float, advice: str) -> str | None:
        """Return a notice with `advice`, once, if data was the bottleneck over a window of these totals; else None."""
        now = (seconds, waited_s)
        if self._said or seconds - self._window[0] < LOADING_WINDOW_S:
            return None
        share = _share(self._window, now)
        self._window = now
        if share < NOTABLE_LOADING:
            return None
        self._said = True
        return f"data loading is the bottleneck: {share:.1%} of training time waits for it\n  fix  {advice}"


def advice(*, num_workers: int, num_free_cores: int) -> str:
    """Return what to do when data loading is the bottleneck."""
    if num_free_cores <= num_workers:
        return "All cores are in use: take smaller images, faster disks or more machines."
    now = "now 0: loading in the training process" if num_workers == 0 else f"now {num_workers}"
    free = "1 core is" if num_free_cores == 1 else f"{num_free_cores} cores are"
    return f"Set loader.num_workers={num_free_cores} ({now}; {free} free per rank)."


def _share(before: tuple[float, float], now: tuple[float, float]) -> float:
    seconds = now[0] - before[0]
    waited_s = now[1] - before[1]
    # Clamped: the two totals are read at slightly different times, so a short interval may give a share above 1.
    return min(max(waited_s / seconds, 0.0), 1.0) if seconds > 0 else 0.0


# Use of rank 0's device: memory, and how busy the GPU is. None: it is not known.


BusyReader = Callable[[], float | None]


class DeviceUse:
    """Reads the use of this process's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        if self._is_gpu:
            self._read_busy = nvml_reader(str(torch.cuda.get_device_properties(device).uuid))

    def values(self) -> dict[str, float | None]:
        """Return the values of a record by name."""
        if self._is_gpu:
            # The peak so far. Reserved, not allocated: what torch's cache keeps is not free for other programs either.
            num_bytes = torch.cuda.max_memory_reserved(self._device)
            return {"memory_gb": num_bytes / 1e9, "gpu_use": self._read_busy()}
        # Linux counts ru_maxrss in KiB.
        num_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"memory_gb": num_bytes / 1e9, "gpu_use": None}


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def nvml_reader(uuid: str, library: Any = None) -> BusyReader:
    """Return a function that asks NVIDIA's driver how busy a GPU was in the last second, 0 to 1.

    A GPU is busy while it computes at all. The function returns None without the driver's library, and for a part of a
    GPU (MIG).
    """
    handle = ctypes.c_void_p()
    # A machine without NVIDIA's driver has no such library, and an old driver may lack a function.
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1") if library is None else library
        if nvml.nvmlInit_v2() == 0:
            # By UUID: NVML numbers all GPUs of the machine, torch only those in CUDA_VISIBLE_DEVICES.
            name = ctypes.c_char_p(f"GPU-{uuid.removeprefix('GPU-')}".encode())
            if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == 0:

                def busy() -> float | None:
                    found = _Utilization()
                    code = nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found))
                    return found.gpu / 100 if code == 0 else None

                return busy
    return lambda: None


# Report processes that have no micro-batch in a step.


def idle_row(num_procs: int, batch: int, micro_batch: int) -> str:
    """Describe how many processes are idle, and which micro_batch would use all of them; empty if none is idle."""
    num_micro = num_micro_batches(batch, micro_batch)
    if num_micro >= num_procs:
        return ""
    num_idle = num_procs - num_micro
    what = (
        f"{num_idle} of {num_procs} processes {'are' if num_idle > 1 else 'is'} idle: "
        f"a step has {counted(num_micro, 'micro-batch')}"
    )
    # The largest micro_batch with at least one micro-batch per process: ceil(batch / most) >= num_procs.
    most = (batch - 1) // (num_procs - 1)
    cure = (
        f"micro_batch={most} gives all of them work (and changes the result)"
        if most
        else f"no micro_batch gives all of them work: a step has {counted(batch, 'sample')}"
    )
    return f"{what}\n{cure}"


# Each rank's own work per step, and which rank slows the others down.


STRAGGLER_WINDOW_S = 30.0
NUM_WINDOWS = 2  # in a row: other load on a machine comes and goes
NOTABLE_STRAGGLER = 1.3
MOST_RANKS = 16  # recorded one by one

Work = Sequence[tuple[float, int, int]]


class Stragglers:
    """Finds slow ranks from the totals of each rank's own work.

    Ranks may have unequal numbers of micro-batches, so the time per micro-batch is compared.
    """

    def __init__(self) -> None:
        self._last: Work = ()
        self._window: Work = ()
        self._window_began = 0.0
        self._slow_windows: dict[int, int] = {}
        self._said: set[int] = set()

    def step_ms(self, work: Work) -> dict[str, float]:
        """Return own work per step since the last call, in milliseconds; empty until every rank has new steps.

        `work` has for each rank, since its start, seconds of own work, steps and micro-batches.
        """
        if len(self._last) != len(work):
            self._last = work
            return {}
        pairs = list(zip(self._last, work, strict=True))
        # A rank without a new step has no time per step. The next record then covers a longer interval.
        if not pairs or not all(new[1] > old[1] for old, new in pairs):
            return {}
        self._last = work
        times = [1000 * (new[0] - old[0]) / (new[1] - old[1]) for old, new in pairs]
        values = {
            "median_ms": statistics.median(times),
            "max_ms": max(times),
            "slowest": times.index(max(times)),
        }
        return values | (
            {f"rank_{rank}_ms": time for rank, time in enumerate(times)}
            if len(times) <= MOST_RANKS
            else {}
        )

    def notice(self, work: Work, now: float) -> str | None:
        """Return a notice, once per rank, on a rank that stays notably slower than the others by now; else None."""
        if len(self._window) != len(work):
            self._window = work
            self._window_began = now
            return None
        # Reported per window and not per record: records may be many a second, and one of them shows noise.
        if now - self._window_began < STRAGGLER_WINDOW_S:
            return None
        times = {
            rank: (new[0] - old[0]) / (new[2] - old[2])
            for rank, (old, new) in enumerate(zip(self._window, work, strict=True))
            if new[2] > old[2]
        }
        self._window = work
        self._window_began = now
        if len(times) < 2:
            return None
        slowest = max(times, key=lambda rank: times[rank])
        # Without the slowest rank, which in a world of two would be half of the median.
        others = statistics.median(time for rank, time in times.items() if rank != slowest)
        if times[slowest] < NOTABLE_STRAGGLER * others:
            self._slow_windows = {}
            return None
        # Only the slowest rank keeps its count, so windows that alternate between two ranks blame neither.
        self._slow_windows = {slowest: self._slow_windows.get(slowest, 0) + 1}
        if self._slow_windows[slowest] < NUM_WINDOWS or slowest in self._said:
            return None
        self._said.add(slowest)
        return (
            f"rank {slowest} is slow: a micro-batch takes {1000 * times[slowest]:,.0f} ms there and "
            f"{1000 * others:,.0f} ms on the other ranks, which wait for it\n"
            "  cause  other load on its machine, a slower processor, or slower loading of its data"
        )


# A profile of some steps of rank 0 by torch.profiler: a trace for a browser, and a table (`report.profile`).


NUM_ROWS = 25  # of the table


class StepProfile:
    """Profiles the steps of `report.profile`, such as "10:13", into a folder. Does not change results."""

    def __init__(self, steps: str | None, folder: Path) -> None:
        self._first, self._stop = parse_steps(steps) if steps is not None else (-1, -1)
        self._folder = folder
        self._profiler: Any = None

    def at(self, step: int) -> Path | None:
        """Start or end the profile before a step; return the folder if it was written now."""
        if self._profiler is None and self._first <= step < self._stop:
            # Late: a run without `report.profile` need not import the profiler.
            from torch.profiler import profile

            self._profiler = profile(record_shapes=True)
            self._profiler.start()
        elif self._profiler is not None and step >= self._stop:
            return self.close()
        return None

    def close(self) -> Path | None:
        """End the profile, also of a run that ends before its last step, write it, and return its folder."""
        # Cleared first, so that a second `close`, after an error in writing, does not stop it again.
        profiler = self._profiler
        self._profiler = None
        if profiler is None:
            return None
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / "trace.json"))
        averages = profiler.key_averages()
        device = "cuda" if any(each.self_device_time_total for each in averages) else "cpu"
        table = averages.table(
            sort_by=f"self_{device}_time_total", row_limit=NUM_ROWS, max_name_column_width=60
        )
        (self._folder / "table.txt").write_text(table, encoding="utf-8")
        return self._folder
