"""Ranks from the environment, the command line, Slurm and MPI, and every way in which they can be wrong."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.cluster.env import PORTS, RankAssignment, first_host, is_in_world, read_assignment, to_torchrun_env
from samebits.errors import LaunchError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_an_environment_without_a_launcher_is_no_world() -> None:
    assert read_assignment({}) is None
    assert not is_in_world({})
    assert to_torchrun_env({"PATH": "/bin"}) == ({"PATH": "/bin"}, "")


def test_torchrun_and_our_launcher_are_recognized() -> None:
    assert is_in_world(TORCHRUN)
    assert read_assignment(TORCHRUN) == RankAssignment(3, 4, 1, 2, "tcp://10.0.0.5:29500", "torchrun", 2, True, "job")
    assert read_assignment(TORCHRUN | {"SAMEBITS_LAUNCHED": "1"}).started_by == "samebits"


def test_variables_set_by_hand_are_a_world_of_the_command_line() -> None:
    here = read_assignment(BY_HAND)
    assert here == RankAssignment(0, 2, None, None, "tcp://a:29500", "command line")
    assert read_assignment(BY_HAND, init="env://") == here
    assert read_assignment(BY_HAND | {"MASTER_ADDR": "fe80::1"}).init == "tcp://[fe80::1]:29500"


def test_the_command_line_wins_over_the_environment() -> None:
    here = read_assignment(TORCHRUN, init="tcp://b:1", rank=0, world_size=2)
    assert (here.rank, here.world_size, here.init, here.started_by) == (0, 2, "tcp://b:1", "command line")
    assert not here.agent_store


@pytest.mark.parametrize("init", ["tcp://host:29500", "tcp://[::1]:29500"])
def test_each_form_of_init_is_taken(init: str) -> None:
    here = read_assignment({}, init=init, rank=1, world_size=2)
    assert here.init == init


REFUSED: list[tuple[dict[str, str], dict[str, Any], list[str]]] = [
    *(({}, {"init": init, "rank": 0, "world_size": 2}, [init, words]) for init, words in {
        "tcp://host": "no port", "tcp://:29500": "no host", "tcp://host:99999": "99999",
        "host:29500": "not an address", "file://meet": "--init tcp://", "file:///tmp/x": "--init tcp://",
        "http://host:80": "not an address",
    }.items()),
    ({}, {"init": "tcp://a:1", "world_size": 2}, ["without --rank"]),
    ({}, {"init": "tcp://a:1", "rank": 0}, ["without --world-size"]),
    ({}, {"rank": 0, "world_size": 2}, ["--rank was given without --init"]),
    (BY_HAND | {"WORLD_SIZE": "0"}, {}, ["WORLD_SIZE is 0"]),
    *(({name: BY_HAND[name] for name in BY_HAND if name != each}, {}, [f"{each} is not set"]) for each in BY_HAND),
    *((BY_HAND | {name: value}, {}, [name, value])
      for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK") for value in ("two", "1.5", "-1")),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "given", "texts"), REFUSED)
def test_an_address_or_a_variable_that_cannot_be_or_is_missing_is_named(
    environ: dict[str, str], given: dict[str, Any], texts: list[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        read_assignment(environ, **given)
    assert [text for text in texts if text not in str(caught.value)] == []


@given(rank=st.integers(-3, 20), world_size=st.integers(-3, 20))
def test_a_rank_is_taken_exactly_if_it_is_below_the_world_size(rank: int, world_size: int) -> None:
    if 0 <= rank < world_size:
        here = read_assignment({}, "tcp://a:1", rank, world_size)
        assert (here.rank, here.world_size) == (rank, world_size)
    else:
        with pytest.raises(LaunchError, match=str(world_size if world_size < 1 else rank)):
            read_assignment({}, "tcp://a:1", rank, world_size)


SRUN = {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "0",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1273430017",
    "OMPI_MCA_orte_hnp_uri": "1273430016.0;tcp://192.0.2.2:58345;tcp6://[fd00::2]:48357",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def _place(environ: dict[str, str]) -> RankAssignment:
    here = read_assignment(environ)
    assert here is not None
    return here


def test_a_task_of_srun_is_one_rank_of_a_world_with_rank_0_on_the_first_node() -> None:
    here = _place(SRUN)
    assert (here.rank, here.world_size, here.local_rank, here.started_by) == (3, 4, 1, "slurm")
    assert here.init.startswith("tcp://gpu07:")
    assert is_in_world(SRUN)
    assert _place(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).init.startswith("tcp://127.0.0.1:")
    assert _place(SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}).init == "tcp://b:7", "a master of one's own wins"


def test_all_tasks_of_a_step_work_out_the_same_port_and_another_step_another() -> None:
    other_rank = _place(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert other_rank.init == _place(SRUN).init
    assert _place(SRUN | {"SLURM_STEP_ID": "1"}).init != other_rank.init
    assert int(other_rank.init.rpartition(":")[2]) in PORTS


def test_an_allocation_or_a_single_task_is_no_world() -> None:
    allocation = {"SLURM_JOB_ID": "812", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "a,b"}
    assert read_assignment(allocation) is None
    assert read_assignment(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_torchrun_inside_of_srun_wins() -> None:
    inside = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"}
    here = _place(SRUN | inside)
    assert (here.rank, here.world_size, here.init, here.started_by) == (0, 2, "tcp://a:29500", "torchrun")


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_mpirun_is_recognized_on_one_machine(environ: dict[str, str]) -> None:
    here = _place(environ)
    assert (here.rank, here.world_size, here.local_rank, here.started_by) == (1, 2, 1, "mpi")
    assert here.init.startswith("tcp://127.0.0.1:")


def test_open_mpi_is_recognized_on_several_machines() -> None:
    apart = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert _place(OPEN_MPI | apart).init.startswith("tcp://192.0.2.2:")


def test_mpich_on_several_machines_asks_where_rank_0_is() -> None:
    apart = MPICH | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    with pytest.raises(LaunchError, match="no variable locates rank 0"):
        read_assignment(apart)
    assert _place(apart | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}).init == "tcp://a:5"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("gpu[007-012,20],cpu1", "gpu007"),
        ("rack[2-3]-node[01-04]", "rack2-node01"), ("n[5,7]", "n5"),
    ],
)  # fmt: skip
def test_the_first_of_slurms_list_of_nodes_is_found(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
