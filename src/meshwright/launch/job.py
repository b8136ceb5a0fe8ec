"""What is asked of a scheduler: one value, whoever it is written for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError, unknown
from meshwright.frameworks.types import Program
from meshwright.launch import values

Way = Literal["torchrun", "slurm", "hosts", "kubernetes", "skypilot"]
ContainerKind = Literal["pyxis", "apptainer"]
Kind = Literal["pytorchjob", "jobset"]
WAYS: tuple[Way, ...] = get_args(Way)
CONTAINER_KINDS: tuple[ContainerKind, ...] = get_args(ContainerKind)
KINDS: tuple[Kind, ...] = get_args(Kind)

SLURM_ONLY = (
    "time", "partition", "account", "qos", "reservation", "constraint", "container_kind", "requeue", "max_requeues",
    "signal_ahead_s", "sbatch", "logs",
)  # fmt: skip
USED_BY: Mapping[str, tuple[Way, ...]] = {
    **dict.fromkeys(SLURM_ONLY, ("slurm",)),
    "image": ("slurm", "kubernetes", "skypilot"),
    "mounts": ("slurm", "kubernetes", "skypilot"),
    "setup": ("slurm", "kubernetes", "skypilot"),
    "cpus_per_rank": ("slurm", "kubernetes", "skypilot"),
    "hosts": ("hosts",),
    "head": ("torchrun",),
    "port": ("torchrun", "hosts", "kubernetes", "skypilot"),
    "max_restarts": ("torchrun", "hosts", "kubernetes", "skypilot"),
    "kind": ("kubernetes",),
    "namespace": ("kubernetes",),
}
"""Which ways read an option; those not named here are read by all."""
OPTIONS = {"signal_ahead_s": "--signal-ahead", "cpus_per_rank": "--cpus-per-rank", "requeue": "--no-requeue"}
# What the script says itself, and the option that changes it.
SBATCH_OWN = {
    "job-name": "--name", "nodes": "--gpus", "ntasks": "--gpus", "ntasks-per-node": "--gpus", "time": "--time",
    "partition": "--partition", "account": "--account", "qos": "--qos", "reservation": "--reservation",
    "constraint": "--constraint", "cpus-per-task": "--cpus-per-rank", "output": "--logs", "requeue": "--no-requeue",
    "no-requeue": "--no-requeue", "signal": "--signal-ahead", "container-image": "--image",
    "container-mounts": "--mount",
}  # fmt: skip
# What would break the script, and why.
SBATCH_BAD = {
    "array": "every task of an array would train in the same folder",
    "wrap": "the script is the job",
    "parsable": "submission reads the job's number by itself",
    "wait": "use --watch",
    "open-mode": "logs are appended to, so that a requeue does not lose them",
    "error": "errors go into the log",
    "export": "use --env",
    "test-only": "run sbatch --test-only SCRIPT",
}


class Variable(msgspec.Struct, frozen=True):
    """An environment variable that an engine wants, and why; None: it must not be set."""

    name: str
    value: str | None
    why: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training as a scheduler is asked for it. A job that exists has been checked."""

    name: str
    named: bool = False  # by the user, who is asked before it is changed
    program: Program
    cluster: Cluster
    finds_ranks: bool = False  # under srun by itself, one task per rank; others need torchrun on every node
    cpu: bool = False  # ask for no GPU
    python: str = "python"
    files: Mapping[str, str] = {}  # what the program reads from the folder it is started in
    folder: str = ""  # where those files lie, on the machines that run it
    advised: tuple[Variable, ...] = ()  # what the engine wants set
    env: Mapping[str, str] = {}  # what the user wants set
    setup: tuple[str, ...] = ()  # lines of shell before the program
    cpus_per_rank: int | None = None
    image: str = ""
    mounts: tuple[str, ...] = ()
    port: int = 29500
    max_restarts: int = 0  # of ranks that failed
    grace_s: int = 60  # in which a run that is told to end saves
    # SLURM
    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    container_kind: ContainerKind = "pyxis"
    requeue: bool = True
    max_requeues: int = 100
    signal_ahead_s: int = 120
    sbatch: tuple[str, ...] = ()
    logs: str = ""
    # torchrun and hosts
    head: str = ""
    hosts: tuple[str, ...] = ()
    # Kubernetes
    kind: Kind = "pytorchjob"
    namespace: str = ""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def ranks_per_node(self) -> int:
        """One per GPU, or per stand-in for one."""
        return self.cluster.gpus_per_node


def _check(job: Job) -> None:
    values.matching(
        "--name", job.name, r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "a name of letters, digits, . _ -", "my_run"
    )
    values.one_line("--python", job.python, "python3")
    values.check_variables("--env", job.env)
    values.as_int("--port", job.port, 1, 65_535)
    values.as_int("--max-restarts", job.max_restarts, 0, 10_000)
    if job.cpus_per_rank is not None:
        values.as_int("--cpus-per-rank", job.cpus_per_rank, 1, 4096)
    for word in job.program.argv:
        values.one_line("the command", word) if word else None
    for text in job.mounts:
        values.mount(text)
    if job.image:
        values.matching(
            "--image", job.image, r"[A-Za-z0-9_./][\w.:/@+#-]*", "an image", "nvcr.io/nvidia/pytorch:26.08-py3"
        )
    _check_setup(job.setup)
    _check_slurm(job)
    if job.head:
        values.host("--head", job.head)


def _check_setup(lines: tuple[str, ...]) -> None:
    """Lines of shell that are whole together: what bash itself would not read is refused here, not in the queue."""
    for line in lines:
        values.shell_line("--setup", line)
    if not lines:
        return
    import subprocess

    try:
        told = subprocess.run(
            ["bash", "-n"], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return  # no bash here to ask
    if told.returncode != 0:
        said = told.stderr.strip().splitlines() or ["a syntax error"]
        reason = f"is not shell that bash reads: {said[0].removeprefix('bash: ')}"
        raise InputError(reason, field="--setup", value="; ".join(lines), fix=("--setup 'module load cuda'",))


def _check_slurm(job: Job) -> None:
    for field in ("partition", "account", "qos", "reservation"):
        if text := getattr(job, field):
            pattern = rf"{values.WORD}(,{values.WORD})*" if field in ("partition", "reservation") else values.WORD
            values.matching(f"--{field}", text, pattern, f"the name of a SLURM {field}", "gpu")
    if job.constraint:
        pattern = r"[\w\[(][\w&|*\[\]().,:-]*"
        values.matching("--constraint", job.constraint, pattern, "a SLURM constraint", "'h100&ib'")
    if job.logs:
        values.matching("--logs", job.logs, r"[\w./@+][\w./@+-]*", "a folder without spaces or % in its name", "logs")
    values.as_int("--max-requeues", job.max_requeues, 0, 100_000)
    values.as_int("--signal-ahead", job.signal_ahead_s, 1, 65_535)
    if job.time and values.seconds(job.time) <= job.signal_ahead_s and job.requeue:
        raise InputError(
            f"is not longer than the {job.signal_ahead_s} s ahead of its end that the run is told to save",
            field="--time",
            value=job.time,
            fix=("a longer --time", "a shorter --signal-ahead", "--no-requeue"),
        )
    for text in job.sbatch:
        sbatch_option(text)


def sbatch_option(text: str) -> tuple[str, str]:
    """An extra option of sbatch as its name and its value, which may be empty."""
    name, _, value = text.removeprefix("--").partition("=")
    values.matching("--sbatch", name, r"[a-z][a-z0-9-]*", "an option of sbatch such as mem=0 or exclusive", "mem=0")
    if value:
        # sbatch reads quotes, backslashes and # in its lines by rules of its own; no value needs them
        what = "a value of an sbatch option: no spaces, quotes, # or backslashes"
        values.matching("--sbatch", value, r"[\w.,:;@%+=/&|*()\[\]~^-]+", what, "mem=0")
    if name in SBATCH_OWN:
        option = SBATCH_OWN[name]
        raise InputError(f"has an option of its own here: {option}", field="--sbatch", value=text, fix=(option,))
    if name in SBATCH_BAD:
        raise InputError(f"cannot be given: {SBATCH_BAD[name]}", field="--sbatch", value=text)
    return name, value


def refuse_unused(way: str, given: Mapping[str, object]) -> None:
    """Refuses options that this way of starting would not read."""
    for field in given:
        ways = USED_BY.get(field, WAYS)
        if way not in ways:
            option = OPTIONS.get(field, "--" + field.replace("_", "-").removesuffix("s" if field == "mounts" else ""))
            reason = f"is not used by --scheduler {way}, only by {' and '.join(ways)}"
            raise InputError(reason, field=option, value=given[field], fix=(f"leave {option} out",))


def find_way(text: str) -> Way:
    """The way to start that a word names."""
    for way in WAYS:
        if text.lower() == way:
            return way
    raise unknown("--scheduler", text, WAYS)
