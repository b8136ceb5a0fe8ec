"""Commands that start ranks: torchrun in its forms, or Python alone if the scheduler creates the ranks."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.frameworks.initial_weights import shell_word
from meshwright.launch import values
from meshwright.launch.artifacts import Launch
from meshwright.launch.job import Job, Variable

PYTHON = "python"
SHUTDOWN_TIMEOUT, SHUTDOWN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30


class Shell(str):
    """A word that the shell expands; only ever ours, never the user's."""


def joined(words: list[str]) -> str:
    """Join words for a shell, which expands only Shell words and variables of the environment in paths."""
    return " ".join(word if isinstance(word, Shell) else shell_word(word, {}) for word in words)


def arguments(job: Job) -> list[str]:
    """Return the words of the program; those with a variable that is set where the job starts are for the shell."""
    variables, expanded = job.program.variables, job.program.expanded
    return [
        Shell(shell_word(word, variables, expanded))
        if word in expanded or any(f"${{{name}}}" in word for name in variables)
        else word
        for word in job.program.argv
    ]


def _option(name: str, value: str) -> str:
    text = f"--{name}={value}"
    return Shell(text) if isinstance(value, Shell) else text


def plain_command(job: Job) -> list[str]:
    """Return the program itself, for launchers that start one process per rank."""
    return [job.python, *arguments(job)]


def torchrun(job: Job, *options: str, restarts: bool = True) -> list[str]:
    """Return the program under torchrun; `restarts=False` if the launcher restarts it."""
    agent = ["torchrun"] if job.python == PYTHON else [job.python, "-m", "torch.distributed.run"]
    restart_option = [f"--max-restarts={job.max_restarts}"] if job.max_restarts and restarts else []
    return [*agent, *options, f"--nproc-per-node={job.ranks_per_node}", *restart_option, *arguments(job)]


def node_count(job: Job) -> list[str]:
    """Return torchrun's number of nodes."""
    return [f"--nnodes={job.cluster.nodes}"]


def rendezvous(job: Job, where: str, run: str) -> list[str]:
    """Return rendezvous options: nodes meet at an endpoint, and the first one there has rank 0."""
    return [*node_count(job), "--rdzv-backend=c10d", _option("rdzv-id", run), _option("rdzv-endpoint", where)]


def fixed_rank(job: Job, head: str, port: str, rank: str) -> list[str]:
    """Return options for nodes with a fixed rank and the address of node 0."""
    address = [_option("master-addr", head), _option("master-port", port)]
    return [*node_count(job), _option("node-rank", rank), *address]


def with_environment(job: Job, words: list[str]) -> str:
    """Return a command line that sets the required variables."""
    required = required_variables(job)
    unset = [word for one in required if one.value is None for word in ("-u", one.name)]
    pairs = [f"{one.name}={one.value}" for one in required if one.value is not None]
    line = joined([*(["env", *unset, *pairs] if required else []), *words])
    return f"cd {shell_word(job.start, {})} && {line}" if job.start else line


def required_variables(job: Job) -> list[Variable]:
    """Return the variables to set: the engine's, then the user's, which take precedence."""
    merged = {one.name: one for one in job.advised}
    for name, value in job.program.env.items():
        if name not in merged or merged[name].value != value:
            place = job.program.env_places.get(name, "")
            merged[name] = Variable(name, value, f"set in {place}" if place else "required by the program")
    merged |= {name: Variable(name, value, "set with --env") for name, value in job.env.items()}
    return list(merged.values())


def variables_with_grace(job: Job) -> list[Variable]:
    """Return the variables under torchrun, which kills ranks 30 s after SIGTERM unless it is set to wait."""
    required = required_variables(job)
    if job.grace_s <= SHUTDOWN_S or any(one.name == SHUTDOWN_TIMEOUT for one in required):
        return required
    return [*required, Variable(SHUTDOWN_TIMEOUT, str(job.grace_s), "seconds that torchrun gives ranks to save")]


def on_torchrun(job: Job) -> Launch:
    """Return one command to run on every node."""
    if job.cluster.nodes == 1:
        words = torchrun(job, "--standalone")
        return Launch(scheduler="torchrun", files=job.files, commands=(with_environment(job, words),))
    if not job.head:
        reason = f"{job.cluster.nodes} nodes need a rendezvous host: name one of them"
        raise InputError(reason, field="--head", fix=("--head node01", "--scheduler hosts --hosts node01,node02"))
    where = values.endpoint(values.host("--head", job.head), job.port)
    words = torchrun(job, *rendezvous(job, where, job.name))
    note = f"run this command on each of the {job.cluster.nodes} nodes; {job.head} must be one of them"
    return Launch(scheduler="torchrun", files=job.files, commands=(with_environment(job, words),), notes=(note,))


def on_hosts(job: Job) -> Launch:
    """Return one command for each host, in their order."""
    nodes = job.cluster.nodes
    hosts = values.distinct("--hosts", (values.host("--hosts", one) for one in job.hosts))
    if len(hosts) != nodes:
        per = job.cluster.gpus_per_node
        reason = f"names {len(hosts)} hosts, but {job.cluster} has {nodes} nodes"
        fix = (f"--gpus {len(hosts)}x{per}x{job.cluster.gpu.name}",) if hosts else ("--hosts node01,node02",)
        raise InputError(reason, field="--hosts", value=",".join(job.hosts), fix=fix)
    port = str(job.port)
    commands = tuple(
        with_environment(job, torchrun(job, *fixed_rank(job, hosts[0], port, str(rank)))) for rank in range(nodes)
    )
    return Launch(scheduler="hosts", files=job.files, commands=commands, places=hosts)
