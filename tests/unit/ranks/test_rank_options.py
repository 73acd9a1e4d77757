"""Options of `samebits launch`, and what it says at the start."""

import pytest

from samebits.errors import ConfigError
from samebits.ranks import start


def shares(*flags: str) -> list[int]:
    given = start._parser().parse_args([*flags, "train.py", "--as", "9"])
    assert given.arguments == ["--as", "9"]  # the script's own
    return start._shares(given, given.nnodes or (len(given.ranks.split(",")) if given.ranks else 1))


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), [1]),
        (("--as", "8"), [8]),
        (("--nproc-per-node", "4"), [4]),
        (("--nproc_per_node=4",), [4]),
        (("--nnodes", "2", "--nproc-per-node", "3"), [3, 3]),
        (("--nnodes", "2", "--as", "8"), [4, 4]),
        (("--ranks", "6,2", "--node-rank", "1"), [6, 2]),
        (("--as", "5", "--nnodes", "2", "--node-rank", "0"), [3, 2]),
    ],
)
def test_ranks_are_shared_out(flags: tuple[str, ...], found: list[int]) -> None:
    assert shares(*flags) == found


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--as", "8", "--nproc-per-node", "4"), "and --as is 8"),
        (("--as", "8", "--ranks", "6,1", "--node-rank", "0"), "and --as is 8"),
        (("--ranks", "6,2"), "--node-rank is missing"),
        (("--ranks", "6,2", "--node-rank", "2"), "--node-rank is 2"),
        (("--as", "2", "--nnodes", "2", "--node-rank", "-1"), "--node-rank is -1"),
        (("--ranks", "6,x"), "--ranks is '6,x'"),
        (("--ranks", "8,0"), "--ranks is '8,0'"),
        (("--as", "0"), "0 ranks"),
        (("--as", "-2"), "-2 ranks"),
        (("--as", "2", "--nnodes", "3"), "2 ranks on 3 machines"),
        (("--nproc-per-node", "many"), "--nproc-per-node is 'many'"),
        (("--as", "many"), "invalid int value"),
        (("--global-batch", "64"), "unrecognized arguments"),
    ],
)
def test_what_does_not_fit_is_refused(flags: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        shares(*flags)


def test_the_start_says_what_few_cores_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "num_cores", lambda: 2)
    assert start.start_line(8, 8, ()) == (
        "8 ranks on 2 cores, as torchrun with 8 processes; a step takes about 4 times as long as with 8 cores"
    )
    assert start.start_line(1, 1, ()) == "1 rank on 2 cores, as torchrun with 1 process"
    assert start.start_line(8, 8, ("0", "1", "2")) == (
        "8 ranks on 3 GPUs, as torchrun with 8 processes; a step takes about 2.7 times as long as with 8 GPUs"
    )
