"""What the doctor sees on one machine: Python, torch, GPUs, cores, memory, disk, limits."""

from __future__ import annotations

import glob
import importlib
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from lockstep.cores import num_cores
from lockstep.doctor.finding import Finding
from lockstep.version import __version__

GB = 1024**3
MB = 1024**2
OLDEST_TORCH = (2, 11)
# What a trial write is: long enough to go past the first burst, short enough not to be waited for.
TRIAL_BYTES = 64 * MB


def short(run_folder: Path, *, needs_shared_memory: bool) -> list[Finding]:
    """What is looked at before every training start: only what costs milliseconds.

    Args:
        run_folder: The run's folder, which need not be there yet.
        needs_shared_memory: Loader workers will hand batches over.
    """
    return [disk_space(run_folder), *([shared_memory()] if needs_shared_memory else []), open_files()]


def whole(run_folder: Path) -> list[Finding]:
    """Everything about this machine."""
    return [
        Finding("lockstep", __version__),
        Finding("python", platform.python_version()),
        *_torch(),
        *_gpus(),
        *_cores(),
        _memory(),
        disk_space(run_folder),
        disk_speed(run_folder),
        shared_memory(),
        open_files(),
    ]


def _torch() -> list[Finding]:
    found = torch.__version__
    version = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return [Finding("torch", found, "problem", f"pip install 'torch>={oldest}'")]
    findings = [Finding("torch", found)]
    try:
        vision = importlib.import_module("torchvision")
        findings.append(Finding("torchvision", str(vision.__version__)))
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        findings.append(
            Finding("torchvision", f"can't be imported: {reason}", "problem", "pip install torch torchvision, together")
        )
    return findings


def _gpus() -> list[Finding]:
    present = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        if not present:
            return [Finding("gpus", "none", "note")]
        if visible is not None and not visible.strip(" ,-1"):
            return [Finding("gpus", f"{present}, hidden by CUDA_VISIBLE_DEVICES={visible}", "warning", "unset it")]
        if torch.version.cuda is None:
            return [Finding("gpus", f"{present}, but this torch is built for CPUs", "problem", "install a CUDA build")]
        do = f"update the driver: this torch is built for CUDA {torch.version.cuda}; see nvidia-smi"
        return [Finding("gpus", f"{present}, but torch can't use them", "problem", do)]
    findings = [Finding("cuda", f"{torch.version.cuda}, driver {_driver() or 'unknown'}")]
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{name}, {free / GB:.0f} of {total / GB:.0f} GB free"
        if free < total / 2:
            findings.append(Finding(f"gpu {index}", text, "warning", "somebody else uses it: see nvidia-smi"))
        else:
            findings.append(Finding(f"gpu {index}", text))
    if torch.cuda.device_count() > 1:
        findings.append(_links())
    return findings


def _driver() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.split("\n")[0].strip()


def _links() -> Finding:
    count = torch.cuda.device_count()
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    direct = sum(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    if direct == len(pairs):
        return Finding("gpu links", "every pair reaches each other directly")
    return Finding(
        "gpu links", f"{direct} of {len(pairs)} pairs reach each other directly", "note", "nvidia-smi topo -m"
    )


def _cores() -> list[Finding]:
    here = num_cores()
    allowed = _cgroup_cores()
    if allowed is not None and allowed < here:
        text = f"{here}, of which this container may use {allowed:g}"
        do = f"start at most {max(1, int(allowed))} processes: --procs {max(1, int(allowed))}"
        return [Finding("cores", text, "warning", do)]
    machine = os.cpu_count() or here
    return [Finding("cores", f"{here}" if here == machine else f"{here} of the machine's {machine}")]


def _cgroup_cores() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return Finding("memory", "unknown", "note")
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, free = kilobytes["MemTotal"] * 1024, kilobytes.get("MemAvailable", 0) * 1024
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        total, free = min(total, limit), min(free, limit - used)
    except (OSError, ValueError):
        pass
    text = f"{free / GB:.1f} of {total / GB:.1f} GB free"
    if free < 2 * GB:
        return Finding("memory", text, "warning", "a process needs about 1 GB and what the model takes: start fewer")
    return Finding("memory", text)


def disk_space(run_folder: Path) -> Finding:
    """Room for checkpoints where the run folder is, or would be."""
    place = _existing(run_folder)
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding("disk space", f"{place}: {error.strerror}", "problem", "give another --run-dir")
    text = f"{free / GB:.1f} GB free for {run_folder}"
    if not os.access(place, os.W_OK):
        return Finding("disk space", f"{place} can't be written to", "problem", "give another --run-dir")
    if free < GB // 4:
        return Finding("disk space", text, "problem", "make room, or give another --run-dir")
    if free < 2 * GB:
        return Finding("disk space", text, "warning", "checkpoints of a large model may not fit: checkpoint.keep=1")
    return Finding("disk space", text)


def disk_speed(run_folder: Path) -> Finding:
    """How fast the run folder's disk takes what must be safe on it: a write with fsync."""
    block = os.urandom(MB)
    try:
        with tempfile.TemporaryFile(dir=_existing(run_folder), prefix=".lockstep-doctor-") as file:
            began = time.perf_counter()
            for _ in range(TRIAL_BYTES // MB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
    except OSError as error:
        return Finding("disk speed", f"{error.strerror}", "problem", "give another --run-dir")
    speed = TRIAL_BYTES / MB / seconds
    if speed < 50:
        do = "save less often (checkpoint.every=10min), or give a --run-dir on another disk"
        return Finding("disk speed", f"{speed:,.0f} MB/s", "warning", do)
    return Finding("disk speed", f"{speed:,.0f} MB/s")


def shared_memory() -> Finding:
    """Room in /dev/shm, through which loader workers hand pictures over."""
    try:
        sizes = os.statvfs("/dev/shm")
    except OSError:
        return Finding("shared memory", "this system has no /dev/shm", "note")
    free = sizes.f_bavail * sizes.f_frsize
    if free < GB:
        do = "loader workers need about 1 GB: docker run --shm-size=8g, or loader.num_workers=0"
        return Finding("shared memory", f"{free / MB:,.0f} MB free", "warning", do)
    return Finding("shared memory", f"{free / GB:.1f} GB free")


def open_files() -> Finding:
    """How many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        do = f"ulimit -n {4096 if hard == resource.RLIM_INFINITY else min(4096, hard)}, before you start"
        return Finding("open files", f"at most {soft:,}", "warning", do)
    return Finding("open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}")


def _existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    place = folder.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place
