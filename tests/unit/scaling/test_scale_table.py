"""The table and the conclusions of `samebits scale`."""

import io
from typing import Any

from samebits.report.console import Console
from samebits.scaling.table import FOOTNOTE, conclusions, table

ROW = {"step_s": 0.1, "reading_s": 0.01, "waiting_s": 0.02, "sending_s": 0.015}


def speeds(**by_name: dict[int, float]) -> dict[str, dict[int, dict[str, Any]]]:
    return {
        name: {size: {"samples_per_s": speed, **ROW} for size, speed in sizes.items()}
        for name, sizes in by_name.items()
    }


def shown(figures: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    out = io.StringIO()
    Console(out, False).draw(table(figures))
    return out.getvalue().splitlines()


def test_efficiency_is_over_the_smallest_world_of_the_same_variant() -> None:
    lines = shown(speeds(exact={2: 200.0, 4: 300.0}, fast={2: 400.0, 4: 400.0}))
    assert lines[1].split() == ["exact", "2", "200", "100%", "100.0", "10%", "15%", "5%", "70%"]
    assert lines[2].split() == ["exact", "4", "300", "75%", "100.0", "10%", "15%", "5%", "70%"]
    assert lines[4].split()[3] == "50%"
    assert max(map(len, [*lines, *FOOTNOTE.splitlines()])) <= 80


def test_what_ddp_spends_on_communication_is_not_known() -> None:
    rows = {1: {"samples_per_s": 10.0, "step_s": 0.1, "reading_s": 0.0, "waiting_s": 0.0, "sending_s": 0.0}}
    assert shown({"ddp": rows})[1].split()[-4:] == ["0%", "-", "-", "-"]


def test_the_conclusion_names_the_fastest_and_compares_the_first_with_the_others() -> None:
    lines = conclusions(speeds(exact={1: 100.0, 2: 150.0}, fast={1: 110.0, 2: 200.0}, ddp={1: 90.0, 2: 153.0}), None)
    assert lines == [
        "Fastest: fast on 2 processes, 200 samples/s, 1.82 times fast on 1.",
        "exact has 75% of the speed of fast on 2 processes.",
        "exact and ddp are equally fast on 2 processes (within 5%).",
    ]


def test_the_conclusion_names_what_takes_much_of_a_step_and_too_few_cores() -> None:
    figures = speeds(exact={1: 100.0, 4: 80.0})
    figures["exact"][4] |= {"waiting_s": 0.07}
    assert conclusions(figures, 2) == [
        "Fastest: exact on 1 process, 100 samples/s.",
        "exact on 4 processes spends 55% of a step on waiting for the slowest process.",
        "This machine has 2 cores: more processes share them.",
    ]
