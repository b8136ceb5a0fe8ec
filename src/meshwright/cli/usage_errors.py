"""Command lines that cannot be parsed: unknown commands and options, with did-you-mean and the command's help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from meshwright import api
from meshwright.api.paths import blend_of
from meshwright.api.verbs import verbs_on
from meshwright.errors import InputError, closest

COMMAND_WORDS = {
    **dict.fromkeys(("finetune", "fine-tune", "fit", "run", "pretrain", "sft", "lora", "resume"), "train"),
    **dict.fromkeys(("eval", "perplexity"), "evaluate"),
    **dict.fromkeys(("benchmark", "throughput"), "bench"),
    **dict.fromkeys(("validate", "lint", "verify"), "check"),
    **dict.fromkeys(("dry-run", "simulate"), "dryrun"),
    **dict.fromkeys(("list", "search", "configs"), "recipes"),
    **dict.fromkeys(("show", "config"), "recipe"),
    **dict.fromkeys(("memory", "calc", "fits"), "estimate"),
    **dict.fromkeys(("diagnose", "debug", "logs"), "doctor"),
    **dict.fromkeys(("submit", "slurm", "sbatch"), "launch"),
    **dict.fromkeys(("serve", "ui", "server"), "web"),
    **dict.fromkeys(("merge", "save"), "convert"),
    **dict.fromkeys(("chat", "infer", "inference", "predict", "sample"), "generate"),
    **dict.fromkeys(("suggest", "advise"), "recommend"),
    "help": "--help",
}
"""Words that other tools use for our commands."""


_LENGTH = ("--seq {value}", "data.seq_length={value}")
_COUNT = ("--gpus {value}", "--nproc {value}", "--gpu H100")
_NODES = ("--gpus {value}x8xH100", "--nproc 8")
_OUT = ("--out {value}", "--write {value}", "--json > {value}")
_DATA = ("--dataset {value}", "data.dataset={value}")
_BATCH = ("train.global_batch_size={value}", "layout.micro_batch_size={value}")
OTHER_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("seq_len", "seqlen", "sequence_length", "seq_length", "max_seq_len", "max_sequence_length"), _LENGTH
    ),
    **dict.fromkeys(("context_length", "context", "context_len", "context_size", "ctx", "ctx_len", "n_ctx"), _LENGTH),
    **dict.fromkeys(("block_size", "cutoff_len"), _LENGTH),
    **dict.fromkeys(("num_gpus", "n_gpus", "ngpus", "gpu_count", "gpus_count", "num_devices", "devices"), _COUNT),
    **dict.fromkeys(("world_size", "num_processes", "np", "n_proc", "nprocs", "gpus", "gpu"), _COUNT),
    **dict.fromkeys(
        ("nproc_per_node", "gpus_per_node", "num_gpus_per_node"), ("--nproc {value}", "--gpus 1x{value}xH100")
    ),
    **dict.fromkeys(("nodes", "num_nodes", "nnodes", "n_nodes"), _NODES),
    **dict.fromkeys(("o", "output", "out_dir", "output_file", "save_dir", "outfile"), _OUT),
    **dict.fromkeys(("data", "data_path", "train_file", "train_data", "dataset_path"), _DATA),
    **dict.fromkeys(("batch_size", "bs", "train_batch_size"), _BATCH),
    **dict.fromkeys(("bf16", "bfloat16"), ("precision.compute=bf16", "--dtype bf16")),
    **dict.fromkeys(("fp16", "half", "float16"), ("precision.compute=fp16", "--dtype fp16")),
    **dict.fromkeys(("fp32", "float32"), ("precision.compute=fp32", "--dtype fp32")),
    **dict.fromkeys(("fp8", "float8"), ("precision.matmul=fp8_tensor",)),
    **dict.fromkeys(
        ("dtype", "precision", "mixed_precision", "torch_dtype"), ("precision.compute={value}", "--dtype {value}")
    ),
    **dict.fromkeys(("lora", "qlora"), ("--goal {name}",)),
    **dict.fromkeys(("resume", "resume_from", "resume_from_checkpoint", "checkpoint_dir"), ("--out {value}",)),
    **dict.fromkeys(("format", "to_format", "framework", "target"), ("--to {value}",)),
    **dict.fromkeys(
        ("max_new_tokens", "max_length", "n_predict", "num_tokens", "max_gen_len", "new_tokens"),
        ("--max-tokens {value}",),
    ),
    **dict.fromkeys(("do_sample", "sample"), ("--temperature 1",)),
    "temp": ("--temperature {value}",),
    "greedy": ("--temperature 0",),
    **dict.fromkeys(("limit", "num_samples", "max_samples", "eval_samples", "n_samples"), ("--samples {value}",)),
    **{
        name.replace("-", "_"): (f"--sbatch {name}={{value}}",)
        for name in (
            *("nodelist", "exclude", "mail-user", "mail-type", "mem", "mem-per-gpu", "mem-per-cpu", "gres", "licenses"),
            *("dependency", "begin", "deadline", "comment", "nice", "priority", "switches", "chdir", "tmp", "wckey"),
            *(
                "gpu-bind",
                "gpu-freq",
                "distribution",
                "network",
                "prefer",
                "clusters",
                "uid",
                "gid",
                "hint",
                "core-spec",
            ),
        )
    },
    **{
        name.replace("-", "_"): (f"--sbatch {name}",)
        for name in ("exclusive", "oversubscribe", "contiguous", "overcommit", "hold", "spread-job", "use-min-nodes")
    },
    **dict.fromkeys(("cpus_per_task", "c"), ("--cpus-per-rank {value}",)),
    "signal": ("--signal-ahead SECONDS",),
}
"""Words that other tools use for our options, with what to write here: the first that the command has."""
SHORT_OPTIONS = {
    "-w": "nodelist",
    "-x": "exclude",
    "-d": "dependency",
    "-D": "chdir",
    "-N": "nodes",
    "-n": "world_size",
    "-s": "oversubscribe",
    "-H": "hold",
    "-L": "licenses",
    "-M": "clusters",
}
"""sbatch's short options by their long names; those that commands have themselves are declared there."""
VALUE_NAMES = ("dtype", "precision", "mixed_precision", "torch_dtype")
MODEL_FORMATS = ("hf", "huggingface", "hugging-face", "transformers", "safetensors", "pytorch")


def _other_option(name: str, value: str, options: Sequence[str], takes_overrides: bool, command: str) -> list[str]:
    """Return what to write for an option of another tool; empty if this command has nothing like it."""
    if command == "export" and value.lower() in MODEL_FORMATS:
        return ["meshwright convert RUN OUT"]
    if name in VALUE_NAMES and value.lower() in OTHER_OPTIONS:  # --precision fp8 is --fp8
        name = value.lower()
    gpus = re.findall(r"[0-9]+(?=x|$)", value.lower()) or ["N"]
    ranks = gpus[0] if len(gpus) == 1 else str(int(gpus[0]) * int(gpus[1]))
    written = [
        one.format(value=ranks if one.startswith("--nproc") else value or "VALUE", name=name)
        for one in OTHER_OPTIONS.get(name, ())
    ]
    fitting = [one for one in written if one.split()[0] in options or (takes_overrides and not one.startswith("--"))]
    alike = [one for one in fitting if one.startswith("--") == fitting[0].startswith("--")]
    return alike if name in ("batch_size", "bs", "train_batch_size") else fitting[:1]


def unknown_command(name: str, known: list[str]) -> InputError:
    """Return the error for a command that does not exist."""
    same = COMMAND_WORDS.get(name.lower())
    near = [same] if same else closest(name, known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    reason = f"unknown command; {hint}Try 'meshwright --help'."
    return InputError(reason, field="command", value=name, fix=near or ["meshwright --help"])


def to_error(error: click.ClickException, arguments: Sequence[str]) -> InputError:
    """Return click's error as ours: the option, why it is refused, and what was meant or the command's help."""
    context: Any = getattr(error, "ctx", None)
    command = _command_path(context, arguments)
    own_help = f"Try '{command} --help'."
    if isinstance(error, click.NoSuchOption):
        typed = next((word for word in arguments if word.startswith(error.option_name)), error.option_name)
        typed = typed.partition("=")[0]  # click splits -to into -t and -o
        hint, near = _meant(typed, context, arguments)
        reason = f"{command} has no such option; {hint}{own_help}"
        return InputError(reason, field="option", value=typed, fix=near or [f"{command} --help"])
    return InputError(f"{error.format_message().rstrip('.')}. {own_help}", fix=[f"{command} --help"])


def given_twice(option: click.Option, arguments: Sequence[str], takes_overrides: bool) -> InputError:
    """Return the error for an option with one value that was given more than once."""
    values = [value for flag in option.opts for value in _values_of(flag, arguments)]
    fix = [f"{option.opts[0]} {values[-1]}"] if values else []
    if option.name == "dataset" and takes_overrides:
        fix = [blend_of(values)]
    return InputError(f"given {len(values)} times; it takes one value", option.opts[0], " and ".join(values), fix)


def _values_of(option: str, arguments: Sequence[str]) -> list[str]:
    found = []
    for place, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            found.append(word.partition("=")[2])
        elif word == option:
            found += arguments[place + 1 : place + 2]
    return found


def _command_path(context: Any, arguments: Sequence[str]) -> str:
    """Return the command as it was typed; the parser raises some errors without a context."""
    if context is not None and not isinstance(context.command, click.Group):
        return str(context.command_path)
    first = arguments[0] if arguments else ""
    return f"meshwright {first}" if first in [verb.name for verb in verbs_on("cli")] else "meshwright"


def _meant(option: str, context: Any, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return what an unknown option was probably meant to be: an argument, a recipe field or another option."""
    parameters = context.command.params if context is not None else []
    name = SHORT_OPTIONS.get(option, option.lstrip("-").replace("-", "_").lower())
    for one in parameters:
        if isinstance(one, click.Argument) and one.name == name and one.nargs == 1:
            meant = f"{context.command_path} {_value_of(option, arguments) or one.make_metavar(context)}"
            return f"it is an argument without a name: {meant}. ", [meant]
    negated = [flag for one in parameters for flag in one.opts if flag == f"--no-{option.lstrip('-')}"]
    if negated:
        return f"it is the default, and {negated[0]} turns it off. ", [f"without {option}"]
    options = [flag for one in parameters if isinstance(one, click.Option) for flag in (*one.opts, *one.secondary_opts)]
    takes_overrides = any(one.name == "overrides" for one in parameters)
    value = _value_of(option, arguments)
    other = _other_option(name, value, options, takes_overrides, context.command.name if context else "")
    if other:
        what = "it writes configs of frameworks; a model folder comes from" if "convert" in other[0] else "write"
        return f"{what} {' or '.join(other)}. ", other
    near = closest(option, [flag for flag in options if flag.startswith("--")])
    found = api.as_override(name, _value_of(option, arguments)) if not near and takes_overrides else None
    if found is not None and (not found[1].startswith("--") or found[1].split()[0] in options):
        return f"{found[0]}. ", [found[1]]
    if not near:
        elsewhere = _commands_with(option, context)
        return f"commands that take it: {', '.join(elsewhere)}. " if elsewhere else "", []
    return f"did you mean {' or '.join(near)}? ", near


def _commands_with(option: str, context: Any) -> list[str]:
    """Return other commands that have an option of this name."""
    if context is None or context.parent is None:
        return []
    group = context.parent.command
    commands = {name: group.get_command(context.parent, name) for name in group.list_commands(context.parent)}
    return [name for name, command in commands.items() if any(option in one.opts for one in command.params)]


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """Return the value that was typed for an option; empty if there is none."""
    for place, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        following = arguments[place + 1 : place + 2]
        if word == option and following and not following[0].startswith("--"):
            return following[0]
    return ""
