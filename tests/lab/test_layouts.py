"""Machines with different numbers of processes, each with its own network: one hash, also after a machine is lost."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import Host
from tests.faults.faults import SETTINGS, WAIT_S, Job
from tests.lab.test_hosts import KEY, _ended, _running
from tests.runs import LONG_S, ROOT, SAMEBITS, TINY, kill_machine, samebits, wait_until, weights

# Several buckets of a small model, in two levels and with a thread.
LIMITS = """
import samebits.parallel.exchange.tree_all_reduce as _tree
import samebits.parallel.reduce as _reduce

_reduce.BUCKET_BYTES, _tree.FLAT_BYTES, _tree.SMALL_BYTES = 300, 0, 100
"""
# A launcher that gets no turn for seconds on a busy machine must not count as lost.
PATIENT = ("cluster.node_timeout_s=120", "cluster.last_call_s=60")
IN_STEP = ("cluster.recovery=in_step", "data.slow_s=0.05")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe, in a folder with the weights that one process gives in alone/."""
    path = tmp_path_factory.mktemp("layouts") / "recipe.py"
    path.write_text(TINY.read_text(encoding="utf-8") + LIMITS, encoding="utf-8")
    samebits("train", path, *SETTINGS, "--procs", 1, "--run-dir", path.parent / "alone", cwd=path.parent)
    return path


def commands(recipe: Path, run: Path, layout: Sequence[int], nodes: str, *more: object) -> list[list[str]]:
    """`samebits train` for each machine."""
    train = [*SAMEBITS, "train", str(recipe), *SETTINGS, *PATIENT, *map(str, more), "--run-dir", str(run)]
    meet = ["--nodes", nodes, "--rdzv-endpoint", "n1:29525"]
    return [[*train, *meet, "--procs", str(num_procs)] for num_procs in layout]


@pytest.mark.parametrize("layout", [(3, 1), (4, 2), (1, 1, 4)], ids=lambda layout: "+".join(map(str, layout)))
def test_the_weights_do_not_depend_on_the_layout(
    layout: tuple[int, ...], three: list[Host], environ: dict[str, str], recipe: Path, tmp_path: Path
) -> None:
    texts = commands(recipe, tmp_path / "run", layout, str(len(layout)))
    started = [host.start(*text, env=environ | KEY, cwd=tmp_path) for host, text in zip(three, texts, strict=False)]
    with _running(*started) as processes:
        said = _ended(processes)
    assert f"{sum(layout)} processes on {len(layout)} hosts" in said[0]
    assert weights(tmp_path / "run") == weights(recipe.parent / "alone")


def test_nor_on_the_loss_of_a_machine(three: list[Host], environ: dict[str, str], recipe: Path, tmp_path: Path) -> None:
    texts = commands(recipe, tmp_path / "run", (2, 2), "1:2", *IN_STEP)
    with (tmp_path / "said").open("w") as said:
        started = [
            host.start(*text, env=environ | KEY, cwd=tmp_path, stdout=said)
            for host, text in zip(three, texts, strict=False)
        ]
        with _running(*started) as (first, second):
            running = Job(tmp_path, first)
            running.wait_for_step(5)
            kill_machine(second.pid)
            wait_until(lambda: running.steps() >= 8 or first.poll() is not None, WAIT_S)
            first.wait(LONG_S)
    text = (tmp_path / "said").read_text()
    assert first.returncode == 0, text
    assert "continuing with 2 processes at step" in text
    assert "from the last checkpoint" not in text
    assert weights(tmp_path / "run") == weights(recipe.parent / "alone")


def test_nor_do_those_of_a_loop_of_the_user(three: list[Host], environ: dict[str, str], tmp_path: Path) -> None:
    example = (ROOT / "examples" / "exact_ddp.py").read_text(encoding="utf-8")
    limits = 'import sys\n\nif "limits" in sys.argv:\n' + "".join(
        f"    {line}\n" for line in LIMITS.split("\n") if line
    )
    head, found, rest = example.partition("torch.manual_seed(0)")
    script = tmp_path / "loop.py"
    script.write_text(head + limits + found + rest.replace("range(5)", "range(1)"), encoding="utf-8")
    alone = three[0].run(sys.executable, script, env=environ, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--master-addr=n1", "--master-port=29526"]
    started = [
        host.start(*torchrun, "--nproc-per-node=2", f"--node-rank={rank}", script, "limits", env=environ, cwd=tmp_path)
        for rank, host in enumerate(three[:2])
    ]
    with _running(*started) as processes:
        said = _ended(processes)
    assert said[0].split()[-1] == alone.stdout.split()[-1]
