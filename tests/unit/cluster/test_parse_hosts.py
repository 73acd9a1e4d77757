"""What `--hosts` may say."""

from __future__ import annotations

import pytest

from lockstep.cluster.ssh import Machine, parse_hosts
from lockstep.errors import ConfigError


def test_hosts_are_names_with_a_user_and_a_number_of_processes_where_wished_for() -> None:
    assert parse_hosts("a, me@b:4") == [Machine("a", None), Machine("me@b", 4)]
    assert parse_hosts("me@b")[0].host == "b"


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:x", ":2", "-oProxyCommand=evil", "a,me@a"])
def test_hosts_that_can_not_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        parse_hosts(text)
