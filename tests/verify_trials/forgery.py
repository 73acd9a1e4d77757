"""What a publisher can do to a run folder after training, such that its files agree with each other again."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from samebits.config import document
from samebits.provenance.record import (
    STATEMENT_FILE,
    STEPS_FILE,
    RunStatement,
    StepRecord,
    make_statement,
    read_statement_and_files,
    read_steps,
    write_steps,
)
from samebits.provenance.run_files import RunFiles
from samebits.storage.manifest import MANIFEST, STATE, WEIGHTS, sha256_of_file
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import weights_sha256
from tests.verify_trials.runs import KEPT


def forge(run: Path, **changes: Any) -> None:
    """Make a run's statement and result agree with its other files, as its publisher can."""
    folder = RunFolder(run)
    log = read_steps(run / STEPS_FILE)
    tensors = load_file(run / WEIGHTS)
    there = RunFiles(run)
    checkpoints = there.checkpoints
    before = read_record(run)
    record = replace(
        before,
        chain=log.link().hex(),
        evaluations=[*there.evaluations()],
        checkpoints=checkpoints,
        weights_sha256=weights_sha256(tensors),
        **changes,
    )
    files = {name: sha256_of_file(run / name) for name in (WEIGHTS, STEPS_FILE)}
    for name, parts in checkpoints.items():
        files |= {f"checkpoints/{name}/{file}": sha256 for file, sha256 in parts.items()}
    folder.write_json(STATEMENT_FILE, make_statement(record, files, run.name, 0.0, 1.0))
    last = record.evaluations[-1]
    result = folder.read_json("result.json")
    result |= {"chain": record.chain, "root": record.root, "weights_sha256": record.weights_sha256}
    result |= {"metrics": last.metrics, "steps": record.num_steps, "skipped_steps": log.skipped()}
    best = result["best"]
    there = [each.metrics for each in record.evaluations if each.step == best["step"]]
    result["best"] = {**best, "value": there[0][best["metric"]]} if there else None
    folder.write_json("result.json", result)


def read_record(run: Path) -> RunStatement:
    """Return a run's record."""
    return read_statement_and_files(run / STATEMENT_FILE)[0]


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_records(run: Path, edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Replace the records in `metrics.jsonl`."""
    path = run / "metrics.jsonl"
    records = edit([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def edit_evaluation(run: Path, step: int, **metrics: float) -> None:
    """Change the metrics after a step in `metrics.jsonl`, or add an evaluation there."""

    def edit(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = [each for each in records if each["kind"] == "eval" and each["step"] == step]
        if not found:
            found = [{**next(each for each in records if each["kind"] == "eval"), "step": step, "epoch": step / 5}]
            records = sorted([*records, *found], key=lambda each: each["step"])
        found[0].update(metrics)
        return records

    edit_records(run, edit)


def edit_steps(run: Path, step: int, edit: Callable[[StepRecord], StepRecord]) -> None:
    """Change the record of a step."""
    path = run / STEPS_FILE
    log = read_steps(path)
    size = len(log.body) // len(log)
    record = log.get(step)
    assert record is not None
    body = log.body[: step * size] + edit(record).to_bytes() + log.body[(step + 1) * size :]
    write_steps(path, replace(log, body=body))
    after = read_steps(path).get(step)
    edit_lines(run, "train", step + 1, loss=after.loss, lr=after.lr, grad_norm=after.norm)


def edit_lines(run: Path, kind: str, step: int, **values: float) -> None:
    """Change the records of a kind after a step in `metrics.jsonl`."""
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for each in records:
        if (each["kind"], each["step"]) == (kind, step):
            each.update({name: value if math.isfinite(value) else None for name, value in values.items()})
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Change a file of tensors, and the manifest beside it if there is one."""
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    _update_manifest(path)


def edit_state(run: Path, step: int, edit: Callable[[Any], None]) -> None:
    """Change the plain state in the checkpoint of a step, and its manifest."""
    path = run / "checkpoints" / f"step-{step:06}" / STATE
    edit_json(path, edit)
    _update_manifest(path)


def edit_settings(run: Path, settings: dict[str, Any]) -> None:
    """State other settings of a run, nested, in `config.yaml` and in its checkpoints."""
    folder = RunFolder(run)
    values = document.parse(folder.config.read_text(), str(folder.config)).values | settings
    folder.config.write_text(document.to_yaml(values))
    for path in sorted(folder.checkpoints.glob("step-*")):
        edit_state(run, int(path.name[5:]), lambda state: state["run"]["settings"].update(settings))


def add_a_checkpoint(run: Path) -> None:
    """Add a checkpoint that the statement does not list."""
    shutil.copytree(run / "checkpoints" / f"step-{KEPT:06}", run / "checkpoints" / "step-000001")


def name_another_best(run: Path) -> None:
    """Name a step without an evaluation as the best."""
    edit_json(run / "checkpoints" / "best.json", lambda best: best.update(step=best["step"] + 1))


def raise_the_best(run: Path) -> None:
    """State a better value of the best validation."""
    edit_json(run / "checkpoints" / "best.json", lambda best: best.update(value=best["value"] + 0.5))


def smooth_the_curve(run: Path) -> None:
    """State a smaller loss of a step in `metrics.jsonl`."""
    edit_lines(run, "train", 3, loss=0.01)


def state_another_processor(run: Path) -> None:
    """State another processor in `environment.json`."""
    edit_json(run / "environment.json", lambda plain: plain["worlds"][0]["environment"].update({"CPU capability": "X"}))


def state_other_typed_settings(run: Path) -> None:
    """State other typed settings."""
    (run / "config.diff.yaml").write_text("epochs: 400\n")


def turn_the_direction(run: Path) -> None:
    """State the worst evaluation as the best, and that smaller is better."""
    path = run / "checkpoints" / "best.json"
    best = json.loads(path.read_text())
    values = {
        record["step"]: record[best["metric"]]
        for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if record["kind"] == "eval"
    }
    worst = min(values, key=lambda step: values[step])
    assert values[worst] < best["value"]
    path.write_text(json.dumps(best | {"step": worst, "value": values[worst], "better": "min"}))


def without_evaluations(run: Path, hidden: Callable[[int], bool]) -> None:
    """Leave evaluations out of `metrics.jsonl`, by their step."""
    edit_records(run, lambda all_: [each for each in all_ if each["kind"] != "eval" or not hidden(each["step"])])


def worst(run: Path) -> dict[str, Any]:
    """Return the best of `result.json` with step and value of another evaluation."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = json.loads((run / "result.json").read_text())["best"]
    evaluations = [each for each in records if each["kind"] == "eval"]
    other = next(each for each in evaluations if each[found["metric"]] != found["value"])
    return {**found, "step": other["step"], "value": other[found["metric"]]}


def _update_manifest(path: Path) -> None:
    manifest = path.with_name(MANIFEST)
    if manifest.exists():
        entry = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
        edit_json(manifest, lambda content: content["files"].update({path.name: entry}))
