"""No version that Samebits allows or pins has a vulnerability that is listed in advisories.toml."""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def _lower_bounds(root: Path) -> dict[str, Version]:
    """The lowest version that pyproject.toml allows of each direct dependency."""
    document = tomllib.loads((root / "pyproject.toml").read_text())
    project = document["project"]
    required = [*document["build-system"]["requires"], *project["dependencies"]]
    required += [text for extra in project["optional-dependencies"].values() for text in extra]
    lower_bounds: dict[str, Version] = {}
    for requirement in map(Requirement, required):
        name = canonicalize_name(requirement.name)
        bounds = [Version(part.version) for part in requirement.specifier if part.operator in (">=", "==", "~=")]
        if bounds:
            lower_bounds[name] = min(max(bounds), lower_bounds.get(name, max(bounds)))
    return lower_bounds


def _pins(root: Path) -> dict[str, Version]:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in lines}


def vulnerable_versions(root: Path) -> list[str]:
    """Lower bounds and pins below the first fixed version of an advisory that is not accepted."""
    problems = []
    for advisory in tomllib.loads((root / "tests/house/advisories.toml").read_text())["advisory"]:
        if "accepted" in advisory:
            continue
        for source, versions in (("pyproject.toml", _lower_bounds(root)), ("constraints.txt", _pins(root))):
            version = versions.get(advisory["package"])
            if version and version < _release(advisory["fixed"], version):
                problems.append(
                    f"{source}: {advisory['package']} {version} has {', '.join(advisory['ids'])}; "
                    f"{advisory['fixed']} is the first version without"
                )
    return problems


def _release(fixed: str, required: Version) -> Version:
    """Return the fixed version, shortened to the precision of the lower bound: >=4.12 excludes all before 4.12.0.88."""
    return Version(".".join(fixed.split(".")[: max(2, len(required.release))]))


@pytest.fixture
def copied(repo: Path, tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "constraints.txt", "tests/house/advisories.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repo / name, tmp_path / name)
    return tmp_path


def test_no_allowed_or_pinned_version_has_a_known_vulnerability(repo: Path) -> None:
    assert vulnerable_versions(repo) == []


@pytest.mark.parametrize(
    ("name", "good", "bad", "says"),
    [
        ("pyproject.toml", '"pillow>=12.3"', '"pillow>=12.2"', "pyproject.toml: pillow 12.2 has CVE-2026-54059"),
        ("pyproject.toml", '"scikit-learn>=1.5"', '"scikit-learn>=1.4"', "scikit-learn 1.4 has CVE-2024-5206"),
        ("pyproject.toml", '"onnx>=1.22"', '"onnx>=1.21"', "onnx 1.21 has"),
        ("constraints.txt", "PyYAML==6.0.3", "PyYAML==5.3.1", "constraints.txt: pyyaml 5.3.1 has CVE-2020-14343"),
    ],
)
def test_a_vulnerable_version_is_named(copied: Path, name: str, good: str, bad: str, says: str) -> None:
    text = (copied / name).read_text()
    assert good in text
    (copied / name).write_text(text.replace(good, bad))
    assert any(says in problem for problem in vulnerable_versions(copied))


def test_every_direct_dependency_has_a_lower_bound(repo: Path) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    required = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    assert required - set(_lower_bounds(repo)) == set()


def test_an_advisory_has_its_names_and_an_accepted_one_a_reason_that_holds(repo: Path) -> None:
    document = tomllib.loads((repo / "tests/house/advisories.toml").read_text())
    assert isinstance(document["checked"], datetime.date)
    known = set(_lower_bounds(repo)) | set(_pins(repo))
    for advisory in document["advisory"]:
        assert advisory["ids"], advisory
        assert advisory["package"] == canonicalize_name(advisory["package"])
        assert advisory["package"] in known, f"{advisory['package']} is no longer used"
        if "accepted" in advisory:
            source = "\n".join(path.read_text() for path in (repo / "src" / "samebits").rglob("*.py"))
            assert advisory["never_in_package"] not in source, advisory["accepted"]


_FAULT = {"id": "PYSEC-2099-1", "aliases": ["CVE-2099-1"], "fix_versions": ["99"], "description": ""}
_ACCEPTED = _FAULT | {"id": "PYSEC-2025-1", "aliases": ["CVE-2025-3000"]}


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ({"version": "1", "vulns": []}, 0, "no known vulnerabilities"),
        ({"version": "1", "vulns": [_FAULT]}, 1, "torch 1: CVE-2099-1 PYSEC-2099-1, fixed in 99"),
        ({"version": "1", "vulns": [_ACCEPTED]}, 0, "(accepted)"),
        ({"skip_reason": "Dependency not found on PyPI"}, 2, "NOT COMPLETE. The database has no answer for torch"),
    ],
    ids=["none", "one", "an accepted one", "no answer"],
)
def test_the_audit_trusts_an_answer(repo: Path, copied: Path, answer: dict[str, object], code: int, says: str) -> None:
    done = _audit(repo, copied, answer)
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("faults", "code", "says"),
    [
        ([], 2, "pinned: asked about 1 of 1 packages"),
        ([{**_FAULT, "fixed_in": ["99"], "withdrawn": None}], 1, "CVE-2099-1 PYSEC-2099-1, fixed in 99"),
        ([{**_FAULT, "fixed_in": ["99"], "withdrawn": "2099-01-01"}], 2, "pinned: asked about 1 of 1 packages"),
    ],
    ids=["none", "one", "a withdrawn one"],
)
def test_the_page_of_the_latest_release_answers_for_a_version_without_one(
    repo: Path, copied: Path, faults: list[dict[str, object]], code: int, says: str
) -> None:
    page = copied / "index" / "torch" / "json"
    page.parent.mkdir(parents=True)
    page.write_text(json.dumps({"info": {"version": str(_pins(copied)["torch"])}, "vulnerabilities": faults}))
    done = _audit(repo, copied, {"skip_reason": "Dependency not found on PyPI"})
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout


def _audit(repo: Path, copied: Path, answer: dict[str, object]) -> subprocess.CompletedProcess[str]:
    """Run .ci/audit with this answer of pip-audit for torch, and with pages of releases in copied/index."""
    shutil.copytree(repo / ".ci", copied / ".ci")
    tools = copied / ".venv/audit/bin"
    tools.mkdir(parents=True)
    (tools.parent / "lowest.txt").write_text("")
    answers = json.dumps({"dependencies": [{"name": "torch", **answer}]})
    for name, text in (("uv", ""), ("pip-audit", answers)):
        (tools / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (tools / name).chmod(0o755)
    return subprocess.run(
        [sys.executable, copied / ".ci/audit"],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "AUDIT_INDEX": (copied / "index").as_uri()},
    )
