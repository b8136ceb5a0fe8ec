"""Which training programs a script starts, with what, and on how many nodes and GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from meshwright.frameworks.shell import sbatch
from meshwright.frameworks.shell.launch_prefixes import (
    Takes,
    command_name,
    is_option,
    read_option,
    unwrap,
    wholly_unknown,
)
from meshwright.frameworks.shell.values import Command, LaunchCommand, Script
from meshwright.frameworks.types import SourcedValue

PYTHON = re.compile(r"python[0-9.]*")
DISTRIBUTED = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
DISTRIBUTED |= {"accelerate.commands.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed"}
NO_TRAINING = {
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


def _flags(names: str) -> frozenset[str]:
    return frozenset(names.split())


TAKES = {
    "torchrun": Takes(
        flags=_flags("module standalone no-python run-path use-env help version virtual-local-rank"),
        short={"r": "redirects", "t": "tee"},
        short_flags=MODULE,
    ),
    "accelerate": Takes(
        flags=_flags(
            "module cpu multi-gpu tpu ipex use-deepspeed use-fsdp use-megatron-lm use-xpu quiet debug no-python "
            "same-network dynamo-use-fullgraph dynamo-use-dynamic dynamo-use-regional-compilation "
            "use-parallelism-config use-mps-device downcast-bf16 tpu-use-cluster no-tpu-cluster tpu-use-sudo "
            "enable-cpu-affinity fp16 help"
        ),
        short_flags={"m": "module", "q": "quiet", "h": "help"},
    ),
    "deepspeed": Takes(
        flags=_flags(
            "module no-python no-local-rank no-ssh no-ssh-check force-multi save-pid elastic-training "
            "bind-cores-to-rank help"
        ),
        short={"H": "hostfile", "i": "include", "e": "exclude"},
        short_flags={"h": "help"},
    ),
    "python": Takes({}, short={"W": "warnings", "X": "setting"}, short_flags={"m": "module", "c": "code"}),
}
KNOWN_OPTIONS = _flags(
    "nnodes nproc-per-node node-rank master-addr master-port rdzv-id rdzv-backend rdzv-endpoint rdzv-conf standalone "
    "max-restarts local-ranks-filter role log-dir tee redirects num-processes num-machines machine-rank config-file "
    "main-process-ip main-process-port mixed-precision num-gpus num-nodes hostfile include exclude"
)


class Started(msgspec.Struct, frozen=True):
    """A program behind its launcher."""

    launcher: str
    program: SourcedValue
    is_module: bool
    args: tuple[SourcedValue, ...]
    options: Mapping[str, SourcedValue]


def find_launches(script: Script) -> tuple[LaunchCommand, ...]:
    """Every training program that a script starts, in order."""
    found = (_launched(command, script) for command in script.commands)
    return tuple(each for each in found if each is not None)


def _launched(command: Command, script: Script) -> LaunchCommand | None:
    around = unwrap(command.words)
    started = _started(command.words[around.start :])
    if started is None:
        return None
    srun, launcher, options = around.options.get("srun"), started.launcher, started.options
    if srun is not None and launcher in ("python", ""):
        launcher, options = "srun", srun
    job = {**script.sbatch, **_renamed(srun or {})}
    nodes = _first_known(NODES[launcher](options) if launcher in NODES else None, sbatch.node_count(job))
    return LaunchCommand(
        launcher,
        started.program,
        started.is_module,
        started.args,
        options,
        {**command.env, **around.env},
        nodes,
        _gpus_per_node(launcher, options, job),
        sbatch.gpu_type(job),
    )


def _renamed(srun: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """An option of srun that has no value, such as a lone flag, says nothing about sizes."""
    return {name: said for name, said in srun.items() if said.value is not True}


# What is started.


def _started(words: Sequence[SourcedValue]) -> Started | None:
    if not words:
        return None
    head, name = words[0], command_name(words[0])
    if name == "torchrun" or name == "deepspeed":
        return _behind_launcher(name, words[1:])
    if name == "accelerate":
        return _behind_launcher(name, words[2:]) if len(words) > 1 and words[1].value == "launch" else None
    if name in ("automodel", "am"):
        return _automodel(words)
    if PYTHON.fullmatch(name):
        return _behind_python(words[1:])
    if head.value in ("-m", "--module"):  # uv run -m
        return _behind_python(words)
    if _is_script(head):
        return Started("python" if "/" not in str(head.value) else "", head, False, tuple(words[1:]), {})
    # An interpreter that is not known by name, such as $PYTHON or $LAUNCHER.
    at = 0
    while at < len(words) and wholly_unknown(words[at]):
        at += 1
    if 0 < at < len(words) and _is_script(words[at]):
        return Started("", words[at], False, tuple(words[at + 1 :]), {})
    return None


def _is_script(word: SourcedValue) -> bool:
    return str(word.value).endswith(".py")


def _behind_launcher(launcher: str, words: Sequence[SourcedValue]) -> Started | None:
    takes, options, at = TAKES[launcher], dict[str, SourcedValue](), 0
    while at < len(words):
        if is_option(words[at]):
            option, at = read_option(words, at, takes)
            options[option.name] = option.said
        elif wholly_unknown(words[at]) and _options_go_on(words, at + 1):
            at += 1
        else:
            break
    if at >= len(words):
        return None
    program = words[at]
    if "no-python" in options and (inner := _started(words[at:])) is not None and inner.launcher in ("python", ""):
        return Started(launcher, inner.program, inner.is_module, inner.args, options)
    return Started(launcher, program, "module" in options, tuple(words[at + 1 :]), options)


def _options_go_on(words: Sequence[SourcedValue], at: int) -> bool:
    """Whether an unknown word stands for options, because the program or more options clearly follow it."""
    while at < len(words) and wholly_unknown(words[at]):
        at += 1
    if at >= len(words):
        return False
    text = str(words[at].value)
    name = text.lstrip("-").partition("=")[0].replace("_", "-")
    return _is_script(words[at]) or text in ("-m", "--module") or (is_option(words[at]) and name in KNOWN_OPTIONS)


def _behind_python(words: Sequence[SourcedValue]) -> Started | None:
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
        return _started(words[at:])
    return Started("python", words[at], False, tuple(words[at + 1 :]), {})


def _python_module(words: Sequence[SourcedValue], at: int) -> Started | None:
    """python -m module, also written as -mmodule."""
    glued = str(words[at].value)[2:] if not str(words[at].value).startswith("--") else ""
    module = SourcedValue(glued, words[at].line, words[at].file, words[at].unresolved) if glued else None
    rest = words[at + 1 :]
    if module is None:
        if not rest:
            return None
        module, rest = rest[0], rest[1:]
    if module.value in DISTRIBUTED:
        return _behind_launcher(DISTRIBUTED[module.value], rest)
    if module.value in NO_TRAINING:
        return None
    return Started("python", module, True, tuple(rest), {})


def _automodel(words: Sequence[SourcedValue]) -> Started:
    """automodel config.yaml [--nproc-per-node N] [--key value …]: that option is the launcher's, the rest is not."""
    options: dict[str, SourcedValue] = {}
    args: list[SourcedValue] = []
    at, takes = 1, Takes({"nproc-per-node": 1, "nproc_per_node": 1})
    while at < len(words):
        name = str(words[at].value).lstrip("-").partition("=")[0].replace("_", "-")
        if is_option(words[at]) and name == "nproc-per-node":
            option, at = read_option(words, at, takes)
            options[option.name] = option.said
        else:
            args.append(words[at])
            at += 1
    return Started("automodel", words[0], False, tuple(args), options)


# How many nodes and GPUs.


def _counted(options: Mapping[str, SourcedValue], *names: str) -> SourcedValue | None:
    """The number under the first of these names; a text such as gpu or 1:4 stays unresolved."""
    said = next((options[name] for name in names if name in options), None)
    if said is None or said.value is True or said.unresolved:
        return said if said is not None and said.unresolved else None
    count = sbatch.as_int(said)
    if count is None and (same := re.fullmatch(r"([0-9]{1,7}):\1", str(said.value))):
        count = int(same[1])
    if count is None:
        return SourcedValue(said.value, said.line, said.file, "the launcher counts when it starts")
    return SourcedValue(count, said.line, said.file)


def _torchrun_nodes(options: Mapping[str, SourcedValue]) -> SourcedValue | None:
    standalone = options.get("standalone")
    if standalone is not None and "nnodes" not in options:
        return SourcedValue(1, standalone.line, standalone.file)
    return _counted(options, "nnodes")


def _deepspeed_nodes(options: Mapping[str, SourcedValue]) -> SourcedValue | None:
    said = _counted(options, "num-nodes")
    include = options.get("include")
    if said is None and include is not None and not include.unresolved:
        return SourcedValue(str(include.value).count("@") + 1, include.line, include.file)
    return said


def _deepspeed_gpus(options: Mapping[str, SourcedValue]) -> SourcedValue | None:
    said = _counted(options, "num-gpus")
    include = options.get("include")
    slots = str(include.value).partition("@")[0].partition(":")[2] if include else ""
    if said is None and include is not None and not include.unresolved and slots:
        return SourcedValue(len(slots.split(",")), include.line, include.file)
    return said


def _accelerate_gpus(options: Mapping[str, SourcedValue]) -> SourcedValue | None:
    """num_processes counts all machines."""
    total, machines = _counted(options, "num-processes"), _counted(options, "num-machines")
    if total is None or total.unresolved or machines is None:
        return total
    if machines.unresolved or not machines.value or total.value % machines.value:
        why = machines.unresolved or f"{total.value} processes do not divide over {machines.value} machines"
        return SourcedValue(str(total.value), total.line, total.file, why)
    return SourcedValue(total.value // machines.value, total.line, total.file)


Count = Callable[[Mapping[str, SourcedValue]], SourcedValue | None]
NODES: dict[str, Count] = {
    "torchrun": _torchrun_nodes,
    "accelerate": lambda options: _counted(options, "num-machines"),
    "deepspeed": _deepspeed_nodes,
}
GPUS: dict[str, Count] = {
    "torchrun": lambda options: _counted(options, "nproc-per-node", "nproc"),
    "automodel": lambda options: _counted(options, "nproc-per-node"),
    "accelerate": _accelerate_gpus,
    "deepspeed": _deepspeed_gpus,
}


def _gpus_per_node(
    launcher: str, options: Mapping[str, SourcedValue], job: Mapping[str, SourcedValue]
) -> SourcedValue | None:
    if launcher == "srun":
        return _first_known(sbatch.tasks_per_node(job), sbatch.gpus_per_node(job))
    own = GPUS[launcher](options) if launcher in GPUS else None
    return _first_known(own, sbatch.gpus_per_node(job))


def _first_known(*candidates: SourcedValue | None) -> SourcedValue | None:
    """The first number that is known, or else the first that is at least said."""
    said = [each for each in candidates if each is not None]
    return next((each for each in said if not each.unresolved), said[0] if said else None)
