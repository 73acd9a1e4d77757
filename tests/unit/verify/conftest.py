"""An honest run of the tiny recipe, trained once in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.verify_trials.runs import prepare_process, train


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "run"
    prepare_process()
    train(folder)
    return folder
