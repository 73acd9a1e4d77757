"""The predicted time of a step: its traffic is that of real exchanges, and its arithmetic holds for any parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samebits.cli.main import run
from samebits.config.schema import RunConfig
from samebits.errors import ConfigError
from samebits.parallel.exchange.link import Link, parse_link
from samebits.scaling.step_time.costs import costs_from_json, costs_to_json
from samebits.scaling.step_time.model import FORWARD_SHARE, MachineGroup, StepCosts, last_that_pays, predict
from samebits.scaling.step_time.table import StepPlan, bar, step_values
from samebits.scaling.step_time.traffic import MessageRound, check_countable, count_traffic
from tests.runs import TINY, samebits

SECONDS = st.floats(0.0, 1.0)
LINKS = st.builds(Link, st.floats(1e6, 1e12), st.floats(0.0, 0.1))
COSTS = st.builds(StepCosts, SECONDS, SECONDS, SECONDS, st.floats(0.0, 1e-8), st.none() | LINKS, st.floats(0.0, 1e-3))
MACHINES = st.builds(MachineGroup, st.integers(1, 64), st.integers(1, 8), st.just(0.0) | st.floats(0.1, 8.0), LINKS)
ROUNDS = st.builds(
    MessageRound, st.integers(1, 99), st.integers(1, 10**8), st.integers(0, 10**8), st.integers(0, 10**8)
)
TRAFFIC = st.lists(st.lists(ROUNDS, max_size=6), max_size=4)
LEAVES = st.integers(1, 999)


def settings(**more: object) -> RunConfig:
    return RunConfig(recipe="test", **{"global_batch": 64, "micro_batch": 1, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100Gbit,5us", Link(100e9, 5e-6)),
        ("1.5Gbit, 0.25ms", Link(1.5e9, 0.25e-3)),
        ("100Mbit,10ms", Link(100e6, 0.01)),
    ],
)
def test_a_link_is_read(text: str, link: Link) -> None:
    read = parse_link(text, "--link")
    assert (read.bits_per_s, read.latency_s) == pytest.approx((link.bits_per_s, link.latency_s))


@given(LINKS)
def test_a_link_is_printed_as_it_is_read(link: Link) -> None:
    read = parse_link(str(link), "--link") if link.latency_s > 1e-9 else link
    assert read.bits_per_s == pytest.approx(link.bits_per_s, rel=1e-3)
    assert read.latency_s == pytest.approx(link.latency_s, rel=1e-3)


@pytest.mark.parametrize("text", ["100", "100Gbit", "0Gbit,5us", "fast,5us", "100Gbit,5"])
def test_another_text_is_no_link(text: str) -> None:
    with pytest.raises(ConfigError, match="--link is"):
        parse_link(text, "--link")


@pytest.mark.parametrize("procs", [2, 5, 32])
def test_counted_messages_are_those_of_simulated_ranks(procs: int, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["global_batch=40", "micro_batch=1"]
    assert run(["simulate", str(TINY), *more, "--procs", str(procs), "--steps", "1", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)["runs"][0]
    from samebits.config.load import load
    from samebits.recipes.catalog import find

    found = find(str(TINY))
    config = load(found.config_class, found.layers, more).config
    buckets = count_traffic(config, found.build(config, {}).model.to("meta"), procs, 1)
    rounds = [each for bucket in buckets for each in bucket]
    # Bytes are counted in both directions, of which the larger number counts.
    assert simulated["rounds"] == len(rounds)
    assert sum(each.messages for each in rounds) == pytest.approx(simulated["messages"], abs=len(rounds))
    assert simulated["num_bytes"] <= sum(each.num_bytes for each in rounds) <= 1.5 * simulated["num_bytes"]


def test_a_large_bucket_of_two_ranks_takes_a_ring_s_bytes() -> None:
    model = nn.Linear(2000, 2000, bias=False, device="meta")
    ((first, second),) = count_traffic(settings(), model, 2, 1)
    half = 4 * 2000**2 / 2
    assert first.between_bytes == first.added_bytes == pytest.approx(half, rel=0.001)
    assert second.between_bytes == pytest.approx(half, rel=0.001)
    assert second.added_bytes == 0


def test_messages_within_a_machine_do_not_use_the_link() -> None:
    model = nn.Linear(100, 100, device="meta")
    ((one,),) = count_traffic(settings(), model, 8, 8)
    ((two,),) = count_traffic(settings(), model, 8, 4)
    assert one.between_bytes == 0
    assert two.between_bytes / two.num_bytes == pytest.approx(4 / 7)


def test_one_rank_sends_nothing() -> None:
    assert count_traffic(settings(), nn.Linear(9, 9, device="meta"), 1, 1) == [[]]


def test_sixteen_bits_halve_the_bytes() -> None:
    model = nn.Linear(1000, 1000, bias=False, device="meta")
    whole, half = (
        sum(each.num_bytes for rounds in count_traffic(settings(compress=name), model, 2, 1) for each in rounds)
        for name in ("none", "bf16")
    )
    assert half / whole == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    "more", [{"parallel": "fsdp"}, {"batch_norm": "sync"}, {"mode": "fast", "compress": "powersgd"}]
)
def test_other_exchanges_are_refused(more: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="cannot be predicted"):
        check_countable(settings(**more))


def test_a_step_is_the_sum_that_can_be_computed_by_hand() -> None:
    costs = StepCosts(0.001, 0.010, 0.002, 1e-9, None)
    machines = MachineGroup(2, 1, 0, Link(8e9, 0.005))
    rounds = [[MessageRound(1, 1_000_000, 1_000_000, 1_000_000)]]
    found = predict(costs, machines, rounds, 8)
    assert found.compute_s == pytest.approx(4 * 0.010)
    assert found.latency_s == pytest.approx(2 * 0.005)
    assert found.bandwidth_s == pytest.approx(0.001)
    assert found.work_s == pytest.approx(0.001)
    assert found.total_s == pytest.approx(0.004 + 0.040 + 0.002 + 0.010 + 0.001 + 0.001)
    assert found.largest == "compute"


def test_each_message_is_work_and_more_processes_than_measured_take_longer() -> None:
    costs = StepCosts(0.0, 0.010, 0.0, 0.0, None, message_s=0.001)
    rounds = [[MessageRound(3, 0, 0, 0)]]
    measured = predict(costs, MachineGroup(1, 4, 4, Link(8e9, 0.0)), rounds, 4)
    assert (measured.work_s, measured.compute_s) == (pytest.approx(0.003), pytest.approx(0.010))
    shared = predict(costs, MachineGroup(1, 4, 2, Link(8e9, 0.0)), rounds, 4)
    assert (shared.work_s, shared.compute_s) == (pytest.approx(0.006), pytest.approx(0.020))


def test_early_buckets_are_hidden_by_the_backward_pass() -> None:
    costs = StepCosts(0.0, 1.0, 0.0, 0.0, None)
    machines = MachineGroup(2, 1, 0, Link(8e9, 0.0))
    half_s = (1 - FORWARD_SHARE) / 2
    rounds = [[MessageRound(1, 0, int(half_s * 1e9), 0)]] * 2
    found = predict(costs, machines, rounds, 2)
    assert found.total_s == pytest.approx(1.0 + half_s)  # of two transfers, one is hidden


@given(COSTS, MACHINES, TRAFFIC, LEAVES)
def test_no_part_is_negative_and_the_step_is_not_shorter_than_its_computing(
    costs: StepCosts, machines: MachineGroup, traffic: list[list[MessageRound]], leaves: int
) -> None:
    found = predict(costs, machines, traffic, leaves)
    assert min(vars(found).values()) >= 0
    assert found.total_s >= costs.compute_s


@given(COSTS, MACHINES, TRAFFIC, LEAVES, st.floats(1.0, 100.0))
def test_a_slower_link_or_fewer_measured_processes_make_no_step_shorter(
    costs: StepCosts, machines: MachineGroup, traffic: list[list[MessageRound]], leaves: int, factor: float
) -> None:
    now_s = predict(costs, machines, traffic, leaves).total_s
    link = machines.link
    for slower in (
        replace(machines, link=replace(link, bits_per_s=link.bits_per_s / factor)),
        replace(machines, link=replace(link, latency_s=link.latency_s * factor)),
        replace(machines, measured=machines.measured / factor),
    ):
        assert predict(costs, slower, traffic, leaves).total_s >= now_s * (1 - 1e-9)


@given(COSTS, MACHINES, LEAVES)
def test_without_messages_only_the_share_of_micro_batches_counts(
    costs: StepCosts, machines: MachineGroup, leaves: int
) -> None:
    found = predict(costs, machines, [[]], leaves)
    most = -(-leaves // (machines.nodes * machines.per_node))
    assert found.compute_s == pytest.approx(machines.slowdown * most * costs.compute_s)
    assert found.latency_s == found.bandwidth_s == found.work_s == 0


def test_the_number_that_pays_is_the_last_one_of_a_growing_throughput() -> None:
    assert last_that_pays({1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}) == 8
    assert last_that_pays({1: 8.0, 2: 4.0, 4: 3.9, 8: 3.8}) == 2
    assert last_that_pays({1: 1.0, 2: 2.0}) == 1


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6))
def test_a_bar_has_its_width(seconds: list[float]) -> None:
    assert len(bar(dict(zip("abcdef", seconds, strict=False)))) == 24


@given(COSTS)
def test_costs_survive_json(costs: StepCosts) -> None:
    assert costs_from_json(json.loads(json.dumps(costs_to_json(costs)))) == costs


def test_compression_helps_on_a_slow_link_and_is_said_to() -> None:
    model = nn.Linear(2000, 2000, bias=False, device="meta")
    costs, machines = StepCosts(0.0, 0.01, 0.0, 0.0, None), MachineGroup(4, 1, 0, Link(1e8, 1e-4))
    values = step_values(StepPlan(settings(), model, costs, machines, num_samples=6400, price=36.0))
    assert [row["nodes"] for row in values["rows"]] == [1, 2, 4]
    best = values["helps"][0]
    assert (best["setting"], best["saves"]) == ("compress=bf16", pytest.approx(0.47, abs=0.05))
    last = values["rows"][-1]
    assert last["largest"] == "bandwidth"
    assert last["epoch_cost"] == pytest.approx(100 * last["step_s"] / 3600 * 4 * 36)


def test_the_command_prints_a_table_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--link", "1Gbit,50us", "--nodes", "8", "--gpus", "4", "--compute-ms", "20", "--price", "9"]
    assert run(["plan", str(TINY), "global_batch=64", "micro_batch=1", *more]) == 0
    printed = capsys.readouterr().out
    assert "tiny_recipe on 32 processes" in printed
    assert "From 8 machines on" in printed or "From 16 machines on" in printed
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert run(["plan", str(TINY), *more, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["step_time"]
    assert [row["procs"] for row in values["rows"]] == [4, 8, 16, 32]


def test_options_of_the_step_time_need_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(TINY), "--nodes", "4"]) == ConfigError.exit_code
    assert "--nodes needs --link" in capsys.readouterr().err
    assert run(["plan", str(TINY), "--link", "quick"]) == ConfigError.exit_code
    assert "--link is 'quick'" in capsys.readouterr().err


@pytest.mark.full
def test_the_command_measures_the_step_on_this_machine(tmp_path: Path) -> None:
    more = ["--link", "1Gbit,50us", "--nodes", "2", "--gpus", "3", "--json", "device=cpu"]
    values = json.loads(samebits("plan", TINY, *more, cwd=tmp_path).stdout)["step_time"]
    assert values["slowdown"] == 1  # measured in three processes
    assert values["costs"]["compute_s"] > 0
    assert 0 < values["costs"]["message_s"] < 1
    assert values["costs"]["local"]["bits_per_s"] > 1e6
    assert values["rows"][0]["epoch_s"] > 0
