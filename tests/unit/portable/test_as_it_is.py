"""Operations that are portable as they are have the same bits with other vector instructions and threads."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SOME = (
    "abs neg floor round frac where clamp maximum sort topk cumsum max argmax index_select gather masked_fill isnan "
    "nn.functional.leaky_relu nn.functional.softshrink nn.functional.max_pool2d nn.functional.hardtanh nan_to_num frexp"
)
DIFFERENT = ("expm1", "log1p", "sigmoid")
NO_AVX2 = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F"}
ENVIRONMENTS = (
    {"OMP_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ATEN_CPU_CAPABILITY": "default", **NO_AVX2},
)


def run(*arguments: str, **variables: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.portable.calls", *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout.splitlines()[-1]


def hashes(folder: Path, *arguments: str) -> list[dict[str, str]]:
    path = str(folder / "calls")
    run(*arguments, "--keep", path)
    return [json.loads(run("--hash", path, **variables)) for variables in ENVIRONMENTS]


def differences(found: list[dict[str, str]]) -> set[str]:
    assert {"aten::floor", "aten::leaky_relu", "aten::topk"} <= {*found[0]}
    return {name for name, each in found[0].items() if any(other.get(name) != each for other in found[1:])}


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="its other vector instructions")
def test_some_operations_have_the_same_bits_and_others_have_not(tmp_path: Path) -> None:
    """What is known to differ is computed too: a comparison that cannot find it proves nothing."""
    names = [*SOME.split(), *DIFFERENT]
    differ = differences(hashes(tmp_path, "2", *names, "--others", *DIFFERENT))
    assert differ == {f"aten::{name}" for name in DIFFERENT}
