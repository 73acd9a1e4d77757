"""What records say of a device: with a GPU whose driver is replaced by a fake one, and without a GPU."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from samebits.config.schema import ReportConfig
from samebits.module.flops import training_flops
from samebits.report.records import MetricsLog, read_records
from samebits.report.speed import DeviceUse, nvml_reader, peak_tflops
from samebits.report.trackers.process import values_of
from samebits.storage.run_folder import RunFolder
from tests.unit.engine.test_epoch_end import go, job_of, parts

UUID = "1b5a2bc0-0000-4a7e-8c1c-2d3e4f5a6b7c"
CPU = torch.device("cpu")


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


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4), ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156), ("NVIDIA A10", "fp32", 31.2), ("NVIDIA A10G", "fp32", None),
        ("Tesla T4", "bf16", None), ("Tesla V100-SXM2-16GB", "fp16", 125), ("AMD Instinct MI300X", "bf16", None),
    ],
)  # fmt: skip
def test_the_peak_is_the_precision_s_or_null_for_an_unknown_gpu(name: str, precision: str, peak: float | None) -> None:
    assert peak_tflops(name, precision) == peak


def test_mfu_is_the_share_of_the_peak_of_all_devices() -> None:
    use = DeviceUse(CPU, "fp32", peak=100.0, read_busy=lambda: 0.5)
    values = use.values(80e12, num_devices=2)
    assert (values["mfu"], values["gpu_use"]) == (pytest.approx(0.4), 0.5)
    assert use.values(None, 2)["mfu"] is None
    values = DeviceUse(CPU, "fp32").values(80e12, 2)
    assert (values["mfu"], values["gpu_use"]) == (None, None)
    assert 0.01 < (values["memory_gb"] or 0) < 100


def test_values_that_are_not_known_are_null_in_records_and_left_out_in_trackers(tmp_path: Path) -> None:
    records = MetricsLog(tmp_path, tensorboard=True)
    records.write("train", 1, 0.1, {"loss": float("nan"), "gpu_use": None, "mfu": 0.25})
    records.close()
    (record,) = read_records(tmp_path)
    assert record == {"kind": "train", "step": 1, "epoch": 0.1, "loss": None, "gpu_use": None, "mfu": 0.25}
    assert values_of(record).keys() == {"train/loss", "train/mfu", "epoch"}


def test_flops_are_those_of_a_real_pass_and_the_model_stays_as_it_is() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    model[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    counted = training_flops(model, torch.empty(1, 3, 8, 8), 4)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(4, 3, 8, 8)).sum().backward()
    assert counted == counter.get_total_flops()
    lstm = nn.LSTM(8, 16, batch_first=True)
    assert training_flops(lstm, torch.empty(1, 5, 8), 2) == 3 * 2 * (2 * 5) * 4 * 16 * (8 + 16)


def test_a_run_records_mfu_against_a_given_peak_and_keeps_its_weights(tmp_path: Path) -> None:
    weights = []
    for peak in (None, 1e-6):
        report = ReportConfig(every_steps=1, tensorboard=False, peak_tflops=peak)
        torch.manual_seed(0)  # the initial weights
        job = job_of(parts([0.1, 0.2, 0.3]), report=report)
        folder = RunFolder(tmp_path / str(peak))
        folder.open()
        go(job, folder)
        folder.close()
        weights.append({name: value.clone() for name, value in job.model.state_dict().items()})
        records = read_records(folder.path, "train")
        assert all(record["gpu_use"] is None and record["memory_gb"] > 0 for record in records)
        for record in records:
            # A linear layer of 2 x 2: 8 FLOPs forward, and as many for the gradient of its weights.
            expected = None if peak is None else 16 * record["samples_per_s"] / 1e6
            assert record["mfu"] == pytest.approx(expected)
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
