"""Habits of training loops that would give another model in each world: each is right, or named by its cause."""

# ruff: noqa: PT012  # what raises is the body of a loop
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, Dataset, get_worker_info

import samebits
from samebits.errors import ConfigError, TrainError
from tests.runs import python
from tests.unit.own_loop.loops import Loop, data_loader, dataset, network

pytestmark = pytest.mark.usefixtures("no_repetition")
Body = Callable[[Loop, Any, int], None]


def test_a_look_at_the_first_batch_changes_nothing(usual: str) -> None:
    loop = Loop()
    with pytest.warns(UserWarning, match="the position stays"):
        next(iter(loop.loader))
    before = torch.rand(1)
    with pytest.warns(UserWarning, match="the position stays"):
        next(iter(loop.loader))
    assert torch.rand(1) != before  # the generators are not set back to those of a rank
    assert (loop.loader.epoch, loop.loader.step) == (0, 0)
    while loop.loader.step < 2 * len(loop.loader):
        loop.epoch()
    assert loop.sha256() == usual


def test_a_look_after_a_resume_within_an_epoch_keeps_the_position() -> None:
    first, second = Loop(), Loop()
    for batch in first.loader:
        first.train(batch)
        if first.loader.step == 1:
            break
    second.loader.load_state_dict({**second.loader.state_dict(), "step": 1})
    with pytest.warns(UserWarning, match="the position stays"):
        next(iter(second.loader))
    second.loader.set_epoch(0)
    assert second.loader.step == 1


def test_a_pass_for_statistics_is_refused() -> None:
    loop = Loop()
    with pytest.raises(TrainError, match="trained nothing") as caught, torch.no_grad():
        for x, _ in loop.loader:
            x.mean()
    assert "EvalLoader" in str(caught.value)
    assert (loop.loader.epoch, loop.loader.step) == (0, 0)


def test_a_part_of_a_pass_for_statistics_is_refused() -> None:
    loop = Loop()
    for number, _ in enumerate(loop.loader):
        if number == 5:
            break
    with pytest.raises(TrainError, match="trained nothing"):
        loop.model(torch.zeros(1, 4))


def by_next(loop: Loop) -> None:
    for _ in range(2):
        batches = iter(loop.loader)
        for _ in range(len(loop.loader)):
            loop.train(next(batches))


def by_limit(loop: Loop) -> None:
    for number, batch in enumerate(loop.loader):
        if number == 6:
            break
        loop.train(batch)


def by_endless_iterator(loop: Loop) -> None:
    def forever() -> Iterator[Any]:
        while True:
            yield from loop.loader

    batches = forever()
    for _ in range(6):
        loop.train(next(batches))
    batches.close()


@pytest.mark.parametrize("habit", [by_next, by_limit, by_endless_iterator])
def test_a_loop_that_ends_inside_a_step_is_named(habit: Callable[[Loop], None]) -> None:
    loop = Loop()
    with pytest.raises(TrainError, match="ended inside a step") as caught:
        habit(loop)
        loop.model.state_dict()  # what a script does next: save
    assert "has 4 on this rank" in str(caught.value)


def test_a_loop_that_counts_bodies_to_the_end_of_a_step_is_named() -> None:
    loop = Loop()
    for number, batch in enumerate(loop.loader, start=1):
        loop.train(batch)
        if number == 4:
            break
    with pytest.raises(TrainError, match="ended within an epoch"):
        next(iter(loop.loader))


def test_a_loop_that_counts_steps_may_end_after_any_of_them() -> None:
    loop = Loop()
    for batch in loop.loader:
        loop.train(batch)
        if loop.loader.sync_gradients and loop.loader.step == 1:
            break
    assert loop.model.state_dict().keys()
    assert loop.loader.epoch == 1


SCRIPT = """
import torch, samebits
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.rand(16, 4), torch.rand(16, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
_, _, loader = samebits.exact(model, optimizer, DataLoader(data, batch_size=2), global_batch=8)
batches = iter(loader)
for number in range(NUM):
    x, y = next(batches)
    (model(x) - y).square().mean().backward()
    optimizer.step()
"""


# The iterator is alive at the script's end, so nothing but the end can judge it.
@pytest.mark.parametrize(
    ("num", "code"), [(3, 1), *(pytest.param(*each, marks=pytest.mark.full) for each in ((5, 1), (10, 0)))]
)
def test_a_script_that_ends_inside_a_step_has_an_error_and_an_exit_code(tmp_path: Path, num: int, code: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("NUM", str(num)))
    done = python("train.py", cwd=tmp_path, code=code)
    assert ("training error: the loop over the exact loader ended" in done.stderr) == bool(code)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("(model(x) - y).square().mean().detach()", "the loss of a micro-batch has no gradient"),
        pytest.param(
            "(model(x).round().long() != y.long()).sum()",
            "the loss of a micro-batch has no gradient",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "(model(x) - y).square()",
            "the loss of a micro-batch is not one number",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_backward_raises_is_explained_after_its_traceback(tmp_path: Path, loss: str, text: str) -> None:
    script = SCRIPT.replace("(model(x) - y).square().mean()", f"({loss})")
    script = script.replace("for number in range(NUM):\n    x, y = next(batches)", "for x, y in loader:")
    (tmp_path / "train.py").write_text(script)
    done = python("train.py", cwd=tmp_path, code=1)
    assert "Traceback" in done.stderr
    assert f"training error: {text}" in done.stderr.partition("RuntimeError")[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: OneCycleLR(optimizer, 0.1, epochs=3, steps_per_epoch=8),
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=3 * 8 + 8),
        lambda optimizer: SequentialLR(
            optimizer, [LambdaLR(optimizer, float), CosineAnnealingLR(optimizer, 5 * 8)], milestones=[3]
        ),
    ],
)
def test_a_schedule_made_from_the_length_of_the_data_loader_is_refused(make: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = data_loader()
    assert len(data) == 8
    scheduler = make(optimizer)
    with pytest.raises(ConfigError, match="has a length and was made before exact"):
        samebits.exact(model, optimizer, data, global_batch=6, per_step=[scheduler])


def test_an_optimizer_with_a_state_and_a_loader_at_its_start_are_refused() -> None:
    def attach(saved: Any) -> Loop:
        loop = Loop()
        loop.optimizer.load_state_dict(saved)
        return loop

    loop = Loop()
    loop.epoch()
    saved = loop.optimizer.state_dict()
    with pytest.raises(TrainError, match="has a state of earlier steps"):
        attach(saved).epoch()
    again = attach(saved)
    again.loader.set_epoch(0)  # on purpose
    again.epoch()
    assert again.loader.step == 2


def test_the_sampler_of_the_loader_sets_the_epoch(usual: str) -> None:
    loop = Loop()
    for epoch in range(2):
        loop.loader.sampler.set_epoch(epoch)
        loop.epoch()
    assert loop.sha256() == usual


def test_a_wrapper_made_after_exact_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    wrapped = DataParallel(loop.model)
    monkeypatch.setattr(wrapped, "device_ids", [])  # what it does without a GPU
    caller = compile("def call(model, x):\n    return model(x)", "/x/torch/nn/parallel/distributed.py", "exec")
    namespace: dict[str, Any] = {}
    exec(caller, namespace)
    with pytest.raises(ConfigError, match="wrapped by DistributedDataParallel or DataParallel"):
        for x, _ in loop.loader:
            namespace["call"](loop.model, x)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.EmbeddingBag(16, 4, sparse=True), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match="layer 0 has sparse gradients"):
        samebits.exact(model, torch.optim.SGD(model.parameters(), lr=0.1), data_loader(), global_batch=8)


def test_a_disabled_scaler_needs_not_to_be_listed(usual: str) -> None:
    loop, scaler = Loop(), torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        for batch in loop.loader:
            loop.optimizer.zero_grad()
            scaler.scale(loop.loss(batch)).backward()
            scaler.step(loop.optimizer)
            scaler.update()
    assert loop.sha256() == usual


class Scaled(Dataset[Any]):
    """Its factor is set in each worker."""

    factor: float | None = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return dataset()[index][0] * self.factor, dataset()[index][1]


def set_factor(_: int) -> None:
    get_worker_info().dataset.factor = 2.0


def test_worker_init_fn_finds_the_dataset() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(Scaled(), batch_size=2, num_workers=1, worker_init_fn=set_factor)
    _, _, loader = samebits.exact(model, optimizer, data, global_batch=8)
    with pytest.warns(UserWarning, match="the position stays"):
        x, _ = next(iter(loader))
    assert torch.equal(x, 2 * dataset().tensors[0][:2])
    seen = torch.cat([x for x, _ in samebits.EvalLoader(data)])
    assert torch.equal(seen, 2 * dataset().tensors[0])


def test_workers_that_are_not_forked_are_refused() -> None:
    data = data_loader(num_workers=1, multiprocessing_context="spawn")
    model = network()
    with pytest.raises(ConfigError, match="starts its workers by spawn"):
        samebits.exact(model, torch.optim.SGD(model.parameters(), lr=0.1), data, global_batch=8)
