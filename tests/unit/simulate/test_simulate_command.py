"""`samebits simulate`: virtual ranks train like real ones, and the costs of steps are counted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from samebits.simulate import table
from samebits.simulate.run import Simulated
from tests.runs import TINY, samebits, weights

SMALL = ["global_batch=40", "micro_batch=1"]


def simulated(printed: Callable[..., str], *arguments: object) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(printed(["simulate", *map(str, arguments), "--json"]))["runs"]
    return runs


def test_virtual_ranks_end_in_the_weights_of_a_run(tmp_path: Path, printed: Callable[..., str]) -> None:
    folder = tmp_path / "run"
    samebits("train", TINY, *SMALL, "max_steps=3", "--procs", 1, "--run-dir", folder, cwd=tmp_path)
    runs = simulated(printed, TINY, *SMALL, "max_steps=3", "--steps", 9, "--procs", "1,2,5,33,40-17-1,50")
    assert [each["procs"] for each in runs] == [[1], [2], [5], [33], [40, 17, 1], [50]]
    assert {each["steps"] for each in runs} == {3}
    assert {each["sha256"] for each in runs} == {weights(folder)}


def test_synchronized_batch_norm_is_simulated(tmp_path: Path, printed: Callable[..., str]) -> None:
    folder, settings = tmp_path / "run", [*SMALL, "batch_norm=sync", "max_steps=3"]
    samebits("train", TINY, *settings, "--procs", 1, "--run-dir", folder, cwd=tmp_path)
    runs = simulated(printed, TINY, *settings, "--steps", 3, "--procs", "1,3,20,40-17-1")
    assert {each["sha256"] for each in runs} == {weights(folder)}


@pytest.mark.full
def test_every_number_of_ranks_up_to_64_has_one_hash(printed: Callable[..., str]) -> None:
    settings = ["global_batch=70", "micro_batch=1", "batch_norm=sync", "--steps", 1]
    runs = simulated(printed, TINY, *settings, "--procs", ",".join(map(str, range(1, 65))))
    assert len({each["sha256"] for each in runs}) == 1


def test_what_a_rank_sends_is_counted(printed: Callable[..., str]) -> None:
    alone, two, many = simulated(printed, TINY, "global_batch=32", "micro_batch=1", "--procs", "1,2,32", "--steps", 1)
    assert (alone["messages"], alone["num_bytes"], alone["rounds"]) == (0, 0, 0)
    assert (two["messages"], two["num_bytes"], two["rounds"]) == (1, two["gradient_bytes"], 1)
    assert (many["messages"], many["rounds"]) == (10, 10)
    ring = 2 * many["gradient_bytes"] * 31 / 32
    assert ring <= many["num_bytes"] <= 1.01 * ring


def test_what_leaves_a_machine_is_counted(printed: Callable[..., str]) -> None:
    settings = [TINY, "global_batch=24", "micro_batch=1", "--steps", 1, "--procs"]
    alone, two, three = simulated(printed, *settings, "1,2x2,3+1")
    assert [each["worlds"] for each in (alone, two, three)] == [[[1]], [[2, 2]], [[3, 1]]]
    assert {each["sha256"] for each in (two, three)} == {alone["sha256"]}
    assert (alone["link_messages"], alone["link_bytes"]) == (0, 0)
    text = printed(["simulate", *map(str, settings), "2x2"])
    assert "2x2: in two levels: 2 machines with 2 ranks each; a machine sends 1.00 of the gradient" in text


@pytest.mark.lab
def test_1024_ranks_and_ranks_that_come_and_go_have_one_hash(printed: Callable[..., str]) -> None:
    settings = ["data.num_samples=1030", "global_batch=1024", "micro_batch=1"]
    *_, most = runs = simulated(printed, TINY, *settings, "--procs", "1,127,256,1000,1024", "--steps", 1)
    assert len({each["sha256"] for each in runs}) == 1
    assert most["messages"] <= most["rounds"] == 20  # of its 1,024 chunks some are empty
    alone, changing = simulated(printed, TINY, *settings, "--procs", "1,1024-1000-64", "--steps", 3)
    assert alone["sha256"] == changing["sha256"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["mode=fast"], "mode=fast cannot be simulated"),
        (["--procs", "0,2"], "--procs is '0,2'"),
        (["--procs", "2-"], "--procs is '2-'"),
    ],
)
def test_what_can_t_be_simulated_is_refused(printed: Callable[..., str], settings: list[str], text: str) -> None:
    assert text in printed(["simulate", str(TINY), *settings], 2)


def test_the_table_of_a_large_world_has_80_columns() -> None:
    many = Simulated(((1024,), (1000,), (64,)), 1, "0" * 64, 8, 1022, 16, 1022, 123.0, 245_000_000)
    console = Console(width=200)
    with console.capture() as text:
        console.print(table.table([many, many]))
    assert max(len(line.rstrip()) for line in text.get().splitlines()) <= 80


def test_the_table_shows_whether_the_weights_are_equal(printed: Callable[..., str]) -> None:
    lines = printed(["simulate", str(TINY), *SMALL, "--procs", "1,2,20,40", "--steps", "1"]).splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["ranks", "1", "2", "20", "40"]
    assert lines[-1] == "The weights are equal, bit for bit, in all 4 runs."
    assert max(map(len, lines)) <= 80


def test_weights_that_differ_are_reported() -> None:
    runs = [Simulated(((size,),), 1, str(size), 8, 1, 1, 1, 1.0, 1) for size in (1, 2)]
    assert table.conclusion(runs).startswith("The weights differ")
