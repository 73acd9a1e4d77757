"""Run folders that are damaged at random or were made by an attacker: an error with a text, or the run's own result."""

import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samebits.cli.main import run as command
from samebits.config.schema import RunConfig
from samebits.engine.build import build_from
from samebits.errors import CheckpointError
from samebits.storage.manifest import sha256_of
from tests.damage import DAMAGE
from tests.unit.inference.test_strange_runs import rewrite
from tests.unit.inference.whole_runs import RESUME, checkpoints, result

GB = 1 << 30


def incomplete(run: Path) -> Path:
    """The run as it was before its last epoch, so that a resume has something to train and to write."""
    for name in ("result.json", "weights.safetensors"):
        (run / name).unlink()
    last = checkpoints(run)[-1]
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    return run


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def outside() -> Path:
    """A user's folder with files of the names that a run writes."""
    folder = Path("outside").absolute()
    for name in ("rank-0.log", "confusion.png", "metrics.jsonl", ".step-000001.1.partial/state.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine\n")
    return folder


@pytest.mark.parametrize("name", ["checkpoints", "logs", "pictures", "tensorboard"])
def test_a_folder_that_is_a_link_is_refused_and_nothing_is_written_or_removed_there(
    run: Path, outside: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(outside)
    if (run / name).exists():
        (run / name).rename("moved")
    (run / name).symlink_to(outside)
    assert command([*RESUME, "report.tensorboard=true"]) == 5
    assert f"run/{name} is a symbolic link, and a run would write through it" in capsys.readouterr().err
    assert tree(outside) == before


@pytest.mark.parametrize(
    "name", ["logs/rank-0.log", "logs/stacks-rank-0.txt", "pictures/confusion.png", "metrics.part"]
)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_is_left(run: Path, outside: Path, name: str, kind: str, printed: Callable[..., str]) -> None:
    before, path = tree(outside), incomplete(run) / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(outside / "rank-0.log")
    else:
        os.mkfifo(path)
    assert f"run/{name} is " in printed(RESUME, 5)
    assert tree(outside) == before


class Picky:
    """A recipe that counts its classes."""

    def dataset_info(self, config: RunConfig) -> dict[str, Any]:
        return {}

    def build(self, config: RunConfig, facts: Any) -> Any:
        return len(facts["classes"]) / 0


@pytest.mark.parametrize("recipe", ["mnist", "mine.py"])
def test_proven_facts_are_the_recipe_s_own_fault_only_where_it_is_a_file(run: Path, recipe: str) -> None:
    # A stranger can write a checkpoint that proves any facts. An own recipe's faults show their traceback.
    expected = CheckpointError if recipe == "mnist" else ZeroDivisionError
    with pytest.raises(expected):
        build_from(Picky(), RunConfig(recipe=recipe), {"classes": [1]}, run)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("arguments", [["eval", "run"], RESUME], ids=lambda arguments: arguments[0])
def test_files_of_terabytes_that_take_no_room_on_the_disk_are_not_read(
    run: Path, name: str, arguments: list[str], printed: Callable[..., str]
) -> None:
    for checkpoint in checkpoints(incomplete(run)):
        os.truncate(checkpoint / name, 200 * GB)
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["files"][name]["bytes"] = 200 * GB
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert f"{name} has {200 * GB:,} bytes, more than" in printed(arguments, 5)
    assert time.process_time() - began < 10
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024 < 200


def test_final_weights_of_terabytes_are_not_opened(run: Path, printed: Callable[..., str]) -> None:
    os.truncate(run / "weights.safetensors", 200 * GB)
    assert f"weights.safetensors has {200 * GB:,} bytes, more than" in printed(["eval", "run"], 5)


@pytest.mark.parametrize("name", ["dataset_info.json", "result.json", "checkpoints/best.json"])
def test_json_of_a_gigabyte_of_memory_is_refused(run: Path, name: str, printed: Callable[..., str]) -> None:
    (run / name).write_bytes(b"[" + b"[]," * 5_000_000 + b"0]")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert name in printed(["eval", "run", "--checkpoint", "best" if "best" in name else "last"], 5)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024 < 300


def at_step(step: object) -> Callable[[dict[str, Any]], object]:
    return lambda plain: (plain.update(step=step), plain["state"].update(step=step))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (at_step(10**18), "step 1,000,000,000,000,000,000 of 6"),
        (at_step(-5), "greater than or equal to 0"),
        (lambda plain: plain["state"].update(step=0), "step 0 of 6, evaluated after step"),
        (lambda plain: plain["state"].update(evaluated_step=5000), "evaluated after step 5,000"),
        (lambda plain: plain["state"].update(metrics={}), "its last validation has no metric"),
        (lambda plain: plain["state"].update(best={"step": float("inf"), "value": 1.0}), "best has step inf"),
        (lambda plain: plain["state"].update(best={"step": 1, "value": "high"}), "value 'high'"),
        (lambda plain: plain["state"].update(seconds=float("nan")), "should be a finite number"),
        (lambda plain: plain["groups"][0].update(params=[0]), "it has other parameter groups"),
        (lambda plain: plain.update(groups=[5]), "it has other parameter groups"),
        (lambda plain: plain["values"].update({"optimizer:0:other": 1}), "other for parameter 0"),
        (
            lambda plain: plain["values"].update({f"optimizer:{10**30}:momentum_buffer": None}),
            f"for parameter {10**30}",
        ),
        (lambda plain: plain["values"].update({"optimizer:0:momentum_buffer": {}}), "of parameter 0 has another shape"),
        # Of another version, or written by another program.
        (lambda plain: plain["state"].update(new_entry=1), "unknown entries: new_entry"),
        (lambda plain: plain["state"].update(step="three"), "has a state that this version"),
        (lambda plain: plain["state"].update(best={"step": None}), "has a state that this version"),
        (lambda plain: plain.pop("groups"), "does not have the form of a checkpoint"),
        (lambda plain: plain.update(state=[]), "does not have the form of a checkpoint"),
        (lambda plain: plain["values"].update({"optimizer:x": 1}), "does not have the form of a checkpoint"),
    ],
)
def test_a_state_or_an_optimizer_that_no_run_has_is_named(
    run: Path, change: Callable[[dict[str, Any]], object], text: str, printed: Callable[..., str]
) -> None:
    for checkpoint in checkpoints(run):
        rewrite(checkpoint, change)
    assert text in printed(RESUME, 5)


def test_hyperparameters_come_from_the_settings_and_not_from_the_checkpoint(run: Path) -> None:
    right = (run / "weights.safetensors").read_bytes()
    for checkpoint in checkpoints(incomplete(run)):
        rewrite(checkpoint, lambda plain: plain["groups"][0].update(momentum="x", maximize=True, fused="y", foreach=7))
    assert command(RESUME) == 0
    assert (run / "weights.safetensors").read_bytes() == right


def test_tensors_of_a_type_that_no_checkpoint_has_are_named(run: Path, printed: Callable[..., str]) -> None:
    header = json.dumps({"average:w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (run / "weights.safetensors").unlink()
    for checkpoint in checkpoints(run):
        (checkpoint / "optimizer.safetensors").write_bytes(content)
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["files"]["optimizer.safetensors"] = {"bytes": len(content), "sha256": sha256_of(content)}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    for arguments in (["eval", "run"], RESUME):
        assert " error: " in printed(arguments, 5)


@pytest.mark.parametrize("width", [10**6, 10**18])
def test_a_model_that_no_machine_has_memory_for_ends_in_a_text(width: int, printed: Callable[..., str]) -> None:
    Path("config.yaml").write_text(f"recipe: mnist\nmodel: {{name: cnn, width: {width}}}\n")
    arguments = ["train", "config.yaml", "--procs", "1", "--run-dir", "wide"]
    assert "the model does not fit into this machine's memory" in printed(arguments, 2)


def test_a_value_of_millions_of_characters_is_cut(run: Path, printed: Callable[..., str]) -> None:
    for checkpoint in checkpoints(run):
        rewrite(checkpoint, lambda plain: plain["run"]["settings"].update(seed="7" * 5_000_000))
    for arguments in (["eval", "run"], RESUME):
        text = printed(arguments, 2)
        assert "seed: 777" in text
        assert "more characters" in text
        assert len(text) < 50_000


@pytest.mark.parametrize("setting", ["loader: {num_workers: 100000}", "num_threads: 1000000"])
def test_a_config_gets_no_thousands_of_threads(setting: str, printed: Callable[..., str]) -> None:
    Path("config.yaml").write_text(f"recipe: mnist\n{setting}\n")
    assert " error: " in printed(["config", "config.yaml"], 2)


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
