"""Each overload of each name in the tables of portable arithmetic has torch's values, or is refused."""

import json
import subprocess
import sys
from typing import Any

import pytest

from samebits.portable.mode import NoPortableForm, PortableMode, form_name
from tests.unit.portable import calls

# Of torch's about 600 operations with sample inputs; `make test-full` tries all.
SOME = (
    "add div pow sum copysign fmod floor_divide where index_add softmax nn.functional.batch_norm nn.functional.conv2d "
    "abs clamp"
)
SHARES = 24  # of all operations, each in a process that ends in a few minutes
# Reached by no sample: views and questions without values, and what test_ways_in, networks and other tests of recipes
# compute.
WITHOUT_SAMPLES: frozenset[str] = frozenset()


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


@pytest.mark.lab  # not yet run to its end
@pytest.mark.timeout(7200)
def test_all_samples_have_torchs_values_and_reach_all_overloads() -> None:
    found = [compare("2", "--share", str(share), str(SHARES)) for share in range(SHARES)]
    assert sum(each["computed"] for each in found) > 3000
    forms = {name for each in found for name in each["forms"]}
    assert not sorted(calls.TABLE - forms - WITHOUT_SAMPLES)
