"""What records say of a device: with a GPU whose driver is replaced by a fake one, and without a GPU."""

import ctypes
from pathlib import Path
from typing import Any

import torch

from samebits.report.records import MetricsLog, read_records
from samebits.report.speed import DeviceUse, nvml_reader
from samebits.report.trackers.process import values_of

UUID = "1b5a2bc0-0000-4a7e-8c1c-2d3e4f5a6b7c"


class Driver:
    """Answers as libnvidia-ml does, into the caller's memory."""

    def __init__(self, *, busy: int = 87, code: int = 0) -> None:
        self.busy, self.code = busy, code
        self.asked: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: ctypes.c_char_p, handle: Any) -> int:
        self.asked.append(uuid.value or b"")
        handle._obj.value = 42
        return 0 if self.asked[-1] == f"GPU-{UUID}".encode() else 6

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, found: Any) -> int:
        assert handle.value == 42
        found._obj.gpu = self.busy
        return self.code


def test_the_driver_is_asked_for_the_gpu_of_the_process() -> None:
    driver = Driver()
    read = nvml_reader(UUID, driver)
    assert read() == 0.87
    driver.busy = 0
    assert read() == 0.0
    assert driver.asked == [f"GPU-{UUID}".encode()]
    driver.code = 3  # NVML_ERROR_NOT_SUPPORTED
    assert read() is None
    assert nvml_reader("another", driver)() is None
    assert nvml_reader(UUID, object())() is None  # a library without these functions
    if not torch.cuda.is_available():
        assert nvml_reader(UUID)() is None


def test_the_cpu_has_memory_and_no_gpu() -> None:
    values = DeviceUse(torch.device("cpu")).values()
    assert values["gpu_use"] is None
    assert 0.01 < (values["memory_gb"] or 0) < 100


def test_values_that_are_not_known_are_null_in_records_and_left_out_in_trackers(tmp_path: Path) -> None:
    records = MetricsLog(tmp_path, tensorboard=True)
    records.write("train", 1, 0.1, {"loss": float("nan"), "gpu_use": None, "memory_gb": 0.25})
    records.close()
    (record,) = read_records(tmp_path)
    assert record == {"kind": "train", "step": 1, "epoch": 0.1, "loss": None, "gpu_use": None, "memory_gb": 0.25}
    assert values_of(record).keys() == {"train/loss", "train/memory_gb", "epoch"}
