"""Exchanges that a thread advances: all to their end, and an error reaches the main thread."""

import pytest
import torch

from samebits.parallel.exchange.in_thread import ExchangeThread


class Counted:
    def __init__(self, rounds: int, error: Exception | None = None) -> None:
        self.rounds, self.error = rounds, error

    def advance(self) -> bool:
        self.rounds -= 1
        if self.rounds == 0 and self.error is not None:
            raise self.error
        return self.rounds == 0


def test_all_exchanges_are_complete_after_finish() -> None:
    exchanges = [Counted(rounds) for rounds in (2, 5, 1)]
    thread = ExchangeThread()
    for each in exchanges:
        thread.put(each)
    thread.finish()
    assert [each.rounds for each in exchanges] == [0, 0, 0]


def test_the_loss_of_a_rank_is_raised_in_the_main_thread() -> None:
    thread = ExchangeThread()
    thread.put(Counted(2, RuntimeError("closed by peer")))
    with pytest.raises(RuntimeError, match="closed by peer"):
        thread.finish()


def test_the_thread_adds_tiny_numbers_like_the_main_thread() -> None:
    tiny, found = torch.tensor(1e-40), []

    class Adds:
        def advance(self) -> bool:
            found.append((tiny + 0.0).item())
            return True

    torch.set_flush_denormal(True)
    try:
        thread = ExchangeThread()
        thread.put(Adds())
        thread.finish()
    finally:
        torch.set_flush_denormal(False)
    assert found == [0.0]
