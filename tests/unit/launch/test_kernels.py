"""`kernels` pins what the libraries choose, before they choose, or says why it can't."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from samebits.config.schema import RunConfig
from samebits.errors import ConfigError
from samebits.launch import kernels
from samebits.launch.kernels import PINNED, pin_kernels
from samebits.module.determinism import check_kernels

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="kernels= is for x86-64")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.backends.cpu.get_cpu_capability()  # torch has chosen, so nothing here can change its choice
    before = dict(os.environ)
    for name in PINNED["avx2"]:
        os.environ.pop(name, None)
    monkeypatch.setattr(kernels, "_pinned", None)
    monkeypatch.setattr(kernels, "cpu_info", lambda: {"flags": "fma avx2"})
    yield
    os.environ.clear()
    os.environ.update(before)


def test_processes_that_are_started_get_the_variables() -> None:
    pin_kernels("avx2", only_children=True)
    assert {name: os.environ[name] for name in PINNED["avx2"]} == PINNED["avx2"]


@pytest.mark.parametrize("kernels", ["auto", "portable"])
def test_others_change_nothing(kernels: str) -> None:
    before = dict(os.environ)
    pin_kernels(kernels)
    assert dict(os.environ) == before


def test_it_is_too_late_once_torch_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    with pytest.raises(ConfigError, match="kernels=avx2 has no effect in this process, because torch has computed"):
        pin_kernels("avx2")


def test_importing_torch_is_not_too_late() -> None:
    code = "import torch; from samebits.launch.kernels import pin_kernels; pin_kernels('avx2')"
    done = subprocess.run([sys.executable, "-c", f"{code}; print(torch.__config__.show())"], capture_output=True,
                          text=True, timeout=180)  # fmt: skip
    assert "CPU capability usage: AVX2" in done.stdout, done.stderr


def test_a_variable_of_the_user_with_another_value_is_refused() -> None:
    os.environ["ATEN_CPU_CAPABILITY"] = "avx512"
    with pytest.raises(ConfigError, match="ATEN_CPU_CAPABILITY is avx512, but kernels=avx2 sets it to avx2"):
        pin_kernels("avx2", only_children=True)


def test_a_variable_of_the_user_with_the_same_value_is_no_contradiction() -> None:
    os.environ["ATEN_CPU_CAPABILITY"] = "AVX2"
    pin_kernels("avx2", only_children=True)


def test_a_processor_without_avx2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cpu_info", lambda: {"flags": "sse4_2 avx"})
    with pytest.raises(ConfigError, match="needs a processor with AVX2 and FMA"):
        pin_kernels("avx2", only_children=True)


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="is for x86-64 processors, and this one is aarch64"):
        pin_kernels("avx2", only_children=True)
    pin_kernels("portable", only_children=True)


def test_a_process_pins_one_kind_only() -> None:
    pin_kernels("avx2", only_children=True)
    with pytest.raises(ConfigError, match="has used kernels=avx2 before"):
        pin_kernels("auto")


def test_training_checks_that_torch_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    check_kernels(RunConfig(recipe="x"))
    check_kernels(RunConfig(recipe="x", kernels="portable"))
    with pytest.raises(ConfigError, match="kernels=avx2 has no effect in this process"):
        check_kernels(RunConfig(recipe="x", kernels="avx2"))
