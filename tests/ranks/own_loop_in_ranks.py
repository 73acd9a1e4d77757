"""Loops that use `samebits.exact`, in the ranks of the pool."""

import sys
import warnings
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import samebits
from samebits.cluster import collectives
from samebits.cluster.world import World
from tests.runs import ROOT
from tests.unit.own_loop.loops import torch_settings


def import_same_modules(world: World) -> None:
    """Import the modules in tests/ranks that any rank has: `samebits.exact` compares those in the script's folder."""
    # A job of a test file is in a module of that file's name only, without "tests.".
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    mine = [name for name, file in files.items() if file.startswith(f"{ROOT}/tests/ranks/") and name != "__main__"]
    for names in collectives.all_gather_object(world, mine):
        for name in names:
            import_module(name)


@dataclass(frozen=True)
class Case:
    """A loop: its data, its batches and what its body does."""

    num_samples: int = 23
    global_batch: int = 8
    micro_batch: int = 2
    num_workers: int = 0
    epochs: int = 2
    passes: int = 1
    optimizers: int = 1
    batch_norm: bool = False
    clips: bool = False
    drop_last: bool = False
    is_lazy: bool = False  # the last backward pass in every second step only
    unfreezes: bool = False  # the first layer is trained from the second epoch on
    toggles: bool = False  # as GANs do: requires_grad of each part changes in each body
    breaks_after: int | None = None  # micro-batches of the first epoch


class Noisy(Dataset[Any]):
    """Samples with random numbers of numpy and torch, as augmentations have."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(0, 1, 6) * (index + 1) / self._num_samples
        return x + 0.1 * float(np.random.rand()) + 0.1 * torch.rand(6), index % 3


class Net(nn.Module):
    """Two layers and a parameter that no loss reaches."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.second = nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.dropout(self.norm(self.first(x)).tanh(), 0.3))


def train(world: World, case: Case) -> str:
    """Return the digest of all weights, buffers and optimizer states after a run."""
    with torch_settings(), warnings.catch_warnings():
        # No body has a forward pass that is only measured.
        warnings.filterwarnings("error", message="Forward passes after the last backward pass")
        return _train(world, case)


def _train(world: World, case: Case) -> str:
    torch.manual_seed(7 + world.rank)  # rank 0's weights count
    nets = [Net(case.batch_norm) for _ in range(case.optimizers)]
    if case.unfreezes:
        nets[0].first.requires_grad_(False)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    data = DataLoader(
        Noisy(case.num_samples), batch_size=case.micro_batch, shuffle=True, num_workers=case.num_workers,
        drop_last=case.drop_last,
    )  # fmt: skip
    _, _, loader = samebits.exact(nets, optimizers, data, global_batch=case.global_batch, seed=3, hang_timeout_s=None)
    for epoch in range(case.epochs):
        if case.unfreezes:
            nets[0].first.requires_grad_(epoch > 0)
        for number, (x, y) in enumerate(loader):
            _body(case, nets, optimizers, loader.step, x, y)
            if epoch == 0 and number + 1 == case.breaks_after:
                break
    state = {f"{number}.{name}": value for number, net in enumerate(nets) for name, value in net.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, values in optimizer.state_dict()["state"].items():
            state |= {f"optimizer {number}, {index}, {name}": torch.as_tensor(value) for name, value in values.items()}
    return samebits.weights_sha256(state)


def _body(
    case: Case, nets: list[Net], optimizers: list[torch.optim.Optimizer], step: int, x: torch.Tensor, y: torch.Tensor
) -> None:
    carried = x
    for number, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
        if case.toggles:
            for other in nets:
                other.requires_grad_(other is net)
        optimizer.zero_grad()
        for turn in range(case.passes):
            if case.is_lazy and turn == case.passes - 1 and step % 2:
                continue
            loss = F.cross_entropy(net(carried), y) * (turn + 1)
            # The other networks have a part in the loss, and their gradients by it are dropped.
            loss = loss + sum(0.1 * other(x).square().mean() for other in nets[:number])
            loss.backward()
        if case.clips:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


def evaluate(world: World, num_samples: int, with_metrics: bool) -> tuple[dict[str, float], list[int], list[float]]:
    """Return sums over a dataset, its labels in order, and the values of two torchmetrics."""
    data = DataLoader(Noisy(num_samples), batch_size=4, shuffle=True)
    loader = samebits.EvalLoader(data)
    metrics: list[Any] = []
    if with_metrics:
        import torchmetrics

        metrics = [torchmetrics.MeanMetric(), torchmetrics.MeanSquaredError()]
    for x, y in loader:
        loader.add(count=len(x), total=(x * torch.rand(())).sum(), largest=float(y.max()))
        loader.collect(y.tolist())
        if metrics:
            loader.update(metrics[0], x)
            loader.update(metrics[1], x[:, 0], x[:, 1])
    sums = loader.sums()
    return sums, loader.collected(), [float(loader.compute(metric)) for metric in metrics]


class _Infers(nn.Module):
    """Infers a scale from the first batch that it sees, as torchvision's MultiScaleRoIAlign does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(3, 1), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = float(x.abs().mean())
        return self.inner(x * self.scale)


def warnings_of_attributes(world: World, is_set_before: bool) -> list[str]:
    """Train one epoch with a module that notes something of its first batch, and return the warnings."""
    import_same_modules(world)
    with torch_settings(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _Infers()
        if is_set_before:
            model(torch.ones(1, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = DataLoader(Noisy(8), batch_size=1, shuffle=True)
        model, optimizer, loader = samebits.exact(model, optimizer, data, global_batch=4, hang_timeout_s=None)
        for x, _ in loader:
            model(x.float().reshape(1, -1)[:, :3]).sum().backward()
            optimizer.step()
        return [str(each.message) for each in caught]


@dataclass(frozen=True)
class Flip:
    """A bit of a gradient that one rank computes wrongly, in a micro-batch that other ranks compute too."""

    rank: int
    step: int
    parameter: int
    place: int
    bit: int


def train_with_flips(world: World, num_steps: int, flips: list[Flip]) -> str:
    """Train steps of 7 micro-batches, and return the error that ends them, or "" without one."""
    mine = {each.step: each for each in flips if each.rank == world.rank}
    with torch_settings():
        torch.manual_seed(7)
        model: Any = Net(False)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        data = DataLoader(Noisy(14 * num_steps), batch_size=2, shuffle=True)
        model, optimizer, loader = samebits.exact(model, optimizer, data, global_batch=14, seed=3, hang_timeout_s=None)
        parameters = [*model.first.parameters(), *model.second.parameters()]

        def flip(parameter: int, gradient: torch.Tensor) -> torch.Tensor:
            planted = mine.get(loader.step)
            if planted is None or planted.parameter != parameter or loader.loop._idle._now is None:
                return gradient
            wrong = gradient.clone()
            bits = wrong.view(-1).view(torch.int32)
            bits[planted.place % len(bits)] ^= torch.tensor(1 << planted.bit).to(torch.int32)
            return wrong

        for number, parameter in enumerate(parameters):
            parameter.register_hook(partial(flip, number))  # before the loop's own, which come after the sum
        try:
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        except samebits.SamebitsError as error:
            return str(error)
        return ""
