"""The batch script for SLURM: resources, environment, ranks, and what happens when the job is told to end."""

from __future__ import annotations

import shlex

from meshwright.launch import commands, values
from meshwright.launch.artifacts import Launch
from meshwright.launch.commands import Shell, joined
from meshwright.launch.environment import threads
from meshwright.launch.job import Job, Variable, sbatch_option
from meshwright.version import VERSION

SAVED = 75  # exit code of a run that was asked to end and has saved
TERMINATED = 143  # of ranks that SLURM told to end before they listened: 128 and the number of SIGTERM
# SLURM tells every process of a step. torchrun ends its ranks then, but with the exit code of any failure.
LISTENING = (
    'told=0; trap "told=1" TERM; "$0" "$@" & step=$!; '
    'while :; do heard="$told"; wait "$step"; code=$?; [ "$heard" -eq "$told" ] && break; done; '
    f'[ "$told" -eq 0 ] || code={SAVED}; exit "$code"'
)
CPUS_PER_GPU = 8  # fewer starve data loading and collectives; every usual GPU node has as many
TOGETHER_S = 60  # seconds after the first rank has ended in which the others must, too
PORTS = (20_000, 12_000)  # first and count: below those that Linux hands out by itself
OWN_GPU_LINES = ("gres", "gpus", "gpus-per-node", "gpus-per-task")


def on_slurm(job: Job) -> Launch:
    """One script, for sbatch."""
    name = f"{job.name}.sbatch"
    return Launch(on="slurm", files={name: script(job), **job.files}, commands=(shlex.join(["sbatch", name]),))


def script(job: Job) -> str:
    """The batch script."""
    parts = (
        _header(job),
        _limit(job) if job.requeue else [],
        _folder(job),
        _setup(job),
        _environment(job),
        _meeting_place(job),
        _run(job),
        _ending(job),
    )
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def cpus_per_rank(job: Job) -> int:
    """Cores of every rank."""
    return job.cpus_per_rank or (1 if job.cpu else CPUS_PER_GPU)


def _header(job: Job) -> list[str]:
    tasks = job.ranks_per_node if job.finds_ranks else 1
    extra = dict(sbatch_option(text) for text in job.sbatch)
    own_gpus = job.cpu or any(name in extra for name in OWN_GPU_LINES)
    logs = f"{job.logs.rstrip('/')}/" if job.logs else ""
    lines = {
        "job-name": job.name,
        "nodes": str(job.cluster.nodes),
        "ntasks-per-node": str(tasks),
        "cpus-per-task": str(cpus_per_rank(job) * job.ranks_per_node // tasks),
        **({} if own_gpus else {"gpus-per-node": str(job.ranks_per_node)}),
        **({"time": values.spelled_time(values.seconds(job.time))} if job.time else {}),
        **{
            name: text
            for name in ("partition", "account", "qos", "reservation", "constraint")
            if (text := getattr(job, name))
        },
        "output": f"{logs}%x-%j.out",
        "open-mode": "append",
        **({"requeue": "", "signal": f"B:TERM@{job.signal_ahead_s}"} if job.requeue else {"no-requeue": ""}),
        **extra,
    }
    options = [f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in lines.items()]
    where = "CPUs alone" if job.cpu else str(job.cluster)
    return ["#!/bin/bash", *options, f"# {job.name} on {where}, written by meshwright {VERSION}"]


def _limit(job: Job) -> list[str]:
    return [
        "# SLURM counts how often a job was requeued, by itself or by this script; at some point a person has to look.",
        'restarts="${SLURM_RESTART_COUNT:-0}"',
        f'if [ "$restarts" -gt {job.max_requeues} ]; then',
        f'  echo "meshwright: requeued $restarts times, and {job.max_requeues} are allowed: it ends here" >&2',
        "  exit 3",
        "fi",
    ]


def _folder(job: Job) -> list[str]:
    return [f"cd {shlex.quote(job.folder)} || exit 2"] if job.folder else []


def _setup(job: Job) -> list[str]:
    """The user's lines; what they make of errors ends with them, because exit codes are looked at further down."""
    return [*job.setup, "set +eu"] if job.setup else []


def _environment(job: Job) -> list[str]:
    """Variables with their reasons; the user's own setting of threads stays."""
    wanted = commands.wanted_variables(job) if job.finds_ranks else commands.with_patience(job)
    if all(one.name != "OMP_NUM_THREADS" for one in wanted):
        wanted.append(threads(cpus_per_rank(job)))
    return [line for one in wanted for line in (f"# {one.why}", _set(one))]


def _set(one: Variable) -> str:
    return f"unset {one.name}" if one.value is None else f"export {one.name}={shlex.quote(one.value)}"


def _meeting_place(job: Job) -> list[str]:
    """Where ranks meet: the first node, at a port that other jobs on it hardly have."""
    if job.cluster.world == 1 and job.finds_ranks:
        return []
    return [
        'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        f'MASTER_PORT="$(({PORTS[0]} + SLURM_JOB_ID % {PORTS[1]}))"',
        "export MASTER_ADDR MASTER_PORT",
    ]


def _run(job: Job) -> list[str]:
    """The step, in the background: a shell that waits for a foreground command hears no signal."""
    # srun passes SIGUSR1 on; at a SIGTERM of its own it kills the ranks, so that torchrun's has to come from SLURM
    tell = 'kill -s USR1 "$step"' if job.finds_ranks else 'scancel --signal=TERM "$SLURM_JOB_ID"'
    return [
        "# Told to end (ahead of the time limit, by preemption or by a person), the shell tells the ranks and waits.",
        "told=0",
        "step=",
        f"trap 'told=$((told + 1)); [ -z \"$step\" ] || {tell}' TERM USR1",
        f"{_srun(job)} &",
        "step=$!",
        f'[ "$told" -eq 0 ] || {tell}',
        "while :; do",
        '  heard="$told"',
        '  wait "$step"',
        "  code=$?",
        '  [ "$heard" -eq "$told" ] && break  # it was the step that ended, not a signal that ended the wait',
        "done",
    ]


def _srun(job: Job) -> str:
    """srun and what it starts; a rank that leaves first does not take the others' time to leave, too."""
    cores = Shell('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    return joined(["srun", "--kill-on-bad-exit=0", f"--wait={TOGETHER_S}", cores, *_container(job), *_program(job)])


def _program(job: Job) -> list[str]:
    if job.finds_ranks:
        return commands.alone(job)
    heard = ["bash", "-c", LISTENING] if job.requeue else []
    if job.cluster.nodes == 1:
        return [*heard, *commands.torchrun(job, "--standalone")]
    meeting = commands.meeting(job, Shell('"$MASTER_ADDR:$MASTER_PORT"'), Shell('"$SLURM_JOB_ID"'))
    return [*heard, *commands.torchrun(job, *meeting)]


def _container(job: Job) -> list[str]:
    if not job.image:
        return []
    if job.container_kind == "pyxis":
        mounts = [f"--container-mounts={','.join(job.mounts)}"] if job.mounts else []
        return [f"--container-image={job.image}", *mounts]
    binds = [word for mount in job.mounts for word in ("--bind", mount)]
    return ["apptainer", "exec", *([] if job.cpu else ["--nv"]), *binds, job.image]


def _ending(job: Job) -> list[str]:
    """Requeues a run that was told to end, and nothing else: not one that failed, not one that a person cancelled."""
    if not job.requeue:
        return ['exit "$code"']
    told = '[ "$told" -gt 0 ]'
    early = f'[ "$code" -eq {TERMINATED} ] || {{ {told} && [ "$code" -gt 128 ]; }}'
    saved = f'[ "$code" -eq {SAVED} ] || {early}'
    heard = f'[ "$code" -eq {SAVED} ] || {told}'
    return [
        f"if {saved if job.finds_ranks else heard}; then",
        '  state="$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID" 2>/dev/null)"',
        '  if [ "$state" != RUNNING ]; then',
        '    echo "meshwright: told to end; not requeued, because the job is ${state:-unknown to SLURM}" >&2',
        f'  elif [ "$restarts" -ge {job.max_requeues} ]; then',
        '    echo "meshwright: told to end; not requeued again after $restarts times (--max-requeues)" >&2',
        "  else",
        '    echo "meshwright: told to end; requeue number $((restarts + 1))" >&2',
        '    scontrol requeue "$SLURM_JOB_ID" ||',
        '      echo "meshwright: SLURM would not requeue it; sbatch this script again to go on" >&2',
        "  fi",
        "fi",
        'exit "$code"',
    ]
