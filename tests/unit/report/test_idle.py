import pytest

from samebits.report.idle import idle_row


def num_micro(batch: int, micro_batch: int) -> int:
    return -(-batch // micro_batch)


def test_busy_processes_are_not_reported() -> None:
    assert idle_row(1, 1, 1) == idle_row(8, 48, 6) == idle_row(3, 64, 16) == ""


def test_the_idle_row_has_the_number_of_idle_processes_and_a_fix() -> None:
    assert idle_row(8, 48, 12) == (
        "4 of 8 processes are idle: a step has 4 micro-batches\n"
        "micro_batch=6 gives all of them work (and changes the result)"
    )
    assert idle_row(2, 32, 32).startswith("1 of 2 processes is idle: a step has 1 micro-batch\nmicro_batch=31 ")


def test_a_step_of_fewer_samples_than_processes_has_no_work_for_all() -> None:
    row = idle_row(8, 7, 4)
    assert row.splitlines()[1] == "no micro_batch gives all of them work: a step has 7 samples"
    assert row.startswith("6 of 8 ")


@pytest.mark.parametrize("batch", [1, 7, 8, 48, 63, 64, 65, 1000])
@pytest.mark.parametrize("num_procs", [2, 3, 7, 8, 64])
def test_the_micro_batch_that_is_named_is_the_largest_of_those_that_do(num_procs: int, batch: int) -> None:
    those = [size for size in range(1, batch + 1) if num_micro(batch, size) >= num_procs]
    row = idle_row(num_procs, batch, batch)
    assert row.splitlines()[1].startswith(f"micro_batch={max(those)} " if those else "no micro_batch ")


def test_the_longest_fits_into_80_columns() -> None:
    lines = idle_row(1024, 100_000, 100_000).splitlines() + idle_row(1024, 1000, 1000).splitlines()
    assert max(map(len, lines)) <= 80 - len("  gradients  ")
