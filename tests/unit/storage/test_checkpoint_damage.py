"""A truncated or altered checkpoint is named and skipped, wherever the damage is, and whenever the process died."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.errors import CheckpointError
from samebits.storage.checkpoint import Checkpoint, clean, load_checkpoint, newest, save
from tests.runs import python

FILES = ("weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def some(step: int) -> Checkpoint:
    """A checkpoint in which every value is the step."""
    state = {0: {"momentum_buffer": torch.full((40,), float(step)), "step": torch.tensor(step)}}
    groups = [{"lr": 0.1, "betas": [0.9, 0.999], "params": [0]}]
    weights = {"conv.weight": torch.full((4, 10), float(step)), "bn.num_batches_tracked": torch.tensor(step)}
    return Checkpoint(step, weights, {"state": state, "param_groups": groups}, {"step": step})


def is_whole(found: Checkpoint) -> bool:
    """Whether all of a checkpoint is of the same step."""
    tensors = [*found.weights.values(), *found.optimizer["state"][0].values()]
    values = {value for tensor in tensors for value in tensor.flatten().tolist()}
    return len(tensors) == 4 and values | {found.state["step"]} == {found.step}


def passed_over(folder: Path) -> tuple[list[str], Checkpoint]:
    """Return the messages on damaged checkpoints, and the intact one."""
    said = []
    for _, found in newest(folder):
        if isinstance(found, Checkpoint):
            return said, found
        said.append(str(found))
    raise AssertionError(f"no checkpoint is whole: {said}")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_file_cut_short_is_named_and_the_one_before_is_taken(tmp_path: Path, name: str, share: float) -> None:
    save(some(1), tmp_path)
    file = save(some(2), tmp_path) / name
    os.truncate(file, int(file.stat().st_size * share))
    said, found = passed_over(tmp_path)
    assert len(said) == 1
    assert f"{file} is truncated" in said[0]
    assert found.step == 1
    assert is_whole(found)


@pytest.mark.parametrize(("name", "is_folder"), [*((name, False) for name in FILES), ("state.json", True)])
def test_a_missing_file_or_a_folder_in_its_place_is_named(tmp_path: Path, name: str, is_folder: bool) -> None:
    file = save(some(1), tmp_path) / name
    file.unlink()
    if is_folder:
        file.mkdir()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(file.parent)
    assert f"{file} " + ("can't be read: Is a directory" if is_folder else "does not exist") in str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(some(3), tmp_path_factory.mktemp("whole"))


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_altered_byte_is_found(whole: Path, name: str, place: float, flip: int) -> None:
    file = whole / name
    content = file.read_bytes()
    altered = bytearray(content)
    altered[int(place * len(content))] ^= flip
    file.write_bytes(altered)
    try:
        if name == "manifest.json":
            # White space may change in it without any harm.
            found = next(iter(newest(whole.parent)))[1]
            assert isinstance(found, CheckpointError) or is_whole(found)
        else:
            with pytest.raises(CheckpointError) as caught:
                load_checkpoint(whole)
            assert f"{file} was altered" in str(caught.value)
    finally:
        file.write_bytes(content)
    assert is_whole(load_checkpoint(whole))


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["format", "files", *FILES, "bytes", "sha256"])
    return st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)


@settings(max_examples=100, deadline=None)
@given(manifest=st.recursive(st.none() | st.integers() | st.text(max_size=5), _nested))
def test_a_manifest_with_other_content_is_an_error(whole: Path, manifest: Any) -> None:
    file = whole / "manifest.json"
    content = file.read_bytes()
    file.write_text(json.dumps(manifest if isinstance(manifest, list) else {"format": 1, "files": manifest}))
    try:
        with pytest.raises(CheckpointError):
            load_checkpoint(whole)
    finally:
        file.write_bytes(content)


class Killed(BaseException):
    """Stands for the end of the process: nothing of the code behind it may matter."""


def killed_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """Let the process die at one of its calls to the system, before it takes place."""
    calls = 0

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= call:
                raise Killed
            return real(*arguments, **options)

        return count

    for owner, name in [(os, "fsync"), (os, "open"), (Path, "mkdir"), (Path, "open"), (Path, "rename"),
                        (shutil, "rmtree")]:  # fmt: skip
        patch.setattr(owner, name, counting(getattr(owner, name)))


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step again"])
def test_a_process_killed_at_any_call_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path, again: bool) -> None:
    outcomes = []
    for call in range(1, 60):
        folder = tmp_path / str(call)
        folder.mkdir()
        save(some(1), folder)
        if again:
            save(some(2), folder)
        with pytest.MonkeyPatch.context() as patch:
            killed_at(call, patch)
            try:
                save(some(2), folder)
                is_killed = False
            except Killed:
                is_killed = True
        said, found = passed_over(folder)
        assert is_whole(found)
        assert not said
        outcomes.append(found.step)
        clean(folder)
        assert {path.name for path in folder.iterdir()} <= {"step-000001", "step-000002"}
        if not is_killed:
            break
    assert not is_killed, "the save has more calls than were tried"
    assert len(outcomes) > 10
    assert outcomes[-1] == 2


_SAVES = """
import os, random, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from samebits.cluster.world import alone
from samebits.config.schema import CheckpointConfig
from samebits.storage.checkpoint import clean, save
from samebits.engine.progress import Progress
from samebits.storage.run_folder import RunFolder
from samebits.engine.checkpoints import CheckpointManager
from tests.unit.storage.test_checkpoint_damage import passed_over, is_whole, some

run = RunFolder(Path(sys.argv[1]))
folder = run.checkpoints
save(some(1), folder)
done, random_numbers = 1, random.Random(0)

def train(mouth):
    checkpoints = CheckpointManager(run, CheckpointConfig(every="1 steps", keep=2), alone("cpu"))
    for step in range(done + 1, 10_000):
        state = some(step)
        checkpoints.save(SimpleNamespace(
            progress=Progress(step=step), is_evaluated=lambda: True, average=None, identity={},
            state=lambda: state.weights,
            optimizer=SimpleNamespace(state_dict=lambda: state.optimizer), order=SimpleNamespace(steps_per_epoch=10),
        ))
        os.write(mouth, b".")  # it has waited for the one before
        for tensor in state.weights.values():
            tensor.fill_(-1)

for trial in range(20):
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(mouth)
        finally:
            os._exit(1)
    os.close(mouth)
    # After some, so that there is progress however busy the machine is.
    began = len(os.read(ear, 1)) + len(os.read(ear, 1))
    assert began == 2, "it ended by itself"
    time.sleep(random_numbers.random() * 0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(ear, "rb") as reader:
        began += len(reader.read())
    said, found = passed_over(folder)
    assert not said and is_whole(found), (said, found)
    assert done + began - 1 <= found.step <= done + began + 1, (done, began, found.step)
    clean(folder)
    done = found.step
print("saved", done)
"""


def test_a_process_killed_at_any_moment_leaves_what_it_had_saved(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(_SAVES)
    done = python(script, tmp_path / "run")
    assert int(done.stdout.split()[1]) > 20
