"""A resume with other code, data, versions or processor: refused or reported, never silent."""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samebits.cluster.world import alone
from samebits.config.schema import CheckpointConfig, OptimConfig, RunConfig
from samebits.data.samples import Batch, sample_digests
from samebits.engine.loop import train
from samebits.engine.opening import opened
from samebits.engine.parts import Parts
from samebits.engine.run_spec import RunSpec
from samebits.errors import CheckpointError, DataError, SamebitsError
from samebits.metrics.classification import Accuracy
from samebits.provenance import fingerprint
from samebits.provenance.fingerprint import Fingerprint
from samebits.provenance.identity import check_unchanged

NUM_SAMPLES = 12


class Data:
    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Any, keys: Any) -> Batch:
        rows = [[float(number) for number in self.files[index].read_text().split()] for index in indices]
        places = torch.from_numpy(indices)
        return Batch(torch.tensor(rows), (places % 2), places)


class Recipe:
    """A recipe in a file of its own; what it does is given, as a file that is imported can't be edited."""

    def __init__(self, folder: Path) -> None:
        self.file, self.data, self.factor = folder / "recipe.py", folder / "data", 1.0
        self.data.mkdir(parents=True)
        self.file.write_text("version = 1\n")
        for index in range(NUM_SAMPLES):
            (self.data / f"{index:02}.txt").write_text(f"{index % 7} {index % 5} 1")

    def dataset_info(self, config: RunConfig) -> Mapping[str, Any]:
        return {}

    def build(self, config: RunConfig, facts: Mapping[str, Any]) -> Parts:
        def loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
            return {"loss": self.factor * nn.functional.cross_entropy(outputs, batch.targets)}

        return Parts(model=nn.Linear(3, 2), loss=loss, train_data=lambda: Data(self.data),
                     eval_data=lambda: Data(self.data), metric=lambda: Accuracy(2))  # fmt: skip

    def train(self, folder: Path, resume: str = "auto", **more: Any) -> dict[str, Any]:
        """Train to the end, or resume a complete run."""
        on_change = more.pop("on_change", "auto")
        config = RunConfig(
            recipe=str(self.file), epochs=1, global_batch=4, micro_batch=2, device="cpu", optim=OptimConfig(lr=0.1),
            checkpoint=CheckpointConfig(on_change=on_change), **more,
        )  # fmt: skip
        request = RunSpec("recipe", config, {}, folder, resume, is_restart=False, started_at=0.0)
        with opened(request, self, alone("cpu")) as run:
            assert run.end(train(run)) == 0
        return dict(json.loads((folder / "environment.json").read_text()))


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    made = Recipe(tmp_path)
    made.train(tmp_path / "run")
    return made


def test_a_resume_on_other_data_names_a_sample_and_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    for file in recipe.data.iterdir():
        file.write_text(file.read_text().replace("1", "2"))  # of the same size
    with pytest.raises(DataError) as caught:
        recipe.train(tmp_path / "run")
    assert "the data changed since this run started: training sample" in caught.value.what
    assert "checkpoint.on_change=warn" in caught.value.slots["fix"]


def test_one_longer_file_among_many_is_seen_by_the_sizes(recipe: Recipe, tmp_path: Path) -> None:
    read = [int(name.split()[-1]) for name in fingerprint_of(tmp_path / "run")["data"] if "sample" in name]
    unread = next(index for index in range(NUM_SAMPLES) if index not in read)
    (recipe.data / f"{unread:02}.txt").write_text("10 20 30")
    with pytest.raises(DataError, match="sizes of the training files and 1 more"):
        recipe.train(tmp_path / "run")


def fingerprint_of(folder: Path) -> dict[str, dict[str, str]]:
    state = json.loads(sorted(folder.glob("checkpoints/step-*/state.json"))[-1].read_text())
    return dict(state.get("state", state)["fingerprint"])


def test_data_may_move(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.data = recipe.data.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    recipe.train(tmp_path / "run")
    assert "changed" not in capsys.readouterr().out


def test_an_edit_of_no_effect_is_a_warning(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.file.write_text("version = 2\n")
    kept = recipe.train(tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "changed since the checkpoint: code of recipe.py" in said
    assert "a trial micro-batch had the same bits" in said
    assert len(kept["worlds"]) == 2


def test_an_edited_recipe_that_computes_something_else_is_refused_unless_allowed(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.file.write_text("version = 2\n")
    recipe.factor = 2.0
    with pytest.raises(CheckpointError) as caught:
        recipe.train(tmp_path / "run")
    assert "code of recipe.py" in caught.value.slots["given"]
    assert "loss of a trial micro-batch" in caught.value.slots["given"]
    recipe.train(tmp_path / "run", on_change="warn")
    assert "changed since the checkpoint of this run" in " ".join(capsys.readouterr().out.split())


def test_another_processor_must_be_allowed(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr(fingerprint.torch.backends.cpu, "get_cpu_capability", lambda: "SVE512")
    with pytest.raises(CheckpointError, match="CPU capability") as caught:
        recipe.train(tmp_path / "run")
    assert f"CPU capability: {before} in the checkpoint, SVE512 now" in caught.value.slots["given"]
    kept = recipe.train(tmp_path / "run", on_change="warn")
    assert [world["environment"]["CPU capability"] for world in kept["worlds"]] == [before, "SVE512"]
    assert [world["size"] for world in kept["worlds"]] == [1, 1]


def test_another_library_must_be_allowed(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fingerprint.describe_kernels
    monkeypatch.setattr(fingerprint, "describe_kernels", lambda *given: {**found(*given), "numpy": "9.9"})
    with pytest.raises(CheckpointError, match="numpy changed"):
        recipe.train(tmp_path / "run")
    recipe.train(tmp_path / "run", on_change="warn")
    assert "numpy changed" in " ".join(capsys.readouterr().out.split())


KNOWN = Fingerprint(
    environment={"samebits": "0.1.0", "torch": "2.15.0", "processor": "one"},
    code={"code of samebits": "a", "code of recipe.py": "b"},
    data={"training sample 3": "c"},
    trial={"loss of a trial micro-batch": "d"},
)


def verdict(now: Fingerprint, before: Fingerprint = KNOWN, **more: Any) -> list[str] | SamebitsError:
    try:
        return check_unchanged(before, now, RunConfig(recipe="test", **more))
    except SamebitsError as error:
        return error


def test_nothing_is_reported_if_nothing_changed() -> None:
    assert verdict(KNOWN) == []


@pytest.mark.parametrize(
    "now",
    [
        replace(KNOWN, environment={**KNOWN.environment, "samebits": "0.2.0"}),
        replace(KNOWN, environment={**KNOWN.environment, "ONEDNN_MAX_CPU_ISA": "AVX2"}),
        replace(KNOWN, environment={**KNOWN.environment, "MKL": "2025.1"}),
        replace(KNOWN, environment={**KNOWN.environment, "MKL_CBWR": "COMPATIBLE"}),
        replace(KNOWN, environment={**KNOWN.environment, "CPU vendor": "AuthenticAMD"}),
        replace(KNOWN, environment={**KNOWN.environment, "CPU instructions": "avx2 avx512f"}),
        replace(KNOWN, environment={**KNOWN.environment, "GPU": "NVIDIA H200"}),
        replace(KNOWN, code={**KNOWN.code, "code of samebits": "x"}),
        replace(KNOWN, code={**KNOWN.code, "code of recipe.py": "x"}, data={"training sample 3": "x"}),
        replace(KNOWN, code={**KNOWN.code, "code of recipe.py": "x"}, trial={}),
        replace(
            KNOWN, environment={**KNOWN.environment, "processor": "two"}, trial={"loss of a trial micro-batch": "x"}
        ),
        replace(KNOWN, trial={"loss of a trial micro-batch": "x"}),
    ],
)
def test_what_can_change_the_bits_is_refused_unless_allowed(now: Fingerprint) -> None:
    assert isinstance(verdict(now), CheckpointError)
    assert isinstance(verdict(now, checkpoint={"on_change": "error"}), CheckpointError)
    assert isinstance(verdict(now, checkpoint={"on_change": "warn"}), list)


def test_another_model_of_processor_with_the_same_bits_is_reported() -> None:
    (warning,) = verdict(replace(KNOWN, environment={**KNOWN.environment, "processor": "two"}))  # type: ignore[misc]
    assert "processor: one in the checkpoint, two now" in warning


def test_a_module_that_is_loaded_only_at_the_start_of_a_run_is_no_change() -> None:
    assert verdict(KNOWN, replace(KNOWN, code={**KNOWN.code, "code of listing.py": "y"})) == []


def test_a_checkpoint_without_a_fingerprint_is_reported() -> None:
    (warning,) = verdict(KNOWN, Fingerprint.from_json({}))  # type: ignore[misc]
    assert "without fingerprints" in warning


@pytest.mark.parametrize("content", [None, [], {"code": 3}, {"data": {"a": [1]}, "more": 5}])
def test_a_strange_fingerprint_in_a_checkpoint_is_read_without_a_traceback(content: Any) -> None:
    assert isinstance(verdict(KNOWN, Fingerprint.from_json(content)), (list, SamebitsError))


def test_digests_of_samples_tell_rows_apart_and_know_no_folders() -> None:
    def digests(rows: list[list[float]], paths: list[str], flat: list[int]) -> dict[int, str]:
        targets = {"path": paths, "flat": torch.tensor(flat)}
        return sample_digests(Batch(torch.tensor(rows), targets, torch.tensor([5, 7])))

    first = digests([[1.0, 2.0], [3.0, 4.0]], ["/a/x.jpg", "/a/y.jpg"], [1, 2, 3])
    assert first == digests([[1.0, 2.0], [3.0, 4.0]], ["/b/x.jpg", "/b/y.jpg"], [1, 2, 3])
    changed = digests([[1.0, 2.0], [3.0, float("nan")]], ["/a/x.jpg", "/a/y.jpg"], [1, 2, 3])
    assert {index for index in first if first[index] != changed[index]} == {7}
    assert first[5] != digests([[1.0, 2.0], [3.0, 4.0]], ["/a/x.jpg", "/a/y.jpg"], [1, 2, 4])[5]


def test_modules_beside_a_recipe_count_not_installed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("beside")
    found = fingerprint.code_digests(os.fspath(tmp_path / "recipe.py"))
    assert set(found) == {"code of samebits", "code of recipe.py", "code of beside.py"}
    (tmp_path / "beside.py").write_text("value = 2\n")
    assert (
        fingerprint.code_digests(os.fspath(tmp_path / "recipe.py"))["code of beside.py"] != found["code of beside.py"]
    )
    assert set(fingerprint.code_digests("digits")) == {"code of samebits"}
    del sys.modules["beside"]
