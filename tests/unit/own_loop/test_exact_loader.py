"""The loader of an exact loop: its length, its position, and what it takes over from a DataLoader."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

import samebits
from samebits.errors import CheckpointError, TrainError
from samebits.own_loop import current
from tests.unit.own_loop.loops import Loop, batches, data_loader, dataset, network

pytestmark = pytest.mark.usefixtures("no_repetition")


def loader_of(data: Any, **more: Any) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return samebits.exact(model, optimizer, data, **{"global_batch": 8, **more})[2]


def test_the_length_is_the_number_of_steps() -> None:
    loader = loader_of(data_loader(18))
    assert len(loader) == 3
    assert len(list(batches(loader))) == loader.micro_batches_per_epoch == 9
    assert len(loader_of(data_loader(18, drop_last=True))) == 2


def test_the_last_micro_batch_of_a_step_is_marked() -> None:
    loader = loader_of(data_loader(16))
    assert [loader.sync_gradients for _ in batches(loader)] == 2 * [False, False, False, True]


def test_an_epoch_has_each_sample_once_in_an_order_of_its_own() -> None:
    loader = loader_of(data_loader(18))
    epochs = [torch.cat([x for x, _ in batches(loader)]) for _ in range(2)]
    for seen in epochs:
        assert sorted(seen.tolist()) == sorted(dataset(18).tensors[0].tolist())
    assert not torch.equal(*epochs)
    in_order = loader_of(data_loader(18, shuffle=False))
    assert torch.equal(torch.cat([x for x, _ in batches(in_order)]), dataset(18).tensors[0])


def test_a_distributed_sampler_sets_the_epoch() -> None:
    def read(epoch: int | None) -> torch.Tensor:
        sampler = DistributedSampler(dataset(), num_replicas=3, rank=1)
        loader = loader_of(DataLoader(dataset(), batch_size=2, sampler=sampler))
        if epoch is not None:
            sampler.set_epoch(epoch)
            assert len(list(batches(loader))) == 8
            return torch.cat([x for x, _ in batches(loader)])  # the epoch after it
        return torch.cat([torch.cat([x for x, _ in batches(loader)]) for _ in range(3)])

    assert torch.equal(read(1), read(None)[32:])


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_random_subset_is_that_subset_shuffled(is_batched: bool) -> None:
    def read(data: Any) -> torch.Tensor:
        loader = loader_of(data, global_batch=4)
        assert len(loader) == 2
        return torch.cat([x for x, _ in batches(loader)])

    chosen = [17, 3, *range(5, 11)]
    sampler = SubsetRandomSampler(chosen)
    how: dict[str, Any] = {"batch_size": 2, "sampler": sampler}
    if is_batched:
        how = {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}
    plain = DataLoader(Subset(dataset(18), chosen), batch_size=2, shuffle=True)
    assert torch.equal(read(DataLoader(dataset(18), **how)), read(plain))


def test_a_batch_sampler_of_torch_is_taken_over() -> None:
    def read(sampler: Any) -> torch.Tensor:
        data = DataLoader(dataset(18), batch_sampler=BatchSampler(sampler, 2, drop_last=True))
        return torch.cat([x for x, _ in batches(loader_of(data))])

    assert torch.equal(read(SequentialSampler(dataset(18))), dataset(18).tensors[0][:16])
    shuffled = read(RandomSampler(dataset(18)))
    assert len(shuffled) == 16
    assert not torch.equal(shuffled, dataset(18).tensors[0][:16])


class Picked(Dataset[Any]):
    """Reads a batch at once."""

    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * index for index in indices]


def test_getitems_and_collate_fn_are_used() -> None:
    loader = loader_of(DataLoader(Picked(), batch_size=4, collate_fn=lambda items: ("batch", items)))
    assert list(batches(loader)) == [("batch", [0, 10, 20, 30]), ("batch", [40, 50, 60, 70])]


def test_a_loop_resumes_in_the_middle_of_an_epoch() -> None:
    whole = Loop()
    for _ in range(2):
        whole.epoch()
    first = Loop()
    state: dict[str, Any] = {}
    for batch in first.loader:
        first.loss(batch).backward()
        first.optimizer.step()
        if first.loader.step == 1:
            state = {
                "model": {name: value.clone() for name, value in first.model.state_dict().items()},
                "optimizer": first.optimizer.state_dict(),
                "loader": first.loader.state_dict(),
            }
            break
    second = Loop()
    second.model.load_state_dict(state["model"])
    second.optimizer.load_state_dict(state["optimizer"])
    second.loader.load_state_dict(state["loader"])
    assert (second.loader.step, second.loader.epoch) == (1, 0)
    for _ in range(2):
        second.epoch()
    assert second.sha256() == whole.sha256()


def resumed(optimizer: str, has_state: bool, has_scheduler: bool) -> list[str]:
    """What a loop warns of that continues after 2 of 4 steps, with an optimizer and a scheduler."""

    def make() -> tuple[Any, Any, Any]:
        more: Any = {"momentum": 0.9} if optimizer == "momentum" else {}
        model = network()
        made = getattr(torch.optim, optimizer, torch.optim.SGD)(model.parameters(), lr=0.1, **more)
        _, _, loader = samebits.exact(model, made, data_loader(), global_batch=8)
        return made, loader.per_step(torch.optim.lr_scheduler.StepLR(made, 3)), loader

    first, scheduler, loader = make()
    model = loader.loop.modules[0]

    def epoch(made: Any, scheduler: Any, loader: Any) -> None:
        for x, _ in loader:
            made.zero_grad()
            loader.loop.modules[0](x).square().mean().backward()
            made.step()
            scheduler.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epoch(first, scheduler, loader)
        second, other, again = make()
        again.loop.modules[0].load_state_dict(model.state_dict())
        if has_state:
            second.load_state_dict(first.state_dict())
        if has_scheduler:
            other.load_state_dict(scheduler.state_dict())
        again.load_state_dict(loader.state_dict())
        epoch(second, other, again)
        epoch(second, other, again)  # once
    return [str(each.message).split(" begins anew")[0] for each in caught if "begins anew" in str(each.message)]


@pytest.mark.parametrize(
    ("optimizer", "has_state", "has_scheduler", "missing"),
    [
        ("momentum", True, True, None),
        ("momentum", False, True, "SGD"),
        *((kind, False, True, kind) for kind in ("Adam", "RMSprop", "Adadelta", "Adafactor", "ASGD", "Rprop")),
        ("momentum", True, False, "StepLR"),
        ("plain", False, True, None),  # it never has a state
    ],
)
def test_a_part_that_is_not_loaded_at_a_resume_is_warned_of(
    optimizer: str, has_state: bool, has_scheduler: bool, missing: str | None
) -> None:
    expected = [] if missing is None else [f"the loop continues after 2 steps, and {missing}"]
    assert resumed(optimizer, has_state, has_scheduler) == expected


def sampled(step: int) -> tuple[Any, DistributedSampler[Any]]:
    """A loader of epochs of 2 steps that resumes after a number of steps, and its sampler."""
    sampler = DistributedSampler(dataset(), num_replicas=1, rank=0)
    loader = loader_of(DataLoader(dataset(), batch_size=2, sampler=sampler))
    loader.load_state_dict({**loader.state_dict(), "step": step})
    return loader, sampler


def test_a_loop_that_counts_epochs_from_0_after_a_resume_is_named() -> None:
    loader, sampler = sampled(3)
    sampler.set_epoch(0)
    assert len(list(batches(loader))) == 4  # the second half of epoch 1
    sampler.set_epoch(1)
    with pytest.raises(TrainError, match=r"set_epoch\(1\) goes back to an epoch that is done") as caught:
        next(iter(loader))
    assert caught.value.slots["given"] == "loader.epoch 2, loader.step 4, after load_state_dict()"
    assert (loader.epoch, loader.step) == (2, 4)
    loader, _ = sampled(3)
    with pytest.raises(TrainError, match=r"set_epoch\(0\) goes back"):
        loader.set_epoch(0)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_loop_from_the_epoch_of_the_loader_resumes_and_may_train_again(is_own: bool) -> None:
    loader, sampler = sampled(3)
    set_epoch = loader.set_epoch if is_own else sampler.set_epoch
    for epoch in range(loader.epoch, 3):
        set_epoch(epoch)
        assert len(list(batches(loader))) == (4 if epoch == 1 else 8)
    for epoch in range(2):  # a second training
        set_epoch(epoch)
        assert len(list(batches(loader))) == 8
        assert (loader.epoch, loader.step) == (epoch + 1, 2 * epoch + 2)


def test_a_loop_that_sets_no_epoch_resumes() -> None:
    loader, _ = sampled(3)
    assert [len(list(batches(loader))) for _ in range(3)] == [4, 8, 8]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, "seed: 1 there, 0 here"),
        ({"global_batch": 4}, "global_batch: 4 there, 8 here"),
        ({"micro_batch": 4}, "micro_batch: 4 there, 2 here"),
        ({"num_samples": 17}, "num_samples: 17 there, 16 here"),
    ],
)
def test_a_position_of_another_run_is_refused(change: dict[str, int], says: str) -> None:
    loader = loader_of(data_loader())
    with pytest.raises(CheckpointError, match="belongs to another run") as caught:
        loader.load_state_dict({**loader.state_dict(), **change})
    assert says in str(caught.value)


@pytest.mark.parametrize("state", [{}, {"step": 1}, {"epoch": 3}])
def test_what_is_no_position_is_refused(state: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="not one of an exact loader"):
        loader_of(data_loader()).load_state_dict(state)


@pytest.mark.parametrize("step", ["1", -1])
def test_a_position_with_a_text_or_below_0_is_refused(step: object) -> None:
    loader = loader_of(data_loader())
    with pytest.raises(CheckpointError, match="not one of an exact loader"):
        loader.load_state_dict({**loader.state_dict(), "step": step})


@pytest.mark.parametrize(
    ("name", "is_compared"), [("scale", True), ("_torchdynamo_wrapper_id", False), ("training", False)]
)
def test_attributes_that_forward_sets_are_compared_and_those_of_torch_are_not(name: str, is_compared: bool) -> None:
    model = network()
    setattr(model[0], name, True)
    assert (f"0.{name}" in current._attributes([model])) is is_compared
