"""Two and three separate hosts: by rank, by torchrun, and errors if something blocks them."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hosts import Host
from tests.lab.conftest import SETTINGS
from tests.runs import LONG_S, ROOT, SAMEBITS, wait_until, weights

Command = Callable[..., list[str]]
# For machines that share no disk, where the launcher that serves the rendezvous could leave one.
KEY = {"SAMEBITS_KEY": "what the three machines were given"}


@contextmanager
def _running(*processes: subprocess.Popen[str]) -> Iterator[list[subprocess.Popen[str]]]:
    try:
        yield list(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _ended(processes: list[subprocess.Popen[str]], timeout_s: float = LONG_S) -> list[str]:
    """Return the output of each process, after all have succeeded."""
    said = []
    for process in processes:
        said.append(process.communicate(timeout=timeout_s)[0] or "")
        assert process.returncode == 0, "\n".join(said)  # the others may wait for this one
    return said


def _with_own_disk(host: Host, tmp_path: Path, command: Sequence[str]) -> list[str]:
    """The same command on each machine, whose run folder is on a disk of the machine's own: in tmp_path/NAME/run."""
    for folder in (tmp_path / host.name / "run", tmp_path / "run"):
        folder.mkdir(parents=True, exist_ok=True)
    mount = f'mount --bind {tmp_path}/{host.name}/run {tmp_path}/run && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh", *command]


def test_tcp_hosts(three: list[Host], command: Command, environ: dict[str, str], wanted: str, tmp_path: Path) -> None:
    join = ("--init", "tcp://n1:29510", "--world-size", 3, "--rank")
    started = [host.start(*command(*join, rank), env=environ, cwd=tmp_path) for rank, host in enumerate(three)]
    with _running(*started) as processes:
        said = _ended(processes)
    assert "3 processes on 3 hosts" in said[0]
    assert weights(tmp_path / "run") == wanted


def test_nodes_meet_at_the_one_that_is_named_and_the_run_is_kept_there(
    three: list[Host], command: Command, environ: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    started = []
    for host in three:
        # The last one is where they meet.
        train = command("--nodes", 3, "--procs", 1, "--rdzv-endpoint", "n3:29519")
        started.append(host.start(*_with_own_disk(host, tmp_path, train), env=environ | KEY, cwd=tmp_path))
    with _running(*started) as processes:
        said = _ended(processes)
    assert "3 processes on 3 hosts" in said[2]
    assert weights(tmp_path / "n3" / "run") == wanted
    assert not (tmp_path / "n1" / "run" / "weights.safetensors").exists()


def test_torchrun_on_two_hosts_static_and_c10d(
    three: list[Host], command: Command, environ: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    static = ["--master-addr=n1", "--master-port=29511", "--node-rank"]
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=n1:29512", "--rdzv-id=lab"]
    for kind in ("static", "c10d"):
        run = tmp_path / kind
        train = command()[1:]
        train[train.index("--run-dir") + 1] = str(run)
        started = []
        for rank, host in enumerate(three[:2]):
            options = [*static, str(rank)] if kind == "static" else [*meeting, f"--local-addr={host.address}"]
            started.append(host.start(*torchrun, *options, *train, env=environ, cwd=tmp_path))
        with _running(*started) as processes:
            _ended(processes)
        assert weights(run) == wanted


def test_the_old_launcher_and_use_env(command: Command, environ: dict[str, str], wanted: str, tmp_path: Path) -> None:
    for flags in ([], ["--use-env"]):
        run = tmp_path / f"run{len(flags)}"
        train = command()[1:]
        train[train.index("--run-dir") + 1] = str(run)
        launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node=2", *flags, *train]
        done = subprocess.run(launch, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S)
        assert done.returncode == 0, done.stderr
        assert weights(run) == wanted


def test_processes_that_a_script_spawns_are_a_world(environ: dict[str, str], wanted: str, tmp_path: Path) -> None:
    script = [sys.executable, ROOT / "examples" / "spawn.py", *SETTINGS[1:], "--run-dir", tmp_path / "run"]
    done = subprocess.run(script, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "run") == wanted


def test_a_rank_that_comes_late_is_waited_for_and_named(
    three: list[Host], command: Command, environ: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    join = ("--init", "tcp://n1:29513", "--world-size", 2, "--rank")
    said = tmp_path / "said"
    with said.open("w") as file:
        first = three[0].start(*command(*join, 0), env=environ, cwd=tmp_path, stdout=file)
    with _running(first):
        wait_until(lambda: "missing rank 1" in said.read_text())
        late = three[1].start(*command(*join, 1), env=environ, cwd=tmp_path)
        with _running(late):
            _ended([late, first])
    text = said.read_text().replace("--world-size 2 --rank 1", "--rank 1 --world-size 2")
    assert "--rank 1 --world-size 2" in text
    assert weights(tmp_path / "run") == wanted


def test_a_rank_that_never_comes(three: list[Host], command: Command, environ: dict[str, str], tmp_path: Path) -> None:
    join = ("--init", "tcp://n1:29514", "--world-size", 2, "--rank", 0, "cluster.join_timeout_s=7")
    done = three[0].run(*command(*join), env=environ, cwd=tmp_path)
    assert done.returncode == 4
    assert "gave up waiting for 2 processes: 1 has joined (rank 0)" in done.stderr
    assert re.search(r"missing +rank 1\n", done.stderr)


def test_a_rank_that_is_taken(three: list[Host], command: Command, environ: dict[str, str], tmp_path: Path) -> None:
    join = ("--init", "tcp://n1:29515", "--world-size", 3, "cluster.join_timeout_s=30", "--rank")
    ranks = [(three[0], 0), (three[1], 1), (three[2], 1)]
    started = [host.start(*command(*join, rank), env=environ, cwd=tmp_path) for host, rank in ranks]
    with _running(*started) as processes:
        said = [process.communicate(timeout=LONG_S)[0] for process in processes]
    assert all(process.returncode == 4 for process in processes)
    for text in said:
        assert "launch error: two processes have rank 1" in text
        assert re.search(r"n2 pid \d+", text)
        assert re.search(r"n3 pid \d+", text)


def test_a_blocked_port_is_named(three: list[Host], command: Command, environ: dict[str, str], tmp_path: Path) -> None:
    join = ("--init", "tcp://n1:29518", "--world-size", 2, "cluster.join_timeout_s=20", "--rank")
    three[0].block(29518)
    started = [host.start(*command(*join, rank), env=environ, cwd=tmp_path) for rank, host in enumerate(three[:2])]
    try:
        with _running(*started) as processes:
            said = [process.communicate(timeout=LONG_S)[0] for process in processes]
    finally:
        three[0].unblock(29518)
    assert [process.returncode for process in processes] == [4, 4]
    assert re.search(r"missing +rank 1\n", said[0])
    assert re.search(r"rank 1 waited \d+ s for rank 0 at tcp://n1:29518: no answer", said[1])
    assert "a firewall is between" in said[1]


def test_a_port_without_a_listener_is_distinguished_from_a_host_that_is_down(
    three: list[Host], command: Command, environ: dict[str, str], tmp_path: Path
) -> None:
    join = ("--init", "tcp://n1:29516", "--world-size", 2, "--rank", 1, "cluster.join_timeout_s=7")
    refused = three[1].run(*command(*join), env=environ, cwd=tmp_path)
    assert refused.returncode == 4
    assert "connection refused" in refused.stderr
    three[0].cut()
    try:
        off = three[1].run(*command(*join), env=environ, cwd=tmp_path)
    finally:
        three[0].restore()
    assert off.returncode == 4
    assert "no answer" in off.stderr or "no route to host" in off.stderr


def _another_version(environ: dict[str, str], place: Path) -> dict[str, str]:
    """Variables with which a host finds a Samebits of another version."""
    shutil.copytree(ROOT / "src" / "samebits", place / "samebits")
    (place / "samebits" / "version.py").write_text('__version__ = "0.0.9"\n')
    return {**environ, "PYTHONPATH": str(place)}


def test_training_with_another_samebits_on_one_rank_ends_on_all_with_one_text(
    three: list[Host], command: Command, environ: dict[str, str], tmp_path: Path
) -> None:
    join = ("--init", "tcp://n1:29522", "--world-size", 2, "--rank")
    variables = [environ, _another_version(environ, tmp_path / "other")]
    started = [
        host.start(*command(*join, rank), env=variables[rank], cwd=tmp_path) for rank, host in enumerate(three[:2])
    ]
    with _running(*started) as processes:
        said = [process.communicate(timeout=LONG_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [4, 4], said
    for text in said:
        assert "launch error: rank 1 differs from rank 0 in 2 things" in text
        assert "samebits: 0.0.9 on rank 1" in text
        assert "code of samebits: " in text


def test_the_doctor_names_the_rank_with_other_code(three: list[Host], environ: dict[str, str], tmp_path: Path) -> None:
    join = [*SAMEBITS, "doctor", "--init", "tcp://n1:29517", "--world-size", 3, "--rank"]
    variables = [environ, environ, _another_version(environ, tmp_path / "other")]
    # Each in a folder without a checkout: Python looks there first.
    started = [host.start(*join, rank, env=variables[rank], cwd=tmp_path) for rank, host in enumerate(three)]
    with _running(*started) as processes:
        said = [process.communicate(timeout=LONG_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1], said
    assert "0.0.9 on rank 2 (n3)" in said[0]
    assert "PROBLEM" in said[0]
