"""A whole replica is the model itself: its state is not a copy, and loading a state changes it in place."""

from __future__ import annotations

import torch
from torch import nn

from samebits.cluster.world import alone
from samebits.parallel.replica import Replica, WholeReplica


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_loading_a_state_fills_the_model_in_place_and_leaves_the_source() -> None:
    model, other = network(), network()
    replica: Replica = WholeReplica(model, alone("cpu"))
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    replica.load(other.state_dict())
    for name, tensor in replica.state().items():
        assert tensor.data_ptr() == before[name] != other.state_dict()[name].data_ptr()
        assert torch.equal(tensor, other.state_dict()[name])


def test_loading_its_own_state_changes_nothing() -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replica = WholeReplica(model, alone("cpu"))
    replica.load(model.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in replica.state().items())


def test_all_tensors_of_a_whole_replica_are_compared_and_saved() -> None:
    model = network()
    replica = WholeReplica(model, alone("cpu"))
    state = replica.state()
    assert replica.gather_all(state) is state
    assert replica.comparable(state, torch.optim.SGD(model.parameters(), lr=1.0)) == dict(state)
    assert not replica.is_sharded
    assert replica.trained is model
