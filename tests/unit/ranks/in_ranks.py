"""Starts three processes of a script of this folder, and reads what each prints as JSON."""

import json
import subprocess
import sys
from pathlib import Path

from tests import warm_start
from tests.runs import environment, own_port

FOLDER = Path(__file__).parent


def run(name: str, *arguments: object) -> list[object]:
    """What three processes print, by rank."""
    port = str(own_port())
    started = [
        warm_start.popen(
            [sys.executable, FOLDER / name, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
            env=environment(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
        )
        for rank in range(3)
    ]  # fmt: skip
    texts = [process.communicate(timeout=240)[0] for process in started]
    assert not any(process.returncode for process in started)
    return [json.loads(text) for text in texts]
