"""Portable arithmetic gives recorded bits, whichever kernels, libraries and threads compute them."""

import os
import subprocess
import sys

import pytest

# Of `python -m tests.unit.portable.networks`, on any processor.
RECORDED = """\
residual cd08f6790befb804
recurrent ae3d650ddb684cf1
attention 0bcc32949ff8a676
decoder 57a459506a879c10
"""
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        pytest.param({}, 1, id="the fastest kernels of this processor"),
        pytest.param({"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}, 1, id="no vectors"),
        pytest.param(
            {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, 2, id="AVX2, two threads", marks=FULL
        ),
        pytest.param({"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, 4, id="no VNNI", marks=FULL),
        pytest.param({"MKL_CBWR": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}, 1, id="SSE4", marks=FULL),
        pytest.param({"ATEN_CPU_CAPABILITY": "default"}, 4, id="no vectors, four threads", marks=FULL),
    ],
)
def test_networks_have_the_recorded_hashes(variables: dict[str, str], threads: int) -> None:
    command = [sys.executable, "-m", "tests.unit.portable.networks", str(threads)]
    found = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert found.stdout == RECORDED, found.stderr[-2_000:]
