"""The example manifests hold to their schemas, and the variables that pods get start a world."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.hosts import Host
from tests.runs import LONG_S, weights

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
VERSION = "1.29"


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def test_the_indexed_job_holds_to_kubernetes_own_schema() -> None:
    schema = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: make test-cluster")
    service, job = _documents("indexed-job.yaml")
    for document in (service, job):
        schema.validate(document, VERSION, strict=True)
    broken = copy.deepcopy(job)
    broken["spec"]["completion"] = 2
    with pytest.raises(schema.ValidationError):
        schema.validate(broken, VERSION, strict=True)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert int(variables["WORLD_SIZE"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def test_the_pytorchjob_has_only_fields_that_the_operator_knows() -> None:
    schema = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: make test-cluster")
    models = pytest.importorskip("kubeflow.training.models", reason="needs kubeflow-training: make test-cluster")
    (job,) = _documents("pytorchjob.yaml")
    _known(job, models.KubeflowOrgV1PyTorchJob)
    _known(job["spec"], models.KubeflowOrgV1PyTorchJobSpec)
    _known(job["spec"]["runPolicy"], models.KubeflowOrgV1RunPolicy)
    for role in ("Master", "Worker"):
        replica = job["spec"]["pytorchReplicaSpecs"][role]
        _known(replica, models.KubeflowOrgV1ReplicaSpec)
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        pod = {"restartPolicy": "OnFailure", **replica["template"]["spec"]}
        schema.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}, VERSION, strict=True
        )


def test_the_trainjob_has_only_fields_that_kubeflows_trainer_knows() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api: make test-cluster")
    (job,) = _documents("trainjob.yaml")
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # unknown fields are left out
    broken = copy.deepcopy(job)
    broken["spec"]["trainer"]["nodes"] = 2
    assert models.TrainerV1alpha1TrainJob.from_dict(broken).to_dict() != broken


def _known(document: dict[str, Any], model: Any) -> None:
    assert set(document) <= set(model.attribute_map.values())


def test_the_variables_of_a_pytorchjobs_pods_start_a_world(
    three: list[Host], command: Callable[..., list[str]], environ: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    # As the operator sets them, read from a pod's description: each pod sees the master by its service's name.
    common = {**environ, "MASTER_ADDR": "n1", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "PYTHONUNBUFFERED": "1"}
    common |= {"PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "23456", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}
    pods = [
        host.start(*command(), env={**common, "RANK": str(rank), "PET_NODE_RANK": str(rank)}, cwd=tmp_path)
        for rank, host in enumerate(three[:2])
    ]
    said = [pod.communicate(timeout=LONG_S)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert weights(tmp_path / "run") == wanted
