"""`samebits launch`: scripts with the habits of public ones give one hash in every world, or are refused at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.own_loop import check_script
from samebits.own_loop.ending import BATCH_SIZES
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


@pytest.mark.parametrize(
    "name",
    [
        "imagenet",
        "spawned",
        "gan",
        "averaged",
        "mnist",
        "numbered number",
        "rebuilt",
        "ema_by_hand class",
        "best_weights",
        "two_loaders shown",
        "habits_of_loops train",
        "habits_of_loops subset",
        "habits_of_loops scheduler",
        "habits_of_loops rate",
        "goes_on evaluation",
    ],
)
def test_an_unmodified_script_gives_one_hash(warm: Starter, name: str) -> None:
    assert len({launch(warm, *name.split()[:1], procs, *name.split()[1:]).sha256 for procs in (1, 2, 3, 4)}) == 1


def test_only_rank_0_of_a_script_for_one_process_writes_files(warm: Starter, tmp_path: Path) -> None:
    written = []
    for procs in (1, 3):
        folder, turns = tmp_path / str(procs), tmp_path / f"turns {procs}"
        folder.mkdir()
        turns.mkdir()
        ended = launch(warm, "alone", procs, folder, sizes=f"{SIZES}@{turns}")
        assert not any(ended.codes), ended
        assert ended.texts[1:] == [""] * (procs - 1)
        written.append({path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    assert set(written[0]) == {"log.txt", "best.pt"}
    assert written[0] == written[1]


def test_a_wrapped_model_is_copied_and_saved_whole(warm: Starter, tmp_path: Path) -> None:
    plain = launch(warm, "habits_of_loops", 1, "plain").sha256
    assert launch(warm, "habits_of_loops", 2, "copied", tmp_path / "whole.pt").sha256 == plain


def test_a_reduction_before_backward_may_serve_the_log(warm: Starter) -> None:
    assert len({launch(warm, "collective", procs, "log").sha256 for procs in (1, 2)}) == 1


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


@pytest.mark.parametrize(("samples", "epochs"), [(48, 1), (48, 2), (64, 1)])  # 3 or 4 steps an epoch, 2 accumulated
def test_accumulation_and_an_average_of_the_wrapped_model_give_one_hash(
    warm: Starter, tmp_path: Path, samples: int, epochs: int
) -> None:
    ended = [launch(warm, "accumulation", n, samples, epochs, tmp_path / f"{n}.pt") for n in (1, 2, 3, 4)]
    assert len({each.sha256 for each in ended}) == 1


@pytest.mark.parametrize(("samples", "more"), [(64, ()), (48, ("drop",))])
def test_accumulation_resumes_where_no_gradient_waits(
    warm: Starter, tmp_path: Path, samples: int, more: tuple[str, ...]
) -> None:
    def run(procs: int, epochs: int, file: str) -> str:
        return launch(warm, "accumulation", procs, samples, epochs, tmp_path / file, *more).sha256

    run(2, 1, "stopped.pt")
    assert run(3, 2, "stopped.pt") == run(1, 2, "whole.pt")


@pytest.mark.parametrize("procs", [1, 2])
def test_a_resume_without_the_gradients_that_waited_is_refused(warm: Starter, tmp_path: Path, procs: int) -> None:
    assert not any(launch(warm, "accumulation", 2, 48, 1, tmp_path / "stopped.pt").codes)
    ended = launch(warm, "accumulation", procs, 48, 2, tmp_path / "stopped.pt")
    assert all(ended.codes), ended
    text = "\n".join(ended.texts)
    assert "accumulated gradients waited for optimizer.step()" in text
    assert "optimizer.zero_grad() at the start of each epoch" in text


def test_a_script_that_its_checkpoint_has_ended_is_named(warm: Starter, tmp_path: Path) -> None:
    assert not any(launch(warm, "accumulation", 1, 64, 1, tmp_path / "done.pt").codes)
    assert "a checkpoint of its last epoch" in "\n".join(
        launch(warm, "accumulation", 1, 64, 1, tmp_path / "done.pt").texts
    )


REFUSED = [
    (
        "numbered",
        ("counter",),
        1,
        "the training loop ends, or trains in another way, after a number",
        "+            step = loader.step",
    ),
    (
        "numbered",
        ("clipped",),
        2,
        "the training loop ends, or trains in another way, after a number",
        "step = loader.step",
    ),
    (
        "numbered",
        ("range",),
        1,
        "the training loop ends, or trains in another way, after a number",
        "+    while loader.step < 12:",
    ),
    ("numbered", ("rate",), 2, "lr of the optimizer changed within a step", "f(loader.step)"),
    ("numbered", ("ahead",), 2, "a batch is read before the one before it is trained on", "num_workers"),
    ("no_loader", (), 2, "backward() outside of the loop over the training data", "+model, optimizer, loader = "),
    ("collective", ("loss",), 2, "all_reduce() in the training loop", "-        dist.all_reduce(count)"),
    (
        "collective",
        ("gradients",),
        1,
        "all_reduce() in the training loop before",
        "(parameter.grad)",
    ),
    ("collective", ("gathered",), 2, "all_gather() in the training loop", "-        logits = Gather.apply(logits)"),
    ("batch_of_rank_zero", (), 2, "broadcast() in the training loop", "-    dist.broadcast(scale, src=0)"),
    ("ema_by_hand", ("copy",), 2, "weights are averaged by hand", "+    average.update_parameters(model)"),
    ("ema_by_hand", ("dict",), 1, "weights are averaged by hand", "+    average.update_parameters(model)"),
    ("ema_by_hand", ("later",), 2, "weights are averaged by hand", "+    average.update_parameters(model)"),
    ("plateau", (), 1, "ReduceLROnPlateau decides by a number of the script", "+scheduler = torch.optim"),
    ("collective", ("state",), 1, "all_reduce() of weights or buffers of the model", "-    dist.all_reduce(model"),
    ("two_loaders", ("shuffled",), 2, "a second DataLoader is read inside the training loop", ""),
    ("two_loaders", ("in order",), 1, "a second DataLoader is read inside the training loop", ""),
    ("carried", ("hidden",), 1, "the first micro-batch of a step gives another gradient when it is repeated", ""),
    ("carried", ("counter",), 2, "the first micro-batch of a step gives another gradient when it is repeated", ""),
    ("carried", ("draws",), 2, "only some ranks draw random numbers", "Do it after optimizer.step()"),
    ("hogwild", (), 1, "the script starts processes of its own", "-        process.start()"),
    ("decides", (), 1, "a learning rate is set, by loss_sum", "Decide by an evaluation"),
    ("stages", (), 1, "backward() in a loop over a second training DataLoader", "a script of its own"),
    ("goes_on", ("errors",), 2, "the first micro-batch of a step gives another gradient when it is repeated", ""),
    ("batch_norm", ("norm",), 1, "torch's SyncBatchNorm", "+    pass"),
    ("batch_norm", ("hook",), 1, "register_comm_hook() reads, splits or averages", ""),
]


def test_a_start_without_batch_sizes_names_those_of_torchrun(warm: Starter) -> None:
    text = "\n".join(launch(warm, "imagenet", 2, sizes="0:0:0").texts)
    assert "the batch sizes are not given" in text
    assert "Add --global-batch 16 --micro-batch 8" in text


def test_other_batch_sizes_than_those_of_the_script_are_refused(warm: Starter) -> None:
    text = "\n".join(launch(warm, "gan", 1, sizes="24:4:0").texts)
    assert "the DataLoader has batch_size=16" in text


def test_a_resume_asks_for_the_same_batch_sizes(warm: Starter, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    assert not any(launch(warm, "per_epoch", 1, 1, path, 0.9).codes)
    text = "\n".join(launch(warm, "per_epoch", 1, 2, path, 0.9, sizes="32:16:0").texts)
    assert "the state of the loader belongs to another run" in text


@pytest.mark.full
@pytest.mark.parametrize("arguments", [("imagenet", "--epochs", 3), ("accumulation", 112, 1, "none.pt")])
def test_check_observes_the_steps_of_an_unmodified_script(tmp_path: Path, arguments: tuple[object, ...]) -> None:
    script, *given = arguments
    target = ["-m", "samebits.own_loop.patched.worker", str(FOLDER / "launched" / f"{script}.py"), *map(str, given)]
    outcome = check_script._run(target, {BATCH_SIZES: SIZES}, check_script._FIRST, tmp_path / "0")
    assert len(outcome.states) == check_script.NUM_STEPS
    assert outcome.settings["micro_batch"] == 4


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
