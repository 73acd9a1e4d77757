"""`samebits gate`: forty edits of a recipe, each judged in this process."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samebits.cluster.env import ALONE
from samebits.errors import ConfigError
from samebits.replay import gate as module
from samebits.replay.gate import GateResult, GateSource, default_file, gate, lines
from samebits.replay.trial import Trial, run_trial
from tests.unit.replay.edits import HARMFUL, HARMLESS, RECIPE, Edit

STEPS = 4
KERNELS = "kernels=auto"


@contextmanager
def here(source: str, overrides: list[str], file: Path, seed: str, num_steps: int = 0) -> Iterator[Callable[[], Any]]:
    """Stands for the interpreter of its own, which takes seconds to start."""
    yield lambda: run_trial(source, overrides, Trial("", num_steps=num_steps), ALONE)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "in_interpreter", here)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    (folder / "recipe.py").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "in_interpreter", here)
        found = gate(GateSource(str(folder / "recipe.py"), [KERNELS], None), folder / "gate.json", STEPS)
    assert found.is_written
    return folder / "gate.json"


def judge(text: str, file: Path, folder: Path, **options: Any) -> GateResult:
    # A new file each time: this process has imported the one before.
    recipe = folder / f"recipe_{len(list(folder.iterdir()))}.py"
    recipe.write_text(text)
    return gate(GateSource(str(recipe), [], None), file, **options)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("edit", HARMLESS, ids=lambda edit: edit.name)
def test_an_edit_that_changes_nothing_passes(written: Path, tmp_path: Path, edit: Edit) -> None:
    found = judge(edit.apply(), written, tmp_path)
    assert found.difference is None
    assert found.num_steps == STEPS


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("edit", HARMFUL, ids=lambda edit: edit.name)
def test_an_edit_that_changes_the_training_is_found_where_it_begins(written: Path, tmp_path: Path, edit: Edit) -> None:
    found = judge(edit.apply(), written, tmp_path).difference
    assert (found.phase, found.module[: len(edit.module)]) == (edit.phase, edit.module)
    assert found.before != found.now or found.phase in ("initial weights", "update", "buffers", "backward")


@pytest.mark.usefixtures("in_process")
def test_an_operation_that_was_replaced_is_named(written: Path, tmp_path: Path) -> None:
    found = judge(RECIPE.replace("F.relu(self.norm", "F.gelu(self.norm"), written, tmp_path).difference
    assert found.operation == "aten.relu before, aten.gelu now"
    assert lines(found)[0] == "differs    step 0, forward, module the model (Net)"


@pytest.mark.usefixtures("in_process")
def test_a_change_of_rounding_is_within_a_tolerance_and_a_larger_one_is_not(written: Path, tmp_path: Path) -> None:
    text = RECIPE.replace("nn.BatchNorm2d(width)", "nn.BatchNorm2d(width, eps=1.1e-5)")
    assert judge(text, written, tmp_path).difference is not None
    assert judge(text, written, tmp_path, within=1e-4).difference is None
    larger = RECIPE.replace("1e-3 *", "1.0 *")
    found = judge(larger, written, tmp_path, within=1e-4).difference
    assert (found.step, found.phase) == (0, "loss")


@pytest.mark.usefixtures("in_process")
def test_a_difference_on_another_processor_is_no_alarm(written: Path, tmp_path: Path) -> None:
    content = json.loads(written.read_text())
    content["environment"]["torch"] = "1.0"
    other = tmp_path / "gate.json"
    other.write_text(json.dumps(content))
    assert judge(RECIPE, other, tmp_path).difference is None  # the same bits are the same bits
    with pytest.raises(ConfigError) as caught:
        judge(RECIPE.replace("0.2", "0.3"), other, tmp_path)
    assert "torch: 1.0 in the file" in caught.value.slots["given"]


@pytest.mark.usefixtures("in_process")
def test_update_accepts_a_change(written: Path, tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    file.write_bytes(written.read_bytes())
    changed = RECIPE.replace("nn.Dropout(0.2)", "nn.Dropout(0.25)")
    (tmp_path / "recipe.py").write_text(changed)
    source = GateSource(str(tmp_path / "recipe.py"), [KERNELS], None)
    assert gate(replace(source, given=[]), file, is_update=True).is_written
    content = json.loads(file.read_text())
    assert (content["given"], len(content["steps"])) == ([KERNELS], STEPS)  # what was not given stays
    assert judge(changed, file, tmp_path).difference is None
    assert judge(RECIPE, file, tmp_path).difference is not None


@pytest.mark.usefixtures("in_process")
def test_a_recipe_that_trains_to_other_bits_each_time_gets_no_file(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(
        RECIPE.replace("return self.head", "x = x * (1 + time.time_ns() % 1000 * 1e-4)\n        return self.head")
    )
    with pytest.raises(ConfigError, match="trains to other bits each time"):
        gate(GateSource(str(tmp_path / "recipe.py"), [], None), tmp_path / "gate.json", 2)
    assert not (tmp_path / "gate.json").exists()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("within", [None, 1e-3])
def test_a_loss_that_is_no_number_equals_itself(tmp_path: Path, within: float | None) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE.replace("1e-3 *", "float('nan') *"))
    gate(GateSource(str(tmp_path / "recipe.py"), [KERNELS], None), tmp_path / "nan.json", 2)
    text = (tmp_path / "recipe.py").read_text()
    assert judge(text, tmp_path / "nan.json", tmp_path, within=within).difference is None


def test_fewer_steps_than_in_the_file_are_a_difference() -> None:
    longer = {"steps": [{}, {}], "evaluation": {}}
    found = module._at_end(longer, {**longer, "steps": [{}]}, lambda one, other: True)
    assert (found.phase, found.before, found.now) == ("number of steps", "2", "1")
    assert module._at_end(longer, longer, lambda one, other: True) is None


@pytest.mark.parametrize("content", ["", "{}", '{"format": "samebits gate 2", "steps": []}', "[1]"])
def test_a_file_that_is_no_gate_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "gate.json"
    file.write_text(content)
    for is_update in (False, True):
        with pytest.raises(ConfigError):
            gate(GateSource("digits", [], None), file, is_update=is_update)
    assert file.read_text() == content


def test_other_settings_than_those_of_the_file_are_refused(written: Path) -> None:
    for given, steps in ((["optim.lr=1"], None), ([], STEPS + 1)):
        with pytest.raises(ConfigError, match="was written with other"):
            gate(GateSource("digits", given, None), written, steps)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_that_the_file_does_not_have_are_refused(written: Path, ranks: int) -> None:
    with pytest.raises(ConfigError, match="was written with other ranks") as caught:
        gate(GateSource("digits", [], ranks), written)
    assert caught.value.slots["given"] == f"now {ranks}, in the file none"


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("a/train.py", "a/train.gate.json"),
        ("digits", "digits.gate.json"),
        ("my.yaml", "my.gate.json"),
        ("timm/net-1.5", "timm-net-1.5.gate.json"),
    ],
)
def test_the_file_is_beside_its_source(source: str, file: str) -> None:
    assert default_file(source) == Path(file)
