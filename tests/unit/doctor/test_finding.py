"""Results of the doctor, merged over all machines, and as a table of 80 columns."""

import io

from samebits.doctor.check_result import CheckResult, merged, table, verdict_line
from samebits.report.console import Console


def shown(results: list[CheckResult]) -> list[str]:
    out = io.StringIO()
    Console(out, False).table(table(results))
    return out.getvalue().splitlines()


SMALL = CheckResult("shared memory", "64 MB free", "warning", "docker run --shm-size=8g")
LARGE = CheckResult("shared memory", "8.0 GB free")


def test_equal_results_of_all_machines_are_shown_once() -> None:
    same = [CheckResult("cores", "8"), LARGE]
    assert merged([same, same, same], ["a", "b", "c"]) == same


def test_what_is_well_everywhere_takes_one_line_with_each_machines_value() -> None:
    (line,) = merged([[CheckResult("disk speed", "900 MB/s")], [CheckResult("disk speed", "400 MB/s")]], ["a", "b"])
    assert line == CheckResult("disk speed", "900 MB/s (a); 400 MB/s (b)")


def test_a_machine_with_a_fault_has_a_line_of_its_own() -> None:
    assert merged([[LARGE], [SMALL], [LARGE]], ["a", "b", "c"]) == [
        CheckResult("shared memory", "8.0 GB free (a, c)"),
        CheckResult("shared memory", "64 MB free (b)", "warning", SMALL.fix),
    ]


def test_several_ranks_of_one_machine_count_once() -> None:
    assert merged([[SMALL], [SMALL]], ["a", "a"]) == [SMALL]


def test_the_table_fits_80_columns_and_has_a_fix() -> None:
    long = CheckResult("every pair", " ".join(["word"] * 60), "problem", " ".join(["do"] * 80))
    lines = shown([LARGE, SMALL, long])
    assert max(map(len, lines)) <= 80
    assert lines[0] == "ok       shared memory  8.0 GB free"
    assert lines[1] == "WARNING  shared memory  64 MB free"
    assert lines[2].strip() == "fix  docker run --shm-size=8g"
    assert lines[3].startswith("PROBLEM  every pair")


def test_texts_of_other_machines_style_nothing() -> None:
    odd = CheckResult("[red]cpu", "[b]x[/b] \x1b[2J", "problem", "[i]y[/i]")
    assert shown([odd]) == ["PROBLEM  [red]cpu  [b]x[/b] \\x1b[2J", "                   fix  [i]y[/i]"]


def test_the_last_line_counts() -> None:
    assert verdict_line([LARGE, CheckResult("gpus", "none", "note")]) == "no problems found"
    assert verdict_line([SMALL, SMALL]) == "0 problems, 2 warnings"
    assert verdict_line([CheckResult("torch", "1.0", "problem"), SMALL]) == "1 problem, 1 warning"
