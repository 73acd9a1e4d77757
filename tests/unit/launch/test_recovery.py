"""After the loss of a process: recovery in the step where it works, by default, and else a restart with its reason."""

import math
from pathlib import Path

import pytest

from samebits.config.schema import RunConfig
from samebits.launch.crew.recovery import STOPPED_S, Recovery, choose_recovery
from samebits.process_range import ProcessRange, RendezvousConfig

NODES = RendezvousConfig(ProcessRange(2, 2), "a:29400", "run", 10.0, 1.0, 5.0, Path("runs/a"))


def chosen(
    max_restarts: int = 1, nodes: RendezvousConfig | None = None, num_procs: int = 2, **more: object
) -> Recovery:
    config = RunConfig.model_validate({"recipe": "any", "device": "cpu", **more})
    return choose_recovery(config, nodes, num_procs, max_restarts)


def test_the_default_recovers_in_the_step_with_restarts_on_one_machine() -> None:
    assert chosen() == Recovery(True, math.inf)
    assert chosen(max_restarts=0) == Recovery()
    assert chosen(nodes=NODES) == Recovery()
    assert chosen(cluster={"recovery": "restart"}) == Recovery()


def test_the_default_names_why_all_restart(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(batch_norm="sync") == Recovery(why_restart="batch_norm=sync")
    assert chosen(num_procs=1) == Recovery(why_restart="one process")
    assert capsys.readouterr().err == ""


def test_in_step_that_is_set_kills_stopped_processes_and_is_refused_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    in_step = {"recovery": "in_step"}
    assert chosen(0, cluster=in_step) == Recovery(True, STOPPED_S)
    assert chosen(0, NODES, cluster=in_step).in_step
    assert chosen(batch_norm="sync", cluster=in_step) == Recovery()
    assert "cluster.recovery=in_step does not work with batch_norm=sync" in capsys.readouterr().err
