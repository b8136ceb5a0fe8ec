"""A job as all schedulers need it, validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from meshwright.choices import SCHEDULERS as SCHEDULERS
from meshwright.choices import Scheduler as Scheduler
from meshwright.clusters import Cluster
from meshwright.errors import InputError, unknown
from meshwright.frameworks.types import Program
from meshwright.launch import values

ContainerKind = Literal["pyxis", "apptainer"]
KubernetesKind = Literal["pytorchjob", "jobset"]
CONTAINER_KINDS: tuple[ContainerKind, ...] = get_args(ContainerKind)
KUBERNETES_KINDS: tuple[KubernetesKind, ...] = get_args(KubernetesKind)

SLURM_ONLY = (
    "time", "partition", "account", "qos", "reservation", "constraint", "container_kind", "requeue", "max_requeues",
    "signal_ahead_s", "sbatch", "logs",
)  # fmt: skip
USED_BY: Mapping[str, tuple[Scheduler, ...]] = {
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
"""Which schedulers use an option; options not listed are used by all."""
OPTIONS = {"signal_ahead_s": "--signal-ahead", "cpus_per_rank": "--cpus-per-rank", "requeue": "--no-requeue"}
# sbatch options that the script sets -> our option for them.
SBATCH_OURS = {
    "job-name": "--name", "nodes": "--gpus", "ntasks": "--gpus", "ntasks-per-node": "--gpus", "time": "--time",
    "partition": "--partition", "account": "--account", "qos": "--qos", "reservation": "--reservation",
    "constraint": "--constraint", "cpus-per-task": "--cpus-per-rank", "output": "--logs", "requeue": "--no-requeue",
    "no-requeue": "--no-requeue", "signal": "--signal-ahead", "container-image": "--image",
    "container-mounts": "--mount",
}  # fmt: skip
# sbatch options that would break the script, and why.
SBATCH_BAD = {
    "array": "every task of an array would train in the same folder",
    "wrap": "the script itself is the job",
    "parsable": "submission already parses the job id",
    "wait": "use --watch",
    "open-mode": "logs are always appended, so that a requeue does not lose them",
    "error": "stderr goes into the log",
    "export": "use --env",
    "test-only": "run sbatch --test-only SCRIPT",
}


RESUMES = "resumes from its last checkpoint"


class Variable(msgspec.Struct, frozen=True):
    """An environment variable that an engine requires, and why; value None means it must not be set."""

    name: str
    value: str | None
    why: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training as it is requested from a scheduler; validated on construction."""

    name: str
    named: bool = False  # whether the user chose the name; then it is not changed silently
    program: Program
    cluster: Cluster
    finds_ranks: bool = False  # the program finds its rank under srun; others need torchrun on every node
    cpu: bool = False  # request no GPUs
    offloads: bool = False  # it keeps state or activations in host memory
    python: str = "python"
    files: Mapping[str, str] = {}  # files that the program reads from its working folder
    folder: str = ""  # folder of those files on the nodes
    start: str = ""  # folder in which the program starts in place of that one
    where_submitted: bool = False  # the program starts where sbatch is run, or where the kept setup changes to
    python_path: tuple[str, ...] = ()  # folders of the framework's checkout that have to be importable
    advised: tuple[Variable, ...] = ()  # required by the engine
    env: Mapping[str, str] = {}  # set by the user
    setup: tuple[str, ...] = ()  # shell lines to run before the program
    kept_setup: tuple[str, ...] = ()  # commands of the user's script that run before those, where the job starts
    cpus_per_rank: int | None = None
    image: str = ""
    needs: str = "meshwright"  # what an image has to contain
    mounts: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()  # folders mounted into the container at the same path because the job needs them
    reads: Mapping[str, str] = {}  # paths that its config names → the key
    comments: tuple[str, ...] = ()  # comment lines of its script: what it does not have of the user's settings
    makes: tuple[str, ...] = ()  # folders that the job creates before it mounts them
    port: int = 29500
    max_restarts: int = 0  # restarts of failed ranks
    grace_s: int = 60  # seconds for saving after SIGTERM
    no_save: str = ""  # why the program does not save on SIGTERM; empty if it does
    restart: str = RESUMES  # what the program does when the job is started again
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
    planned_exit_s: int = 0  # seconds after which the program ends by itself, with 0, though it is not done; 0: never
    sbatch: tuple[str, ...] = ()
    logs: str = ""
    # torchrun and hosts
    head: str = ""
    hosts: tuple[str, ...] = ()
    # Kubernetes
    kind: KubernetesKind = "pytorchjob"
    namespace: str = ""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def ranks_per_node(self) -> int:
        """One rank per GPU, or per CPU process in its place."""
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
    for folder in job.binds:
        values.mount(f"{folder}:{folder}")
    if job.image:
        values.matching(
            "--image", job.image, r"[A-Za-z0-9_./][\w.:/@+#-]*", "an image", "nvcr.io/nvidia/pytorch:26.08-py3"
        )
    _check_setup(job.setup)
    _check_slurm(job)
    if job.head:
        values.host("--head", job.head)


def _check_setup(lines: tuple[str, ...]) -> None:
    """Refuse setup lines that are not valid bash together, here instead of in the queue."""
    for line in lines:
        values.shell_line("--setup", line)
    if not lines:
        return
    import subprocess

    try:
        checked = subprocess.run(
            ["bash", "-n"], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return  # bash is not installed here
    if checked.returncode != 0:
        errors = checked.stderr.strip().splitlines() or ["a syntax error"]
        reason = f"is not valid bash: {errors[0].removeprefix('bash: ')}"
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
            f"is not longer than the {job.signal_ahead_s} s before its end at which the run is signaled to save",
            field="--time",
            value=job.time,
            fix=("a longer --time", "a shorter --signal-ahead", "--no-requeue"),
        )
    for text in job.sbatch:
        sbatch_option(text)


def sbatch_option(text: str) -> tuple[str, str]:
    """Return an extra sbatch option as name and value, which may be empty."""
    name, _, value = text.removeprefix("--").partition("=")
    values.matching("--sbatch", name, r"[a-z][a-z0-9-]*", "an option of sbatch such as mem=0 or exclusive", "mem=0")
    if value:
        # sbatch has its own rules for quotes, backslashes and #; no value needs them
        what = "a value of an sbatch option: no spaces, quotes, # or backslashes"
        values.matching("--sbatch", value, r"[\w.,:;@%+=/&|*()\[\]~^-]+", what, "mem=0")
    if name in SBATCH_OURS:
        option = SBATCH_OURS[name]
        raise InputError(f"is set with {option} instead", field="--sbatch", value=text, fix=(option,))
    if name in SBATCH_BAD:
        raise InputError(f"is not allowed: {SBATCH_BAD[name]}", field="--sbatch", value=text)
    return name, value


def refuse_unused(scheduler: str, given: Mapping[str, object]) -> None:
    """Refuse options that the scheduler would ignore."""
    for field in given:
        schedulers = USED_BY.get(field, SCHEDULERS)
        if scheduler not in schedulers:
            option = OPTIONS.get(field, "--" + field.replace("_", "-").removesuffix("s" if field == "mounts" else ""))
            reason = f"is not used by --scheduler {scheduler}, only by {' and '.join(schedulers)}"
            raise InputError(reason, field=option, value=given[field], fix=(f"leave {option} out",))


def find_scheduler(text: str) -> Scheduler:
    """Return the scheduler with this name."""
    for scheduler in SCHEDULERS:
        if text.lower() == scheduler:
            return scheduler
    raise unknown("--scheduler", text, SCHEDULERS)
