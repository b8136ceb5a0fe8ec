"""Kubernetes manifests: a PyTorchJob of Kubeflow's training operator, or a JobSet."""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.clusters import AMD_ARCHS
from meshwright.errors import InputError
from meshwright.launch import commands, values
from meshwright.launch.artifacts import Launch
from meshwright.launch.job import Job
from meshwright.launch.manifests import restart_note, to_yaml

MAX_NAME = 40  # pod names such as NAME-node-0-1023-abcde may have at most 63 characters
FILES = "/meshwright"  # working folder of a pod, with the job's files
EXIT_S = 30  # for torchrun and the container to exit after saving
NODE_RANK = "NODE_RANK"
CONFIGS = "files"  # the volume of the job's files
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
GPU_RESOURCES = dict.fromkeys(AMD_ARCHS, "amd.com/gpu")
NVIDIA = "nvidia.com/gpu"
REPLICAS = "node"  # the JobSet's only replicated job


def on_kubernetes(job: Job) -> Launch:
    """Return one file of one or two documents, for kubectl."""
    if not job.image:
        raise InputError(
            f"a pod needs an image that contains {job.needs}", field="--image", fix=("--image REGISTRY/IMAGE",)
        )
    name = values.dns_name("--name", job.name, MAX_NAME, job.named)
    namespace = values.dns_name("--namespace", job.namespace, 63, True) if job.namespace else ""
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    manifest = _jobset(job, metadata) if job.kind == "jobset" else _pytorchjob(job, metadata)
    documents = [*([_config_map(job, metadata)] if job.files else []), manifest]
    file = f"{name}.yaml"
    return Launch(
        scheduler="kubernetes",
        files={file: to_yaml(*documents, comments=job.comments)},
        commands=(shlex.join(["kubectl", "apply", "-f", file]),),
        notes=(*restart_note(job), *_network_note(job)),
    )


def _network_note(job: Job) -> tuple[str, ...]:
    """Return what the pods of several nodes need for RDMA; the names of its resources differ between clusters."""
    if job.cluster.nodes < 2 or job.cpu:
        return ()
    return (
        f"{job.cluster.nodes} nodes: the manifest requests no network device, and without one NCCL uses TCP sockets. "
        "For InfiniBand or RoCE add the cluster's RDMA resource to the limits (rdma/hca: 1, or "
        "vpc.amazonaws.com/efa; kubectl describe node lists them) and IPC_LOCK to securityContext.capabilities.add; "
        "without a device plugin, hostNetwork: true. NCCL_DEBUG=INFO must then print `Using network IB`, not Socket",
    )


def _pytorchjob(job: Job, metadata: dict[str, str]) -> dict[str, Any]:
    """Build a PyTorchJob with one pod per node; the operator sets rank and master address."""
    options = commands.fixed_rank(job, "$(MASTER_ADDR)", "$(MASTER_PORT)", "$(RANK)")
    port = {"ports": [{"name": "pytorchjob-port", "containerPort": job.port}]}
    template = {"spec": _pod(job, metadata["name"], "pytorch", options, [], port)}
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
    """Build a JobSet with one indexed job and one pod per node; if one fails, all restart."""
    name = metadata["name"]
    options = commands.fixed_rank(job, f"{name}-{REPLICAS}-0-0.{name}", str(job.port), f"$({NODE_RANK})")
    number = [{"name": NODE_RANK, "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}]
    pod = _pod(job, name, "trainer", options, number, {}) | {"restartPolicy": "Never"}
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
    job: Job, name: str, container: str, options: list[str], env: list[dict[str, Any]], more: dict[str, Any]
) -> dict[str, Any]:
    volumes = _volumes(job)
    configs = [{"name": CONFIGS, "configMap": {"name": f"{name}-files"}}] if job.files else []
    required = [one for one in commands.variables_with_grace(job) if one.value is not None]
    cores = {"cpu": str(job.cpus_per_rank * job.ranks_per_node)} if job.cpus_per_rank else {}
    gpus = {} if job.cpu else {GPU_RESOURCES.get(job.cluster.gpu.arch, NVIDIA): str(job.ranks_per_node)}
    resources = {**({"requests": cores} if cores else {}), **({"limits": gpus} if gpus else {})}
    return {
        "terminationGracePeriodSeconds": job.grace_s + EXIT_S,
        "containers": [
            {
                "name": container,
                "image": job.image,
                "command": _command(job, options),
                **({"workingDir": job.start or FILES} if job.start or job.files else {}),
                "env": [*env, *({"name": one.name, "value": _literal(str(one.value))} for one in required)],
                **more,
                **({"resources": resources} if resources else {}),
                "volumeMounts": [*(mount for _, mount in volumes), *_file_mounts(job)],
            }
        ],
        "volumes": [*(volume for volume, _ in volumes), *configs],
    }


def _command(job: Job, options: list[str]) -> list[str]:
    """Return the container's command; Kubernetes expands $(NAME) only in what we write."""
    words = commands.torchrun(job, *options, restarts=False)
    own = len(words) - len(job.program.argv)
    unset = [word for one in commands.required_variables(job) if one.value is None for word in ("-u", one.name)]
    escaped = [*(["env", *unset] if unset else []), *words[:own], *(_literal(word) for word in words[own:])]
    if not job.setup:
        return escaped
    lines = [*(_literal(line) for line in job.setup), 'exec "$$@"']
    return ["bash", "-c", "\n".join(lines), "bash", *escaped]


def _literal(text: str) -> str:
    """Escape a text so that Kubernetes expands nothing in it: it reads $$ as $."""
    return text.replace("$", "$$")


def _volumes(job: Job) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return volumes and their mounts: shared memory for data loading and collectives, claims, a working folder."""
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    found: list[tuple[dict[str, Any], dict[str, Any]]] = [(memory, {"name": "shared-memory", "mountPath": "/dev/shm"})]
    for number, mount in enumerate(map(values.plain_mount, job.mounts)):
        if mount.options not in ("", "ro"):
            reason = "can only have the option ro on Kubernetes"
            raise InputError(reason, field="--mount", value=":".join(mount), fix=(f"{mount.source}:{mount.path}:ro",))
        claim = values.dns_name("--mount", mount.source, 253, True)
        volume = {"name": f"disk-{number}", "persistentVolumeClaim": {"claimName": claim}}
        read_only = {"readOnly": True} if mount.options else {}
        found.append((volume, {"name": f"disk-{number}", "mountPath": mount.path, **read_only}))
    if job.files and not any(mount["mountPath"] == FILES for _, mount in found):
        # a ConfigMap is read-only, and programs write logs and checkpoints to relative paths
        found.append(({"name": "work", "emptyDir": {}}, {"name": "work", "mountPath": FILES}))
    return found


def _file_mounts(job: Job) -> list[dict[str, Any]]:
    """Return one mount for each file of the ConfigMap, so that their folder stays writable."""
    return [
        {"name": CONFIGS, "mountPath": f"{FILES}/{file}", "subPath": _key(file), "readOnly": True} for file in job.files
    ]


def _config_map(job: Job, metadata: dict[str, str]) -> dict[str, Any]:
    for file in job.files:
        values.matching("the file name", _key(file), r"[A-Za-z0-9._-]{1,253}", "a key of a ConfigMap", "recipe.toml")
    named = metadata | {"name": f"{metadata['name']}-files"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": named,
        "data": {_key(file): text for file, text in job.files.items()},
    }


def _key(file: str) -> str:
    """Return the key of a file in the ConfigMap, which has no folders: those of a package are dots."""
    return file.replace("/", ".")
