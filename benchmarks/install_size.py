"""The size of Samebits's core beside torch: the packages that `pip install samebits` installs, and their bytes.

Measures the environment of the interpreter that runs it. In an empty one:

    make dist && python3 -m venv empty && empty/bin/pip install dist/*.whl
    empty/bin/python benchmarks/install_size.py [--downloads]

Packages that torch itself needs count as torch's. Bytes are those of the installed files without compiled ones (.pyc).
With --downloads, the wheels of these versions are downloaded into a temporary folder, and their bytes are listed too.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

DISTRIBUTION = "samebits"


def closure(name: str) -> set[str]:
    """Return a distribution and all that it requires without extras, by normalized name; those that are installed."""
    found: set[str] = set()
    waiting = [normalized(name)]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        try:
            required = metadata.requires(each) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform
        found.add(each)
        waiting += [normalized(line) for line in required if "extra ==" not in line]
    return found


def normalized(requirement: str) -> str:
    """Return the name in a requirement, as the package index compares it."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def num_bytes(name: str) -> int:
    """Return the bytes of a distribution's installed files."""
    paths = [Path(str(file.locate())) for file in metadata.files(name) or () if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.is_file())


def download_bytes(names: Iterable[str]) -> dict[str, int]:
    """Return the bytes of the wheel of each distribution, in its installed version, as pip downloads it."""
    wanted = [f"{name}=={metadata.version(name)}" for name in names]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", "-d", folder]
        subprocess.run([*command, *wanted], check=True)
        return {normalized(path.name.partition("-")[0]): path.stat().st_size for path in Path(folder).iterdir()}


def main() -> None:
    """Print a row for each package, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--downloads", action="store_true", help="also list the bytes that pip downloads")
    arguments = parser.parse_args()
    sizes = {name: num_bytes(name) for name in closure(DISTRIBUTION) - closure("torch")}
    own = normalized(DISTRIBUTION)
    downloads = download_bytes(sizes.keys() - {own}) if arguments.downloads else {}
    for name, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
        fetched = f"  {downloads[name] / 1e6:6.1f} MB" if name in downloads else ""
        print(f"{name:<20} {metadata.version(name):<12} {size / 1e6:6.1f} MB{fetched}")
    count = f"{len(sizes) - 1} packages beside torch and {DISTRIBUTION}"
    print(f"{count}: {sum(sizes.values()) / 1e6:.1f} MB with {DISTRIBUTION}, installed")
    if downloads:
        print(f"{sum(downloads.values()) / 1e6:.1f} MB to download, without {DISTRIBUTION}")


if __name__ == "__main__":
    main()
