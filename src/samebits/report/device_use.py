"""Use of rank 0's device: memory, how busy the GPU is, and MFU (model FLOPs utilization). None: it is not known."""

import ctypes
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

NAMES = ("memory_gb", "gpu_use", "mfu")
# Peak TFLOP/s without sparsity by precision, from NVIDIA's data sheets. The first name that a device's name has counts.
_PEAKS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250, "fp16": 2250},
    "H200": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    "H100 PCIe": {"fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756},
    "H100 NVL": {"fp32": 60, "tf32": 417.7, "bf16": 835.5, "fp16": 835.5},
    "H100": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    "A100": {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    "A10": {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125},
    "L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362},
    "L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121},
    "V100": {"fp32": 15.7, "fp16": 125},
    "T4": {"fp32": 8.1, "fp16": 65},
    "RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2},
    "RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
}
BusyReader = Callable[[], float | None]


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the peak TFLOP/s of a GPU, as torch names it, in fp32, tf32, bf16 or fp16; None if it is unknown."""
    # Names of the driver, of torch and of data sheets differ in hyphens and spaces.
    words = re.sub(r"[-_]", " ", device_name)
    # Word borders, so that "A10" does not find an A100; longer
    # names come first in the table, since the first one counts.
    known = next((peaks for name, peaks in _PEAKS.items() if re.search(rf"\b{name}\b", words)), {})
    return known.get(precision)


class DeviceUse:
    """Reads the use of this process's device.

    Args:
        peak: Peak TFLOP/s of one device; None: that of a known GPU.
        read_busy: Returns how busy the GPU is, 0 to 1; None: NVIDIA's driver is asked.
    """

    def __init__(
        self, device: torch.device, precision: str, peak: float | None = None, read_busy: BusyReader | None = None
    ) -> None:
        self._is_gpu = device.type == "cuda"
        self._device = device
        if self._is_gpu:
            properties = torch.cuda.get_device_properties(device)
            peak = peak if peak is not None else peak_tflops(properties.name, precision)
            read_busy = read_busy or nvml_reader(str(properties.uuid))
        self._read_busy = read_busy or (lambda: None)
        self.peak = peak  #: Peak TFLOP/s of one device; None if it is not known.

    def values(self, flops_per_s: float | None, num_devices: int) -> dict[str, float | None]:
        """Return the values of a record, with the names in `NAMES`; `flops_per_s` is that of all devices, or None."""
        mfu = None if self.peak is None or not flops_per_s else flops_per_s / (self.peak * 1e12 * num_devices)
        if self._is_gpu:
            # The peak so far. Reserved, not allocated: what torch's cache keeps is not free for other programs either.
            num_bytes = torch.cuda.max_memory_reserved(self._device)
        else:
            # Linux counts ru_maxrss in KiB.
            num_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"memory_gb": num_bytes / 1e9, "gpu_use": self._read_busy(), "mfu": mfu}


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
