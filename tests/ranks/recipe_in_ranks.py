"""A whole run of a recipe with facts and a start, as a rank of a rank pool carries it out."""

import io
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebits.cluster.world import World
from samebits.config.schema import ReportConfig, RunConfig
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch
from samebits.engine.loop import train
from samebits.engine.opening import opened
from samebits.engine.parts import Parts
from samebits.engine.run_spec import RunSpec
from samebits.errors import CheckpointError, DataError, SamebitsError
from samebits.storage.weights import weights_sha256
from tests.ranks.jobs import InMemory, Seen
from tests.ranks.networks import WithBatchNorm
from tests.ranks.runs_in_ranks import loss


class Slow(InMemory):
    """Samples of which a batch takes a while to read."""

    def __init__(self, read_s: float) -> None:
        super().__init__(32)
        self.read_s = read_s

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        time.sleep(self.read_s)
        return super().batch(indices, keys)


class Recipe:
    """Remembers what it was asked and given."""

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        self.wanted = wanted
        self.asked = 0
        self.given: Any = None
        self.model: nn.Module = nn.Identity()

    def dataset_info(self, config: RunConfig) -> Mapping[str, Any]:
        self.asked += 1
        if "fault" in self.wanted:
            raise DataError(self.wanted["fault"])
        return {"names": self.wanted.get("names", ("cat", "dog", "cow")), "of": {1: "x"}}

    def build(self, config: RunConfig, facts: Mapping[str, Any]) -> Parts:
        self.given = facts
        self.model = WithBatchNorm()
        samples = Slow(self.wanted.get("read_s", 0.0))
        return Parts(model=self.model, loss=loss, train_data=lambda: samples, eval_data=lambda: InMemory(11),
                     metric=Seen, init_weights=self.start if "start" in self.wanted else None)  # fmt: skip

    def start(self, model: nn.Module) -> Mapping[str, str]:
        value = self.wanted["start"]
        if value < 0:
            raise CheckpointError(f"nothing starts at {value}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        return {"weights": f"{value} everywhere"}


def carry_out(world: World, folder: Path, resume: str, wanted: Mapping[str, Any]) -> Any:
    """Train two epochs of two steps; the error's text if there was one."""
    recipe = Recipe(wanted)
    config = RunConfig(recipe="test", epochs=2, global_batch=16, micro_batch=4, device="cpu",
                       report=ReportConfig(tensorboard=False))  # fmt: skip
    request = RunSpec(name="test", config=config, diff={}, folder=folder, resume=resume, is_restart=False,
                      started_at=time.time())  # fmt: skip
    said = io.StringIO()
    try:
        with redirect_stdout(said), opened(request, recipe, world) as run:
            code = run.end(train(run))
        assert code == 0
    except SamebitsError as error:
        return str(error)
    finally:
        torch.use_deterministic_algorithms(False)
    weights = weights_sha256(recipe.model.state_dict())
    return {"asked": recipe.asked, "facts": recipe.given, "weights": weights, "said": said.getvalue()}
