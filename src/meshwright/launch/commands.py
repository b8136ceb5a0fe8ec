"""The words that start ranks: torchrun in its forms, and Python alone where the scheduler has made the ranks."""

from __future__ import annotations

import shlex

from meshwright.errors import InputError
from meshwright.launch import values
from meshwright.launch.artifacts import Launch
from meshwright.launch.job import Job, Variable

PYTHON = "python"
SHUTDOWN, SHUTDOWN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30


class Shell(str):
    """A word that a shell shall read as it stands: ours, never a user's."""


def joined(words: list[str]) -> str:
    """Words as a shell reads them back; only those that are meant for it are not quoted."""
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)


def _option(name: str, value: str) -> str:
    text = f"--{name}={value}"
    return Shell(text) if isinstance(value, Shell) else text


def alone(job: Job) -> list[str]:
    """The program itself: whoever starts it has made it a rank."""
    return [job.python, *job.program.argv]


def torchrun(job: Job, *how: str, restarts: bool = True) -> list[str]:
    """The program under torchrun, with an interpreter of its own where one is named; or whoever starts it restarts."""
    agent = ["torchrun"] if job.python == PYTHON else [job.python, "-m", "torch.distributed.run"]
    again = [f"--max-restarts={job.max_restarts}"] if job.max_restarts and restarts else []
    return [*agent, *how, f"--nproc-per-node={job.ranks_per_node}", *again, *job.program.argv]


def several(job: Job) -> list[str]:
    """How many nodes there are, for torchrun."""
    return [f"--nnodes={job.cluster.nodes}"]


def meeting(job: Job, where: str, run: str) -> list[str]:
    """Nodes that find each other at a place; who is first there has rank 0."""
    return [*several(job), "--rdzv-backend=c10d", _option("rdzv-id", run), _option("rdzv-endpoint", where)]


def numbered(job: Job, head: str, port: str, rank: str) -> list[str]:
    """Nodes that are told their number and where node 0 is."""
    place = [_option("master-addr", head), _option("master-port", port)]
    return [*several(job), _option("node-rank", rank), *place]


def with_environment(job: Job, words: list[str]) -> str:
    """A command that sets what the program wants, for a shell to read."""
    wanted = wanted_variables(job)
    unset = [word for one in wanted if one.value is None for word in ("-u", one.name)]
    pairs = [f"{one.name}={one.value}" for one in wanted if one.value is not None]
    return shlex.join([*(["env", *unset, *pairs] if wanted else []), *words])


def wanted_variables(job: Job) -> list[Variable]:
    """What is set for the program: the engine's, then the user's, who has the last word."""
    merged = {one.name: one for one in job.advised}
    for name, value in job.program.env.items():
        if name not in merged or merged[name].value != value:
            merged[name] = Variable(name, value, "the program needs it")
    merged |= {name: Variable(name, value, "asked for with --env") for name, value in job.env.items()}
    return list(merged.values())


def with_patience(job: Job) -> list[Variable]:
    """What is set where torchrun is told to end: it kills ranks 30 s later, unless it is told to let them save."""
    wanted = wanted_variables(job)
    if job.grace_s <= SHUTDOWN_S or any(one.name == SHUTDOWN for one in wanted):
        return wanted
    return [*wanted, Variable(SHUTDOWN, str(job.grace_s), "torchrun gives ranks this many seconds to save")]


def on_torchrun(job: Job) -> Launch:
    """One command, to be run on every node."""
    if job.cluster.nodes == 1:
        words = torchrun(job, "--standalone")
        return Launch(on="torchrun", files=job.files, commands=(with_environment(job, words),))
    if not job.head:
        reason = f"{job.cluster.nodes} nodes have to find each other: name one of them"
        raise InputError(reason, field="--head", fix=("--head node01", "--scheduler hosts --hosts node01,node02"))
    where = values.endpoint(values.host("--head", job.head), job.port)
    words = torchrun(job, *meeting(job, where, job.name))
    note = f"run it on each of the {job.cluster.nodes} nodes; {job.head} must be one of them"
    return Launch(on="torchrun", files=job.files, commands=(with_environment(job, words),), notes=(note,))


def on_hosts(job: Job) -> Launch:
    """One command for each host, in their order."""
    nodes = job.cluster.nodes
    named = values.distinct("--hosts", (values.host("--hosts", one) for one in job.hosts))
    if len(named) != nodes:
        per = job.cluster.gpus_per_node
        reason = f"names {len(named)} hosts, and {job.cluster} has {nodes} nodes"
        fix = (f"--gpus {len(named)}x{per}x{job.cluster.gpu.name}",) if named else ("--hosts node01,node02",)
        raise InputError(reason, field="--hosts", value=",".join(job.hosts), fix=fix)
    port = str(job.port)
    commands = tuple(
        with_environment(job, torchrun(job, *numbered(job, named[0], port, str(rank)))) for rank in range(nodes)
    )
    return Launch(on="hosts", files=job.files, commands=commands, places=named)
