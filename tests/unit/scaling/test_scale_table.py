"""The table of several worlds."""

from __future__ import annotations

from lockstep.scaling.table import table


def test_efficiency_is_over_the_smallest_world_of_the_same_way() -> None:
    row = {"step_s": 0.1, "reading_s": 0.01, "waiting_s": 0.02, "sending_s": 0.015}
    figures = {"exact": {2: {"samples_per_s": 200.0, **row}, 4: {"samples_per_s": 300.0, **row}}}
    head, two, four = table(figures)
    assert two.split() == ["exact", "2", "200", "100%", "100.0", "10%", "15%", "5%", "70%"]
    assert four.split() == ["exact", "4", "300", "75%", "100.0", "10%", "15%", "5%", "70%"]
    assert max(map(len, (head, two, four))) <= 80


def test_what_ddp_spends_on_adding_up_is_not_known() -> None:
    rows = {1: {"samples_per_s": 10.0, "step_s": 0.1, "reading_s": 0.0, "waiting_s": 0.0, "sending_s": 0.0}}
    assert table({"ddp": rows})[1].split()[-3:] == ["-", "-", "-"]
