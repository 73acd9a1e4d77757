"""Check one machine: Python, torch, GPUs, cores, memory, disk, limits."""

import glob
import importlib
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from samebits.cores import describe_other_load, num_cores
from samebits.doctor.check_result import CheckResult
from samebits.extras import is_installed, pip_line
from samebits.storage.run_folder import nearest
from samebits.version import __version__

GB = 1024**3
MB = 1024**2
OLDEST_TORCH = (2, 11)
# Size of the test write: large enough to outlast a short burst, small enough to be quick.
TRIAL_BYTES = 64 * MB


def short(run_folder: Path, *, needs_shared_memory: bool) -> list[CheckResult]:
    """Run the checks that cost milliseconds, before every training."""
    return [
        disk_space(run_folder),
        *([shared_memory()] if needs_shared_memory else []),
        open_files(),
    ]


def whole(run_folder: Path) -> list[CheckResult]:
    """Run all checks of this machine."""
    text, is_notable = describe_other_load()
    load = CheckResult("load", text)
    if is_notable:
        fix = "Stop them, or expect slower steps and unreliable measurements."
        load = CheckResult("load", text, "warning", fix)
    return [
        CheckResult("samebits", __version__),
        CheckResult("python", platform.python_version()),
        *_torch(),
        *_gpus(),
        *_cores(),
        *([load] if text else []),
        _memory(),
        disk_space(run_folder),
        disk_speed(run_folder),
        shared_memory(),
        open_files(),
    ]


def _torch() -> list[CheckResult]:
    found = torch.__version__
    # A version may end in a build tag, such as 2.11.0+cu130.
    version = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return [CheckResult("torch", found, "problem", f"pip install 'torch>={oldest}'")]
    results = [CheckResult("torch", found)]
    if not is_installed("torchvision"):
        fix = f"{pip_line('classify')}, for recipe classify"
        return [*results, CheckResult("torchvision", "not installed", "note", fix)]
    try:
        vision = importlib.import_module("torchvision")
        results.append(CheckResult("torchvision", str(vision.__version__)))
    # RuntimeError: torchvision's operators were built for another torch.
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        fix = "pip install torch torchvision, in one command"
        results.append(CheckResult("torchvision", f"cannot be imported: {reason}", "problem", fix))
    return results


def _gpus() -> list[CheckResult]:
    present = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        if not present:
            return [CheckResult("gpus", "none", "note")]
        if visible is not None and not visible.strip(" ,-1"):
            return [
                CheckResult(
                    "gpus",
                    f"{present}, hidden by CUDA_VISIBLE_DEVICES={visible}",
                    "warning",
                    "Unset it.",
                )
            ]
        if torch.version.cuda is None:
            text = f"{present}, but this torch is built for CPUs"
            return [CheckResult("gpus", text, "problem", "Install a CUDA build.")]
        fix = f"Update the driver (see nvidia-smi): this torch is built for CUDA {torch.version.cuda}."
        return [CheckResult("gpus", f"{present}, but torch cannot use them", "problem", fix)]
    results = [CheckResult("cuda", f"{torch.version.cuda}, driver {_driver() or 'unknown'}")]
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{name}, {free / GB:.0f} of {total / GB:.0f} GB free"
        is_used = free < total / 2
        fix = "Stop the program that uses it: see nvidia-smi." if is_used else ""
        results.append(CheckResult(f"gpu {index}", text, "warning" if is_used else "ok", fix))
    count = torch.cuda.device_count()
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    direct = sum(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    if direct < len(pairs):
        text = f"{direct} of {len(pairs)} pairs have direct access"
        results.append(CheckResult("gpu links", text, "note", "nvidia-smi topo -m"))
    elif pairs:
        results.append(CheckResult("gpu links", "all pairs have direct access"))
    return results


def _driver() -> str:
    try:
        # With a timeout: nvidia-smi can hang if a GPU has failed.
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(
            query, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.split("\n")[0].strip()


def _cores() -> list[CheckResult]:
    usable = num_cores()
    allowed = None
    with suppress(OSError, ValueError):  # "max" is no number: there is no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        allowed = int(quota) / int(period)
    if allowed is not None and allowed < usable:
        text = f"{usable}, of which this container may use {allowed:g}"
        fix = f"Start at most {max(1, int(allowed))} processes: --procs {max(1, int(allowed))}"
        return [CheckResult("cores", text, "warning", fix)]
    total = os.cpu_count() or usable
    return [
        CheckResult(
            "cores", f"{usable}" if usable == total else f"{usable} of the machine's {total}"
        )
    ]


def _memory() -> CheckResult:
    try:
        memory = psutil.virtual_memory()
    except (OSError, psutil.Error):
        return CheckResult("memory", "unknown", "note")
    total = memory.total
    free = memory.available
    # In a container, psutil sees the memory of the machine, not the container's limit.
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        total = min(total, limit)
        free = min(free, limit - used)
    text = f"{free / GB:.1f} of {total / GB:.1f} GB free"
    if free < 2 * GB:
        return CheckResult(
            "memory",
            text,
            "warning",
            "Start fewer processes: each needs about 1 GB plus the model.",
        )
    return CheckResult("memory", text)


def disk_space(run_folder: Path) -> CheckResult:
    """Check the free space for checkpoints on the disk of the run folder, which may not exist yet."""
    folder = nearest(run_folder)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return CheckResult(
            "disk space", f"{folder}: {error.strerror}", "problem", "Give another --run-dir."
        )
    text = f"{free / GB:.1f} GB free for {run_folder}"
    if not os.access(folder, os.W_OK):
        return CheckResult(
            "disk space", f"{folder} cannot be written to", "problem", "Give another --run-dir."
        )
    if free < GB // 4:
        return CheckResult(
            "disk space", text, "problem", "Free some space, or give another --run-dir."
        )
    if free < 2 * GB:
        fix = "Set checkpoint.keep=1 if checkpoints of a large model may not fit."
        return CheckResult("disk space", text, "warning", fix)
    return CheckResult("disk space", text)


def disk_speed(run_folder: Path) -> CheckResult:
    """Measure how fast the run folder's disk completes a write with fsync."""
    # Random bytes, since a file system may compress or skip zeros.
    block = os.urandom(MB)
    try:
        # A file without a name: nothing is left behind if the process is killed.
        with tempfile.TemporaryFile(dir=nearest(run_folder), prefix=".samebits-doctor-") as file:
            started = time.perf_counter()
            for _ in range(TRIAL_BYTES // MB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
    except OSError as error:
        return CheckResult("disk speed", f"{error.strerror}", "problem", "Give another --run-dir.")
    speed = TRIAL_BYTES / MB / seconds
    if speed < 50:
        fix = "Save less often (checkpoint.every=10min), or give a --run-dir on another disk."
        return CheckResult("disk speed", f"{speed:,.0f} MB/s", "warning", fix)
    return CheckResult("disk speed", f"{speed:,.0f} MB/s")


def shared_memory() -> CheckResult:
    """Check the space in /dev/shm, through which DataLoader workers pass images."""
    try:
        sizes = os.statvfs("/dev/shm")
    except OSError:
        return CheckResult("shared memory", "this system has no /dev/shm", "note")
    # f_bavail, not f_bfree, of which a part is reserved for root.
    free = sizes.f_bavail * sizes.f_frsize
    if free < GB:
        fix = "DataLoader workers need about 1 GB: docker run --shm-size=8g, or set loader.num_workers=0."
        return CheckResult("shared memory", f"{free / MB:,.0f} MB free", "warning", fix)
    return CheckResult("shared memory", f"{free / GB:.1f} GB free")


def open_files() -> CheckResult:
    """Check how many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        fix = f"ulimit -n {4096 if hard == resource.RLIM_INFINITY else min(4096, hard)} before the command"
        return CheckResult("open files", f"at most {soft:,}", "warning", fix)
    return CheckResult(
        "open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}"
    )
