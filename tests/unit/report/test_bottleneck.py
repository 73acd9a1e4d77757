import pytest

from samebits.report.bottleneck import WINDOW_S, DataWait, advice


def test_the_share_is_that_since_the_last_call() -> None:
    wait = DataWait()
    wait.start(100.0, 50.0)  # a resumed run
    assert wait.share(110.0, 51.0) == pytest.approx(0.1)
    assert wait.share(114.0, 53.0) == pytest.approx(0.5)
    assert wait.share(114.0, 53.0) == 0.0


def test_a_bottleneck_is_reported_once_and_only_after_a_while() -> None:
    wait = DataWait()
    wait.start(0.0, 0.0)
    assert wait.notice(0.9 * WINDOW_S, 0.9 * WINDOW_S, "more workers") is None
    text = wait.notice(WINDOW_S, 0.4 * WINDOW_S, "more workers")
    assert text == "data loading is the bottleneck: 40.0% of training time waits for it\n  fix  more workers"
    assert wait.notice(3 * WINDOW_S, 3 * WINDOW_S, "more workers") is None


def test_a_slow_first_epoch_that_fills_a_cache_does_not_hide_a_later_one_without() -> None:
    wait = DataWait()
    assert wait.notice(WINDOW_S, 0.1 * WINDOW_S, "") is None
    assert wait.notice(2 * WINDOW_S, 0.5 * WINDOW_S, "") is not None


@pytest.mark.parametrize(
    ("num_workers", "num_free", "can_cache", "texts"),
    [
        (0, 3, False, ["loader.num_workers=3 (now 0: loading in the training process; 3 cores are free per rank)"]),
        (2, 3, True, ["loader.num_workers=3 (now 2; ", "data.cache=FOLDER"]),
        (0, 0, True, ["data.cache=FOLDER"]),
        (0, -1, False, ["All cores are in use"]),
        (4, 3, False, ["All cores are in use"]),
    ],
)
def test_the_advice_can_be_followed_here(num_workers: int, num_free: int, can_cache: bool, texts: list[str]) -> None:
    text = advice(num_workers=num_workers, num_free_cores=num_free, can_cache=can_cache)
    assert [part in text for part in texts] == [True] * len(texts)
    assert len(text.splitlines()) == len(texts)
