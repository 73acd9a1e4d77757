"""The output of `samebits plan`, compared with a real pass."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from samebits.cli.main import run
from samebits.cluster.world import alone
from samebits.config.schema import OptimConfig, RunConfig
from samebits.data.order import MicroBatch, Order
from samebits.errors import ConfigError
from samebits.parallel.bucket import Flat
from samebits.parallel.reduce import Reducer
from samebits.scaling.plan import bucket_copies, memory, owner_copies, pass_through, sizes_of

NUM_SAMPLES, SIZE_PX = 12, 128
_MEASURED = f"""
import json
from pathlib import Path
import torch
from torchvision.models import resnet18

def rss(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0])

torch.set_num_threads(1)
resnet18()(torch.zeros(2, 3, 32, 32)).sum().backward()  # whatever the first pass loads
before = rss("VmRSS")
model = resnet18()
weights = rss("VmRSS") - before
inputs = torch.zeros({NUM_SAMPLES}, 3, {SIZE_PX}, {SIZE_PX}).contiguous(memory_format=torch.channels_last)
before = rss("VmRSS")
outputs = model(inputs)
print(json.dumps([weights, rss("VmRSS") - before]))
"""


def config(**more: Any) -> RunConfig:
    return RunConfig(recipe="test", **{"global_batch": 64, "micro_batch": 8, **more})


def planned(settings: RunConfig, build: Callable[[], nn.Module] = resnet18, num_samples: int = NUM_SAMPLES) -> Any:
    inputs = torch.zeros(1, 3, SIZE_PX, SIZE_PX)
    return pass_through(settings, lambda: SimpleNamespace(model=build()), inputs, num_samples)


@pytest.mark.full
def test_weights_and_activations_are_those_of_a_real_pass_to_a_sixth() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED],
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # what is freed is gone
    weights, activations = json.loads(done.stdout)
    one, sizes = planned(config())
    assert 4 * sizes.total == pytest.approx(weights, rel=0.17)
    assert one.activations == pytest.approx(activations, rel=0.17)


def test_the_flops_are_those_of_the_literature() -> None:
    # He et al., 2016, table 1: 1.8e9 multiplications and additions forward at 224 px; backward takes twice as much but
    # for the first layer's input.
    one, _ = planned(config(), num_samples=2)
    forward = 2 * 2 * 1.8e9 * (SIZE_PX / 224) ** 2
    assert one.flops == pytest.approx(3 * forward, rel=0.05)


class Recurrent(nn.Module):
    """Rows of a picture one after the other, by torch's LSTM or by products that its counter knows."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE_PX, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True, bidirectional=True)
        self.by_hand = by_hand

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.first(images[:, 0])
        if not self.by_hand:
            outputs: torch.Tensor = self.lstm(rows)[0]
            return outputs
        both = []
        for end in ("", "_reverse"):
            inward, across = (self.lstm.get_parameter(f"weight_{kind}_l0{end}") for kind in ("ih", "hh"))
            hidden, cell = rows.new_zeros(len(rows), 32), rows.new_zeros(len(rows), 32)
            for place in range(SIZE_PX):
                own, forget, new, out = (rows[:, place] @ inward.T + hidden @ across.T).chunk(4, 1)
                cell = forget.sigmoid() * cell + own.sigmoid() * new.tanh()
                hidden = out.sigmoid() * cell.tanh()
            both.append(hidden)
        return torch.cat(both, 1)


@pytest.mark.full
def test_an_lstm_counts_as_the_products_that_it_consists_of() -> None:
    counted, by_hand = (planned(config(), partial(Recurrent, by_hand=way))[0].flops for way in (False, True))
    assert counted == pytest.approx(by_hand, rel=0.02)


def test_tf32_is_planned_on_a_machine_without_a_gpu() -> None:
    assert planned(config(precision="tf32"), num_samples=2) == planned(config(), num_samples=2)


class AskingForValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]


def test_a_model_that_asks_for_values_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="cannot be planned, since it reads values"):
        planned(config(), AskingForValues)


HELD = [{}, {"mode": "fast"}, {"compress": "bf16"}, {"compress": "bf16", "mode": "fast"}, {"batch_norm": "sync"},
        {"batch_norm": "sync", "mode": "fast"}]  # fmt: skip


def flats() -> list[Flat]:
    """All copies of gradients that there are."""
    return [each for each in gc.get_objects() if type(each) is Flat]


@pytest.mark.parametrize("settings", HELD, ids=str)
def test_what_is_planned_for_gradients_is_what_the_sum_holds(settings: dict[str, Any]) -> None:
    chosen = config(global_batch=16, micro_batch=2, **settings)
    before = flats()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(192, 600), nn.BatchNorm1d(600), nn.Linear(600, 600), nn.Linear(600, 5)
    )
    reducer = Reducer(
        model, alone(), exact=chosen.mode == "exact", synchronized=chosen.batch_norm == "sync",
        compress=chosen.compress,
    )  # fmt: skip
    (step,) = Order(16, 16, 2, 0).steps(alone(), stop=1)

    def run(micro: MicroBatch) -> None:
        with reducer.micro_batch(micro):
            reducer.backward(model(torch.randn(2, 3, 8, 8)).square().mean())

    reducer.begin(step)
    reducer.run(run)
    reducer.reduce()
    held = sum(flat.values.nbytes for flat in flats() if not any(flat is other for other in before))
    assert memory(chosen, sizes_of(model), 0, 1, "ddp")["gradients"] == pytest.approx(held, rel=0.02)


def test_activation_checkpointing_keeps_less_and_computes_more() -> None:
    plain, _ = planned(config())
    twice, _ = planned(config(activation_checkpointing=True))
    assert twice.activations < 0.8 * plain.activations  # a ResNet-18's stem is outside of its blocks
    assert twice.flops == pytest.approx(4 / 3 * plain.flops, rel=0.03)


def test_fsdp_holds_its_share_of_the_state() -> None:
    settings = config(optim=OptimConfig(name="adam", ema=0.9))
    sizes = sizes_of(resnet18())
    ddp, fsdp = (memory(settings, sizes, 0, 4, way) for way in ("ddp", "fsdp"))
    for part in ("weights", "optimizer"):
        assert 4 * fsdp[part] == pytest.approx(ddp[part], rel=1e-4)
    assert ddp["optimizer"] == 2 * ddp["weights"]
    assert fsdp["communication"] < ddp["weights"] * 3


def test_an_owner_of_whole_tensors_holds_few_sums() -> None:
    assert [owner_copies(config(), num_procs) for num_procs in (2, 3, 4, 8)] == [2, 2, 1, 1]  # of eight leaves


def test_the_tree_takes_a_copy_of_the_gradients_for_each_of_its_floors() -> None:
    assert bucket_copies(config(), 1) == (3, 0)  # eight leaves: every second one joins the one before
    assert bucket_copies(config(mode="fast"), 2) == (1, 1)


def test_synchronized_batch_norm_holds_all_micro_batches_of_a_process_at_once() -> None:
    sizes = sizes_of(resnet18())
    assert memory(config(batch_norm="sync"), sizes, 100, 2, "ddp")["activations"] == 400
    assert memory(config(), sizes, 100, 2, "ddp")["activations"] == 100


def test_the_command_gives_a_table_of_80_columns_and_json(printed: Callable[..., str]) -> None:
    table = printed(["plan", "digits", "--procs", "2", "--memory-gb", "1"])
    assert "70,586 parameters" in table
    assert "With 1 GB, fsdp: micro_batch=64 or less fits, the whole global_batch." in table
    assert max(map(len, table.splitlines())) <= 80
    assert json.loads(printed(["plan", "digits", "--json"]))["ways"]["ddp"]["memory"]["weights"] == 4 * 70586


@pytest.mark.full
def test_a_plan_needs_no_data_if_the_recipe_gives_a_shape(tmp_path: Path, printed: Callable[..., str]) -> None:
    (tmp_path / "empty").mkdir()
    smaller = ["model.width=8", "data.size_px=128", "micro_batch=2"]
    planned = json.loads(printed(["plan", "pose/coco_w32_512", "--json", f"data.root={tmp_path}/empty", *smaller]))
    assert planned["ways"]["ddp"]["memory"]["activations"] > 0


RECIPE_WITHOUT_SHAPE = """
import numpy as np
import torch

from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.errors import DataError


class Samples:
    def __len__(self):
        return 9

    def batch(self, indices, keys):
        return Batch(torch.zeros(len(indices), 5), torch.zeros(len(indices)), torch.from_numpy(indices))


def gone():
    raise DataError("there are no samples")


def build(config):
    return Parts(model=torch.nn.Linear(5, 3), loss=None, train_data=OPENER, eval_data=gone, metric=None)
"""


def test_without_a_shape_a_training_sample_is_looked_at(tmp_path: Path, printed: Callable[..., str]) -> None:
    there, gone = tmp_path / "there_recipe.py", tmp_path / "gone_recipe.py"
    there.write_text(RECIPE_WITHOUT_SHAPE.replace("OPENER", "Samples"))
    gone.write_text(RECIPE_WITHOUT_SHAPE.replace("OPENER", "gone"))
    assert json.loads(printed(["plan", str(there), "--json"]))["parameters"] == 18
    assert "there are no samples" in printed(["plan", str(gone)], 3)


def test_a_plan_reports_idle_processes(printed: Callable[..., str]) -> None:
    many = ["plan", "digits", "--procs", "8", "global_batch=48", "micro_batch=12"]
    lines = printed(many).splitlines()
    assert lines[0] == "digits on 8 processes"
    assert lines[2:6] == [
        "  step   4 micro-batches of up to 12, 0.1 GFLOP",
        "  idle   4 of 8 processes are idle: a step has 4 micro-batches",
        "         micro_batch=6 gives all of them work (and changes the result)",
        "",
    ]
    assert lines[6].split() == ["MB", "per", "process", "ddp", "fsdp"]
    assert max(map(len, lines)) <= 80
    assert json.loads(printed([*many, "--json"]))["idle_procs"] == 4
    assert json.loads(printed([*many, "micro_batch=6", "--json"]))["idle_procs"] == 0


def test_a_model_that_depends_on_missing_data_is_reported(tmp_path: Path, printed: Callable[..., str]) -> None:
    told = printed(["plan", "classify", f"data.root={tmp_path}/nowhere"], 3)
    assert "nowhere" in told
    assert "samebits data make classify --out DIR" in told
    assert run(["data", "make", "classify", "--out", f"{tmp_path}/made", "num_per_class=2"]) == 0
    assert run(["plan", "classify", f"data.root={tmp_path}/made", "model.name=resnet18", "data.size_px=32"]) == 0
