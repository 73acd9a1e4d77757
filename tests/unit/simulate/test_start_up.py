"""What the start needs of the store, counted with the rendezvous of real ranks."""

import pytest

from samebits.simulate.start_up import join_calls


@pytest.mark.parametrize("size", [1, 2, 16, 256])
def test_only_rank_0_makes_more_calls_of_the_store_in_a_larger_world(size: int) -> None:
    first, last = join_calls(size)
    assert first == size + 4  # an entry of each other rank, and five of its own
    assert last == (first if size == 1 else 4)


@pytest.mark.lab
def test_1024_ranks_join_with_some_thousand_calls_of_the_store() -> None:
    first, last = join_calls(1024)
    assert first + 1023 * last == 1028 + 4092
