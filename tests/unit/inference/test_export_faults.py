"""An ONNX file that onnxruntime refuses ends with a message, and is not left behind."""

from pathlib import Path

import pytest
import torch

from samebits.errors import ConfigError
from samebits.inference import export


def test_an_onnx_file_that_can_not_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_to_onnx", lambda *_: b"no model")
    with pytest.raises(ConfigError, match="onnxruntime can't run the file") as refused:
        export._write("onnx", torch.nn.Linear(2, 2), (2,), {}, tmp_path / "net.onnx")
    assert refused.value.slots["fix"].endswith("or export --to torch-export or safetensors")
    assert list(tmp_path.iterdir()) == []


def test_an_onnx_file_that_does_not_run_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = tmp_path / "net.onnx"
    path.write_bytes(export._to_onnx(model, torch.zeros(2, 2), {}))
    run = export._from_onnx(path, model)
    assert len(run(torch.zeros(3, 2))) == 1
    with pytest.raises(ConfigError, match="onnxruntime can't run the file"):
        run(torch.zeros(3, 5))
