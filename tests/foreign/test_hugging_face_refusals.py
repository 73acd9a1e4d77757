"""What can't be exact with Accelerate and the Trainer is refused with its name and a fix."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm_start
from tests.foreign.forms import FOLDER
from tests.foreign.hugging_face_worlds import worlds_of
from tests.runs import LONG_S, environment

ACCELERATE = {
    "accumulation": "gradient_accumulation_steps is 2",
    "no global batch": "global_batch is 0",
    "two shuffled loaders": "a second DataLoader shuffles its samples",
    "sampler": "the sampler WeightedRandomSampler decides the order itself",
    "stream": "Stream is a stream",
    "lbfgs": "LBFGS evaluates the loss several times a step",
    "sync batch norm": "layer 0 is torch's SyncBatchNorm",
    "save within a step": "save_state() is called within a step",
    "load without position": "samebits.json can't be read",
    "load another batch": "given: global_batch: 8 there, 16 here",
    "skip other steps": "2 batches are to be skipped, and the loader is at step 1",
    "backward on another loader": "backward() is called outside of the loop over the training DataLoader",
}
TRAINER = {
    "accumulation": "gradient_accumulation_steps is 2",
    "auto batch size": "auto_find_batch_size is on",
    "data seed": "data_seed is 7, and seed is 42",
    "tokens": "average_tokens_across_devices is off",
    "data skip": "ignore_data_skip is on",
    "groups of lengths": "train_sampling_strategy is group_by_length",
    "stream": "Stream is a stream",
}

MISSING = """
import importlib, sys
import samebits
sys.modules["accelerate"] = sys.modules["transformers"] = None
for name in ("accelerate", "transformers"):
    try:
        importlib.import_module("samebits.integrations." + name)
    except samebits.ConfigError as error:
        print(error.line)
"""


def test_a_missing_package_is_named_with_its_pip_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MISSING)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, tmp_path / "script.py"]
    with warm_start.popen(command, cwd=tmp_path, env=environment(), text=True, **pipes) as process:
        out, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, err
    accelerate, transformers = out.splitlines()
    assert accelerate.startswith("accelerate is not installed")
    assert "pip install 'samebits[accelerate]'" in accelerate
    assert "pip install 'samebits[transformers]'" in transformers


@pytest.mark.parametrize(("kind", "package"), [("accelerate", "accelerate"), ("trainer", "transformers")])
@pytest.mark.full
def test_what_is_not_exact_is_refused_with_its_name_and_a_fix(kind: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'samebits[{package}]'")
    with worlds_of(FOLDER / "hugging_face_refusals.py", tmp_path) as worlds:
        _, text = worlds.run(1, kind, tmp_path)
    refused = dict(line.split("| ", 1) for line in text.splitlines() if "| " in line)
    wanted = {"accelerate": ACCELERATE, "trainer": TRAINER}[kind]
    assert refused.keys() == wanted.keys()
    for name, problem in wanted.items():
        assert problem in refused[name]
        assert "fix: " in refused[name]
