"""What is recorded of the hardware: what the libraries choose their kernels by."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.launch import kernels
from samebits.provenance import fingerprint
from samebits.provenance.fingerprint import describe_kernels

CPU = torch.device("cpu")
INFO = {
    "vendor_id": "GenuineIntel",
    "model name": "Some Xeon",
    "flags": "fpu sse4_2 avx f16c fma avx2 avx512f avx512bw amx_tile hypervisor",
}


@pytest.fixture(autouse=True)
def _some_xeon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels, fingerprint):
        monkeypatch.setattr(module, "cpu_info", lambda: INFO)


def test_vendor_and_instructions_are_recorded_as_far_as_kernels_may_follow_from_them() -> None:
    found = describe_kernels(CPU, "auto")
    assert found["CPU vendor"] == "GenuineIntel"
    assert found["CPU instructions"] == "sse4_2 avx f16c fma avx2 avx512f avx512bw amx_tile"


def test_portable_arithmetic_leaves_the_processor_and_torch_out() -> None:
    found = describe_kernels(CPU, "portable")
    assert found["arithmetic"] == "portable v1"
    assert "numpy" in found
    assert not {"torch", "MKL", "CPU capability", "CPU vendor", "processor"} & found.keys()


def test_the_variables_that_libraries_read_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = kernels.VARIABLES[1:]  # torch reports the first one itself
    for name in names:
        monkeypatch.setenv(name, "AVX2")
    found = describe_kernels(CPU, "auto")
    assert {found[name] for name in names} == {"AVX2"}


def test_the_versions_of_the_math_libraries_are_recorded() -> None:
    found = describe_kernels(CPU, "auto")
    assert all(name in found for name in ("MKL", "oneDNN")) or not torch.backends.mkl.is_available()


def test_the_model_of_the_gpu_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    fake: Any = SimpleNamespace(type="cuda")
    assert describe_kernels(fake, "auto")["GPU"] == "NVIDIA H200"
