"""A run folder that is damaged, altered or a stranger's: an error with the cause, or weights that are stated."""

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
from samebits.errors import CheckpointError, ConfigError
from samebits.inference.predict import evaluate
from samebits.inference.trained_model import TrainedModel, describe_weights
from samebits.storage.manifest import sha256_of
from samebits.storage.weights import read, weights_sha256
from tests.unit.inference.whole_runs import RECIPE, RESUME, SETTINGS, checkpoints, result
from tests.verify_trials.forgery import edit_json, edit_tensors

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
    text = printed(RESUME, code)
    assert code == 0 or "metrics.jsonl" in text
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


def replace_the_weights(run: Path) -> None:
    edit_tensors(run / "weights.safetensors", lambda tensors: [each.zero_() for each in tensors.values()])
    found = weights_sha256(read(run / "weights.safetensors"))
    edit_json(run / "result.json", lambda result: result.update(weights_sha256=found))


def replace_a_checkpoint(run: Path) -> None:
    path = run / "checkpoints" / "step-000008" / "weights.safetensors"
    edit_tensors(path, lambda tensors: [each.zero_() for each in tensors.values()])


def plant_a_checkpoint(run: Path) -> None:
    folder = run / "checkpoints"
    shutil.copytree(folder / "step-000008", folder / "step-000002")
    edit_json(folder / "best.json", lambda best: best.update(step=2))


def name_another_best(run: Path) -> None:
    edit_json(run / "checkpoints" / "best.json", lambda best: best.update(value=0.99))


@pytest.mark.parametrize(
    ("change", "which", "text"),
    [
        (replace_the_weights, "last", "weights.safetensors is not the file"),
        (replace_a_checkpoint, "step-000008", "step-000008/weights.safetensors is not the file"),
        (plant_a_checkpoint, "best", "step-000002/weights.safetensors is not the file"),
        (plant_a_checkpoint, "step-000002", "step-000002/weights.safetensors is not the file"),
        (name_another_best, "best", "is not that of its record"),
    ],
)
def test_weights_that_the_statement_does_not_list_are_refused(
    honest: Path, tmp_path: Path, change: Callable[[Path], None], which: str, text: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    assert evaluate(run, checkpoint="best" if which == "best" else "last")
    change(run)
    with pytest.raises(CheckpointError, match=text):
        evaluate(run, checkpoint=which)


def test_a_statement_itself_is_checked(honest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    replace_the_weights(run)
    sha256 = json.loads((run / "result.json").read_text())["weights_sha256"]
    edit_json(
        run / "provenance.json",
        lambda plain: plain["predicate"]["buildDefinition"]["internalParameters"].update(weights_sha256=sha256),
    )
    with pytest.raises(CheckpointError, match=r"provenance\.json"):
        evaluate(run)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    from PIL import Image

    run = tmp_path / "run"
    for name in ("a", "b"):
        for index in range(3):
            folder = run / "data" / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"{index}.png")
    return run


def write_settings(run: Path, *overrides: str) -> None:
    from samebits.config import document
    from samebits.provenance.identity import plain_settings
    from samebits.recipes.catalog import find

    config = find("classify").load(["data.val_fraction=0.5", *overrides]).config
    (run / "config.yaml").write_text(document.to_yaml(plain_settings(config)))


@pytest.mark.parametrize("name", ["root", "train", "link"])
def test_data_in_the_run_folder_is_refused_unless_the_user_names_it(images: Path, tmp_path: Path, name: str) -> None:
    place, setting = images / "data", f"data.{name}"
    if name == "link":
        shutil.move(images / "data", tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
        setting = "data.root"
    write_settings(images, f"{setting}={place}", *([f"data.eval={place}"] if name == "train" else []))
    with pytest.raises(ConfigError, match=f"{setting} lies in the run folder"):
        TrainedModel(images).settings()
    typed = [f"{setting}={place}", *([f"data.eval={place}"] if name == "train" else [])]
    assert TrainedModel(images, typed).settings()[1].recipe == "classify"


def test_data_elsewhere_needs_no_word(images: Path, tmp_path: Path) -> None:
    shutil.move(images / "data", tmp_path / "run-data")
    write_settings(images, f"data.root={tmp_path / 'run-data'}")
    assert TrainedModel(images).settings()[1].recipe == "classify"


BEST = {"step": 184, "metric": "top1", "value": 0.99444}


def folder(path: Path, best: object = BEST, result: object = None, *, is_complete: bool = True) -> Path:
    (path / "checkpoints").mkdir()
    (path / "checkpoints/best.json").write_text(json.dumps(best))
    (path / "result.json").write_text(json.dumps(result or {"steps": 230, "metrics": {"top1": 0.99167}}))
    if is_complete:
        (path / "weights.safetensors").touch()
        (path / "provenance.json").touch()
    return path


@pytest.mark.parametrize(
    ("which", "line"),
    [
        ("last", "final weights (step 230): top-1 99.17%; --checkpoint best (step 184): 99.44%"),
        ("best", "best checkpoint (step 184): top-1 99.44%"),
        ("step-000046", "checkpoint step-000046"),
    ],
)
def test_the_final_weights_are_named_with_the_best_ones(tmp_path: Path, which: str, line: str) -> None:
    assert describe_weights(folder(tmp_path), which) == line
    assert len(line) <= 80


@pytest.mark.parametrize(
    "change", [{"step": 4, "value": 0.99}, {"value": 0.99}, {"metric": [[]]}, {"metric": None}, {"value": "0.9"}]
)
def test_a_best_value_that_the_record_contradicts_is_not_shown(honest: Path, tmp_path: Path, change: object) -> None:
    run = shutil.copytree(honest, tmp_path / "run")
    assert "best of the run" in describe_weights(run, "last") or "--checkpoint best" in describe_weights(run, "last")
    edit_json(run / "checkpoints" / "best.json", lambda content: content.update(change))
    assert "best" not in describe_weights(run, "last")
    assert describe_weights(run, "best") == "best checkpoint"


def test_weights_that_no_statement_lists_are_named(tmp_path: Path) -> None:
    run = folder(tmp_path)
    (run / "provenance.json").unlink()
    first, second = describe_weights(run, "last").split("\n")
    assert first.startswith("final weights (step 230)")
    assert second.startswith("provenance.json is missing")
    assert len(second) <= 80


def test_final_weights_may_be_the_best(tmp_path: Path) -> None:
    run = folder(tmp_path, {**BEST, "step": 230, "value": 0.99167})
    assert describe_weights(run, "last") == "final weights (step 230), the best of the run: top-1 99.17%"


def test_a_run_that_is_not_complete_has_the_newest_checkpoint(tmp_path: Path) -> None:
    line = "newest checkpoint, because the run is not complete"
    assert describe_weights(folder(tmp_path, is_complete=False), "last") == line


def test_a_file_of_weights_is_not_described(tmp_path: Path) -> None:
    assert describe_weights(tmp_path / "weights.pth", "last") == ""


@pytest.mark.parametrize(
    "best",
    [
        [], {"step": "x" * 10**6, "metric": "top1", "value": 1}, {"step": 10**400, "metric": "top1", "value": 10**400},
        {"step": 1, "metric": "\x1b[2J", "value": 0.5}, {"step": -1, "metric": "m" * 1000, "value": None},
    ],
)  # fmt: skip
@pytest.mark.parametrize("which", ["last", "best", "\x1b[2J"])
def test_a_strangers_folder_prints_one_short_line_or_none(tmp_path: Path, best: object, which: str) -> None:
    line = describe_weights(folder(tmp_path, best, {"steps": 10**400, "metrics": {"top1": "x" * 10**6}}), which)
    assert len(line) < 200
    assert line.isprintable()
