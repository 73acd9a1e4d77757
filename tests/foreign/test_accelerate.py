"""Scripts with Accelerate have equal weights at any number of processes once they use `ExactAccelerator`."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.foreign.cases import cases
from tests.foreign.forms import names, script
from tests.foreign.hugging_face_worlds import worlds_of

pytestmark = pytest.mark.skipif(
    not find_spec("accelerate"), reason="accelerate is not installed: pip install 'samebits[accelerate]'"
)

SCRIPTS = names("accelerate")
EVALUATION = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from samebits.integrations.accelerate import ExactAccelerator

accelerator = ExactAccelerator(cpu=True, global_batch=8)
train_loader, eval_loader = accelerator.prepare(
    DataLoader(TensorDataset(torch.arange(20.0)), batch_size=4, shuffle=True),
    DataLoader(TensorDataset(torch.arange(22)), batch_size=4),
)
samples, means, names = [], [], []
for (batch,) in eval_loader:
    samples += accelerator.gather_for_metrics(batch).tolist()
    means += accelerator.gather_for_metrics(batch.float().mean().repeat(4)).tolist()
    names += accelerator.gather_for_metrics([f"n{number}" for number in batch.tolist()], use_gather_object=True)
if accelerator.is_main_process:
    print("samples", samples == list(range(22)), "names", names == [f"n{number}" for number in range(22)])
    print("means", means)
accelerator.end_training()
"""


@pytest.mark.parametrize("name", cases(SCRIPTS))
def test_an_exact_accelerate_script_has_one_hash_also_after_a_kill(name: str, tmp_path: Path) -> None:
    with worlds_of(script(name, "exact", tmp_path), tmp_path) as worlds:
        (whole,) = {worlds.hash(size) for size in (1, 4)}
        output = tmp_path / "output"
        arguments = ["--checkpointing_steps", 4, "--output_dir", output]
        found, text = worlds.run(3, *arguments, kill_when=output / "step_4" / "samebits.json")
        assert found is None, text
        assert worlds.hash(2, "--resume_from_checkpoint", output / "step_4") == whole


@pytest.mark.lab
def test_a_usual_accelerate_script_has_other_weights_at_each_number_of_processes(tmp_path: Path) -> None:
    with worlds_of(script("accelerate_cnn", "usual", tmp_path), tmp_path) as worlds:
        assert worlds.hash(1) != worlds.hash(2)


@pytest.mark.full
def test_gather_for_metrics_returns_each_sample_once_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "evaluation.py").write_text(EVALUATION)
    with worlds_of(tmp_path / "evaluation.py", tmp_path) as worlds:
        texts = [worlds.run(size)[1] for size in (1, 2, 3)]
    assert "samples True names True" in texts[0]
    assert len(set(texts)) == 1, texts
