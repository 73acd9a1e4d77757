from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.own_loop.loops import torch_settings


@pytest.fixture(autouse=True)
def _torch_settings() -> Iterator[None]:
    with torch_settings():
        yield
