"""`samebits scale` as a user runs it."""

import json
import signal
from pathlib import Path

import pytest

from tests.ranks.recipes_in_ranks import draw_digits
from tests.runs import LONG_S, running, samebits, wait_until

TELLS = """
from pathlib import Path

from tests.e2e import tiny_recipe
from tests.e2e.tiny_recipe import PRESET, Config

def build(config):
    Path("building").touch()
    return tiny_recipe.build(config)
"""


@pytest.mark.full
def test_scale_gives_a_table_a_picture_and_a_file(tmp_path: Path) -> None:
    options = ["--procs", "2", "--compare", "bf16-sums", "--steps", 3, "--out", tmp_path / "out"]
    done = samebits("scale", "digits", *options, cwd=tmp_path)
    assert "bf16-sums on 2 processes " in done.stdout
    assert max(map(len, done.stdout.splitlines()[:4])) <= 80
    row = json.loads((tmp_path / "out" / "scale.json").read_text())["variants"]["bf16-sums"]["2"]
    assert row["samples_per_s"] > 0
    assert 0 <= row["sending_s"] <= row["waiting_s"]
    assert 0 < row["reading_s"] + row["waiting_s"] < 2 * row["step_s"]
    assert (tmp_path / "out" / "scale.png").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # it leaves no run behind


@pytest.mark.full
def test_torchs_ddp_is_left_out_where_a_step_has_not_a_micro_batch_for_each_process(tmp_path: Path) -> None:
    options = ["global_batch=32", "micro_batch=32", "--procs", "2", "--compare", "ddp", "--out", tmp_path / "out"]
    done = samebits("scale", "digits", *options, cwd=tmp_path, code=2)
    assert "ddp on 2 processes is skipped" in done.stdout
    assert "nothing could be measured" in done.stderr


@pytest.mark.full
def test_steps_of_samples_in_groups_are_measured(tmp_path: Path) -> None:
    """Lines of two widths never share a micro-batch: here no step has all the samples that it could have."""
    draw_digits(tmp_path, 90)
    settings = ["data.train=l.tsv", "data.val_fraction=0.1", "data.width=[64,160]", "data.on_too_long=skip"]
    settings += ["global_batch=64", "micro_batch=32"]
    options = ["--procs", "2", "--compare", "exact,ddp", "--steps", 2, "--out", tmp_path / "out"]
    samebits("scale", "text", *settings, *options, cwd=tmp_path)
    found = json.loads((tmp_path / "out" / "scale.json").read_text())["variants"]
    assert all(found[way]["2"]["samples_per_s"] > 0 for way in ("exact", "ddp"))


def test_names_and_numbers_that_can_not_be_are_refused_at_once(tmp_path: Path) -> None:
    assert "--compare has 'quick'" in samebits("scale", "digits", "--compare", "quick", cwd=tmp_path, code=2).stderr
    for procs in ("1,x", "1,1000000000"):
        assert f"--procs is '{procs}'" in samebits("scale", "digits", "--procs", procs, cwd=tmp_path, code=2).stderr


@pytest.mark.full
def test_ctrl_c_promises_no_checkpoint_where_none_is_made(tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    with running("scale", "tells.py", "--procs", 2, "--steps", 1000000, cwd=tmp_path) as process:
        wait_until((tmp_path / "building").exists)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LONG_S)
    assert process.returncode == 130
    assert said == "SIGINT: stopping; press Ctrl-C again to exit at once\n"
