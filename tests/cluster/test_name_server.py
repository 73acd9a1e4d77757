"""A name server that does not answer: torch asks one at each connection of a store, and waits."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import PYTHON_PATH, SAMEBITS, environment

MOUNT = ["unshare", "--mount", "sh", "-c", 'mount --bind resolv.conf /etc/resolv.conf && exec "$@"', "sh"]
LOOKUP = """import contextlib, socket, time
start = time.monotonic()
with contextlib.suppress(OSError):
    socket.getnameinfo(("::ffff:127.0.0.1", 1), 0)
print("waited", time.monotonic() - start)
"""


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[socket.socket]:
    """A name server that all processes under MOUNT ask, and that never answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        try:
            server.bind(("127.0.0.77", 53))
        except OSError as error:
            pytest.skip(f"no name server can be served here: {error.strerror}")
        server.settimeout(1.0)
        (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.77\n")
        if (
            not shutil.which("unshare")
            or subprocess.run([*MOUNT, "true"], cwd=tmp_path, capture_output=True).returncode
        ):
            pytest.skip("no file can be mounted here: needs root")
        yield server


def waited_s(folder: Path, **more: str) -> float:
    """Seconds that a launched rank waits for a name, without this process's own limit."""
    (folder / "lookup.py").write_text(LOOKUP)
    environ = {name: value for name, value in environment().items() if name != "RES_OPTIONS"} | more
    words = [*MOUNT, *SAMEBITS, "launch", "--as", "1", "lookup.py"]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=180, check=True)
    return float(done.stdout.rpartition("waited ")[2].split()[0])


@pytest.mark.full
def test_a_lookup_waits_for_a_silent_name_server_shortly(tmp_path: Path, silent: socket.socket) -> None:
    assert waited_s(tmp_path) < 8.0
    assert silent.recv(4096)
    assert waited_s(tmp_path, RES_OPTIONS="timeout:5") > 8.0, "the user's own limit, which is glibc's: twice 5 s"


@pytest.mark.full
def test_machines_meet_while_no_name_server_answers(tmp_path: Path, silent: socket.socket) -> None:
    endpoint = f"127.0.0.1:{socket.create_server(('127.0.0.1', 0)).getsockname()[1]}"
    line = [*MOUNT, *SAMEBITS, "train", "digits", "epochs=1", "--run-dir", "run", "--nodes", "2", "--rdzv-endpoint"]
    nodes = [
        subprocess.Popen(
            [*line, endpoint], cwd=tmp_path, env=environment(PYTHONPATH=PYTHON_PATH), stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for node in nodes:
        _, said = node.communicate(timeout=180)
        assert node.returncode == 0, said.decode()
    assert silent.recv(4096)
