"""Files of a run folder damaged at random: an error with a text, or the run's own result. FUZZ_TRIALS=2000 for more."""

import json
import os
import random
import resource
import shutil
import time
from pathlib import Path

import pytest

from samebits.cli.main import run as command
from tests.damage import DAMAGE
from tests.unit.inference.whole_runs import RESUME, checkpoints, result

FILES = ["config.yaml", "dataset_info.json", "result.json", "weights.safetensors", "metrics.jsonl", "environment.json",
         "recipe.json", "recipe.py", "checkpoints/best.json"]  # fmt: skip
FILES += [f"checkpoints/LAST/{name}" for name in ("manifest.json", "state.json", "weights.safetensors")]
FILES += ["checkpoints/LAST/optimizer.safetensors"]
COMMANDS = [["eval", "run", "--json"], ["eval", "run", "--checkpoint", "best", "--json"],
            ["predict", "run", "dot.png", "--json"], ["config", "run/config.yaml"], RESUME]  # fmt: skip


def mutate(path: Path, numbers: random.Random) -> str:
    """Damage a file in some way."""
    kind = numbers.choice([*DAMAGE, "flipped", "another line", "another value"])
    content = path.read_bytes()
    if kind == "flipped":
        bits = bytearray(content or b"\0")
        bits[numbers.randrange(len(bits))] ^= 1 << numbers.randrange(8)
        path.write_bytes(bits)
    elif kind == "another line":
        lines = content.splitlines(keepends=True) or [b""]
        lines[numbers.randrange(len(lines))] = numbers.choice([b"unknown: 3\n", b"- 1\n", b"seed: 9\n", b"{}\n", b""])
        path.write_bytes(b"".join(lines))
    elif kind == "another value":
        path.write_bytes(_other_value(content, numbers))
    else:
        DAMAGE[kind](path)
    return kind


def _other_value(content: bytes, numbers: random.Random) -> bytes:
    """JSON with another value somewhere."""
    try:
        value = json.loads(content)
    except ValueError:
        return content + b"\0"
    at = value
    while isinstance(at, dict) and at:
        name = numbers.choice(sorted(at))
        if not isinstance(at[name], dict) or numbers.random() < 0.3:
            at[name] = numbers.choice([None, -1, 1e308, float("nan"), "x", [], {}, 10**30, "\ud800"])
            break
        at = at[name]
    return json.dumps(value).encode()


@pytest.mark.parametrize("group", [0, pytest.param(1, marks=pytest.mark.full)])
def test_whatever_is_in_a_run_folder_there_is_an_error_with_a_text_or_the_run_s_own_result(
    whole: Path, run: Path, group: int, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = random.Random(os.environ.get("FUZZ_SEED", "1") + f"-{group}")
    last = checkpoints(run)[-1].name
    right = {}
    for arguments in COMMANDS[:3]:
        assert command(arguments) == 0
        right[" ".join(arguments)] = capsys.readouterr().out
    ended_with = result(run)["weights_sha256"]
    for trial in range(int(os.environ.get("FUZZ_TRIALS", "30")) // 2):
        name = numbers.choice(FILES).replace("LAST", last)
        kind = mutate(run / name, numbers)
        arguments = numbers.choice(COMMANDS)
        what = f"{name} {kind}, then {' '.join(arguments)} (trial {trial} of group {group})"
        memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        code = command(arguments)  # a fault of ours would be raised
        taken = time.monotonic() - began
        out, error = capsys.readouterr()
        assert code in (0, 2, 3, 5), f"{what}: code {code}\n{error}"
        assert "Traceback" not in out + error, f"{what}\n{error}"
        assert code == 0 or " error: " in error, f"{what}: no text"
        assert taken < 60, f"{what} took {taken:.0f} s"  # 10 at rest
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024 < 1000, f"{what}: memory"
        if code == 0 and arguments[0] in ("eval", "predict"):
            assert out == right[" ".join(arguments)], f"{what}: another result"
        if code == 0 and arguments is RESUME:
            assert result(run)["weights_sha256"] == ended_with, f"{what}: another model"
        shutil.rmtree(run)
        shutil.copytree(whole / "run", run)
