"""What has no portable form in a loop of a script's own is refused by name, before its first step is done."""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import samebits
from samebits.errors import ConfigError
from samebits.own_loop import ending
from samebits.portable import floats, scripts
from samebits.portable.arithmetic import is_portable, portable_arithmetic
from tests.unit.portable.test_refusals import REFUSED

X = torch.linspace(0.1, 2.0, 64).view(16, 4)


class Powers(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.1 * 0.9 ** group.setdefault("steps", 0)


class Squares(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = ((group["lr"] + 0.37) / 1234.5) ** 2


class Products(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= math.pow(0.1, 1.5) * math.tanh(2.0) * parameter.grad * parameter.grad


class Decay(lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        return [_decayed(base, self.last_epoch) for base in self.base_lrs]


def _decayed(base: float, step: int) -> float:
    return base * 0.97**step


Optimizer = Callable[[Any], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.1)


def train(optimizer: Optimizer = SGD, scheduler: Any = None, use: Any = None) -> Tensor:
    """Two steps of a loop, with a scheduler and something else in its body."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    update = optimizer(model.parameters())
    follower = [] if scheduler is None else [scheduler(update)]
    data = DataLoader(TensorDataset(X, torch.arange(16) % 3), batch_size=4)
    model, update, loader = samebits.exact(model, update, data, global_batch=8, hang_timeout_s=None)
    for x, y in loader:
        if use is not None:
            use()
        update.zero_grad()
        F.cross_entropy(model(x), y).backward()
        update.step()
    for each in follower:
        each.step()
    return model.weight.detach()


@pytest.fixture
def portable() -> Iterator[None]:
    with portable_arithmetic():
        yield
    ending._FAULTS.clear()  # of the loop that was left inside a step
    ending._LOADERS.clear()


@pytest.mark.parametrize("make", [pytest.param(each, id=name) for name, each in REFUSED.items()])
def test_an_operation_in_the_body_is_refused(portable: None, make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"aten::\w+.* has no portable form"):
        train(use=make)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD,
        partial(torch.optim.Adafactor, lr=0.1), partial(Powers, lr=0.1), partial(Squares, lr=0.1),
    ],
)  # fmt: skip
def test_an_optimizer_with_powers_of_floats_is_refused(portable: None, optimizer: Optimizer) -> None:
    with pytest.raises(ConfigError, match="has no portable form"):
        train(optimizer)


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(lr_scheduler.PolynomialLR, power=0.9), partial(lr_scheduler.MultiStepLR, milestones=[2, 2]),
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.95**step), Decay,
        partial(lr_scheduler.LambdaLR, lr_lambda=partial(_decayed, 1.0)),
        partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: (step + 0.37) ** 2),
        partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.2, mode="exp_range", gamma=0.9),
    ],
)  # fmt: skip
def test_a_schedule_with_powers_of_floats_is_refused_before_the_first_step(portable: None, scheduler: Any) -> None:
    with pytest.raises(ConfigError, match="has no portable form"):
        train(scheduler=scheduler)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Rprop", "Products"])
def test_other_optimizers_and_schedules_train_as_torchs_do(optimizer: str) -> None:
    def weights() -> Tensor:
        make = partial(Products if optimizer == "Products" else getattr(torch.optim, optimizer), lr=0.01)
        return train(make, partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (step + 1)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "reset_parameters", _spread)  # random numbers are others in portable arithmetic
        usual = weights()
        with portable_arithmetic():
            assert torch.allclose(weights(), usual, rtol=1e-4, atol=1e-6)


def _spread(layer: nn.Linear) -> None:
    for each in layer.parameters():
        each.data.copy_((torch.arange(each.numel()) / each.numel() - 0.5).view(each.shape))


def test_pythons_functions_are_portable_inside_only() -> None:
    original = math.cos
    with portable_arithmetic():
        assert math.cos(0.7) == floats.cos(0.7)
        assert math.log(8, 2) == 3
        assert math.exp(math.inf) == math.inf
        with pytest.raises(ValueError, match="math domain"):
            math.log(-1)
    assert math.cos is original


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scripts.gc, "get_objects", list)
    monkeypatch.setattr(scripts.atexit, "register", lambda _: None)
    monkeypatch.delenv(scripts.VARIABLE, raising=False)
    yield
    samebits.use_kernels("auto")


def test_use_kernels_comes_before_the_model() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="called after a model was made"):
        samebits.use_kernels("portable")
    assert not is_portable()
    with pytest.raises(ConfigError, match="kernels is 'avx2'"):
        samebits.use_kernels("avx2")  # type: ignore[arg-type]
    assert model is not None


def test_a_process_that_does_not_choose_what_its_parent_chose_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(scripts.VARIABLE, "portable")
    with pytest.raises(ConfigError, match="computes with kernels=auto") as error:
        train()
    assert "use_kernels('portable')" in error.value.slots["fix"]


def refuses() -> bool:
    try:
        X.logcumsumexp(1)
    except ConfigError:
        return True
    return False


class Own(threading.Thread):
    def run(self) -> None:
        self.refused = refuses()


def test_threads_of_the_script_compute_in_portable_arithmetic(no_model: None) -> None:
    samebits.use_kernels("portable")
    own = Own()
    own.start()
    own.join()
    assert own.refused
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(refuses).result()
        samebits.use_kernels("auto")
        assert not refuses()
    after = Own()
    after.start()
    after.join()
    assert not after.refused


def test_a_compiled_model_runs_eagerly(no_model: None) -> None:
    samebits.use_kernels("portable")
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    assert torch.equal(torch.compile(model)(X), model(X))
