"""Kubernetes: a PyTorchJob of Kubeflow's training operator, or a JobSet."""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.errors import InputError
from meshwright.launch import commands, values
from meshwright.launch.artifacts import Launch
from meshwright.launch.job import Job
from meshwright.launch.manifests import restart_note, to_yaml

LONGEST_NAME = 40  # pods are called NAME-worker-1023 and NAME-node-0-1023-abcde, of 63 letters at most
FILES = "/meshwright"  # where the job's files lie in its pods
LEAVE_S = 30  # for torchrun and the container to end, after the run has saved
NODE_RANK = "NODE_RANK"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
GPU_RESOURCES = {"cdna3": "amd.com/gpu"}
NVIDIA = "nvidia.com/gpu"
REPLICAS = "node"  # the JobSet's only replicated job


def on_kubernetes(job: Job) -> Launch:
    """One file of one or two documents, for kubectl."""
    if not job.image:
        raise InputError("a pod needs an image with meshwright in it", field="--image", fix=("--image REGISTRY/IMAGE",))
    name = values.dns_name("--name", job.name, LONGEST_NAME, job.named)
    namespace = values.dns_name("--namespace", job.namespace, 63, True) if job.namespace else ""
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    made = _jobset(job, metadata) if job.kind == "jobset" else _pytorchjob(job, metadata)
    documents = [*([_config_map(job, metadata)] if job.files else []), made]
    file = f"{name}.yaml"
    return Launch(
        on="kubernetes",
        files={file: to_yaml(*documents)},
        commands=(shlex.join(["kubectl", "apply", "-f", file]),),
        notes=restart_note(job),
    )


def _pytorchjob(job: Job, metadata: dict[str, str]) -> dict[str, Any]:
    """A master and workers, one pod a node; the operator tells each its number and where the master is."""
    how = commands.numbered(job, "$(MASTER_ADDR)", "$(MASTER_PORT)", "$(RANK)")
    port = {"ports": [{"name": "pytorchjob-port", "containerPort": job.port}]}
    template = {"spec": _pod(job, metadata["name"], "pytorch", how, [], port)}
    restart = "OnFailure" if job.max_restarts else "Never"
    replicas = {
        role: {"replicas": count, "restartPolicy": restart, "template": template}
        for role, count in (("Master", 1), ("Worker", job.cluster.nodes - 1))
        if count
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(job.ranks_per_node),
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": job.max_restarts},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _jobset(job: Job, metadata: dict[str, str]) -> dict[str, Any]:
    """One indexed job with a pod a node; when one of them fails, all are started again."""
    name = metadata["name"]
    how = commands.numbered(job, f"{name}-{REPLICAS}-0-0.{name}", str(job.port), f"$({NODE_RANK})")
    number = [{"name": NODE_RANK, "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}]
    pod = _pod(job, name, "trainer", how, number, {}) | {"restartPolicy": "Never"}
    nodes = job.cluster.nodes
    spec = {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": job.max_restarts},
            "replicatedJobs": [{"name": REPLICAS, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _pod(
    job: Job, name: str, container: str, how: list[str], env: list[dict[str, Any]], more: dict[str, Any]
) -> dict[str, Any]:
    disks = _disks(job, name)
    wanted = [one for one in commands.with_patience(job) if one.value is not None]
    cores = {"cpu": str(job.cpus_per_rank * job.ranks_per_node)} if job.cpus_per_rank else {}
    gpus = {} if job.cpu else {GPU_RESOURCES.get(job.cluster.gpu.arch, NVIDIA): str(job.ranks_per_node)}
    resources = {**({"requests": cores} if cores else {}), **({"limits": gpus} if gpus else {})}
    return {
        "terminationGracePeriodSeconds": job.grace_s + LEAVE_S,
        "containers": [
            {
                "name": container,
                "image": job.image,
                "command": _command(job, how),
                **({"workingDir": FILES} if job.files else {}),
                "env": [*env, *({"name": one.name, "value": _literal(str(one.value))} for one in wanted)],
                **more,
                **({"resources": resources} if resources else {}),
                "volumeMounts": [mount for _, mount in disks],
            }
        ],
        "volumes": [volume for volume, _ in disks],
    }


def _command(job: Job, how: list[str]) -> list[str]:
    """The words of the container; $(NAME) is filled in by Kubernetes, in what we write and nowhere else."""
    words = commands.torchrun(job, *how, restarts=False)
    own = len(words) - len(job.program.argv)
    unset = [word for one in commands.wanted_variables(job) if one.value is None for word in ("-u", one.name)]
    safe = [*(["env", *unset] if unset else []), *words[:own], *(_literal(word) for word in words[own:])]
    if not job.setup:
        return safe
    lines = [*(_literal(line) for line in job.setup), 'exec "$$@"']
    return ["bash", "-c", "\n".join(lines), "bash", *safe]


def _literal(text: str) -> str:
    """A text in which Kubernetes fills in nothing: it reads $$ as $."""
    return text.replace("$", "$$")


def _disks(job: Job, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Volumes and where they go: memory for data loading and collectives, claims, the job's files."""
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    found: list[tuple[dict[str, Any], dict[str, Any]]] = [(memory, {"name": "shared-memory", "mountPath": "/dev/shm"})]
    for number, mount in enumerate(map(values.mount, job.mounts)):
        if mount.options not in ("", "ro"):
            reason = "can only be read-only (ro) there, or nothing"
            raise InputError(reason, field="--mount", value=":".join(mount), fix=(f"{mount.source}:{mount.path}:ro",))
        claim = values.dns_name("--mount", mount.source, 253, True)
        volume = {"name": f"disk-{number}", "persistentVolumeClaim": {"claimName": claim}}
        read_only = {"readOnly": True} if mount.options else {}
        found.append((volume, {"name": f"disk-{number}", "mountPath": mount.path, **read_only}))
    if job.files:
        volume = {"name": "files", "configMap": {"name": f"{name}-files"}}
        found.append((volume, {"name": "files", "mountPath": FILES}))
    return found


def _config_map(job: Job, metadata: dict[str, str]) -> dict[str, Any]:
    for file in job.files:
        values.matching("the file name", file, r"[A-Za-z0-9._-]{1,253}", "a key of a ConfigMap", "recipe.toml")
    named = metadata | {"name": f"{metadata['name']}-files"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "data": dict(job.files)}
