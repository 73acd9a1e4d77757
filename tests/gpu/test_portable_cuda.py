"""Portable arithmetic on a GPU: the weights of the CPU."""

from pathlib import Path

import pytest

from tests.runs import samebits, weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("settings", [("digits", "epochs=2"), ("digits", "max_steps=20", "precision=bf16")])
def test_a_gpu_gives_the_weights_of_the_cpu(tmp_path: Path, settings: tuple[str, ...]) -> None:
    for device in ("cpu", "cuda"):
        samebits("train", *settings, f"device={device}", "--run-dir", tmp_path / device, cwd=tmp_path)
    assert weights(tmp_path / "cuda") == weights(tmp_path / "cpu")
