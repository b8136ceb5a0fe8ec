"""SLURM batch scripts: resources, environment, ranks, and what happens on preemption."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping

from meshwright.frameworks.initial_weights import shell_word
from meshwright.launch import commands, images, values
from meshwright.launch.artifacts import Launch
from meshwright.launch.commands import Shell, joined
from meshwright.launch.environment import threads
from meshwright.launch.job import RESUMES, SBATCH_BAD, SBATCH_OURS, Job, Variable, sbatch_option
from meshwright.version import VERSION

SAVED = 75  # exit code of a run that was preempted and has saved a checkpoint
TERMINATED = 143  # exit code of ranks that got SIGTERM before they handled it: 128 + 15
# SLURM signals every process of a step. torchrun then ends its ranks, but exits like after any failure.
SIGNAL_WRAPPER = (
    'signals=0; trap "signals=1" TERM; "$0" "$@" & step=$!; '
    'while :; do before="$signals"; wait "$step"; code=$?; [ "$before" -eq "$signals" ] && break; done; '
    f'[ "$signals" -eq 0 ] || code={SAVED}; exit "$code"'
)
CPUS_PER_GPU = 8  # fewer starve data loading and collectives; usual GPU nodes have at least as many
EXIT_WAIT_S = 60  # seconds after the first rank has exited until srun ends the others
PORTS = (20_000, 12_000)  # first and count: below Linux's ephemeral ports
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
ALL_MEMORY = "0"  # of a node; many clusters otherwise give a few GiB per core and kill a job that offloads
SAME_VALUES = ("--name", "--time", "--partition", "--account", "--qos", "--reservation", "--constraint")
"""Our options that take the value of the sbatch option."""
GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task")


def on_slurm(job: Job) -> Launch:
    """Return one script, for sbatch."""
    name = f"{job.name}.sbatch"
    return Launch(scheduler="slurm", files={name: script(job), **job.files}, commands=(shlex.join(["sbatch", name]),))


def script(job: Job) -> str:
    """Return the batch script."""
    parts = (
        _header(job),
        _limit(job) if job.requeue else [],
        _kept_setup(job),
        _folder(job),
        _setup(job),
        _environment(job),
        _variables(job),
        _rendezvous(job),
        _run(job),
        _requeue(job),
    )
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def cpus_per_rank(job: Job) -> int:
    """Return the cores of every rank."""
    return job.cpus_per_rank or (1 if job.cpu else CPUS_PER_GPU)


def _header(job: Job) -> list[str]:
    tasks = job.ranks_per_node if job.finds_ranks else 1
    extra = dict(sbatch_option(text) for text in job.sbatch)
    sets_gpus = job.cpu or any(name in extra for name in GPU_OPTIONS)
    logs = f"{job.logs.rstrip('/')}/" if job.logs else ""
    lines = {
        "job-name": job.name,
        "nodes": str(job.cluster.nodes),
        "ntasks-per-node": str(tasks),
        "cpus-per-task": str(cpus_per_rank(job) * job.ranks_per_node // tasks),
        **({} if sets_gpus else {"gpus-per-node": str(job.ranks_per_node)}),
        **({"mem": ALL_MEMORY} if job.offloads and not any(name in extra for name in MEMORY_OPTIONS) else {}),
        **({"time": values.format_time(values.seconds(job.time))} if job.time else {}),
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
    where = "CPUs only" if job.cpu else str(job.cluster)
    return ["#!/bin/bash", *options, f"# {job.name} on {where}, written by meshwright {VERSION}", *job.comments]


def repeated_options(options: Mapping[str, str], given: Callable[[str], object]) -> list[tuple[str, list[str]]]:
    """Return the #SBATCH options of a user's script that the job does not take over, each with the words that keep it.

    Options that follow from --gpus are left out, and those for which `given` returns the value of our own option.
    """
    found: list[tuple[str, list[str]]] = []
    for name, value in options.items():
        ours = SBATCH_OURS.get(name, "")
        if name in GPU_OPTIONS or ours == "--gpus" or (ours and given(ours[2:].replace("-", "_"))):
            continue
        text = f"{name}={value}" if value else name
        if ours == "--signal-ahead" and (ahead := re.search(r"@(\d+)$", value)):
            found.append((f"--{text}", [ours, ahead[1]]))  # the job sends its own signal, at that time
            continue
        others = ["--sbatch", text] if not ours and name not in SBATCH_BAD else []
        found.append((f"--{text}", [ours, value] if ours in SAME_VALUES else others))
    return found


def repeated_mount(text: str) -> str:
    """Return a mount of pyxis as --mount takes it, with SOURCE or /PATH for parts that are only known in the job."""
    text = re.sub(r"\$\(pwd\)|`pwd`", "$PWD", text.strip())
    text = text if ":" in text else f"{text}:{text}"
    if re.fullmatch(values.MOUNT, text, re.ASCII):
        return text
    path = re.search(r":(/[\w./@+ -]*)(?=:|$)", text, re.ASCII)
    return f"SOURCE:{path[1] if path else '/PATH'}"


def _limit(job: Job) -> list[str]:
    return [
        "# SLURM counts requeues, its own and those of this script. Stop a job that never finishes.",
        'restarts="${SLURM_RESTART_COUNT:-0}"',
        f'if [ "$restarts" -gt {job.max_requeues} ]; then',
        f'  echo "meshwright: requeued $restarts times, more than --max-requeues {job.max_requeues}: giving up" >&2',
        "  exit 3",
        "fi",
    ]


def _folder(job: Job) -> list[str]:
    lines = [f"mkdir -p {shell_word(one, {})} || exit 2  # mounted into the container" for one in job.makes]
    start = job.folder if job.image else job.start or job.folder  # a container has an option for it
    lines += [f"cd {shell_word(start, {})} || exit 2"] if start and not job.where_submitted else []
    script = job.program.argv[0]
    known = bool(job.folder) or script.startswith("/")  # otherwise the folder of submission decides
    if not known or job.finds_ranks or job.image or script.startswith("-") or script in job.files:
        return lines
    wrong = f"meshwright: there is no {script} on this node: check its path, or "
    if _in_submit_folder(job):
        place = "$PWD" if job.where_submitted else "${SLURM_SUBMIT_DIR:-$PWD}"
        lines = [f'checkout="{place}"  # the folder where sbatch was run', *lines]
        wrong = f"meshwright: there is no {script} in the folder where sbatch was run: run it in a checkout, or "
    message = shlex.quote(f"{wrong}write the job with --framework-dir PATH")
    return [*lines, f"[ -f {_script(job)} ] || {{ echo {message} >&2; exit 2; }}"]


def _in_submit_folder(job: Job) -> bool:
    """Return whether the program is a script that is looked for where the job was submitted."""
    script = job.program.argv[0]
    is_theirs = not (script.startswith(("-", "/")) or script in job.files)
    return bool(job.folder) and is_theirs and not job.finds_ranks and not job.image


def _script(job: Job) -> Shell:
    """Return the program's script for a shell."""
    quoted = shlex.quote(job.program.argv[0])
    return Shell(f'"$checkout"/{quoted}' if _in_submit_folder(job) else quoted)


def _setup(job: Job) -> list[str]:
    """Return the user's lines; error options that they set are reset, because exit codes are checked below."""
    own = [line for line in job.setup if line not in job.kept_setup]  # the user's script ran the others
    return [*own, "set +eu"] if own else []


def _kept_setup(job: Job) -> list[str]:
    """Return the setup of the user's script, which ran in the folder of submission."""
    return [*job.kept_setup, "set +eu"] if job.kept_setup else []


def _environment(job: Job) -> list[str]:
    """Return the variables with their reasons; the user's OMP_NUM_THREADS is kept."""
    required = commands.required_variables(job) if job.finds_ranks else commands.variables_with_grace(job)
    if all(one.name != "OMP_NUM_THREADS" for one in required):
        required.append(threads(cpus_per_rank(job)))
    lines = [line for one in required for line in (f"# {one.why}", _set(one))]
    if _in_submit_folder(job) and job.python_path:
        folders = ":".join(f"$checkout/{one}" if one else "$checkout" for one in job.python_path)
        lines += ["# the framework's modules", f'export PYTHONPATH="{folders}${{PYTHONPATH:+:$PYTHONPATH}}"']
    return lines


def _set(one: Variable) -> str:
    if one.name == "PYTHONPATH" and one.value:  # what an image or a module has set stays importable
        return f'export PYTHONPATH={shlex.quote(one.value)}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    return f"unset {one.name}" if one.value is None else f"export {one.name}={shlex.quote(one.value)}"


def _variables(job: Job) -> list[str]:
    """Return checks of the variables that the program needs: a job without one ends before it takes GPUs."""
    return [
        f'[ -n "${{{name}:-}}" ] || {{ echo {shlex.quote(f"meshwright: set {name}: {what}")} >&2; exit 2; }}'
        for name, what in job.program.variables.items()
    ]


def _rendezvous(job: Job) -> list[str]:
    """Return the rendezvous: the first node, at a port that other jobs on it hardly use."""
    if job.cluster.world == 1 and job.finds_ranks:
        return []
    return [
        'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        f'MASTER_PORT="$(({PORTS[0]} + SLURM_JOB_ID % {PORTS[1]}))"',
        "export MASTER_ADDR MASTER_PORT",
    ]


def _run(job: Job) -> list[str]:
    """Return the step, in the background: bash does not handle signals while a foreground command runs."""
    # srun forwards SIGUSR1. On SIGTERM it kills the ranks itself, so torchrun's SIGTERM has to come from SLURM.
    forward = 'kill -s USR1 "$step"' if job.finds_ranks else 'scancel --signal=TERM "$SLURM_JOB_ID"'
    ended = f"ended: {job.no_save}" if job.no_save else "saved"
    return [
        "# On SIGTERM (time limit ahead, preemption, scancel), forward it to the ranks and wait until they have "
        f"{ended}.",
        "signals=0",
        "step=",
        f"trap 'signals=$((signals + 1)); [ -z \"$step\" ] || {forward}' TERM USR1",
        *(['started="$SECONDS"'] if job.requeue and job.planned_exit_s else []),
        f"{_srun(job)} &",
        "step=$!",
        f'[ "$signals" -eq 0 ] || {forward}',
        "while :; do",
        '  before="$signals"',
        '  wait "$step"',
        "  code=$?",
        '  [ "$before" -eq "$signals" ] && break  # the step has ended; a signal would only interrupt wait',
        "done",
    ]


def _srun(job: Job) -> str:
    """Return srun and what it starts; one rank that exits does not end the others immediately."""
    cores = Shell('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    return joined(["srun", "--kill-on-bad-exit=0", f"--wait={EXIT_WAIT_S}", cores, *_container(job), *_program(job)])


def _program(job: Job) -> list[str]:
    if job.finds_ranks:
        return commands.plain_command(job)
    wrapper = ["bash", "-c", SIGNAL_WRAPPER] if job.requeue else []
    options = ["--standalone"]
    if job.cluster.nodes > 1:
        options = commands.rendezvous(job, Shell('"$MASTER_ADDR:$MASTER_PORT"'), Shell('"$SLURM_JOB_ID"'))
    words = commands.torchrun(job, *options)
    words[len(words) - len(job.program.argv)] = _script(job)
    return [*wrapper, *words]


def _container(job: Job) -> list[str]:
    if not job.image:
        return []
    # The job's folder has the files that the program reads and, relative to it, the checkpoints.
    inside, image = job.start or job.folder, images.for_container(job.image, job.container_kind)
    places = (*job.mounts, *(f"{one}:{one}" for one in (*job.binds, job.folder) if one))
    if job.container_kind == "pyxis":
        mounts = [_expanded(f"--container-mounts={','.join(places)}")] if places else []
        return [f"--container-image={image}", *mounts, *([f"--container-workdir={inside}"] if inside else [])]
    binds = [word for mount in places for word in ("--bind", _expanded(mount))]
    at = ["--pwd", inside] if inside else []
    return ["apptainer", "exec", *([] if job.cpu else ["--nv"]), *binds, *at, image]


def _expanded(mounts: str) -> str:
    """Return validated mounts as one word whose variables the job's shell expands."""
    if "$" not in mounts:
        return mounts
    # The job may have changed its folder; in the user's script, $PWD is where sbatch was run.
    submitted = re.sub(r"\$(PWD\b|\{PWD\})", "${SLURM_SUBMIT_DIR:-$PWD}", mounts)
    return Shell(f'"{submitted}"')


def _requeue(job: Job) -> list[str]:
    """Return the requeue logic: a preempted run is requeued, one that failed or was cancelled is not."""
    if not job.requeue:
        return ['exit "$code"']
    signaled = '[ "$signals" -gt 0 ]'
    early = f'[ "$code" -eq {TERMINATED} ] || {{ {signaled} && [ "$code" -gt 128 ]; }}'
    saved = f'[ "$code" -eq {SAVED} ] || {early}'
    interrupted = f'[ "$code" -eq {SAVED} ] || {signaled}'
    ended = saved if job.finds_ranks else interrupted
    planned = job.planned_exit_s
    reason = "$reason" if planned else "preempted"
    to_resume = " to resume" if job.restart == RESUMES else ""
    # A training that is done just then is requeued once more: it resumes at its last step and ends at once.
    unless_done = [
        f"# The program ends after {planned // 60} minutes with 0, done or not.",
        "reason=",
        f'if [ "$code" -eq 0 ] && [ "$((SECONDS - started))" -ge {planned} ]; then',
        '  reason="the planned time of the run is over"',
        "fi",
        f"if {ended}; then reason=preempted; fi",
    ]
    return [
        *(unless_done if planned else []),
        'if [ -n "$reason" ]; then' if planned else f"if {ended}; then",
        '  state="$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID" 2>/dev/null)"',
        '  if [ "$state" != RUNNING ]; then',
        f'    echo "meshwright: {reason}; not requeued because the job is ${{state:-unknown to SLURM}}" >&2',
        f'  elif [ "$restarts" -ge {job.max_requeues} ]; then',
        f'    echo "meshwright: {reason}; not requeued again after $restarts times (--max-requeues)" >&2',
        "  else",
        f'    echo "meshwright: {reason}; requeue number $((restarts + 1))" >&2',
        '    scontrol requeue "$SLURM_JOB_ID" ||',
        f'      echo "meshwright: SLURM refused to requeue the job; sbatch this script again{to_resume}" >&2',
        "  fi",
        "fi",
        'exit "$code"',
    ]
