"""`samebits launch`: scripts with the habits of public ones give one hash in every world, or are refused at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import guards
from tests.foreign.forms import FOLDER
from tests.foreign.scripts import Ended, Starter

SIZES = "16:4:0"


@pytest.fixture(scope="module")
def warm() -> Iterator[Starter]:
    with Starter("samebits.own_loop.patched.worker", "torch.distributed.run") as starter:
        guards.KEPT.add(starter.pid)
        yield starter
    guards.KEPT.discard(starter.pid)


def launch(starter: Starter, name: str, procs: int, *arguments: object, sizes: str = SIZES) -> Ended:
    script = FOLDER / "launched" / f"{name}.py"
    return starter.run_files([FOLDER / "launch_worker.py"], procs, sizes, script, *arguments)


@pytest.mark.parametrize("name", ["imagenet", "spawned", "gan", "averaged"])
def test_an_unmodified_script_gives_one_hash(warm: Starter, name: str) -> None:
    assert len({launch(warm, name, procs).sha256 for procs in (1, 2, 3)}) == 1


@pytest.mark.parametrize(
    ("name", "argument"), [("tutorial", None), ("imagenet", None), ("per_epoch", 0.9), ("per_epoch", 0.0)]
)
def test_an_unmodified_script_resumes_on_another_number(
    warm: Starter, tmp_path: Path, name: str, argument: object
) -> None:
    def run(procs: int, epochs: int, file: str) -> str:
        path = tmp_path / file
        given = ["--epochs", epochs, "--resume", path] if name == "imagenet" else [epochs, path]
        return launch(warm, name, procs, *given, *([] if argument is None else [argument])).sha256

    run(2, 2, "stopped.pt")
    assert run(3, 3, "stopped.pt") == run(1, 3, "whole.pt")


REFUSED = [
    ("accumulation", (), 2, "the loop called optimizer.step() in some micro-batches of a step only", ""),
    ("no_loader", (), 2, "backward() outside of the loop over the training data", "+model, optimizer, loader = "),
    ("collective", ("loss",), 2, "all_reduce() between the start of a body", "-        dist.all_reduce(count)"),
    ("collective", ("gradients",), 1, "all_reduce() of gradients", "-            dist.all_reduce(parameter.grad)"),
    ("ema_by_hand", ("copy",), 2, "weights are averaged by hand", "+    average.update_parameters(model)"),
    ("ema_by_hand", ("dict",), 1, "weights are averaged by hand", "+    average.update_parameters(model)"),
    ("plateau", (), 1, "ReduceLROnPlateau decides by a number of the script", "+scheduler = torch.optim"),
    ("two_loaders", (), 2, "a second DataLoader that shuffles is read inside the training loop", ""),
]


@pytest.mark.parametrize(("name", "arguments", "procs", "what", "instead"), REFUSED)
def test_what_cannot_be_exact_is_refused_before_the_first_step(
    warm: Starter, name: str, arguments: tuple[str, ...], procs: int, what: str, instead: str
) -> None:
    ended = launch(warm, name, procs, *arguments)
    assert all(ended.codes), ended
    text = "\n".join(ended.texts)
    assert what in text
    assert f"{name}.py:" in text or "training error" in text
    assert instead in text
