"""Find the training programs that a script launches, with their arguments, nodes and GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from meshwright.frameworks import accelerate_options
from meshwright.frameworks.shell import sbatch
from meshwright.frameworks.shell.launch_prefixes import (
    GIVEN,
    SUBMITTED,
    OptionSpec,
    command_name,
    is_option,
    is_script,
    is_unresolved_expansion,
    read_option,
    unwrap,
)
from meshwright.frameworks.shell.launcher_names import launcher_option
from meshwright.frameworks.shell.values import Command, LaunchCommand, Script
from meshwright.frameworks.types import SourcedValue, as_int

PYTHON = re.compile(r"python[0-9.]*")
DISTRIBUTED = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
DISTRIBUTED |= {"accelerate.commands.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed"}
DISTRIBUTED_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "srun", "automodel")
FRONT_ENDS = ("swift", "megatron", "axolotl", "llamafactory-cli", "lmf")  # commands of fine-tuning front ends
NOT_TRAINING = {
    "pip",
    "venv",
    "json.tool",
    "http.server",
    "pytest",
    "ensurepip",
    "compileall",
    "tensorboard.main",
    "site",
}
MODULE = {"m": "module"}
ONE_NODE = 8  # ranks that mpirun starts on one node if neither hosts nor ranks per node are given


def _flags(names: str) -> frozenset[str]:
    return frozenset(names.split())


TORCHRUN_FLAGS = _flags("module standalone no-python run-path use-env help version virtual-local-rank")
LIKE_TORCHRUN: dict[str, OptionSpec] = {
    "ft_launcher": OptionSpec(
        flags=TORCHRUN_FLAGS | {"ignore-missing-fault-tol-cfg"},
        short={"r": "redirects", "t": "tee"},
        short_flags=MODULE,
    ),
    "dlrover-run": OptionSpec(
        flags=TORCHRUN_FLAGS | _flags("network-check auto-config auto-tunning exclude-straggler save-at-breakpoint"),
        short={"r": "redirects", "t": "tee"},
        short_flags=MODULE,
    ),
    "colossalai": OptionSpec(flags=_flags("m"), short={"H": "host"}, short_flags=MODULE),
    "composer": OptionSpec(
        flags=_flags("module-mode command-mode verbose"), short={"n": "nproc-per-node"}, short_flags=MODULE
    ),
}
"""Launchers that start ranks on each node as torchrun does: nvidia-resiliency-ext, DLRover, Colossal-AI, Composer."""
TAKES = {
    "torchrun": OptionSpec(flags=TORCHRUN_FLAGS, short={"r": "redirects", "t": "tee"}, short_flags=MODULE),
    "accelerate": OptionSpec(
        flags=_flags(
            "module cpu multi-gpu tpu ipex use-deepspeed use-fsdp use-megatron-lm use-xpu quiet debug no-python "
            "same-network dynamo-use-fullgraph dynamo-use-dynamic dynamo-use-regional-compilation "
            "use-parallelism-config use-mps-device downcast-bf16 tpu-use-cluster no-tpu-cluster tpu-use-sudo "
            "enable-cpu-affinity fp16 help"
        ),
        short_flags={"m": "module", "q": "quiet", "h": "help"},
    ),
    "deepspeed": OptionSpec(
        flags=_flags(
            "module no-python no-local-rank no-ssh no-ssh-check force-multi save-pid elastic-training "
            "bind-cores-to-rank help"
        ),
        short={"H": "hostfile", "i": "include", "e": "exclude"},
        short_flags={"h": "help"},
    ),
    "python": OptionSpec({}, short={"W": "warnings", "X": "setting"}, short_flags={"m": "module", "c": "code"}),
}
TRL_LAUNCH = OptionSpec(
    dict.fromkeys((name.replace("_", "-") for name in accelerate_options.VALUES), 1),
    flags=frozenset(name.replace("_", "-") for name in accelerate_options.FLAGS),
)
"""Options of Accelerate's launcher that trl sft passes on."""
KNOWN_OPTIONS = _flags(
    "nnodes nproc-per-node node-rank master-addr master-port rdzv-id rdzv-backend rdzv-endpoint rdzv-conf standalone "
    "max-restarts local-ranks-filter role log-dir tee redirects num-processes num-machines machine-rank config-file "
    "main-process-ip main-process-port mixed-precision num-gpus num-nodes hostfile include exclude"
)


class ParsedProgram(msgspec.Struct, frozen=True):
    """A program and its launcher."""

    launcher: str
    program: SourcedValue
    is_module: bool
    args: tuple[SourcedValue, ...]
    options: Mapping[str, SourcedValue]


def find_launches(script: Script) -> tuple[LaunchCommand, ...]:
    """Return every training program that a script launches, in order.

    If no launcher starts one, those of branches whose condition is known only at run time are returned too.
    """
    found = _launches(script.commands, script)
    if any(one.launcher in DISTRIBUTED_LAUNCHERS for one in found):
        return found
    possible = [one for one in _launches(script.possible, script) if one.launcher in DISTRIBUTED_LAUNCHERS]
    return (*found, *(possible or ()))


def launch_command(script: Script) -> Command | None:
    """Return the command that starts the training: the first of a distributed launcher, or the last of Python."""
    found = [(command, _find_launch(command, script)) for command in (*script.commands, *script.possible)]
    starts = [(command, launch) for command, launch in found if launch is not None]
    distributed = [command for command, launch in starts if launch.launcher in DISTRIBUTED_LAUNCHERS]
    return distributed[0] if distributed else starts[-1][0] if starts else None


def _launches(commands: Sequence[Command], script: Script) -> tuple[LaunchCommand, ...]:
    found = (_find_launch(command, script) for command in commands)
    return tuple(each for each in found if each is not None)


def _find_launch(command: Command, script: Script) -> LaunchCommand | None:
    prefix = unwrap(command.words)
    program = _parse_program(command.words[prefix.start :])
    if program is None:
        return None
    srun, launcher, options = prefix.options.get("srun"), program.launcher, program.options
    if srun is not None and launcher in ("python", ""):
        launcher, options = "srun", srun
    if SUBMITTED in prefix.options and launcher == "accelerate" and "main-process-ip" not in options:
        reason = "the program that submits the job sets it"
        host = msgspec.structs.replace(program.program, value="$MAIN_PROCESS_IP", unresolved=reason)
        options = {**options, "main-process-ip": host}
    job = _job_options(script.sbatch, _with_value(srun or {}))
    nodes = _first_known(NODES[launcher](options) if launcher in NODES else None, sbatch.node_count(job))
    gpus_per_node = _gpus_per_node(launcher, options, job)
    if GIVEN in prefix.options:  # that script may start the ranks of a node itself
        gpus_per_node = _first_known(sbatch.gpus_per_node(job), gpus_per_node)
    mpi = prefix.options.get("mpirun") or prefix.options.get("mpiexec")
    if mpi is not None and launcher in ("python", ""):
        mpi_nodes, mpi_ranks = _mpi_counts(mpi)
        nodes, gpus_per_node = _first_known(mpi_nodes, nodes), _first_known(mpi_ranks, gpus_per_node)
    return LaunchCommand(
        launcher,
        program.program,
        program.is_module,
        program.args,
        options,
        {**command.env, **prefix.env},
        nodes,
        gpus_per_node,
        sbatch.gpu_type(job),
        job,
        srun is not None,
    )


def with_options(
    launch: LaunchCommand, launcher_args: Mapping[str, SourcedValue], job: Mapping[str, SourcedValue]
) -> LaunchCommand:
    """Return a launch with other options of its launcher or job, and with the nodes and GPUs that these request."""
    kind = launch.launcher
    options = job if kind == "srun" else launcher_args
    return msgspec.structs.replace(
        launch,
        launcher_args=launcher_args,
        job=job,
        nodes=_first_known(NODES[kind](options) if kind in NODES else None, sbatch.node_count(job)),
        gpus_per_node=_gpus_per_node(kind, options, job),
    )


def _job_options(batch: Mapping[str, SourcedValue], srun: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Return the options of a job step: a task count of srun replaces the tasks per node of the job."""
    kept = {name: one for name, one in batch.items() if name != "ntasks-per-node" or "ntasks" not in srun}
    return {**kept, **srun}


def _with_value(srun: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Drop srun flags: only options with a value describe sizes."""
    return {name: setting for name, setting in srun.items() if setting.value is not True}


# Programs.


def _parse_program(words: Sequence[SourcedValue]) -> ParsedProgram | None:
    if not words:
        return None
    head, name = words[0], command_name(words[0])
    if name == "torchrun" or name == "deepspeed":
        return _parse_launcher(name, words[1:])
    if name in LIKE_TORCHRUN:
        rest = words[2:] if name == "colossalai" and len(words) > 1 and words[1].value == "run" else words[1:]
        return _parse_launcher("torchrun", rest, LIKE_TORCHRUN[name])
    if name == "accelerate":
        return _parse_launcher(name, words[2:]) if len(words) > 1 and words[1].value == "launch" else None
    if name == "meshwright":  # the command of python -m meshwright
        return ParsedProgram("python", SourcedValue(name, head.line, head.file), True, tuple(words[1:]), {})
    if name in ("automodel", "am"):
        return _automodel(words)
    if name == "trl":
        return _trl(words)
    if name in FRONT_ENDS and len(words) > 1 and not is_option(words[1]):
        return _front_end(words)
    if PYTHON.fullmatch(name):
        return _parse_python(words[1:])
    if head.value in ("-m", "--module"):  # uv run -m
        return _parse_python(words)
    if is_script(head):
        return ParsedProgram("python" if "/" not in str(head.value) else "", head, False, tuple(words[1:]), {})
    # An unresolved interpreter, such as $PYTHON or $LAUNCHER.
    at = 0
    while at < len(words) and is_unresolved_expansion(words[at]):
        at += 1
    if 0 < at < len(words) and is_script(words[at]):
        return ParsedProgram("", words[at], False, tuple(words[at + 1 :]), {})
    return None


def _parse_launcher(
    launcher: str, words: Sequence[SourcedValue], takes: OptionSpec | None = None
) -> ParsedProgram | None:
    option_spec, options, at = takes or TAKES[launcher], dict[str, SourcedValue](), 0
    while at < len(words):
        if is_option(words[at]):
            option, at = launcher_option(words, at, "" if takes else launcher, option_spec)
            options[option.name] = option.value
        elif is_unresolved_expansion(words[at]) and _more_options_follow(words, at + 1):
            at += 1
        else:
            break
    if at >= len(words):
        return None
    program = words[at]
    if (
        "no-python" in options
        and (inner := _parse_program(words[at:])) is not None
        and inner.launcher in ("python", "")
    ):
        return ParsedProgram(launcher, inner.program, inner.is_module, inner.args, options)
    return ParsedProgram(launcher, program, "module" in options, tuple(words[at + 1 :]), options)


def _more_options_follow(words: Sequence[SourcedValue], at: int) -> bool:
    """Return whether an unresolved word expands to options: the program or known options follow it."""
    while at < len(words) and is_unresolved_expansion(words[at]):
        at += 1
    if at >= len(words):
        return False
    text = str(words[at].value)
    name = text.lstrip("-").partition("=")[0].replace("_", "-")
    return is_script(words[at]) or text in ("-m", "--module") or (is_option(words[at]) and name in KNOWN_OPTIONS)


def _parse_python(words: Sequence[SourcedValue]) -> ParsedProgram | None:
    at = 0
    while at < len(words) and is_option(words[at]):
        option, after = read_option(words, at, TAKES["python"])
        if option.name == "code":
            return None
        if option.name == "module":
            return _python_module(words, at)
        at = after
    if at >= len(words) or words[at].value == "-":
        return None
    if command_name(words[at]) in ("torchrun", "accelerate", "deepspeed"):  # python $(which torchrun)
        return _parse_program(words[at:])
    return ParsedProgram("python", words[at], False, tuple(words[at + 1 :]), {})


def _python_module(words: Sequence[SourcedValue], at: int) -> ParsedProgram | None:
    """python -m module, also written as -mmodule."""
    glued = str(words[at].value)[2:] if not str(words[at].value).startswith("--") else ""
    module = SourcedValue(glued, words[at].line, words[at].file, words[at].unresolved) if glued else None
    rest = words[at + 1 :]
    if module is None:
        if not rest:
            return None
        module, rest = rest[0], rest[1:]
    if module.value in DISTRIBUTED:
        return _parse_launcher(DISTRIBUTED[module.value], rest)
    if module.value in ("trl", "trl.cli"):
        return _trl((module, *rest))
    if module.value in NOT_TRAINING:
        return None
    return ParsedProgram("python", module, True, tuple(rest), {})


def _automodel(words: Sequence[SourcedValue]) -> ParsedProgram:
    """automodel config.yaml [--nproc-per-node N] [--key value …]: only --nproc-per-node belongs to the launcher."""
    options: dict[str, SourcedValue] = {}
    args: list[SourcedValue] = []
    at, option_spec = 1, OptionSpec({"nproc-per-node": 1, "nproc_per_node": 1})
    while at < len(words):
        name = str(words[at].value).lstrip("-").partition("=")[0].replace("_", "-")
        if is_option(words[at]) and name == "nproc-per-node":
            option, at = read_option(words, at, option_spec)
            options[option.name] = option.value
        else:
            args.append(words[at])
            at += 1
    return ParsedProgram("automodel", words[0], False, tuple(args), options)


def _front_end(words: Sequence[SourcedValue], options: Mapping[str, SourcedValue] | None = None) -> ParsedProgram:
    """swift sft --model NAME …, llamafactory-cli train FILE.yaml: the program starts its own ranks."""
    program = SourcedValue(f"{command_name(words[0])} {words[1].value}", words[0].line, words[0].file)
    return ParsedProgram("front-end", program, False, tuple(words[2:]), options or {})


def _trl(words: Sequence[SourcedValue]) -> ParsedProgram | None:
    """trl sft [--accelerate_config FILE] [--num_processes N] [--name value …]: Accelerate starts TRL's script."""
    if len(words) < 2:
        return None
    if is_option(words[1]):
        return None
    options: dict[str, SourcedValue] = {}
    args: list[SourcedValue] = []
    at = 2
    while at < len(words):
        name = str(words[at].value).lstrip("-").partition("=")[0].replace("_", "-")
        if is_option(words[at]) and (name in TRL_LAUNCH.flags or name in (TRL_LAUNCH.values or {})):
            option, at = read_option(words, at, TRL_LAUNCH)
            options["config-file" if option.name == "accelerate-config" else option.name] = option.value
        else:
            args.append(words[at])
            at += 1
    if words[1].value != "sft":  # dpo, grpo and others do not train on the tokens of samples: only keys are read
        return _front_end((*words[:2], *args), options)
    program = SourcedValue("trl.scripts.sft", words[0].line, words[0].file)
    return ParsedProgram("accelerate", program, True, tuple(args), options)


# Nodes and GPUs.


def _count_option(options: Mapping[str, SourcedValue], *names: str) -> SourcedValue | None:
    """Return the first of these options as an integer; a text such as gpu or 1:4 is unresolved."""
    setting = next((options[name] for name in names if name in options), None)
    if setting is None or setting.value is True or setting.unresolved:
        return setting if setting is not None and setting.unresolved else None
    count = as_int(setting, digits=7)
    if count is None and (same := re.fullmatch(r"([0-9]{1,7}):\1", str(setting.value))):
        count = int(same[1])
    if count is None:
        return SourcedValue(setting.value, setting.line, setting.file, "the launcher determines it at start-up")
    return SourcedValue(count, setting.line, setting.file)


def _mpi_counts(options: Mapping[str, SourcedValue]) -> tuple[SourcedValue | None, SourcedValue | None]:
    """Return the nodes and the ranks of each that mpirun or mpiexec starts; None if the host file decides."""
    total, ranks = _count_option(options, "np", "n", "c"), _count_option(options, "ppn", "npernode", "N")
    if total is None or total.unresolved or not total.value:
        return None, ranks
    hosts = {"hostfile", "machinefile", "f", "H", "host", "hosts"} & options.keys()
    if ranks is None:
        one_node = total.value <= ONE_NODE and not hosts
        return (msgspec.structs.replace(total, value=1), total) if one_node else (None, None)
    if ranks.unresolved or not ranks.value or total.value % ranks.value:
        return None, ranks
    return msgspec.structs.replace(total, value=total.value // ranks.value), ranks


def _torchrun_nodes(options: Mapping[str, SourcedValue]) -> SourcedValue | None:
    standalone = options.get("standalone")
    if standalone is not None and "nnodes" not in options:
        return SourcedValue(1, standalone.line, standalone.file)
    return _count_option(options, "nnodes", "num-nodes")


def _deepspeed_nodes(options: Mapping[str, SourcedValue]) -> SourcedValue | None:
    setting = _count_option(options, "num-nodes")
    include = options.get("include")
    if setting is None and include is not None and not include.unresolved:
        return SourcedValue(str(include.value).count("@") + 1, include.line, include.file)
    return setting


def _deepspeed_gpus(options: Mapping[str, SourcedValue]) -> SourcedValue | None:
    setting = _count_option(options, "num-gpus")
    include = options.get("include")
    slots = str(include.value).partition("@")[0].partition(":")[2] if include else ""
    if setting is None and include is not None and not include.unresolved and slots:
        return SourcedValue(len(slots.split(",")), include.line, include.file)
    return setting


def _accelerate_gpus(options: Mapping[str, SourcedValue]) -> SourcedValue | None:
    """Return the GPUs per machine; num_processes counts all machines."""
    total, machines = _count_option(options, "num-processes"), _count_option(options, "num-machines")
    if total is None or total.unresolved or machines is None:
        return total
    if machines.unresolved or not machines.value or total.value % machines.value:
        reason = machines.unresolved or f"{total.value} processes are not divisible by {machines.value} machines"
        return SourcedValue(str(total.value), total.line, total.file, reason)
    return SourcedValue(total.value // machines.value, total.line, total.file)


Count = Callable[[Mapping[str, SourcedValue]], SourcedValue | None]
NODES: dict[str, Count] = {
    "torchrun": _torchrun_nodes,
    "accelerate": lambda options: _count_option(options, "num-machines"),
    "deepspeed": _deepspeed_nodes,
}
GPUS: dict[str, Count] = {
    "torchrun": lambda options: _count_option(options, "nproc-per-node", "nproc"),
    "automodel": lambda options: _count_option(options, "nproc-per-node"),
    "accelerate": _accelerate_gpus,
    "deepspeed": _deepspeed_gpus,
}


def _gpus_per_node(
    launcher: str, options: Mapping[str, SourcedValue], job: Mapping[str, SourcedValue]
) -> SourcedValue | None:
    if launcher == "srun":
        return _first_known(sbatch.tasks_per_node(job), sbatch.gpus_per_node(job))
    count = GPUS[launcher](options) if launcher in GPUS else None
    return _first_known(count, sbatch.gpus_per_node(job))


def _first_known(*candidates: SourcedValue | None) -> SourcedValue | None:
    """Return the first resolved value, or else the first one that is set."""
    given = [each for each in candidates if each is not None]
    return next((each for each in given if not each.unresolved), given[0] if given else None)
