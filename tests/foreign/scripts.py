"""Starts of the training scripts in this folder, in real processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests import warm_start
from tests.foreign.forms import FOLDER, script
from tests.runs import environment

# Steps of optimizers, over all of a process, after which a rank is killed: after the first checkpoint.
KILL_AT = {
    "ddp_cnn": 25, "ddp_vit": 15, "ddp_unet": 7, "ddp_detection": 20, "ddp_gan": 22, "ddp_text": 18, "ddp_timm": 12,
    "lightning_cnn": 15, "lightning_contrastive": 15, "lightning_gan": 30, "lightning_unet": 7, "lightning_vit": 7,
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """The exit codes of a start's processes, and what they printed."""

    codes: list[int]
    texts: list[str]

    @property
    def sha256(self) -> str:
        """The digest that rank 0 printed."""
        assert not any(self.codes), "\n".join([str(self.codes), *self.texts])
        (digest,) = re.findall(r"^sha256 (\w{64})$", "\n".join(self.texts), re.MULTILINE)
        return digest


class Starter:
    """Context with the process of `in_processes.py`, which starts scripts without importing torch anew.

    Args:
        imports: Further modules to import once.
        cwd: Working directory of the scripts.
        environ: Further environment variables of the scripts.
    """

    def __init__(self, *imports: str, cwd: Path | None = None, **environ: str) -> None:
        self._imports, self._cwd, self._environ = imports or ("sklearn.datasets",), cwd, environ

    def __enter__(self) -> Starter:
        self._server = warm_start.popen(
            [sys.executable, FOLDER / "in_processes.py", *self._imports],
            cwd=self._cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(**self._environ),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    @property
    def pid(self) -> int:
        """The process that starts the others."""
        return self._server.pid

    def run(self, name: str, form: str, procs: int, checkpoint: Path, *, kill_at: int | None = None) -> Ended:
        """Run a script of this folder to its end, or until a rank is killed."""
        file = script(name, form, checkpoint.parent)
        return self.run_files([file], procs, "--checkpoint", checkpoint, kill_at=kill_at)

    def run_files(
        self,
        scripts: list[Path],
        procs: int,
        *arguments: object,
        alone: bool = False,
        kill_at: int | None = None,
        kill_when: Path | None = None,
    ) -> Ended:
        """Run a script, or one for each rank.

        Args:
            scripts: One for all ranks, or one for each.
            procs: Number of processes.
            arguments: Arguments of the scripts.
            alone: Whether one process runs without a launcher's environment variables.
            kill_at: Kill the last rank after this number of optimizer steps.
            kill_when: Kill rank 0 when it has written this file.
        """
        request = {
            "scripts": list(map(str, scripts)), "arguments": list(map(str, arguments)), "procs": procs, "alone": alone,
            "kill_at": kill_at, "kill_when": kill_when and str(kill_when),
        }  # fmt: skip
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return Ended(**json.loads(self._server.stdout.readline()))
