"""The command for a longer run that a refusal prints works as it is printed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samebits.provenance.identity import ways_to_train_longer
from samebits.storage.run_folder import RunFolder


@pytest.mark.parametrize(
    ("has_setting", "is_complete"), [(True, True), (True, False), (False, True)], ids=["complete", "stopped", "fixed"]
)
def test_weights_are_named_only_if_the_run_has_written_them(
    tmp_path: Path, has_setting: bool, is_complete: bool
) -> None:
    config: Any = SimpleNamespace(max_steps=None, model=SimpleNamespace(weights="") if has_setting else None)
    folder = RunFolder(tmp_path)
    if is_complete:
        folder.weights.write_bytes(b"")
    text = ways_to_train_longer(folder, config, "epochs=8")
    assert f"samebits train {tmp_path}/config.yaml --run-dir NEW epochs=8" in text
    assert (f"model.weights={tmp_path}/weights.safetensors" in text) == (has_setting and is_complete)
