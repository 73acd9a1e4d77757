"""Mistakes in the body of an exact loop are named before the weights change."""

# ruff: noqa: PT012  # what raises is the body of a loop
import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import samebits
from samebits.errors import ConfigError, TrainError
from tests.unit.own_loop.loops import Loop, data_loader, network

pytestmark = pytest.mark.usefixtures("no_repetition")


def test_accumulation_by_a_counter_is_named() -> None:
    loop = Loop()
    before = loop.sha256()
    with pytest.raises(TrainError, match=r"called optimizer.step\(\) in some micro-batches of a step only"):
        for number, batch in enumerate(loop.loader):
            loop.loss(batch).backward()
            if number % 3 == 0:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert loop.loader.step == 0
    assert loop.sha256() == before


@pytest.mark.parametrize("has_second_loss", [False, True])
def test_a_second_step_in_a_micro_batch_is_named(has_second_loss: bool) -> None:
    loop = Loop()
    before = loop.sha256()
    with pytest.raises(TrainError, match=r"called optimizer.step\(\) twice in one micro-batch"):
        for batch in loop.loader:
            loop.train(batch)
            if has_second_loss:
                loop.loss(batch).square().backward()
            loop.optimizer.step()
    assert loop.sha256() == before


def test_an_average_of_one_of_two_models_by_hand_is_named() -> None:
    first, second = network(), network()
    average = copy.deepcopy(first)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    _, _, loader = samebits.exact([first, second], optimizers, data_loader(), global_batch=8)
    with pytest.raises(TrainError, match="weights are averaged or copied by hand in the training loop"):
        for x, _ in loader:
            for model, other, optimizer in ((first, second, optimizers[0]), (second, first, optimizers[1])):
                model.requires_grad_(True)
                other.requires_grad_(False)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            for old, new in zip(average.parameters(), first.parameters(), strict=True):
                old.data.mul_(0.9).add_(new.data, alpha=0.1)


def test_a_scheduler_that_is_not_listed_is_named() -> None:
    loop = Loop()
    scheduler = ExponentialLR(loop.optimizer, 0.9)
    before = loop.sha256()
    with pytest.raises(TrainError, match=r"lr of the optimizer changed within a step: 0\.1 -> 0\.09"):
        for batch in loop.loader:
            loop.loss(batch).backward()
            loop.optimizer.step()
            scheduler.step()
    assert loop.sha256() == before


def test_a_scheduler_that_is_listed_or_stepped_by_epoch_is_fine() -> None:
    loop = Loop()
    scheduler = loop.loader.per_step(OneCycleLR(loop.optimizer, 0.2, epochs=2, steps_per_epoch=len(loop.loader)))
    by_epoch = ExponentialLR(loop.optimizer, 1.0)
    for _ in range(2):
        for batch in loop.loader:
            loop.loss(batch).backward()
            loop.optimizer.step()
            scheduler.step()
        by_epoch.step()
    assert scheduler.last_epoch == loop.loader.step == 4


def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing() -> None:
    loop = Loop()
    loop.epoch()
    before = loop.sha256()
    with pytest.raises(TrainError, match="the gradient is not finite") as caught:
        for batch in loop.loader:
            epoch = loop.loader.epoch
            (loop.loss(batch) * float("nan")).backward()
            loop.optimizer.step()
    assert (loop.loader.step, epoch) == (2, 1)
    assert caught.value.slots["given"].startswith("step 2, epoch 1, both counted from 0;")
    assert loop.sha256() == before


def test_a_layer_that_one_backward_pass_reaches_twice_is_named() -> None:
    loop = Loop()
    first, tanh, last = loop.model
    with pytest.raises(RuntimeError, match="got its gradient twice in one micro-batch: call backward once") as caught:
        for x, y in loop.loader:
            hidden = checkpoint(first, x.requires_grad_(), use_reentrant=True)
            hidden = checkpoint(first, tanh(hidden)[:, :4], use_reentrant=True)
            (last(hidden) - y).square().mean().backward()
    assert "use_reentrant=False" in str(caught.value)


def test_a_parameter_that_is_unfrozen_within_a_step_is_named() -> None:
    loop = Loop()
    extra = nn.Parameter(torch.zeros(1), requires_grad=False)
    loop.optimizer.add_param_group({"params": [extra]})
    with pytest.raises(TrainError, match="was unfrozen within a step"):
        for batch in loop.loader:
            extra.requires_grad_(True)
            (loop.loss(batch) + extra.sum()).backward()
            loop.optimizer.step()


def test_gradients_dropped_in_some_micro_batches_only_are_named() -> None:
    loop = Loop()
    with pytest.raises(TrainError, match="drops gradients in some micro-batches of a step only"):
        for number, batch in enumerate(loop.loader):
            loop.loss(batch).backward()
            if number == 1:
                loop.optimizer.zero_grad()
            loop.optimizer.step()


def test_gradients_of_a_part_of_an_optimizer_cannot_be_dropped() -> None:
    model, extra = network(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    _, _, loader = samebits.exact(model, optimizer, data_loader(), global_batch=8)
    with pytest.raises(TrainError, match="drops gradients of a part of an optimizer's parameters"):
        for x, _ in loader:
            (model(x) * extra).mean().backward()
            model.zero_grad()


@pytest.mark.parametrize("by_module", [True, False])
def test_gradients_before_zero_grad_do_not_count(by_module: bool) -> None:
    usual, loop = Loop(), Loop()
    usual.epoch()
    for batch in loop.loader:
        (3 * loop.loss(batch)).backward()
        (loop.model if by_module else loop.optimizer).zero_grad()
        loop.loss(batch).backward()
        loop.optimizer.step()
    assert loop.sha256() == usual.sha256()


def test_gradients_can_be_read_and_clipped_in_each_micro_batch() -> None:
    loop = Loop()
    for batch in loop.loader:
        loop.loss(batch).backward()
        assert all(parameter.grad is not None for parameter in loop.model.parameters())
        nn.utils.clip_grad_value_(loop.model.parameters(), 1e6)
        loop.optimizer.step()
    usual = Loop()
    usual.epoch()
    assert loop.sha256() == usual.sha256()


def test_a_model_keeps_its_class_in_copies_and_files() -> None:
    loop = Loop(per_step=[AveragedModel(network())])
    assert isinstance(loop.model, nn.Sequential)
    assert type(loop.model) is not nn.Sequential
    assert type(copy.deepcopy(loop.model)) is nn.Sequential
    assert type(pickle.loads(pickle.dumps(loop.model))) is nn.Sequential
    assert type(copy.deepcopy(loop.optimizer)) is torch.optim.SGD


def test_a_compiled_model_trains_in_an_exact_loop() -> None:
    loop = Loop()
    compiled = torch.compile(loop.model, backend="eager", fullgraph=True)
    for x, y in loop.loader:
        (compiled(x) - y).square().mean().backward()
        loop.optimizer.step()
    usual = Loop()
    usual.epoch()
    assert loop.sha256() == usual.sha256()


def test_hooks_of_an_optimizer_run_once_a_step_also_after_a_resume() -> None:
    loop = Loop()
    calls: list[int] = []
    loop.optimizer.register_step_post_hook(lambda *_: calls.append(loop.loader.step))
    loop.epoch()
    assert len(calls) == 2
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    loop.epoch()
    assert len(calls) == 4


def test_an_averaged_model_follows_the_steps() -> None:
    model = network()
    average = AveragedModel(model)
    loop = Loop(model, per_step=[average])
    for batch in loop.loader:
        loop.train(batch)
        average.update_parameters(model)
    assert average.n_averaged.item() == loop.loader.step == 2


def test_a_loss_scaler_skips_the_step_that_overflows() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    loop = Loop(data=data_loader(8), per_step=[scaler])
    before, factors = loop.sha256(), iter((1.0, float("inf"), 1.0, 1.0))
    for batch in loop.loader:
        scaler.scale(loop.loss(batch) * next(factors)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**3
    assert loop.sha256() == before


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_loss_scaler_that_is_not_listed_is_named(is_scheduled: bool) -> None:
    loop = Loop()
    scheduler = loop.loader.per_step(ExponentialLR(loop.optimizer, 0.9)) if is_scheduled else None
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match="a GradScaler is not in per_step"):
        for batch in loop.loader:
            scaler.scale(loop.loss(batch)).backward()
            scaler.step(loop.optimizer)
            scaler.update()
    assert scheduler is None or scheduler.last_epoch == 0


@pytest.mark.parametrize(
    "keep",
    [
        lambda average, model: _average(average, model, through_data=False),
        lambda average, model: _average(average, model, through_data=True),
        lambda _, model: copy.deepcopy(model.state_dict()),  # of the best micro-batch so far
        lambda _, model: [each.detach().clone() for each in model.parameters()],
    ],
)
def test_an_average_or_a_copy_of_the_weights_in_each_body_is_named(keep: Callable[..., object]) -> None:
    loop = Loop()
    average = copy.deepcopy(loop.model)
    with pytest.raises(TrainError, match="weights are averaged or copied by hand in the training loop"):
        for batch in loop.loader:
            loop.loss(batch).backward()
            loop.optimizer.step()
            _kept = keep(average, loop.model)
    assert loop.loader.step == 0


@pytest.mark.parametrize(
    "keep",
    [
        lambda model: {"net": model.state_dict()},  # for a checkpoint, in each body of every tenth step
        lambda model: [each.detach() for each in model.parameters()],
        lambda model: {name: each.data for name, each in model.named_parameters()},
    ],
)
def test_what_refers_to_the_weights_is_no_average(keep: Callable[[nn.Module], object]) -> None:
    loop = Loop()
    kept = None
    for batch in loop.loader:
        loop.loss(batch).backward()
        loop.optimizer.step()
        kept = keep(loop.model)
    assert kept


def test_an_average_by_hand_once_a_step_is_fine() -> None:
    loop = Loop()
    average, num = copy.deepcopy(loop.model), 0
    for batch in loop.loader:
        loop.loss(batch).backward()
        loop.optimizer.step()
        if loop.loader.sync_gradients:
            _average(average, loop.model, False)
            num += 1
    assert num == loop.loader.step == 2


def _average(average: nn.Module, model: nn.Module, through_data: bool) -> None:
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            if through_data:
                old.data = 0.9 * old.data + 0.1 * new.data
            else:
                old.mul_(0.9).add_(new, alpha=0.1)
