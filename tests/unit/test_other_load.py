"""How busy other programs keep this process's cores."""

import subprocess
import sys
import threading
import time

import pytest

from samebits import cores
from samebits.cores import core_ids, describe_other_load, num_cores
from tests.unit.parallel.virtual_ranks import on_one_core


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc/stat")
def test_a_busy_machine_is_noticed() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_cores())]
    try:
        until = time.monotonic() + 60
        while not describe_other_load()[1]:
            assert time.monotonic() < until, describe_other_load()
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("busy_s", "own_s", "text", "is_notable"),
    [
        (0.0, 0.0, "other programs use 0.0 of 2 cores", False),
        (0.008, 0.0, "other programs use 0.8 of 2 cores", True),
        (0.008, 0.005, "other programs use 0.3 of 2 cores", False),
        (0.001, 0.005, "other programs use 0.0 of 2 cores", False),
        (9.0, 0.0, "other programs use 2.0 of 2 cores", True),
    ],
)
def test_the_own_work_of_this_process_does_not_count(
    busy_s: float, own_s: float, text: str, is_notable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, own = iter([100.0, 100.0 + busy_s]), iter([5.0, 5.0 + own_s])
    monkeypatch.setattr(cores, "_busy_seconds", lambda: next(counts))
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(cores, "num_cores", lambda: 2)
    assert describe_other_load(0.01) == (text, is_notable)


def test_a_system_that_does_not_count_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_busy_seconds", lambda: None)
    assert describe_other_load(0.0) == ("", False)


@pytest.mark.skipif(not core_ids(), reason="needs affinity masks (Linux)")
def test_threads_that_start_on_one_core_share_it_and_the_mask_comes_back() -> None:
    before, seen = core_ids(), []
    with pytest.raises(ZeroDivisionError), on_one_core():  # noqa: PT012 - the mask has to come back after an error
        thread = threading.Thread(target=lambda: seen.append(core_ids()))
        thread.start()
        thread.join()
        seen.append(core_ids())
        raise ZeroDivisionError
    assert len(seen[0]) == 1
    assert seen[1] == seen[0] <= before == core_ids()
