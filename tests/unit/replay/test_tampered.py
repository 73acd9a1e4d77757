"""Tampered runs are found, with the step; an honest one is not. `make bench-verify` has a hundred, and audits."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.replay.segments import Segment
from samebits.replay.verify import lines
from samebits.storage.manifest import WEIGHTS
from tests.verify_trials.forgery import edit_json, read_record
from tests.verify_trials.runs import KEPT, NUM_STEPS, train, verified
from tests.verify_trials.tampers import Tamper, tampers

TAMPERS = {each.name: each for each in tampers()}
QUICK = [
    "sample 13", "statistics after step 12", "a bit of weights at 8", "loss of 10", "cut off", "subject", "no data",
    "no code", "no code, environment, data", "none after (10,)", "none after (5, 10)", "none after (5, 10, 15)",
    "from 10 on", "curve smoothed", "another processor", "typed settings", "best.json, direction", "checkpoint added",
    "seed in config.yaml", "weights at 8 replaced", "best of result.json is another", "best of result.json by loss",
    "best of result.json is none", "none", "all but weights", "all but a checkpoint", "steps.bin deleted",
    f"{WEIGHTS} deleted",
]  # fmt: skip
# One of each kind, and those that came close to escaping.
MORE = sorted({each.kind: each.name for each in TAMPERS.values() if each.name not in QUICK}.values())


def check(tamper: Tamper, honest: Path, folder: Path) -> None:
    tamper.make(honest, folder)
    verdict = verified(folder, **tamper.request)
    assert tamper.is_found(verdict), lines(verdict)


def test_an_honest_run_is_verified_and_not_changed(honest: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in honest.rglob("*")}
    verdict = verified(honest)
    assert lines(verdict) == [
        "  ok       20 of 20 steps: equal samples, loss, gradient norm and weights",
        "  note     not compared: logs, recipe.json, recipe.py, times",
        "verified   every step of the run",
    ]
    assert {path: path.stat().st_mtime_ns for path in honest.rglob("*")} == before


def test_there_are_a_hundred_ways_to_tamper_of_57_kinds() -> None:
    assert len(TAMPERS) == len(tampers()) >= 100
    assert len({each.kind for each in TAMPERS.values()}) >= 57


@pytest.mark.parametrize("name", QUICK)
def test_a_tampered_run_is_found_with_its_step(honest: Path, tmp_path: Path, name: str) -> None:
    check(TAMPERS[name], honest, tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
@pytest.mark.one_in(3)
def test_other_tampered_runs_are_found_too(honest: Path, tmp_path: Path, name: str) -> None:
    check(TAMPERS[name], honest, tmp_path / "run")


def test_a_segment_that_is_not_replayed_hides_its_change_and_no_other(honest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    TAMPERS["loss of 10"].make(honest, run)
    assert verified(run, steps=(0, 8)).is_verified
    found = verified(run, steps=(8, 12))
    assert [(each.step, each.name) for each in found.differences] == [(10, "loss")]
    every = verified(run)
    assert set(every.chosen) - set(every.replayed) == {Segment(8, 12)}


def test_steps_within_a_segment_are_replayed_from_its_start(honest: Path) -> None:
    verdict = verified(honest, steps=(5, 7))
    assert verdict.replayed == [Segment(4, 7)]
    assert lines(verdict)[-1] == "verified   steps 4-6: 15.0% of the steps"
    # Steps that the user names are no sample, also where they end with a segment.
    assert lines(verified(honest, steps=(4, 8)))[-1] == "verified   steps 4-7: 20.0% of the steps"


def without(*names: str) -> Callable[[Path, Path], None]:
    def copy(honest: Path, folder: Path) -> None:
        shutil.copytree(honest, folder, ignore=shutil.ignore_patterns(*names))

    return copy


@pytest.mark.parametrize("names", [("step-*",), ("metrics.jsonl", "result.json"), ("step-*", "result.json")])
def test_what_is_left_out_is_noted_and_the_rest_verified(honest: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    without(*names)(honest, run)
    verdict = verified(run, from_scratch="step-*" in names)
    assert verdict.is_verified, lines(verdict)
    assert verdict.share == 1
    assert verdict.notes


def test_without_records_some_steps_are_replayed_to_the_next_checkpoint(honest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    without("steps.bin")(honest, run)
    verdict = verified(run, steps=(5, 6))
    assert verdict.replayed == [Segment(KEPT, 2 * KEPT)]
    assert "equal weights where a segment ends" in "\n".join(lines(verdict))


def test_settings_and_data_alone_find_other_weights_from_scratch(honest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    TAMPERS["a buffer"].make(honest, run)
    for path in (run / "steps.bin", run / "result.json", run / "metrics.jsonl"):
        path.unlink()
    shutil.rmtree(run / "checkpoints")
    verdict = verified(run, from_scratch=True)
    assert [(each.step, each.name) for each in verdict.differences] == [(NUM_STEPS, "tensor 1.running_var[0]")]


def damaged(honest: Path, folder: Path, file: str, change: Callable[[bytearray], object]) -> Path:
    shutil.copytree(honest, folder)
    path = folder / file
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return folder


def flip(content: bytearray) -> None:
    content[-1] ^= 1


@pytest.mark.parametrize(
    ("file", "change", "text"),
    [
        ("weights.safetensors", lambda content: content.pop(), "weights.safetensors is truncated: "),
        ("optimizer.safetensors", flip, "optimizer.safetensors was altered: its SHA-256 is not the manifest's"),
        ("state.json", flip, "state.json was altered: its SHA-256 is not the manifest's"),
    ],
)
def test_a_damaged_checkpoint_fails_by_name_and_the_steps_after_it_are_still_verified(
    honest: Path, tmp_path: Path, file: str, change: Callable[[bytearray], object], text: str
) -> None:
    run = damaged(honest, tmp_path / "run", f"checkpoints/step-000008/{file}", change)
    verdict = verified(run)
    assert not verdict.is_verified
    assert [each.startswith(f"checkpoints/step-000008/{text}") for each in verdict.mismatches] == [True]
    # The replay of the steps before it leads to the same state, so no step is left out.
    assert (verdict.share, verdict.differences) == (1.0, [])


def test_a_damaged_checkpoint_that_is_not_needed_is_found_by_its_size(honest: Path, tmp_path: Path) -> None:
    run = damaged(
        honest, tmp_path / "run", "checkpoints/step-000008/weights.safetensors", lambda content: content.pop()
    )
    (run / "checkpoints" / "step-000012" / "state.json").unlink()
    verdict = verified(run, steps=(0, 1))
    assert verdict.replayed == [Segment(0, 1)]
    assert [text.partition(":")[0] for text in verdict.mismatches] == [
        "checkpoints/step-000008/weights.safetensors is truncated",
        "checkpoints/step-000012/state.json does not exist",
    ]


def test_a_segment_of_a_damaged_checkpoint_is_left_out_the_others_are_verified(honest: Path, tmp_path: Path) -> None:
    run = damaged(honest, tmp_path / "run", "checkpoints/step-000008/weights.safetensors", flip)
    verdict = verified(run, steps=(8, 20))
    assert [text.partition(" was ")[0] for text in verdict.mismatches] == [
        "checkpoints/step-000008/weights.safetensors"
    ]
    assert verdict.replayed == [Segment(12, 16), Segment(16, 20)]
    assert any("steps 8-11 were not replayed" in note for note in verdict.notes)
    assert lines(verdict)[-1].startswith("result     NOT verified")


@pytest.mark.full
def test_a_damaged_manifest_fails_by_name_and_every_step_is_replayed(honest: Path, tmp_path: Path) -> None:
    run = damaged(honest, tmp_path / "run", "checkpoints/step-000008/manifest.json", lambda content: content.clear())
    verdict = verified(run)
    assert verdict.mismatches == ["checkpoints/step-000008: its manifest.json is missing or damaged"]
    assert (verdict.share, verdict.is_verified) == (1.0, False)


def test_a_checkpoint_of_another_form_with_a_manifest_to_match_fails_by_name(honest: Path, tmp_path: Path) -> None:
    run = damaged(honest, tmp_path / "run", "checkpoints/step-000008/state.json", lambda content: content.clear())
    folder = run / "checkpoints" / "step-000008"
    (folder / "state.json").write_text("{}")
    edit_json(
        folder / "manifest.json",
        lambda each: each["files"].update({"state.json": {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}}),
    )
    verdict = verified(run)
    assert ["checkpoints/step-000008" in text for text in verdict.mismatches] == [True]
    assert verdict.share == 1.0


def test_damaged_final_weights_fail_by_name_and_the_steps_are_verified(honest: Path, tmp_path: Path) -> None:
    run = damaged(honest, tmp_path / "run", "weights.safetensors", lambda content: content.clear())
    verdict = verified(run)
    assert not verdict.is_verified
    assert any(text.startswith("weights.safetensors can't be read as safetensors") for text in verdict.mismatches)
    assert verdict.share == 1.0


def altered(honest: Path, folder: Path, file: str, before: str, after: str) -> Path:
    shutil.copytree(honest, folder)
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after, 1))
    return folder


def test_altered_settings_are_a_finding_and_no_error(honest: Path, tmp_path: Path) -> None:
    run = altered(honest, tmp_path / "run", "config.yaml", "seed: 0", "seed: 1")
    verdict = verified(run)
    assert verdict.mismatches == ["config.yaml: seed is 1, recorded 0"]
    assert verdict.notes[0] == "no step was replayed, since config.yaml does not have the run's settings"
    assert not verdict.is_verified
    (run / "provenance.json").unlink()  # the settings in the checkpoints remain
    (run / "result.json").unlink()
    assert verified(run).mismatches == [
        "provenance.json is missing, and there is weights.safetensors, which nothing then states",
        "config.yaml: seed: 0 in the run, 1 now",
    ]


def test_altered_dataset_info_is_a_finding_and_no_error(run: Path) -> None:
    (run / "dataset_info.json").write_text('{"classes": []}')
    verdict = verified(run)
    assert ["dataset_info.json was altered" in text for text in verdict.mismatches] == [True]
    assert (verdict.is_verified, verdict.share) == (False, 0.0)


def test_without_its_statement_a_complete_run_is_not_verified(honest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    without("provenance.json")(honest, run)
    flip_last_bit(run / "weights.safetensors")
    verdict = verified(run, steps=(0, 4))
    assert verdict.mismatches == ["provenance.json is missing, and there is result.json, which nothing then states"]
    (run / "result.json").unlink()
    verdict = verified(run, steps=(0, 4))
    assert not verdict.is_verified
    assert "there is weights.safetensors" in verdict.mismatches[0]


def test_what_contradicts_the_record_is_named_with_both_values(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "eval"][-1]
    recorded, last["top1"] = last["top1"], 2.0
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    flip_last_bit(run / "weights.safetensors")
    starts = [text.rpartition(" has sha256 ")[0] or text for text in verified(run, steps=(0, 1)).mismatches]
    assert starts[0] == f"metrics.jsonl: top1 after step 20 is 2.0, recorded {recorded}"
    assert starts[1] == "weights.safetensors"
    assert starts[2].startswith("weights.safetensors: its tensors have sha256")


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    flip(content)
    path.write_bytes(content)


def test_hostile_results_are_mismatches_and_no_traceback(run: Path) -> None:
    edit_json(
        run / "result.json", lambda each: each.update(best={"step": [], "metric": {}, "value": 10**400}, steps="x")
    )
    (run / "metrics.jsonl").write_text(
        '{"kind": "eval", "step": 20, "top1": 1' + "0" * 400 + ', "loss": [[]]}\n{"kind": 3}\n'
    )
    verdict = verified(run, steps=(0, 1))
    assert not verdict.is_verified
    assert {text.partition(":")[0] for text in verdict.mismatches} == {"result.json", "metrics.jsonl"}


def test_a_run_that_recorded_no_steps_is_verified_by_its_weights(honest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, ("record.steps=false",))
    assert not (run / "steps.bin").exists()
    assert read_record(run).chain == ""
    verdict = verified(run)
    assert verdict.is_verified
    assert verdict.share == 1
