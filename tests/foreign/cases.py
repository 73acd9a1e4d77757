"""Which scripts a test run chooses: long tests run a few in `make test-full`, and all in `make test-cluster`."""

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

# Those that differ most from the scripts that unmarked tests run, of each framework.
CHOSEN = ("ddp_gan", "ddp_timm", "accelerate_gan", "lightning_gan", "trainer_lm --lora")


def cases(scripts: Iterable[str]) -> list[ParameterSet]:
    """A test's cases, each with its marker."""
    return [pytest.param(name, marks=pytest.mark.full if name in CHOSEN else pytest.mark.lab) for name in scripts]
