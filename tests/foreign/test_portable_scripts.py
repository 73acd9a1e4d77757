"""Scripts in portable arithmetic give one hash, whichever kernels and processes compute it."""

from pathlib import Path

import pytest

from tests.runs import TORCHRUN, python

SCRIPT = ("-W", "ignore", "-m", "tests.foreign.portable_script")
OTHER = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.full
@pytest.mark.parametrize(
    "way", ["loop", "lightning", *(pytest.param(w, marks=pytest.mark.lab) for w in ("accelerate", "trainer"))]
)
def test_a_script_gives_one_hash(way: str, tmp_path: Path) -> None:
    alone, others = (
        python(*start, way, cwd=tmp_path, **variables).stdout.splitlines()[-1]
        for start, variables in ((SCRIPT, {}), ((*TORCHRUN, 2, *SCRIPT[2:]), OTHER))
    )
    assert alone == others
    assert alone.startswith("sha256 ")
