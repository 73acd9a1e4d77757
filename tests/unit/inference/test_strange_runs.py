"""A run folder that is damaged, altered or a stranger's: an error with the cause, or the run's own result."""

import hashlib
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samebits.cli.main import run as command
from samebits.storage.manifest import sha256_of
from tests.unit.inference.whole_runs import RECIPE, RESUME, SETTINGS, checkpoints, result

MB = 1024 * 1024


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's state.json, and its manifest with it."""
    plain = json.loads((checkpoint / "state.json").read_text())
    change(plain)
    content = json.dumps(plain).encode()
    (checkpoint / "state.json").write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(content), "sha256": sha256_of(content)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


OPENING = (["eval", "run"], ["predict", "run", "dot.png"], ["export", "run", "--to", "safetensors"])


@pytest.mark.parametrize("arguments", OPENING, ids=lambda arguments: arguments[0])
def test_weights_with_a_flipped_bit_fail(run: Path, arguments: list[str], printed: Callable[..., str]) -> None:
    content = bytearray((run / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "weights.safetensors").write_bytes(content)
    text = printed(arguments, 5)
    assert "run/weights.safetensors does not hold the weights that this run ended with" in text
    assert result(run)["weights_sha256"] in text
    assert "samebits train --run-dir run --resume auto, which writes it again" in text


def test_weights_of_another_run_are_refused_and_a_resume_mends(
    run: Path, capsys: pytest.CaptureFixture[str], printed: Callable[..., str]
) -> None:
    before, ended_with = (run / "weights.safetensors").read_bytes(), result(run)["weights_sha256"]
    figures = printed(["eval", "run", "--json"])
    shutil.copy(checkpoints(run)[0] / "weights.safetensors", run)
    assert command(["eval", "run"]) == 5
    assert command(RESUME) == 0
    assert (run / "weights.safetensors").read_bytes() == before
    assert result(run)["weights_sha256"] == ended_with
    capsys.readouterr()
    assert printed(["eval", "run", "--json"]) == figures


def test_final_weights_without_a_result_are_not_used(run: Path, printed: Callable[..., str]) -> None:
    (run / "result.json").unlink()
    assert "run/result.json does not exist" in printed(["eval", "run"], 5)
    assert command(RESUME) == 0
    assert command(["eval", "run"]) == 0


def test_a_resume_without_config_is_compared_with_the_checkpoint(run: Path, printed: Callable[..., str]) -> None:
    (run / "config.yaml").unlink()
    (run / "result.json").unlink()
    more = ["train", str(RECIPE), *SETTINGS, *RESUME[1:]]
    text = printed([*more, "seed=1"], 2)
    assert "was written with other settings" in text
    assert "seed: 0 in the run, 1 now" in text
    assert not (run / "config.yaml").exists()
    assert command(more) == 0
    assert (run / "config.yaml").is_file()


def test_a_config_that_was_edited_is_not_evaluated_as_the_run(run: Path, printed: Callable[..., str]) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("twice: false", "twice: true"))
    text = printed(["eval", "run"], 2)
    assert "run/config.yaml was altered: the run was trained with other settings" in text
    assert "twice: False in the run, True now" in text
    config.write_text(config.read_text().replace("twice: true", "twice: false"))
    assert command(["eval", "run", "twice=true"]) == 0


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"classes": ["bright", "dark"]}', "run/dataset_info.json was altered since the run started"),
        ("", "run/dataset_info.json can't be read"),
        ("{}", "run/dataset_info.json was altered since the run started"),
        ("[1]", "run/dataset_info.json holds no JSON object"),
        (None, "run/dataset_info.json is missing, and the data has other dataset info"),
    ],
    ids=["swapped", "empty", "no facts", "list", "missing"],
)
@pytest.mark.parametrize("arguments", [["eval", "run"], RESUME], ids=lambda arguments: arguments[0])
def test_facts_that_are_not_the_run_s_are_refused(
    run: Path, arguments: list[str], content: str | None, text: str, printed: Callable[..., str]
) -> None:
    if content is None:
        (run / "dataset_info.json").unlink()
        Path("dots/classes.txt").write_text("black white")
    else:
        (run / "dataset_info.json").write_text(content)
    assert text in printed([*arguments, "data.root=dots"], 5)


def test_unhashed_facts_of_an_old_run_that_do_not_fit_are_named(run: Path, printed: Callable[..., str]) -> None:
    for checkpoint in checkpoints(run):
        rewrite(checkpoint, lambda plain: plain.pop("run"))
    assert command(["eval", "run"]) == 0
    (run / "dataset_info.json").write_text('{"names": 3}')
    for arguments in (["eval", "run"], RESUME):
        assert "run/dataset_info.json does not fit the recipe: KeyError: 'classes'" in printed(arguments, 5)


def test_a_checkpoint_from_before_settings_were_kept_still_resumes(run: Path) -> None:
    weights = (run / "weights.safetensors").read_bytes()
    for path in checkpoints(run)[1:]:
        shutil.rmtree(path)
    rewrite(checkpoints(run)[0], lambda plain: plain.pop("run"))
    assert command(RESUME) == 0
    assert (run / "weights.safetensors").read_bytes() == weights


def test_a_recipe_that_was_edited_since_is_noticed(
    run: Path, capsys: pytest.CaptureFixture[str], printed: Callable[..., str]
) -> None:
    recipe = Path("my_dots.py").absolute()
    shutil.copy(RECIPE, recipe)
    assert command(["train", "my_dots.py", *SETTINGS, "--procs", "1", "--run-dir", "mine"]) == 0
    assert Path("mine/recipe.py").read_bytes() == RECIPE.read_bytes()
    assert command(["eval", "mine"]) == 0
    with recipe.open("a") as file:
        file.write("# edited\n")
    capsys.readouterr()
    text = printed(["eval", "mine"], 2)
    assert "is not trusted" in text
    assert "copied to mine/recipe.py" in text
    assert command(["trust", "my_dots.py"]) == 0
    assert command(["eval", "mine"]) == 0
    assert "has changed since the run in mine started" in capsys.readouterr().err
    sys.modules.pop("my_dots", None)


@pytest.mark.parametrize(
    ("kind", "code"), [("pipe", 5), ("dangling", 5), ("link", 5), ("huge", 0), ("one long line", 0)]
)
def test_strange_records_are_not_waited_for(run: Path, kind: str, code: int, printed: Callable[..., str]) -> None:
    (run / "result.json").unlink()
    shutil.rmtree(checkpoints(run)[-1])  # so that there is something left to train
    records, precious = run / "metrics.jsonl", Path("precious").absolute()
    if kind == "huge":
        os.truncate(records, 30 << 30)
    elif kind == "one long line":
        records.write_bytes(b"x" * 3 * MB + b"\n" + records.read_bytes())
    else:
        records.unlink()
    if kind == "pipe":
        os.mkfifo(records)
    elif kind in ("link", "dangling"):
        records.symlink_to(precious)
    if kind == "link":
        precious.write_text("mine\n")
    assert code == 0 or "metrics.jsonl" in printed(RESUME, code)
    assert (precious.read_text() if precious.exists() else None) == ("mine\n" if kind == "link" else None)


def test_a_checkpoint_that_claims_another_model_takes_no_memory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "weights.safetensors").unlink()
    checkpoint = checkpoints(run)[-1]
    shutil.rmtree(checkpoints(run)[0])
    name, size = "optimizer.safetensors", 240 * MB  # of holes
    entry = json.dumps({"average:w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    with (checkpoint / name).open("wb") as file:
        file.write(len(entry).to_bytes(8, "little") + entry.encode())
        file.truncate(8 + len(entry) + size)
    with (checkpoint / name).open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": (checkpoint / name).stat().st_size, "sha256": sha256}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert command(["eval", "run"]) == 5
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024 < 150
    assert "more than this model's can have" in capsys.readouterr().err
