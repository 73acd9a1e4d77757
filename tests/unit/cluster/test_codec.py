"""Values between processes: what arrives, and what is refused of a message or a store that a stranger wrote to."""

import json
import math
import os
import pickle
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, Store, TCPStore

from samebits import errors
from samebits.cluster import rendezvous, signed
from samebits.cluster.collectives import MessageError, decode, encode
from samebits.cluster.env import RankAssignment
from samebits.cluster.rendezvous import RankInfo
from samebits.cluster.signed import Seal, SignedStore
from samebits.cluster.store import Generations
from samebits.errors import DataError, SamebitsError
from samebits.launch.nodes import rendezvous as admission
from samebits.scratch import is_running
from samebits.watchdog import detector

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


def bits(value: Any) -> str:
    """A text in which two floats are equal only if their bits are, all NaN taken as one."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value).hex()
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(bits, value))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{bits(name)}: {bits(item)}' for name, item in value.items())})"
    return f"{type(value).__name__} {value!r}"


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_a_value_arrives_with_its_types_and_all_its_bits(value: Any) -> None:
    assert bits(decode(encode(value))) == bits(value)


@pytest.mark.parametrize(
    "value",
    [
        {1: 2, (0, 1): 3.5, "a": {"$": "tensor", "of": 1}}, {"$": "bytes"}, Path("runs/a"), {1, 2}, frozenset({"a"}),
        torch.Size([2, 3]), torch.bfloat16, 2**70, "x\ud800\x00é",
    ],
    ids=repr,
)  # fmt: skip
def test_values_beyond_json_arrive_as_they_were(value: Any) -> None:
    back = decode(encode(value))
    assert (type(back), back) == (type(value), value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4).transpose(0, 2), torch.tensor([math.nan, -0.0, math.inf]),
        torch.randn(5).to(torch.bfloat16), torch.tensor(7), torch.empty(0, 4, dtype=torch.bool),
        torch.randn(2, dtype=torch.complex64),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)  # fmt: skip
def test_a_tensor_arrives_with_its_shape_type_and_bits(tensor: torch.Tensor) -> None:
    back = decode(encode(["before", tensor, b"after"]))[1]
    assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
    assert back.reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3).T, np.array(["a", "é"]), np.float32(0.1), np.int64(3)])
def test_an_array_and_a_scalar_of_numpy_arrive_as_such(array: Any) -> None:
    back = decode(encode(array))
    assert type(back) is type(array)
    assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())


def test_every_error_of_the_package_arrives_as_itself() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SamebitsError)]
    assert len(kinds) > 5
    for kind in kinds:
        back = decode(encode(kind("x is wrong", where="a\nb", fix="mend it")))
        assert type(back) is kind
        assert (back.what, list(back.slots.items())) == ("x is wrong", [("where", "a\nb"), ("fix", "mend it")])


def test_an_error_of_a_recipe_s_own_kind_arrives_as_the_package_s_kind() -> None:
    class MyError(DataError):
        pass

    assert type(decode(encode(MyError("x")))) is DataError


@dataclass
class Thing:
    x: int = 1


def test_a_value_of_any_other_type_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"Thing cannot be sent"):
        encode({"a": [Thing()]})
    with pytest.raises(TypeError, match=r"array of object cannot be sent"):
        encode(np.array([None]))
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(TypeError, match=r"cannot be sent"):
        encode(circle)


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.canary),))


def test_a_pickle_is_no_message_and_runs_nothing(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "canary"))
    for data in (bomb, len(bomb).to_bytes(8, "little") + bomb):
        with pytest.raises(MessageError):
            decode(data)
    assert not (tmp_path / "canary").exists()
    pickle.loads(bomb)
    assert (tmp_path / "canary").exists(), "the bomb is none, so this test shows nothing"


def test_damaged_messages_are_refused_and_never_take_long() -> None:
    whole = encode({"a": torch.randn(10), "b": [(1, 2.5), {"x": b"abc"}], "e": DataError("x")})
    generator = np.random.default_rng(0)
    for _ in range(500):
        damaged = bytearray(whole[: int(generator.integers(len(whole) + 1))])
        for place in generator.integers(len(damaged), size=3) if damaged else ():
            damaged[place] = generator.integers(256)
        try:
            decode(bytes(damaged))
        except MessageError:
            continue


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{",
        '{"$":"tensor","of":["float32",[1000000000000],false,[0,4]]}',
        '{"$":"tensor","of":["load",[1],false,[0,4]]}',
        '{"$":"array","of":["O",[1],false,[0,8]]}',
        '{"$":"error","of":["SystemExit","x",{}]}',
        '{"$":"error","of":{"kind":"SystemExit","what":"x","slots":{}}}',
        '{"$":"eval","of":"1"}',
        '{"$":"bytes","of":[0,99999999]}',
        '{"$":"dict","of":[[[],1]]}',
    ],
    ids=lambda text: text[:40],
)
def test_a_message_that_lies_is_refused(text: str) -> None:
    with pytest.raises(MessageError):
        decode(len(text).to_bytes(8, "little") + text.encode() + bytes(64))


HUGE = 10**400


def served(folder: Path) -> Store:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)


@pytest.mark.parametrize("make", [served, lambda folder: HashStore()])
def test_a_key_that_is_not_there_is_not_waited_for(make: Callable[[Path], Store], tmp_path: Path) -> None:
    raw = make(tmp_path)
    store = SignedStore(raw, Seal())
    start = time.monotonic()
    assert signed.peek(raw, "x") is None
    assert store.get("x") is None
    assert store.count("x") == 0
    store.put("x", [1])
    assert store.get("x") == [1]
    raw.delete_key("x")
    assert store.get("x") is None
    assert time.monotonic() - start < 60, "it waited for the store's timeout"


def test_numbers_that_are_too_large_are_refused() -> None:
    info = asdict(RankInfo(0, 2, "h", 7, "cpu", "auto", 0))
    assert rendezvous._rank_info(info) == RankInfo(**info)
    for name in ("rank", "pid", "world_size", "restart"):
        assert rendezvous._rank_info(info | {name: HUGE}) is None
        assert rendezvous._rank_info(info | {name: -1}) is None
    sign = {"doing": "", "waits": True, "step": 1, "stalled_s": 0.5, "beat": 0.5, "work_s": 0.5}
    sign |= {"num_steps": 1, "num_micro_batches": 1}
    assert signed.read_as(detector.Heartbeat, sign) is not None
    for number in (HUGE, float("nan"), float("inf"), True):
        assert signed.read_as(detector.Heartbeat, sign | {"stalled_s": number}) is None
    assert not is_running(HUGE)
    record = {"run": "r", "host": "h", "pid": 1, "user": "u", "folder": "f", "inode": float("inf"), "shared": {}}
    assert admission.read_record(json.dumps(record).encode()) is None


def test_slots_of_other_names_are_left_out_of_a_fault_in_the_store() -> None:
    error = signed.error_from_store({"what": "it failed", "slots": {"self": 1, "what": 2, "where": 3}})
    assert error.slots == {"where": "3"}


def test_a_damaged_count_of_arrivals_does_not_keep_rank_0_busy() -> None:
    raw = HashStore()
    raw.add("arrivals", 1 << 60)
    here = RankAssignment(0, 2, None, None, "tcp://h:1", "torchrun", agent_store=True)
    first = Generations(here, SignedStore(raw, Seal()), time.monotonic(), 5.0)
    assert first.find_generation() == 1
    other = RankAssignment(1, 2, None, None, "tcp://h:1", "torchrun", agent_store=True)
    generations = Generations(other, SignedStore(raw, Seal()), time.monotonic(), 5.0)
    first.announce()
    assert generations.find_generation() == 1
