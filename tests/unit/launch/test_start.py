"""From command-line options to a rendezvous and processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, ConfigError
from samebits.launch.start import LaunchOptions, default_procs, rendezvous_config, resume_from
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
