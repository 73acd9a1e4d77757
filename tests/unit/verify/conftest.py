"""Replays set torch's threads and algorithms, which the tests after them do not expect."""

import pytest


@pytest.fixture(autouse=True)
def _as_before(torch_as_before: None) -> None:
    """Restore them."""
