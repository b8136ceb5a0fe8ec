"""Kubernetes and SkyPilot files, validated against their published schemas."""

from __future__ import annotations

import json
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012 as DRAFT
from ruamel.yaml import YAML
from tests.launch.jobs import TRAIN, job

from meshwright.errors import InputError
from meshwright.launch.artifacts import Launch
from meshwright.launch.job import Job, Variable
from meshwright.launch.kubernetes import on_kubernetes
from meshwright.launch.skypilot import on_skypilot

SCHEMAS = Path(__file__).parent / "schemas"
KINDS = {"PyTorchJob": "pytorchjob", "JobSet": "jobset", "ConfigMap": "configmap"}


@cache
def schemas() -> tuple[dict[str, Any], Registry[Any]]:
    found = {path.stem: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    known = [(f"{name}.json", Resource.from_contents(one, default_specification=DRAFT)) for name, one in found.items()]
    return found, Registry().with_resources(known)


def validated(name: str, document: Any) -> Any:
    found, registry = schemas()
    Draft202012Validator(found[name], registry=registry).validate(document)
    return document


def documents(launch: Launch) -> list[Any]:
    text = next(text for name, text in launch.files.items() if name.endswith(".yaml"))
    return list(YAML(typ="safe").load_all(text))


def on_cluster(one: Job) -> list[Any]:
    return [validated(KINDS[made["kind"]], made) for made in documents(on_kubernetes(one))]


def kubernetes_job(gpus: str = "2x8xH100", **changes: Any) -> Job:
    return job(gpus, **{"image": "site/meshwright:1", **changes})


def pod_of(document: Any, role: str = "Master") -> Any:
    spec = document["spec"]
    if document["kind"] == "JobSet":
        return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return spec["pytorchReplicaSpecs"][role]["template"]["spec"]


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
@pytest.mark.parametrize("gpus", ["1xH100", "8xH100", "4x8xH200", "2x8xMI300X"])
def test_pods_and_gpus_add_up(kind: str, gpus: str) -> None:
    request = kubernetes_job(gpus, kind=kind)
    (made,) = on_cluster(request)
    if kind == "pytorchjob":
        pods = sum(replica["replicas"] for replica in made["spec"]["pytorchReplicaSpecs"].values())
    else:
        pods = made["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]
    limits = pod_of(made)["containers"][0]["resources"]["limits"]
    assert pods * int(*limits.values()) == request.cluster.world
    assert list(limits) == ["amd.com/gpu" if "MI" in gpus else "nvidia.com/gpu"]
    assert f"--nproc-per-node={request.cluster.gpus_per_node}" in pod_of(made)["containers"][0]["command"]


def test_a_pytorchjob_gets_its_rank_from_the_operator() -> None:
    (made,) = on_cluster(kubernetes_job(max_restarts=3, namespace="team-a"))
    assert made["metadata"] == {"name": "try-it", "namespace": "team-a"}
    assert made["spec"]["runPolicy"]["backoffLimit"] == 3
    assert pod_of(made)["containers"][0]["name"] == "pytorch"  # the operator looks for this name
    assert pod_of(made)["containers"][0]["command"] == [
        "torchrun", "--nnodes=2", "--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)",
        "--master-port=$(MASTER_PORT)", "--nproc-per-node=8", *TRAIN,
    ]  # fmt: skip
    assert pod_of(made, "Master") == pod_of(made, "Worker")


def test_a_jobset_knows_its_head_by_name() -> None:
    (made,) = on_cluster(kubernetes_job("4x8xH100", kind="jobset", max_restarts=5, port=1234))
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 5}
    words = pod_of(made)["containers"][0]["command"]
    assert words[1:5] == [
        "--nnodes=4", "--node-rank=$(NODE_RANK)", "--master-addr=try-it-node-0-0.try-it", "--master-port=1234",
    ]  # fmt: skip
    assert pod_of(made)["containers"][0]["env"][0]["name"] == "NODE_RANK"


def test_a_pod_has_time_to_save() -> None:
    (made,) = on_cluster(kubernetes_job(grace_s=200))
    assert pod_of(made)["terminationGracePeriodSeconds"] == 230
    env = {one["name"]: one["value"] for one in pod_of(made)["containers"][0]["env"]}
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "200"


def test_disks_and_files_are_mounted() -> None:
    first, made = on_cluster(kubernetes_job(mounts=("data:/data:ro", "runs:/runs"), files={"my.toml": "x = 1\n"}))
    assert first["data"] == {"my.toml": "x = 1\n"}
    container = pod_of(made)["containers"][0]
    places = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert set(places) == {"/dev/shm", "/data", "/runs", "/meshwright", "/meshwright/my.toml"}
    assert places["/meshwright/my.toml"] == {
        "name": "files", "mountPath": "/meshwright/my.toml", "subPath": "my.toml", "readOnly": True,
    }  # fmt: skip
    assert {"name": "work", "emptyDir": {}} in pod_of(made)["volumes"]  # programs write there
    assert places["/data"]["readOnly"] is True
    assert container["workingDir"] == "/meshwright"
    claims = [
        one["persistentVolumeClaim"]["claimName"] for one in pod_of(made)["volumes"] if "persistentVolumeClaim" in one
    ]
    assert claims == ["data", "runs"]
    assert {one["name"] for one in pod_of(made)["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}


def test_no_gpus_and_cores() -> None:
    (made,) = on_cluster(kubernetes_job("2", cpu=True, cpus_per_rank=3))
    assert pod_of(made)["containers"][0]["resources"] == {"requests": {"cpu": "6"}}


def test_setup_runs_in_a_shell_and_the_program_does_not() -> None:
    advised = (Variable("X", None, "must not be set"),)
    (made,) = on_cluster(kubernetes_job(setup=("pip install $PKG",), words=("x", "$(RANK)"), advised=advised))
    words = pod_of(made)["containers"][0]["command"]
    assert words[:3] == ["bash", "-c", 'pip install $$PKG\nexec "$$@"']
    assert words[3:7] == ["bash", "env", "-u", "X"]
    assert words[-1] == "$$(RANK)"


@pytest.mark.parametrize(
    "changes",
    [{"image": ""}, {"name": "My_Run", "named": True}, {"namespace": "Team A"}, {"mounts": ("/data:/data",)},
     {"mounts": ("data:/data:rw",)}, {"files": {"a b": ""}}],
)  # fmt: skip
def test_invalid_kubernetes_values_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        on_kubernetes(kubernetes_job(**changes))


def test_checkpoints_that_would_be_lost_are_noted() -> None:
    def lost(**changes: Any) -> bool:
        return any("checkpoints are lost" in note for note in on_kubernetes(kubernetes_job(**changes)).notes)

    assert lost()
    assert not lost(mounts=("runs:/data",), words=("x", "--out", "/data/run"))
    assert lost(mounts=("runs:/data",), words=("x", "--out", "/database"))


# SkyPilot


def sky(one: Job) -> Any:
    (made,) = documents(on_skypilot(one))
    return validated("skypilot", made)


def test_a_task_asks_for_nodes_and_gpus() -> None:
    made = sky(job("4x8xH100", env={"A": "b"}, setup=("pip install meshwright",), image="site/x:1", cpus_per_rank=4))
    assert (made["num_nodes"], made["resources"]["accelerators"]) == (4, "H100:8")
    assert made["resources"] | {"cpus": "32+", "image_id": "docker:site/x:1"} == made["resources"]
    assert made["envs"]["A"] == "b"
    assert made["setup"] == "pip install meshwright\n"


@pytest.mark.parametrize(
    ("gpus", "name"), [("8xA100-40", "A100:8"), ("8xA100-80", "A100-80GB:8"), ("4xGB200", "GB200:4")]
)
def test_gpus_have_skypilot_names(gpus: str, name: str) -> None:
    assert sky(job(gpus))["resources"]["accelerators"] == name


def test_a_gpu_that_skypilot_does_not_have() -> None:
    with pytest.raises(InputError, match="SkyPilot has no H800"):
        on_skypilot(job("8xH800"))


def test_buckets_are_mounted_and_folders_copied() -> None:
    made = on_skypilot(
        job("8xH100", mounts=("s3://runs/a:/runs", "./data:/data"), files={"my.toml": "x = 1\n"}, max_restarts=2)
    )
    (task,) = [validated("skypilot", one) for one in documents(made)]
    assert task["file_mounts"] == {
        "/runs": {"source": "s3://runs/a", "mode": "MOUNT"}, "/data": "./data",
        "~/meshwright_files/my.toml": "./my.toml",
    }  # fmt: skip
    assert made.files["my.toml"] == "x = 1\n"
    assert made.commands == ("sky jobs launch try-it.yaml",)
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 2}


def test_every_node_runs_torchrun_with_its_number(tmp_path: Path) -> None:
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/bash\nprintf "%s\\0" "${X-unset}" "$@"\n')
    fake.chmod(0o755)
    text = sky(job("2x8xH100", words=("x", "it's $HOME"), advised=(Variable("X", None, "no"),)))["run"]
    environment = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "1",
        "X": "1",
        "PATH": f"{tmp_path}:/usr/bin:/bin",
    }
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == [
        "unset", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500", "--nproc-per-node=8",
        "x", "it's $HOME",
    ]  # fmt: skip


# Arbitrary user input

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def expanded(text: str) -> str:
    """Return what a container gets from a text in which Kubernetes expands nothing."""
    return text.replace("$$", "\0").replace("$(", "FILLED IN").replace("\0", "$")


@given(
    words=st.lists(TEXT | st.sampled_from(["$(RANK)", "$$", "yes", "1", "null", "- a", "a: b", "'"]), max_size=3),
    value=TEXT,
)
@settings(max_examples=25)
def test_arguments_and_values_survive_yaml(words: list[str], value: str) -> None:
    try:
        request = kubernetes_job(words=("x", *words), env={"A": value})
    except InputError:
        return
    (made,) = on_cluster(request)
    container = pod_of(made)["containers"][0]
    assert [expanded(word) for word in container["command"][-len(words) - 1 :]] == ["x", *words]
    assert expanded(container["env"][0]["value"]) == value
    task = sky(request)
    assert task["envs"]["A"] == value
    assert shlex.split(task["run"])[-len(words) - 1 :] == ["x", *words]


@pytest.mark.parametrize(
    "break_manifest",
    [
        lambda made: made["spec"].update(replicas=1),
        lambda made: made["metadata"].update(name="Not_Clean"),
        lambda made: pod_of(made)["containers"][0].update(gpu=8),
        lambda made: pod_of(made)["containers"][0]["resources"]["limits"].update({"nvidia.com/gpu": "eight"}),
        lambda made: pod_of(made)["containers"][0]["env"].append({"name": "A", "value": 1}),
    ],
)
def test_the_schemas_reject_invalid_manifests(break_manifest: Any) -> None:
    (made,) = on_cluster(kubernetes_job())
    break_manifest(made)
    with pytest.raises(ValidationError):
        validated("pytorchjob", made)
