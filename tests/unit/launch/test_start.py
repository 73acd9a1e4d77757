"""Options of a launch: processes, hosts, ways to recover, and the batch script."""

import math
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from samebits.cli.main import run
from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, ConfigError
from samebits.launch.crew.recovery import STOPPED_S, Recovery, choose_recovery
from samebits.launch.slurm import BatchJob, batch_script
from samebits.launch.ssh import RemoteHost, parse_hosts
from samebits.launch.start import LaunchOptions, default_procs, rendezvous_config, resume_from
from samebits.process_range import ProcessRange, RendezvousConfig
from samebits.storage.run_folder import check_run_dir

CONFIG = RunConfig(recipe="none")
RUN = Path("runs/a")


def test_one_machine_needs_no_rendezvous() -> None:
    assert rendezvous_config(LaunchOptions(), CONFIG, None) is None
    assert rendezvous_config(LaunchOptions(nodes="1"), CONFIG, None) is None


def test_the_endpoint_has_torchruns_port_by_default() -> None:
    nodes = rendezvous_config(LaunchOptions(nodes="2:3", endpoint="a.example"), CONFIG, RUN)
    assert (nodes.size.least, nodes.size.most, nodes.endpoint) == (2, 3, "a.example:29400")
    again = rendezvous_config(LaunchOptions(nodes="2", endpoint="10.0.0.5:1234"), CONFIG, RUN)
    assert again.endpoint == "10.0.0.5:1234"
    for given, whole in (("[::1]:1234", "[::1]:1234"), ("[fe80::1%eth-0]", "[fe80::1%eth-0]:29400")):
        nodes = rendezvous_config(LaunchOptions(nodes="2", endpoint=given), CONFIG, RUN)
        assert nodes.endpoint == whole


@pytest.mark.parametrize(
    ("settings", "visible", "expected"),
    [
        ({}, "", 4),  # as many as have cores
        ({"num_threads": 2}, "", 2),
        ({"global_batch": 16, "micro_batch": 8}, "", 2),  # and work
        ({}, "0,1,2", 3),  # one a GPU
        ({"device": "cpu"}, "0,1,2", 4),
    ],
)
def test_as_many_processes_start_as_can_be_put_to_use(
    settings: dict[str, object], visible: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = RunConfig(recipe="none", **{"global_batch": 64, "micro_batch": 8, "num_threads": 1, **settings})
    assert default_procs(config) == expected


@pytest.mark.parametrize(
    ("options", "run_dir", "text"),
    [
        (LaunchOptions(nodes="2"), RUN, "--nodes 2 was given without --rdzv-endpoint"),
        (LaunchOptions(nodes="2", endpoint="a:1"), None, "--nodes 2 was given without --run-dir"),
        (LaunchOptions(endpoint="a:1"), RUN, "--rdzv-endpoint was given for one machine"),
        (LaunchOptions(nodes="2", endpoint="tcp://a:1"), RUN, "--rdzv-endpoint is 'tcp://a:1'"),
        (LaunchOptions(nodes="2", endpoint=":1"), RUN, "--rdzv-endpoint is ':1'"),
        (LaunchOptions(nodes="3:2", endpoint="a:1"), RUN, "--nodes is '3:2'"),
        (LaunchOptions(nodes="2", endpoint="a:99999"), RUN, "--rdzv-endpoint is 'a:99999'"),
        (LaunchOptions(nodes="2", endpoint="a:0"), RUN, "--rdzv-endpoint is 'a:0'"),
        (LaunchOptions(nodes="2", endpoint="a:abc"), RUN, "--rdzv-endpoint is 'a:abc'"),
        (LaunchOptions(nodes="2", endpoint="a:"), RUN, "--rdzv-endpoint is 'a:'"),
        (LaunchOptions(nodes="2", endpoint="::1"), RUN, "an IPv6 address in brackets"),
        (LaunchOptions(nodes="2", endpoint="a:65536"), RUN, "--rdzv-endpoint is 'a:65536'"),
    ],
)
def test_incomplete_options_are_refused_with_a_fix(options: LaunchOptions, run_dir: Path | None, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rendezvous_config(options, CONFIG, run_dir)
    assert text in str(caught.value)


def test_a_checkpoint_to_resume_from_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").touch()
    assert resume_from("~/step-1", None) == str(tmp_path / "step-1")
    assert (resume_from("never", None), resume_from("auto", tmp_path)) == ("never", "auto")


@pytest.mark.parametrize(("resume", "what"), [("~/run", "is a run folder"), ("~/none", "is not a checkpoint"),
                                              ("auto", "without --run-dir"), ("", "--resume is empty")])  # fmt: skip
def test_what_cannot_be_resumed_is_refused(
    resume: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=what):
        resume_from(resume, None)


def test_a_run_folder_that_can_be_created_is_not_created_yet(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        check_run_dir(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "Not a directory"),
        ("file/x", "Not a directory"),
        ("/proc/x", "No such file or directory"),
        (300 * "a", "File name too long"),
    ],
)
def test_a_run_folder_that_cannot_be_created_is_reported_without_advice_that_does_not_help(
    name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        check_run_dir(tmp_path / name)
    assert caught.value.what == f"can't write run folder {tmp_path / name}: {reason}"
    assert caught.value.slots == {"fix": "Choose another --run-dir."}


def test_hosts_are_names_with_a_user_and_a_number_of_processes_where_wished_for() -> None:
    assert parse_hosts("a, me@b:4") == [RemoteHost("a", None), RemoteHost("me@b", 4)]
    assert parse_hosts("me@b")[0].host == "b"


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:x", ":2", "-oProxyCommand=evil", "a,me@a"])
def test_hosts_that_can_not_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        parse_hosts(text)


NODES = RendezvousConfig(ProcessRange(2, 2), "a:29400", "run", 10.0, 1.0, 5.0, Path("runs/a"))


def chosen(
    max_restarts: int = 1, nodes: RendezvousConfig | None = None, num_procs: int = 2, **more: object
) -> Recovery:
    config = RunConfig.model_validate({"recipe": "any", "device": "cpu", **more})
    return choose_recovery(config, nodes, num_procs, max_restarts)


def test_the_default_recovers_in_the_step_with_restarts_on_one_machine() -> None:
    assert chosen() == Recovery(True, math.inf)
    assert chosen(max_restarts=0) == Recovery()
    assert chosen(nodes=NODES) == Recovery()
    assert chosen(cluster={"recovery": "restart"}) == Recovery()


def test_the_default_names_why_all_restart(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(batch_norm="sync") == Recovery(why_restart="batch_norm=sync")
    assert chosen(num_procs=1) == Recovery(why_restart="one process")
    assert capsys.readouterr().err == ""


def test_in_step_that_is_set_kills_stopped_processes_and_is_refused_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    in_step = {"recovery": "in_step"}
    assert chosen(0, cluster=in_step) == Recovery(True, STOPPED_S)
    assert chosen(0, NODES, cluster=in_step).in_step
    assert chosen(batch_norm="sync", cluster=in_step) == Recovery()
    assert "cluster.recovery=in_step does not work with batch_norm=sync" in capsys.readouterr().err


def test_a_folder_with_spaces_and_quotes_is_one_word_everywhere(tmp_path: Path) -> None:
    folder = tmp_path / 'my "best" $(touch x) run\'s'
    text = batch_script(
        BatchJob(["python", "-m", "samebits", "train", "digits"], folder, time="1:00:00", options=["-p gpu"])
    )
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert f"--output={folder}.log" in [shlex.split(option)[0] for option in options]
    assert shlex.split(next(line for line in text.splitlines() if line.startswith("srun"))).count(str(folder)) == 1
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_each_start_has_a_key_of_its_own_unless_the_user_gives_one(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nprintenv SAMEBITS_KEY\n", encoding="utf-8")
    srun.chmod(0o700)
    text = batch_script(BatchJob(["true"], tmp_path / "run"))

    def key(**given: str) -> str:
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", **given}
        done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    keys = {key(), key()}
    assert len(keys) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", found) for found in keys)
    assert key(SAMEBITS_KEY="one of my own, long enough") == "one of my own, long enough"


def test_signs_that_slurm_replaces_in_names_of_files_stand_for_themselves() -> None:
    text = batch_script(BatchJob(["true"], Path("/data/50%-off")))
    assert "#SBATCH --output=/data/50%%-off.log" in text


@pytest.mark.parametrize(
    "job",
    [
        BatchJob(["true"], Path("a\ntouch x\n#")),
        BatchJob(["true"], Path("a"), options=["-pgpu\ntouch x"]),
        BatchJob(["true"], Path("a"), time="1\ntouch x"),
        BatchJob(["true"], Path("a\rb")),
    ],
)
def test_a_line_break_never_becomes_a_line_of_the_script(job: BatchJob) -> None:
    with pytest.raises(ConfigError, match="line break"):
        batch_script(job)


def test_submit_refuses_a_folder_with_a_line_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["submit", "digits", "--dry-run", "--run-dir", f"{tmp_path}/a\ntouch x"])
    said = capsys.readouterr()
    assert code == ConfigError.exit_code
    assert "--run-dir has a line break" in said.err
    assert said.out == ""
