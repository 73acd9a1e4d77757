"""Bodies of training loops that act by themselves are named by what they do."""

# ruff: noqa: PT012  # what raises is the body of a loop
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

import samebits
from samebits.errors import ConfigError, SamebitsError, TrainError
from tests.unit.own_loop.loops import Loop, data_loader, network

pytestmark = pytest.mark.usefixtures("no_repetition")

Body = Callable[[Loop, Any, int], None]


def accumulating(every: int) -> Body:
    def body(loop: Loop, batch: Any, number: int) -> None:
        (loop.loss(batch) / every).backward()
        if (number + 1) % every == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    return body


def new_optimizer(loop: Loop, batch: Any, number: int) -> None:
    if number == 0:
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    loop.train(batch)


OWN = nn.Parameter(torch.ones(1))
OTHER = torch.optim.SGD([OWN], lr=0.1)


def loss_with_parameters(loop: Loop, batch: Any, number: int) -> None:
    (loop.loss(batch) * OWN).sum().backward()
    loop.optimizer.step()
    OTHER.step()


def perturbed(loop: Loop, batch: Any, number: int) -> None:
    loop.loss(batch).backward()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.add_(0.01)
    loop.loss(batch).backward()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.sub_(0.01)
    loop.optimizer.step()


def clipped(loop: Loop, batch: Any, number: int) -> None:
    loop.train(batch)
    for parameter in loop.model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def by_hand(loop: Loop, batch: Any, number: int) -> None:
    loop.loss(batch).backward()
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.data -= 0.1 * parameter.grad
    loop.optimizer.step()


def rate_by_a_counter_of_passes(loop: Loop, batch: Any, number: int) -> None:
    # The position is looked at, but for something else. Of two passes a step, the second one is the last.
    if loop.loader.step == 1:
        loop.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
    loop.train(batch)


HELD: list[Any] = []


def fetched_between(loop: Loop, batch: Any, number: int) -> None:
    # The batch of this body is trained in the next one: forward here, backward there.
    if HELD:
        HELD.pop().backward()
        loop.optimizer.step()
    HELD.append(loop.loss(batch))


def rate_by_hand(loop: Loop, batch: Any, number: int) -> None:
    loop.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
    loop.train(batch)


@pytest.mark.parametrize(
    ("body", "text", "cause"),
    [
        (accumulating(2), "in some micro-batches of a step only", "counter of its own"),
        (accumulating(3), "in some micro-batches of a step only", "counter of its own"),
        (accumulating(4), "in some micro-batches of a step only", "counter of its own"),
        (new_optimizer, "an optimizer .SGD. that exact.. was not given", "act in each micro-batch"),
        (loss_with_parameters, "an optimizer .SGD. that exact.. was not given", "act in each micro-batch"),
        (perturbed, "weights changed within a step", "SAM"),
        (clipped, "weights changed within a step", "clipping"),
        (by_hand, "weights changed within a step", "by hand"),
        (fetched_between, "read between the forward and the backward pass", "another micro-batch"),
        (rate_by_hand, "lr of the optimizer changed within a step", "The script sets it"),
    ],
)
def test_a_body_that_acts_by_itself_is_named(body: Body, text: str, cause: str) -> None:
    loop = Loop()
    HELD.clear()
    with pytest.raises(SamebitsError, match=text) as caught:
        for number, batch in enumerate(loop.loader):
            body(loop, batch, number)
    assert cause in str(caught.value)
    assert loop.loader.step == 0


def test_accumulation_over_steps_where_each_has_one_body_is_named() -> None:
    loop = Loop(global_batch=2)
    with pytest.raises(TrainError, match="in some steps and not in others"):
        for number, batch in enumerate(loop.loader):
            accumulating(2)(loop, batch, number)


def test_accumulation_over_steps_by_the_loader_is_allowed() -> None:
    loop = Loop()
    for batch in loop.loader:
        is_due = loop.loader.step % 2 == 1
        loop.loss(batch).backward()
        if is_due:
            loop.optimizer.step()
    assert loop.loader.step == 2


def test_an_optimizer_of_a_single_body_is_allowed(usual: str) -> None:
    loop = Loop()
    for _ in range(2):
        for x, y in loop.loader:
            noise = torch.zeros_like(x, requires_grad=True)
            attack = torch.optim.SGD([noise], lr=0.1)
            (-loop.loss((x + noise, y))).backward()
            attack.step()
            loop.train((x, y))
    assert loop.sha256() == usual


def test_an_embedding_with_max_norm_is_named() -> None:
    class Words(Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(index)

    model = nn.Embedding(16, 4, max_norm=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = samebits.exact(model, optimizer, DataLoader(Words(), batch_size=2), global_batch=8)
    with pytest.raises(TrainError, match="weights changed within a step") as caught:
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
    assert "max_norm" in str(caught.value)


class Student(nn.Module):
    """Keeps an average of its weights, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.average = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x) + self.average(x)

    def move(self) -> None:
        for old, new in zip(self.average.parameters(), self.trained.parameters(), strict=True):
            old.data = old.data * 0.9 + new.data * 0.1


def test_a_rate_that_differs_in_the_last_pass_only_is_named_if_the_first_one_has_set_it_too() -> None:
    loop = Loop(global_batch=4)
    with pytest.raises(TrainError, match="lr of the optimizer changed within a step"):
        for number, batch in enumerate(loop.loader):
            rate_by_a_counter_of_passes(loop, batch, number)
    assert loop.loader.loop.step == 2


def test_a_rate_that_is_set_in_the_last_pass_for_the_next_step_or_for_this_one_stays() -> None:
    loop = Loop(global_batch=4)
    for batch in loop.loader:
        if loop.loader.sync_gradients and loop.loader.step == 1:
            loop.optimizer.param_groups[0]["lr"] = 0.05
        loop.train(batch)
        if loop.loader.step >= 2:
            loop.optimizer.param_groups[0]["lr"] = 0.02 / loop.loader.step
    assert loop.optimizer.param_groups[0]["lr"] == 0.02 / 4


def test_a_model_that_averages_its_own_weights_is_named_and_may_do_it_once_a_step() -> None:
    def run(is_once: bool) -> torch.Tensor:
        torch.manual_seed(0)
        loop = Loop(Student())
        for batch in loop.loader:
            loop.train(batch)
            if not is_once or loop.loader.sync_gradients:
                loop.model.move()
        return loop.model.average.weight - Student().average.weight

    with pytest.raises(TrainError, match="weights changed within a step") as caught:
        run(is_once=False)
    assert "+    if loader.sync_gradients" in str(caught.value)
    assert run(is_once=True).abs().sum() > 0


class Codebook(nn.Module):
    """Changes two buffers of its own, and one that is not changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        for name in ("sizes", "kept", "sums"):
            self.register_buffer(name, torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes += 1
        self.sums += x.detach().sum()
        return self.linear(x)


class Halving:
    """A scheduler that is not torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


def test_a_scheduler_of_the_script_acts_once_a_step() -> None:
    loop = Loop()
    scheduler = loop.loader.per_step(Halving(loop.optimizer))
    for batch in loop.loader:
        loop.train(batch)
        scheduler.step()
    assert loop.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**loop.loader.step


def test_parameters_without_an_optimizer_do_not_count_in_clipping() -> None:
    def run(is_frozen: bool) -> str:
        model = network()
        model[0].requires_grad_(not is_frozen)
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        _, _, loader = samebits.exact(model, optimizer, data_loader(), global_batch=8)
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        return samebits.weights_sha256(model.state_dict())

    with pytest.warns(UserWarning, match="requires a gradient, and no optimizer has it"):
        expected = run(False)
    assert run(True) == expected


@pytest.mark.parametrize("is_second", [True, False])
def test_what_follows_the_optimizer_in_some_bodies_only_is_named(is_second: bool) -> None:
    average = AveragedModel(network())
    loop = Loop(per_step=[average])
    with pytest.raises(TrainError, match=r"called update_parameters\(\) of AveragedModel in some micro-batches"):
        for number, batch in enumerate(loop.loader):
            loop.train(batch)
            if number % 2 == is_second:
                average.update_parameters(loop.model)


class Preview(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("at", [0, 3])  # 3: the last body of a step, after the update
def test_a_forward_pass_after_the_update_changes_no_statistics(at: int) -> None:
    def run(shows: bool) -> str:
        loop = Loop(Preview())
        for number, batch in enumerate(loop.loader):
            loop.train(batch)
            if shows and number == at:
                loop.model(torch.ones(5, 4))
        return samebits.weights_sha256(loop.model.state_dict())

    expected = run(False)
    with pytest.warns(UserWarning, match="change no buffers"):
        assert run(True) == expected


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("queue", torch.zeros(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        self.queue[: len(out)] = out.detach()
        return out


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Queue, "which is not known to be an average"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 1)), "which is not known to be an average"),
        (lambda: nn.Sequential(Codebook()), r"averaged_buffers = \('sizes', 'sums'\)"),
    ],
    ids=["a queue", "spectral norm", "all that a module changes, at once"],
)
def test_a_buffer_that_is_no_average_is_refused(make: Callable[[], nn.Module], says: str) -> None:
    loop = Loop(make())
    with pytest.raises(ConfigError, match=says):
        loop.epoch()


def test_a_buffer_that_a_module_lists_is_averaged() -> None:
    model = Queue()
    model.averaged_buffers = ("queue",)  # type: ignore[assignment]
    loop = Loop(model)
    loop.epoch()
    assert loop.loader.step == 2


def test_one_sample_under_batch_norm_is_named() -> None:
    loop = Loop(Preview(), data_loader(15))
    with pytest.raises(ConfigError, match="a micro-batch of one sample") as caught:
        loop.epoch()
    assert "drop_last=True" in str(caught.value)
