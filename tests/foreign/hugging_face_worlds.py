"""Runs a script with Hugging Face's packages in worlds of several sizes."""

import contextlib
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.foreign.scripts import Starter

# What scripts import; of these, a script's text has the first two. torch imports the last one for deterministic
# algorithms; it takes seconds.
IMPORTED = ("transformers", "sklearn.datasets", "samebits.integrations.accelerate", "torch._inductor.config")


@dataclass(frozen=True)
class Worlds:
    """A script, and the process that forks its worlds."""

    starter: Starter
    script: Path

    def run(self, size: int, *arguments: object, kill_when: Path | None = None) -> tuple[str | None, str]:
        """Run the script on a number of processes.

        Args:
            size: Number of processes.
            *arguments: Arguments of the script.
            kill_when: Kill rank 0 when it has written this file, and then the other ranks.

        Returns:
            The hash that the script prints, and all that it prints.
        """
        ended = self.starter.run_files([self.script], size, *arguments, alone=True, kill_when=kill_when)
        text = "".join(ended.texts)
        if kill_when is not None:
            assert -signal.SIGKILL in ended.codes, f"{self.script} has not written {kill_when}\n{text}"
        else:
            assert ended.codes == [0] * size, f"{self.script} on {size} processes: exit codes {ended.codes}\n{text}"
        found = re.search(r"^sha256 (\w{64})$", text, re.MULTILINE)
        return found and found[1], text

    def hash(self, size: int, *arguments: object) -> str:
        """Run the script on a number of processes, and return its hash."""
        found, text = self.run(size, *arguments)
        assert found, text
        return found


@contextlib.contextmanager
def worlds_of(script: Path, folder: Path) -> Iterator[Worlds]:
    """Start the process that forks worlds of a script, which run in a folder."""
    text = script.read_text(encoding="utf-8")
    imports = [name for name in IMPORTED if name not in IMPORTED[:2] or name in text]
    with Starter(*imports, cwd=folder, HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error") as starter:
        yield Worlds(starter, script)
