"""Each overload of each name in the tables of portable arithmetic has torch's values, or is refused."""

import json
import subprocess
import sys
from typing import Any

import pytest

from samebits.portable.mode import NoPortableForm, PortableMode, form_name
from tests.unit.portable import calls
from tests.unit.portable.written_calls import CALLS

# Of torch's about 600 operations with sample inputs; `make test-full` tries all.
SOME = (
    "add div pow sum copysign fmod floor_divide where index_add softmax nn.functional.batch_norm nn.functional.conv2d "
    "abs clamp"
)
SHARES = 4  # of all operations, each in a process of its own
# Reached by no sample, for these reasons.
REASONS = {
    "random numbers, which are not torch's: test_ways_in, test_oracle": """
        _sample_dirichlet bernoulli.Tensor native_dropout normal.Tensor_float normal.float_Tensor
        rand.generator rand_like.generator randint.generator randint.low_generator randn.generator randn_like.generator
        random_ random_.from random_.to randperm randperm.generator""",
    "memory, and questions about it, without values": """
        _pin_memory is_pinned record_stream set_ set_.source_Storage set_.source_Storage_storage_offset
        set_.source_Tensor""",
}
WITHOUT_SAMPLES = frozenset(name for names in REASONS.values() for name in names.split())


def test_each_name_in_the_tables_is_an_overload_of_torch() -> None:
    names = {each.name().removeprefix("aten::") for each in calls.overloads()}
    assert not sorted(calls.TABLE - names)


def test_an_overload_that_is_in_no_table_is_refused_or_consists_of_others() -> None:
    mode, refused = PortableMode(), set()
    for each in calls.overloads():
        try:
            function = mode._resolve(each)
        except NoPortableForm:
            refused.add(each.name())
            continue
        is_composite = getattr(function, "func", None) == mode._decompose
        assert is_composite or form_name(each) in calls.TABLE, each.name()
    assert {"aten::scatter.reduce", "aten::addmm.dtype", "aten::scatter_.value_reduce"} <= refused


def compare(*arguments: str) -> dict[str, Any]:
    """In a process of its own: torch's tests change switches when they are imported."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.portable.calls", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not found["wrong"], "\n".join(found["wrong"])
    return found


def test_some_operations_have_torchs_values_in_each_overload_and_type() -> None:
    found = compare("2", *SOME.split())
    assert found["computed"] > 100
    expected = {"aten::add_.Tensor", "aten::sum.IntList_out", "aten::fmod_.Tensor", "aten::div_.Tensor"}
    assert expected <= {*found["reached"]}


@pytest.mark.full
def test_written_calls_have_torchs_values() -> None:
    """Of what torch's samples do not reach."""
    found = compare("1", "written")
    assert {*CALLS} <= {*found["forms"]}


@pytest.mark.lab
@pytest.mark.timeout(3600)
def test_all_samples_have_torchs_values_and_reach_all_overloads() -> None:
    found = [compare("2", "--share", str(share), str(SHARES)) for share in range(SHARES)]
    assert sum(each["computed"] for each in found) > 4000
    forms = {*CALLS}.union(*(each["forms"] for each in found))
    assert sorted(calls.TABLE - forms) == sorted(WITHOUT_SAMPLES)
