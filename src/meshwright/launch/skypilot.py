"""SkyPilot task files, for the clouds and clusters it supports."""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.initial_weights import shell_word
from meshwright.launch import commands, values
from meshwright.launch.artifacts import Launch
from meshwright.launch.commands import Shell, joined
from meshwright.launch.job import Job
from meshwright.launch.manifests import restart_note, to_yaml

FILES = "~/meshwright_files"  # folder of the job's files on every node
STARTED_FILES = "/tmp/meshwright_files"  # of a program that starts in another folder and names them by full paths
INSTALL = "add --setup with the commands that install it and torch, or --image with both"
# GPUs with another name in SkyPilot; those with the same name; others are not available there.
NAMES = {"A100-40": "A100", "A100-80": "A100-80GB"}
SAME_NAMES = ("A6000", "H100", "H200", "B200", "B300", "GB200", "GB300", "L40S", "RTX4090", "RTX5090", "MI300X")


def on_skypilot(job: Job) -> Launch:
    """Return one task file, for sky."""
    name = values.dns_name("--name", job.name, 50, job.named)
    file = f"{name}.yaml"
    recovery = {"job_recovery": {"max_restarts_on_errors": job.max_restarts}} if job.max_restarts else {}
    cores = {"cpus": f"{job.cpus_per_rank * job.ranks_per_node}+"} if job.cpus_per_rank else {}
    image = {"image_id": f"docker:{job.image}"} if job.image else {}
    resources = {**_accelerators(job), **cores, **image, **recovery}
    task: dict[str, Any] = {
        "name": name,
        "num_nodes": job.cluster.nodes,
        **({"resources": resources} if resources else {}),
        **_file_mounts(job),
        **_environment(job),
        **({"setup": "\n".join(job.setup) + "\n"} if job.setup else {}),
        "run": _run(job),
    }
    verb = ["sky", "jobs", "launch"] if job.max_restarts else ["sky", "launch"]
    files = {file: to_yaml(task, comments=job.comments), **job.files}
    bare = job.finds_ranks and not job.image and not job.setup
    notes = (*restart_note(job), *((f"new machines have no {job.needs}: {INSTALL}",) if bare else ()))
    return Launch(scheduler="skypilot", files=files, commands=(shlex.join([*verb, file]),), notes=notes)


def _accelerators(job: Job) -> dict[str, str]:
    if job.cpu:
        return {}
    ours = job.cluster.gpu.name
    theirs = NAMES.get(ours, ours if ours in SAME_NAMES else "")
    if not theirs:
        known = ", ".join([*NAMES, *SAME_NAMES])
        raise InputError(f"SkyPilot has no {ours}; it supports {known}", field="--gpus", value=str(job.cluster))
    return {"accelerators": f"{theirs}:{job.ranks_per_node}"}


def _file_mounts(job: Job) -> dict[str, Any]:
    """Return paths on the nodes with their sources: local folders, or buckets."""
    found: dict[str, Any] = {}
    for mount in map(values.plain_mount, job.mounts):
        if mount.options:
            fix = (f"--mount {mount.source}:{mount.path}",)
            raise InputError("cannot have options on SkyPilot", field="--mount", value=":".join(mount), fix=fix)
        bucket = {"source": mount.source, "mode": "MOUNT"}  # mounted for writing, not copied
        found[mount.path] = bucket if "://" in mount.source else mount.source
    found |= {f"{STARTED_FILES if job.start else FILES}/{name}": f"./{name}" for name in job.files}
    return {"file_mounts": found} if found else {}


def _environment(job: Job) -> dict[str, Any]:
    required = {one.name: one.value for one in commands.variables_with_grace(job) if one.value is not None}
    return {"envs": required} if required else {}


def _run(job: Job) -> str:
    """Return the script of every node; SkyPilot sets its rank and the addresses of all nodes."""
    head, rank = Shell('"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'), Shell('"$SKYPILOT_NODE_RANK"')
    command = commands.torchrun(job, *commands.fixed_rank(job, head, str(job.port), rank), restarts=False)
    unset = [f"unset {one.name}" for one in commands.required_variables(job) if one.value is None]
    folder = shell_word(job.start, {}) if job.start else FILES if job.files else ""
    return "\n".join([*([f"cd {folder}"] if folder else []), *unset, joined(command)]) + "\n"
