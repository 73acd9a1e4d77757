"""A run that is stopped, killed or loses a process ends with the weights of an uninterrupted one."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.runs import (
    LONG_S,
    TINY,
    chain,
    kill_session,
    processes_with,
    records,
    result,
    running,
    samebits,
    start,
    wait_until,
    weights,
)

SETTINGS = ["data.num_samples=401", "epochs=3", "checkpoint.every=4 steps", "report.every_steps=1"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    samebits("train", TINY, *SETTINGS, "--procs", 2, "--run-dir", folder / "run", cwd=folder)
    return folder / "run"


def steps_done(folder: Path) -> int:
    return max((record["step"] for record in records(folder, "train")), default=0)


def slow(folder: Path) -> list[str]:
    """Settings of a run that takes minutes, until `hurry`."""
    return [*SETTINGS, "data.slow_s=0.1", f"data.slow_while={slow_while(folder)}"]


def slow_run(folder: Path, procs: int, *more: object):
    slow_while(folder).touch()
    return running("train", TINY, *slow(folder), "--procs", procs, "--run-dir", folder, *more, cwd=folder.parent)


def slow_while(folder: Path) -> Path:
    return folder.with_suffix(".slow")


def hurry(folder: Path) -> None:
    slow_while(folder).unlink()


def go_on(folder: Path, procs: int) -> str:
    hurry(folder)
    return samebits(
        "train", TINY, *slow(folder), "--procs", procs, "--run-dir", folder, "--resume", "auto", cwd=folder.parent
    ).stdout


def test_a_stop_saves_mid_epoch_and_any_world_resumes(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with slow_run(folder, 2) as process:
        wait_until(lambda: steps_done(folder) >= 6)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 143, output + errors
    assert "--resume auto" in output
    stopped_at = steps_done(folder)
    assert (folder / "checkpoints" / f"step-{stopped_at:06}").is_dir()
    assert not processes_with(str(folder))

    assert f"from step {stopped_at}" in go_on(folder, 3)
    assert weights(folder) == weights(undisturbed)
    assert result(folder)["metrics"] == result(undisturbed)["metrics"]
    assert [world["size"] for world in result(folder)["worlds"]] == [2, 3]
    # Each step stands in the records once, in order, and its loss is the same.
    assert losses(folder) == losses(undisturbed)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records(folder, "train")]


@pytest.mark.full
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    folder, slow = tmp_path / "run", ["data.slow_s=300", f"data.slow_while={tmp_path}/slow", "epochs=10000"]
    process = start("train", TINY, *slow, "--procs", 2, "--run-dir", folder, cwd=tmp_path)

    def has_heard() -> bool:
        try:
            process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired as waiting:
            return b"SIGINT" in (waiting.stderr or b"")
        return True

    try:
        wait_until(lambda: records(folder, "train"))
        (tmp_path / "slow").touch()
        time.sleep(0.5)  # a step that has read its samples ends, and the next one hangs
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        wait_until(has_heard)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=LONG_S)  # the step would take longer
    finally:
        kill_session(process)
    assert process.returncode == 130
    assert not processes_with(str(folder))


@pytest.mark.full
def test_a_killed_launcher_leaves_nothing_and_the_run_resumes(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with slow_run(folder, 2, "loader.num_workers=1") as process:
        wait_until(lambda: steps_done(folder) >= 6)
        process.kill()
        wait_until(lambda: not processes_with(str(folder)))
    go_on(folder, 1)
    assert weights(folder) == weights(undisturbed)
    assert chain(folder) == chain(undisturbed)


@pytest.mark.full
def test_a_truncated_and_an_altered_checkpoint_are_named_and_passed_over(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with slow_run(folder, 1) as process:
        # They are written beside training: the step's record may be there before its checkpoint.
        wait_until(lambda: (folder / "checkpoints" / "step-000012").exists())
        process.kill()
        process.communicate()
    *_, older, newer = sorted((folder / "checkpoints").glob("step-??????"))
    torn = newer / "weights.safetensors"
    torn.write_bytes(torn.read_bytes()[:-7])
    altered = older / "optimizer.safetensors"
    content = bytearray(altered.read_bytes())
    content[-1] ^= 1
    altered.write_bytes(content)
    output = go_on(folder, 2)
    assert f"{torn} is truncated" in output
    assert f"{altered} was altered" in output
    assert weights(folder) == weights(undisturbed)
    assert chain(folder) == chain(undisturbed)


def test_a_run_that_is_complete_is_left_as_it_is(undisturbed: Path, tmp_path: Path) -> None:
    before = result(undisturbed)
    samebits("train", TINY, *SETTINGS, "--procs", 1, "--run-dir", undisturbed, "--resume", "auto", cwd=tmp_path)
    assert result(undisturbed) == before


@pytest.mark.full
def test_resume_from_a_checkpoint_by_its_folder(undisturbed: Path, tmp_path: Path) -> None:
    *_, newest = sorted((undisturbed / "checkpoints").glob("step-*"))
    other = tmp_path / "other"
    samebits("train", TINY, *SETTINGS, "--procs", 2, "--run-dir", other, "--resume", newest, cwd=tmp_path)
    assert weights(other) == weights(undisturbed)
    assert chain(other) == chain(undisturbed)
    # The records before the checkpoint, and the last evaluation, came from the other folder.
    output = samebits("verify", other, "--all", "--procs", 2, cwd=tmp_path).stdout
    assert "verified   every step of the run" in output
    assert "the record of steps" not in output


@pytest.mark.full
def test_settings_alone_are_for_the_run_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    samebits("train", TINY, "epochs=1", "--procs", 1, "--run-dir", folder, cwd=tmp_path)
    samebits("train", "report.every_steps=2", "--run-dir", folder, "--resume", "auto", cwd=tmp_path)
    other = samebits("train", "epochs=2", "--run-dir", folder, "--resume", "auto", cwd=tmp_path, code=2)
    assert "holds a run with other settings" in other.stderr


@pytest.mark.full
def test_a_truncated_checkpoint_is_named_even_if_it_is_the_only_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    samebits("train", TINY, "epochs=1", "--procs", 1, "--run-dir", folder, cwd=tmp_path)
    (folder / "weights.safetensors").unlink()
    for place in (folder / "checkpoints").glob("step-*"):
        torn = place / "weights.safetensors"
        torn.write_bytes(torn.read_bytes()[:1000])
    for command in (["eval", folder], ["train", "--run-dir", folder, "--resume", "auto"]):
        errors = samebits(*command, cwd=tmp_path, code=5).stderr
        assert f"{torn} is truncated" in errors.replace("\n", " ")
