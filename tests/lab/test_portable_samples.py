"""torch's own sample inputs of about 600 operations in portable arithmetic."""

import re
import subprocess
import sys

import pytest


@pytest.mark.timeout(1800)
def test_samples_of_torchs_own_tests_agree_or_are_refused_by_name() -> None:
    pytest.importorskip("expecttest", reason="torch's own tests need expecttest: pip install 'samebits[lab]'")
    # In a process of its own: torch's tests change switches when they are imported.
    done = subprocess.run([sys.executable, "-m", "tests.lab.portable_samples"], capture_output=True, text=True)
    *problems, last = done.stdout.splitlines()
    assert not problems, "\n".join(problems)
    assert (found := re.match(r"(\d+) samples agree, \d+ are refused", last)), done.stderr[-2000:]
    assert int(found[1]) > 3000
