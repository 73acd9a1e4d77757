"""Set-up and the make commands: without a .venv, and when tests fail."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samebits.extras import EXTRAS

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")

ONE_OF_EACH = "import pytest\n@pytest.mark.full\ndef test_x(): ...\ndef test_y(): ...\n"


@pytest.fixture
def checkout(repo: Path, tmp_path: Path) -> Path:
    """The files that set up, in a folder of their own."""
    for name in ("Makefile", "constraints.txt", ".ci/run", ".ci/venv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(repo / name, tmp_path / name)
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def _run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    hidden = ("PYTEST_", "MAKE", "MFLAGS", "PYTHON")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environ |= variables
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=180)


def _old_python(folder: Path) -> Path:
    """Answers as Python 3.10 would."""
    code = 'case "$2" in *"%d.%d.%d"*) echo 3.10.13;; *"version_info < (3, 11)"*) exit 1;; *) exit 99;; esac'
    return _script(folder / "bin" / "python3.10", code)


@pytest.mark.parametrize("target", ["digits", "test"])
def test_an_older_python_is_refused_with_what_to_do(checkout: Path, target: str) -> None:
    run = _run(checkout, "make", target, f"PYTHON={_old_python(checkout)}")
    assert run.returncode != 0
    assert "is Python 3.10.13; Samebits needs 3.11 or newer" in run.stderr
    assert f"make {target} PYTHON=" in run.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_not_there_is_named(checkout: Path) -> None:
    run = _run(checkout, "make", "digits", "PYTHON=python3.99")
    assert run.returncode != 0
    assert "setup error: there is no python3.99" in run.stderr


@pytest.mark.full
def test_the_output_of_pip_is_shown_when_it_fails(checkout: Path) -> None:
    _script(checkout / ".venv/bin/python", 'case "$*" in *--version*) exit 0;; esac; echo "no matching torch"; exit 1')
    run = _run(checkout, "make", "venv", f"PYTHON={sys.executable}")
    assert run.returncode != 0
    assert "no matching torch" in run.stderr
    assert "setup error: pip could not install samebits" in run.stderr
    assert not (checkout / ".venv/.installed").exists()


@pytest.mark.full
def test_torch_s_index_gives_torch_alone(checkout: Path) -> None:
    _script(checkout / ".venv/bin/python", 'case "$*" in *--version*) ;; *) echo "$*" >> calls;; esac')
    run = _run(checkout, "make", "venv", f"PYTHON={sys.executable}", "TORCH_INDEX=https://torch.example/cpu")
    assert run.returncode == 0, run.stderr
    first, second, *_ = (checkout / "calls").read_text().splitlines()
    assert "--no-deps --index-url https://torch.example/cpu torch torchvision" in first
    assert "torch.example" not in second
    assert second.endswith("-e .[all]")


@pytest.mark.full
@pytest.mark.skipif(Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None, reason="has a GPU")
@pytest.mark.parametrize(
    ("reached", "gpu", "variables", "is_cpu"),
    [
        ("0", False, [], True),
        ("1", False, [], False),
        ("0", True, [], False),
        ("0", False, ["TORCH_INDEX="], False),
    ],
)
def test_a_machine_without_a_gpu_gets_torch_s_cpu_build_if_its_index_answers(
    checkout: Path, reached: str, gpu: bool, variables: list[str], is_cpu: bool
) -> None:
    code = f'case "$*" in *--version*) ;; *" index "*) exit {reached};; *) echo "$*" >> calls;; esac'
    _script(checkout / ".venv/bin/python", code)
    if gpu:
        _script(checkout / "tools/nvidia-smi", "exit 0")
    path = f"{checkout}/tools:{os.environ['PATH']}"
    run = _run(checkout, "make", "venv", f"PYTHON={sys.executable}", *variables, PATH=path)
    assert run.returncode == 0, run.stderr
    calls = (checkout / "calls").read_text().splitlines()
    assert ("--no-deps --index-url https://download.pytorch.org/whl/cpu torch torchvision" in calls[0]) == is_cpu
    assert any(call.endswith("-e .[all]") for call in calls)
    assert ("torch's CPU build" in run.stdout) == is_cpu
    assert ("GPU libraries" in run.stdout) == (not is_cpu)


@pytest.mark.full
@pytest.mark.skipif(Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None, reason="has a GPU")
@pytest.mark.parametrize(("given", "code"), [([], 0), (["TORCH_INDEX=https://torch.example/cpu"], 2)])
def test_an_index_that_lacks_torch_s_version_ends_the_setup_only_if_it_was_named(
    checkout: Path, given: list[str], code: int
) -> None:
    script = 'case "$*" in *--version*|*" index "*) ;; *--index-url*) exit 1;; *) echo "$*" >> calls;; esac'
    _script(checkout / ".venv/bin/python", script)
    run = _run(checkout, "make", "venv", f"PYTHON={sys.executable}", *given)
    assert run.returncode == code, run.stderr
    assert (checkout / "calls").exists() == (code == 0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "doing"),
    [
        ("Collecting scipy==1.16 (from x)", "looking for scipy==1.16"),
        ("  Downloading https://index.example/a/torch-2.whl (190.1 MB)", "downloading torch-2.whl (190.1 MB)"),
        ("Installing collected packages: a, b, c", "unpacking 3 packages"),
        ("", "asking the package index"),
    ],
)
def test_the_lines_while_pip_works_tell_what_it_does(checkout: Path, line: str, doing: str) -> None:
    (checkout / "log").write_text(f"Looking in indexes: x\n{line}\n")
    command = 'log=log; source <(sed -n "/^doing()/,/^}/p" .ci/venv); doing'
    assert _run(checkout, "bash", "-c", command).stdout == f"{doing}\n"


def test_the_lines_while_pip_works_end_with_the_set_up(checkout: Path) -> None:
    _script(checkout / ".venv/bin/python", "exit 0")
    start = time.monotonic()
    run = _run(checkout, "make", "venv", f"PYTHON={sys.executable}", "TORCH_INDEX=")
    assert "installed in" in run.stdout
    assert time.monotonic() - start < 9  # a last sleep of ten seconds would keep the pipe of its output open


def test_nothing_advises_to_mix_two_indexes(repo: Path) -> None:
    pages = [*repo.glob("*.md"), *(repo / "docs").rglob("*.md"), repo / "Makefile", repo / ".ci/venv", repo / ".ci/run"]
    mixing = re.compile(r"extra-index-url[ =]+['\"]?(https?|\$)")
    assert [path.name for path in pages if mixing.search(path.read_text())] == []


@pytest.fixture
def ready(checkout: Path) -> Path:
    """As after set-up: a .venv whose Python is the one that runs this, and in which every check but pytest passes."""
    code = f'case "$*" in "-m pytest"*|"- "*) exec {sys.executable} "$@";; *) exit 0;; esac'
    _script(checkout / ".venv/bin/python", code)
    (checkout / ".venv/.installed").touch()
    (checkout / ".venv/.installed-dev").touch()
    rules = checkout / "tests" / "house" / "test_rules.py"
    rules.parent.mkdir(parents=True)
    rules.write_text("import pytest\n@pytest.mark.check\ndef test_rule(): ...\n")
    return checkout


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def test_x(): assert False\n", "ci: FAILED: test"),
        ("", "ci: FAILED: test"),
        (
            ONE_OF_EACH.replace("import pytest", "import pytest\npytestmark = pytest.mark.skip"),
            "ci: FAILED: count of tests",
        ),
        (ONE_OF_EACH + "@pytest.mark.skip\ndef test_z(): ...\n", "ci: FAILED: count of tests"),
        ("import pytest\n@pytest.mark.full\ndef test_x(): assert False\ndef test_y(): ...\n", "ci: FAILED: test-full"),
        ("raise SystemExit(0)\n", "ci: FAILED: test"),
    ],
    ids=[
        "one fails", "there is none", "all are skipped", "a third is skipped", "a full one fails", "collection ends it",
    ],
)  # fmt: skip
def test_continuous_integration_fails_when(ready: Path, text: str, says: str) -> None:
    (ready / "tests/test_x.py").write_text(text)
    run = _run(ready, ".ci/run", JOBS="0")
    assert run.returncode != 0, run.stdout
    assert says in run.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "says"), [("assert False", "ci: FAILED: check"), ("...", "ci: 2 of 2 tests ran")], ids=["broken", "kept"]
)
def test_continuous_integration_passes_when_tests_pass_and_rules_are_kept(ready: Path, rule: str, says: str) -> None:
    (ready / "tests/test_x.py").write_text(ONE_OF_EACH)
    (ready / "tests/house/test_rules.py").write_text(f"import pytest\n@pytest.mark.check\ndef test_rule(): {rule}\n")
    run = _run(ready, ".ci/run", JOBS="0")
    assert (run.returncode == 0) == (rule == "..."), run.stdout + run.stderr
    assert says in run.stdout + run.stderr


@pytest.mark.full
def test_set_up_is_done_once(ready: Path) -> None:
    (ready / "tests/test_x.py").write_text("def test_x(): ...\n")
    assert "installing" not in _run(ready, "make", "test", "JOBS=0").stdout


def test_constraints_are_versions_only_and_fit_what_the_package_asks_for(repo: Path) -> None:
    import tomllib

    from packaging.requirements import Requirement

    lines = [line for line in (repo / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines)
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(text for extra in ("bench", "dev", *EXTRAS) for text in extras[extra])]:
        wanted = Requirement(text)
        if wanted.name == project["name"]:  # its own extras
            continue
        assert wanted.specifier.contains(pinned[wanted.name.lower().replace("_", "-")]), text
