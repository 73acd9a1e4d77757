"""Guards around every test, and what tests share.

A test must leave nothing behind: no environment variable, signal handler, process group, thread, child process or file
in the checkout. What is set up once for several tests (a rank pool of ranks) is a fixture of a wider scope: it is there
before the guards look.
"""

import gc
import os
import signal
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings

from tests import guards

# The workers of pytest-xdist share the cores. Set before torch is imported: with more threads they would spin and wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the command does: stores of tests ask the name server at each connection too.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

_ROOT = Path(__file__).resolve().parents[1]
# Folders of tests that start processes, and of one that takes four minutes.
_WITH_PROCESSES = {"e2e", "faults", "cluster", "foreign", "ranks", "portable"}
_CONFIG_HOME = pytest.StashKey[TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    # Importing all test files makes no garbage to speak of: see pytest_collection_finish.
    gc.disable()
    # Durations depend on other programs that run at the same time, not on the code.
    settings.register_profile("samebits", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("samebits")
    # Training puts recipe files into the user's list of trusted ones: here into one of the tests' own.
    config.stash[_CONFIG_HOME] = TemporaryDirectory(prefix="samebits-tests-config-")
    os.environ["XDG_CONFIG_HOME"] = config.stash[_CONFIG_HOME].name
    # A shell starts what it puts in the background with Ctrl-C ignored, and all programs from there inherit it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")
    config.addinivalue_line(
        "markers", "full: widens what another test in `make test` holds; make test-full runs it (CONTRIBUTING.md)"
    )
    config.addinivalue_line("markers", "one_in(n): of its `full` cases, make test-full runs one in n, the lab all")
    config.addinivalue_line("markers", "check: whether the sources follow the house rules; make check runs it")
    config.addinivalue_line(
        "markers", "lab: long, with a shorter test of the same beside it; make test-cluster runs it"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave most of the `full` cases of a large table to the lab, always the same ones."""
    share = item.get_closest_marker("one_in")
    if share is not None and item.get_closest_marker("full") and zlib.crc32(item.name.encode()) % share.args[0]:
        item.add_marker(pytest.mark.lab)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CONFIG_HOME in config.stash:
        config.stash[_CONFIG_HOME].cleanup()


@pytest.hookimpl(trylast=True)  # after pytest-randomly has shuffled them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files with long tests first: those with short ones then fill up all workers until the end.
    items.sort(key=lambda item: _WITH_PROCESSES.isdisjoint(item.path.parts))
    wants_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not wants_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wants_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    # Each full collection of garbage would go through the objects of all modules again.
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("../shared" in str(report.longrepr) for report in skipped)
    if count:
        text = f"{count} tests were skipped because their data is missing"
        terminalreporter.write_line(f"{text}: CONTRIBUTING.md, Test data, says how to get it")


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    watch = (
        guards.Environment(), guards.Signals(), guards.Torch(), guards.Threads(), guards.Processes(),
        guards.Files(request.config.rootpath),
    )  # fmt: skip
    before = [guard.look() for guard in watch]
    yield
    # Every guard puts its own things right, so all of them run before the verdict.
    problems = [problem for guard, seen in zip(watch, before, strict=True) for problem in guard.left(seen)]
    if problems:
        pytest.fail("the test left behind: " + "; ".join(problems), pytrace=False)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return _ROOT


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    """MNIST's four .gz files: in data/mnist, or in shared/data/mnist beside the checkout."""
    for folder in (_ROOT / "data" / "mnist", _ROOT.parent / "shared" / "data" / "mnist"):
        if (folder / "train-images-idx3-ubyte.gz").is_file():
            return folder
    pytest.skip("MNIST's files are neither in data/mnist nor in ../shared/data/mnist")


def mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=100)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"can't mount a disk for the test, which only root may: {error}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk))
    assert os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize <= 2**20
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
