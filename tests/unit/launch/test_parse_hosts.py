"""Values of `--hosts`."""

from __future__ import annotations

import pytest

from samebits.errors import ConfigError
from samebits.launch.ssh import RemoteHost, parse_hosts


def test_hosts_are_names_with_a_user_and_a_number_of_processes_where_wished_for() -> None:
    assert parse_hosts("a, me@b:4") == [RemoteHost("a", None), RemoteHost("me@b", 4)]
    assert parse_hosts("me@b")[0].host == "b"


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:x", ":2", "-oProxyCommand=evil", "a,me@a"])
def test_hosts_that_can_not_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        parse_hosts(text)
