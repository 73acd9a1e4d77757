"""Runs a script in worlds of several sizes. torch and the packages of Hugging Face are imported once, then forked.

The tests start this file as a process of its own. It reads one JSON object a line: a world to run; it prints one: the
exit codes of its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONG_S = 180.0
# What scripts import; of these, a script's text has the first two. torch imports the last one for deterministic
# algorithms; it takes seconds.
IMPORTED = ("transformers", "sklearn.datasets", "samebits.integrations.accelerate", "torch._inductor.config")


@dataclass
class Worlds:
    """The process that forks the worlds of one script.

    Attributes:
        process: The process.
        script: The script.
        folder: Where the script runs.
    """

    process: subprocess.Popen[str]
    script: Path
    folder: Path

    def run(self, size: int, *arguments: object, kill_when: Path | None = None) -> tuple[str | None, str]:
        """Run the script on a number of processes.

        Args:
            size: Number of processes.
            *arguments: Arguments of the script.
            kill_when: Kill rank 0 when it has written this file, and then the other ranks.

        Returns:
            The hash that the script prints, and all that it prints.
        """
        from tests.runs import own_port

        log = self.folder / "log.txt"
        command = {
            "size": size,
            "script": str(self.script),
            "arguments": list(map(str, arguments)),
            "port": own_port(),
            "log": str(log),
            "kill_when": None if kill_when is None else str(kill_when),
        }
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        reply = self.process.stdout.readline()
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        assert reply, f"the process that forks has ended\n{text}"
        codes = json.loads(reply)
        if kill_when is not None:
            assert -signal.SIGKILL in codes, f"{self.script} has not written {kill_when}\n{text}"
        else:
            assert codes == [0] * size, f"{self.script} on {size} processes: exit codes {codes}\n{text}"
        found = re.search(r"^sha256 (\w{64})$", text, re.MULTILINE)
        return found and found[1], text

    def hash(self, size: int, *arguments: object) -> str:
        """Run the script on a number of processes, and return its hash."""
        found, text = self.run(size, *arguments)
        assert found, text
        return found


@contextlib.contextmanager
def worlds_of(script: Path, folder: Path) -> Iterator[Worlds]:
    """Start the process that forks worlds of a script."""
    from tests import warm_start
    from tests.runs import environment

    process = warm_start.popen(
        [sys.executable, __file__, str(script)],
        cwd=folder,
        env=environment(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Worlds(process, script, folder)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _rank(command: dict[str, Any], rank: int) -> None:
    """Become a rank, and run the script."""
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    size = command["size"]
    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(command["port"])}
    if command["kill_when"]:
        _kill_after_writing(command["kill_when"])
    sys.argv = [command["script"], *command["arguments"]]
    code = 0
    try:
        runpy.run_path(command["script"], run_name="__main__")
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _kill_after_writing(path: str) -> None:
    replace = Path.replace

    def replace_and_kill(self: Path, target: Any) -> Path:
        result = replace(self, target)
        if str(target) == path:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Path.replace = replace_and_kill  # type: ignore[method-assign]


def _run(command: dict[str, Any]) -> list[int]:
    """Fork the ranks, and wait for them. The first failure ends them all."""
    Path(command["log"]).unlink(missing_ok=True)
    children: list[int] = []
    for rank in range(command["size"]):
        child = os.fork()
        if child == 0:
            _rank(command, rank)
        children.append(child)
    codes: dict[int, int] = {}
    end = time.monotonic() + LONG_S
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > end:
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[child] for child in children]


def main() -> None:
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    for name in IMPORTED:
        if name in IMPORTED[:2] and name not in text:
            continue
        with contextlib.suppress(ImportError):
            __import__(name)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
