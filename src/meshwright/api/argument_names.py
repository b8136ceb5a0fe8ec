"""Names that other tools and people use for our options and parameters, and what to write here."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from meshwright.choices import SCHEDULERS
from meshwright.errors import InputError, closest, unknown
from meshwright.parsing import sequence_length, snake_case, token_budget
from meshwright.recipes.key_maps import REMOVED_KEYS, override_keys
from meshwright.recipes.overrides import accepts, translate_value
from meshwright.recipes.replacements import VALIDATION_WORDS, as_share, held_out_data, removed_key, run_folder
from meshwright.recipes.types import Recipe, recipe_fields

_LENGTH = ("--seq {value}", "data.seq_length={value}")
_COUNT = ("--gpus {value}", "--nproc {value}", "--gpu H100")
_NODES = ("--gpus {value}x8xH100", "--nproc 8")
_OUT = ("--out {value}", "--write {value}", "--json > {value}")
_DATA = ("--dataset {value}", "data.dataset={value}")
PARALLEL = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "sequence": "sp"}
_BATCH = ("train.global_batch_size={value}", "layout.micro_batch_size={value}")
RESUMING = ("checkpoint_dir", "resume")
NODE_NAMES = ("nodes", "num_nodes", "nnodes", "n_nodes")
GPU_NAMES = ("gpu", "gpu_type", "gpu_name", "gpu_model", "accelerator")
PER_NODE_NAMES = ("nproc_per_node", "gpus_per_node", "num_gpus_per_node")
COST_LIMITS = ("budget", "max_cost", "max_price", "cost", "cost_limit", "max_budget", "money")
OTHER_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("seq_len", "seqlen", "sequence_length", "seq_length", "max_seq_len", "max_sequence_length"), _LENGTH
    ),
    **dict.fromkeys(("context_length", "context", "context_len", "context_size", "ctx", "ctx_len", "n_ctx"), _LENGTH),
    **dict.fromkeys(("block_size", "cutoff_len", "max_seq_length", "seq"), _LENGTH),
    **dict.fromkeys(("num_gpus", "n_gpus", "ngpus", "gpu_count", "gpus_count", "num_devices", "devices"), _COUNT),
    **dict.fromkeys(("world_size", "num_processes", "np", "n_proc", "nprocs", "gpus", "gpu"), _COUNT),
    **dict.fromkeys(PER_NODE_NAMES, ("--nproc {value}", "--gpus 1x{value}xH100")),
    **dict.fromkeys(NODE_NAMES, _NODES),
    **dict.fromkeys(("o", "output", "out_dir", "output_file", "save_dir", "outfile"), _OUT),
    **dict.fromkeys(("data", "data_path", "train_file", "train_data", "dataset_path"), _DATA),
    **dict.fromkeys(
        ("text_column", "text_column_name", "text_field", "text_key", "json_keys"),
        ("--column {value}", "data.columns.text={value}"),
    ),
    **dict.fromkeys(("batch_size", "bs", "train_batch_size"), _BATCH),
    **dict.fromkeys(("bf16", "bfloat16"), ("precision.compute=bf16", "--dtype bf16")),
    **dict.fromkeys(("fp16", "half", "float16"), ("precision.compute=fp16", "--dtype fp16")),
    **dict.fromkeys(("fp32", "float32"), ("precision.compute=fp32", "--dtype fp32")),
    **dict.fromkeys(("fp8", "float8"), ("precision.matmul=fp8_tensor",)),
    **dict.fromkeys(
        ("dtype", "precision", "mixed_precision", "torch_dtype"), ("precision.compute={value}", "--dtype {value}")
    ),
    **dict.fromkeys(("lora", "qlora"), ("--goal {name}",)),
    "use_lora": ("--goal lora",),
    **dict.fromkeys(
        ("use_qlora", "load_in_4bit", "use_4bit", "load_4bit", "nf4", "bnb_4bit"), ("--goal qlora", "peft.method=qlora")
    ),
    **{
        name: (f"layout.{key}={{value}}",)
        for word, key in PARALLEL.items()
        for name in (f"{word}_parallel", f"{word}_parallel_degree", f"{key}_size", f"{key}_degree", f"num_{key}")
    },
    **dict.fromkeys(("gbs", "global_bs", "global_batch"), ("train.global_batch_size={value}",)),
    **dict.fromkeys(("mbs", "micro_bs", "micro_batch"), ("layout.micro_batch_size={value}",)),
    **dict.fromkeys(RESUMING, ("--out {value}",)),
    **dict.fromkeys(("merge_and_unload", "merge_adapter", "merge_adapters", "merge_lora"), ("--merge",)),
    **dict.fromkeys(("format", "to_format", "framework", "target"), ("--to {value}",)),
    **dict.fromkeys(
        ("max_new_tokens", "max_length", "n_predict", "num_tokens", "max_gen_len", "new_tokens"),
        ("--max-tokens {value}",),
    ),
    **dict.fromkeys(("do_sample", "sample"), ("--temperature 1",)),
    "temp": ("--temperature {value}",),
    "greedy": ("--temperature 0",),
    **dict.fromkeys(
        ("limit", "num_samples", "max_samples", "eval_samples", "n_samples", "samples", "examples", "num_examples"),
        ("--samples {value}", "data.split=train[:{value}]"),
    ),
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
    **dict.fromkeys(
        ("container", "container_image", "docker", "docker_image", "singularity_image", "apptainer_image", "sif"),
        ("--image {value}",),
    ),
    **dict.fromkeys(
        ("mail", "email", "notify", "mail_to"), ("--sbatch mail-user={value} --sbatch mail-type=END,FAIL",)
    ),
    **dict.fromkeys(SCHEDULERS, ("--scheduler {name}",)),
    "k8s": ("--scheduler kubernetes",),
    **dict.fromkeys(("cpus_per_task", "c"), ("--cpus-per-rank {value}",)),
    "deadline": ("--days {value}", "--sbatch deadline={value}"),
    **dict.fromkeys(("mtbf", "gpu_mtbf", "mtbf_hours", "gpu_mtbf_hours"), ("--mtbf-hours {value}",)),
    **dict.fromkeys(("failure_rate", "failures", "failures_per_day", "fault_rate"), ("--mtbf-hours HOURS",)),
    "signal": ("--signal-ahead SECONDS",),
    **dict.fromkeys(("strict", "werror", "warnings_as_errors", "fail_on_warning"), ("--fail-on warning",)),
    **dict.fromkeys(("exit_zero", "no_fail", "warn_only"), ("--fail-on never",)),
    **dict.fromkeys(("sarif", "github"), ("--format {name}",)),
    **dict.fromkeys(("suppress", "disable", "ignore_rule", "exclude_rule", "skip_rule"), ("--ignore {value}",)),
}
"""Words that other tools use for our options, with what to write here: the first that the command has."""
Meant = tuple[str, str] | None
"""Why an option is none of ours and what to write instead, empty if it is not clear; None for an unknown option."""
VALUE_NAMES = ("dtype", "precision", "mixed_precision", "torch_dtype")
MODEL_FORMATS = ("hf", "huggingface", "hugging-face", "transformers", "safetensors", "pytorch")


def pasted(text: str, value: str) -> str:
    """Return an option or override as a shell needs it: a value with spaces is quoted."""
    if not any(sign.isspace() for sign in value):
        return text
    return text.replace(value, shlex.quote(value)) if text.startswith("--") else shlex.quote(text)


def as_is(text: str, value: str) -> str:
    """Return an option or override for a surface that quotes values itself: Python and JSON."""
    del value
    return text


def meant_option(
    name: str,
    value: str,
    options: Collection[str],
    takes_overrides: bool,
    command: str,
    quoted: Callable[[str, str], str] = pasted,
) -> list[str]:
    """Return what to write for an option of another tool; empty if this command has nothing like it."""
    if command == "export" and value.lower() in MODEL_FORMATS:
        return ["meshwright convert RUN OUT"]
    if name == "resume" and value.lower() in ("", "true", "false"):  # checkpoint.resume
        return []
    if name in VALIDATION_WORDS and command == "evaluate" and value and as_share(value) is None:
        return [f"--dataset {value}"]  # evaluate trains nothing: its only data is what it evaluates on
    if name in VALIDATION_WORDS and takes_overrides:
        return [held_out_data(value)]
    word = value.lower().rpartition(".")[2]
    if name in VALUE_NAMES and word in OTHER_OPTIONS:  # --precision fp8 is --fp8, torch.float16 too
        name = word
    gpus = re.findall(r"(?<![a-wyz0-9])[0-9]+(?=x|$)", value.lower()) or ["N"]  # 8xH100: not the 100
    ranks = gpus[0] if len(gpus) == 1 else str(int(gpus[0]) * int(gpus[1]))
    if name in RESUMING and value:
        value = run_folder(value)
    values = {
        one: ranks if one.startswith("--nproc") else _plain_length(one.partition("=")[0], value or "VALUE")
        for one in OTHER_OPTIONS.get(name, ())
    }
    written = [quoted(one.format(value=text, name=name), text) for one, text in values.items()]
    fitting = [one for one in written if one.split()[0] in options or (takes_overrides and not one.startswith("--"))]
    alike = [one for one in fitting if one.startswith("--") == fitting[0].startswith("--")]
    return alike if name in ("batch_size", "bs", "train_batch_size") else fitting[:1]


def repeats_goal(name: str, value: str, goal: str) -> bool:
    """Return whether an option of another tool says what the typed goal says: load_in_4bit=true with --goal qlora."""
    key = name.strip().lstrip("-").replace("-", "_").lower()
    meant = [one.format(name=key, value=value) for one in OTHER_OPTIONS.get(key, ())]
    return value.strip().lower() in ("", "true", "1", "yes") and f"--goal {goal.strip().lower()}" in meant


def with_nodes(name: str, value: str, gpus: str) -> str:
    """Return --gpus with other nodes, other GPUs in each, or the name of the GPU; of a file, what to write in it.

    Empty if it is unknown.
    """
    counts_nodes = name in NODE_NAMES
    is_count = value.isdigit() and int(value) > 0
    if name in GPU_NAMES:
        return _with_gpu(value, gpus)
    if not (counts_nodes or name in PER_NODE_NAMES) or not is_count or not gpus:
        return ""
    from meshwright.clusters import cluster, file_as_typed, is_known

    if gpus.endswith(".toml"):
        key, path = "nodes" if counts_nodes else "gpus_per_node", file_as_typed(gpus)
        setting = f"--gpus {shlex.quote(f'{value}x{path}')}" if counts_nodes else f"{key} = {value} in {path}"
        return "" if _is_in_file(gpus, key, int(value)) else setting
    alone = is_known(gpus.strip())  # a GPU without a count: its usual nodes are meant
    try:
        found = cluster(f"1x{gpus}" if alone else gpus)
    except InputError:
        return ""
    each = found.gpu.gpus_per_node if alone else found.gpus_per_node
    if counts_nodes and not re.match(r"[0-9]+x[0-9]+x", gpus) and not alone and found.world % int(value) == 0:
        each = found.world // int(value)  # a count of all GPUs
    nodes, each = (int(value), each) if counts_nodes else (1 if alone else found.nodes, int(value))
    return f"--gpus {nodes}x{each}x{found.gpu.name}"


DATASET_WORDS = ("--dataset", "data.dataset", "--train-file", "--train_file", "train_file")
LENGTH_WORDS = ("train.epochs", "train.steps", "--epochs", "--steps", "epochs", "num_train_epochs", "max_steps")
"""Words of a command that state a dataset, whose epochs have a length, and words that state a length."""


def cost_limit(name: str, value: str, options: Collection[str], typed: Sequence[str]) -> Meant:
    """Return why a limit of the cost is no option, and what prints the cost of each count instead; None for others."""
    if name not in COST_LIMITS or "--price" not in options:
        return None
    if value[-1:].isalpha() and _is_tokens(value):  # --budget 2T
        return f"a number of tokens is written --tokens {value}", f"--tokens {value}"
    if "--days" in options and re.fullmatch(r"[0-9.]+ ?(?:days?|weeks?|months?)", value.lower()):
        return f"a time is written --days {value}", f"--days {value}"
    words = [word.partition("=")[0] for word in typed]
    has_length = {"--tokens", "--days", *LENGTH_WORDS} & {*words}
    length = () if has_length else ("train.epochs=3",) if {*DATASET_WORDS} & {*words} else ("--tokens 1T",)
    missing = " ".join((*length, *(() if "--price" in words else ("--price 2.50",))))
    least = f" to compare with {value}" if value else ""
    if not missing:
        return f"the cost is in the answer{least}", f"without --{name.replace('_', '-')}"
    time = "; a limit of time is --days N" if "--days" in options and "--days" not in words else ""
    unit = " (per GPU-hour)" if "--price" in missing else ""
    return f"no count is chosen by its cost; {missing}{unit} prints the cost{least}{time}", missing


def key_of_cluster_file(name: str, value: str, gpus: str) -> Meant:
    """Return that an option is a key of cluster files, and what to write in which; None for others."""
    from meshwright.clusters.file_keys import option_in_cluster_file

    return option_in_cluster_file(name, value, gpus)


def _is_tokens(value: str) -> bool:
    try:
        return token_budget(value) is not None
    except InputError:
        return False


def steps_of_tokens(value: str, recipe: Recipe | None) -> str:
    """Return train.steps=N for a token budget of a command that takes none; empty if the recipe is not known."""
    try:
        tokens = token_budget(value)
    except InputError:
        return ""
    if recipe is None or tokens is None:
        return ""
    return f"train.steps={ceil(tokens / (recipe.data.seq_length * recipe.train.global_batch_size))}"


def _with_gpu(name: str, gpus: str) -> str:
    """Return --gpus with a GPU of this name: the typed count of it, or the typed cluster with it; empty if unknown."""
    from meshwright.clusters import cluster, gpu

    try:
        named, found = gpu(name).name, cluster(gpus)
    except InputError:
        return ""
    if gpus.isdigit():
        return f"--gpus {gpus}x{named}"
    return f"--gpus {gpus}" if named == found.gpu.name else f"--gpus {str(found).replace(found.gpu.name, named)}"


def _is_in_file(path: str, key: str, value: int) -> bool:
    """Return whether a cluster file has this many nodes, or GPUs in each."""
    from meshwright.clusters import cluster

    try:
        return int(getattr(cluster(path), key)) == value
    except InputError:
        return False


PARAMETERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("model_name", "model_id", "model_name_or_path", "hf_model", "base_model"), ("model", "recipe")),
    **dict.fromkeys(("cluster", "hardware", "gpu_type", "accelerator", "accelerators"), ("gpus", "gpu")),
    **dict.fromkeys(("task", "mode", "method", "objective", "stage", "training_type"), ("goal",)),
    **dict.fromkeys(("cost", "gpu_price", "price_per_hour", "price_per_gpu_hour", "hourly_price"), ("price",)),
    **dict.fromkeys(("token_budget", "num_tokens", "total_tokens", "train_tokens", "max_tokens"), ("tokens",)),
    **dict.fromkeys(("file", "config", "path", "recipe_name", "config_file"), ("target", "recipe", "file", "model")),
    **dict.fromkeys(("model", "recipe", "target"), ("target", "recipe", "model", "query")),
    **dict.fromkeys(("log", "logs", "log_file", "run_dir", "folder", "checkpoint"), ("run", "source")),
    **dict.fromkeys(
        ("name", "pattern", "search", "filter", "message", "query", "question", "error", "term", "topic"),
        ("query", "about", "log", "target", "recipe"),
    ),
    **dict.fromkeys(
        ("text", "content", "contents", "file_text"), ("text", "log", "recipe", "query", "about", "config")
    ),
    **dict.fromkeys(("output_dir", "save_path", "out_path", "run_name"), ("out", "write")),
}
"""Words that people use for our parameters, with their names here: the first that the function has."""


LONGEST_SHOWN = 200  # characters of a value that an answer repeats


class ArgumentError(InputError, TypeError):
    """A Python function was called with a parameter that it does not have, or without one that it needs."""


class Writer(NamedTuple):
    """How a surface writes a parameter and an override."""

    parameter: Callable[[str, str], str]
    override: Callable[[str, str], str]


def _literal(text: str) -> str:
    """Return a value as Python writes it: numbers and truth values as such, all else as a string."""
    if text.lower() in ("true", "false"):
        return text.capitalize()
    return json.dumps(text) if _json(text).startswith('"') else text


def _json(text: str) -> str:
    """Return a value as JSON: numbers and truth values as such, all else as a string."""
    if text.lower() in ("true", "false"):
        return text.lower()
    try:
        float(text)
    except ValueError:
        return json.dumps(text)
    return text


PYTHON = Writer(
    lambda name, value: f"{name}={_literal(value)}", lambda key, value: f'overrides={{"{key}": {_literal(value)}}}'
)
JSON = Writer(
    lambda name, value: f"{name}: {_json(value)}", lambda key, value: f"overrides: {json.dumps([f'{key}={value}'])}"
)


def unknown_parameters(function: str, given: Mapping[str, Any], flags: Mapping[str, str]) -> ArgumentError:
    """Return one error for all parameters that a function does not have; `flags` are the options of its own."""
    meant = {name: _meant(function, name, value, flags, PYTHON) for name, value in given.items()}
    (first, (hint, _)), *others = meant.items()
    known = f"it has {', '.join(flags)}"
    more = "".join(f"; nor {name}" + (f": {text}" if text else "") for name, (text, _) in others)
    reason = f"{function}() has no such parameter; {hint or known}{more}"
    if hint and any(not text for _, (text, _) in others):
        reason += f"; {known}"
    fixes = [one for _, fix in meant.values() for one in fix[: None if len(meant) == 1 else 1]]
    return ArgumentError(reason, field=first, value=given[first], fix=_one_call(fixes) if others else fixes)


def _one_call(fixes: Sequence[str]) -> list[str]:
    """Return the fixes of several parameters as the arguments of one call, with one dictionary of overrides."""
    if len(fixes) < 2:
        return list(fixes)
    start = "overrides={"
    changes = [one.removeprefix(start).removesuffix("}") for one in fixes if one.startswith(start)]
    plain = [one for one in fixes if not one.startswith(start)]
    return [", ".join([*plain, *([f"{start}{', '.join(changes)}}}"] if changes else [])])]


def unknown_arguments(given: Mapping[str, Any], flags: Mapping[str, str]) -> InputError:
    """Return one error for all arguments over HTTP or MCP that the verb does not have."""
    meant = {name: _meant("", name, value, flags, JSON) for name, value in given.items()}
    (first, (hint, fix)), *others = meant.items()
    if not others and not hint:
        return unknown("argument", first, flags)
    known = f"it takes {', '.join(flags)}"
    reason = f"unknown argument {first}; {hint or known}"
    reason += "".join(f"; nor {name}" + (f": {text}" if text else "") for name, (text, _) in others)
    fixes = [one for _, written in meant.values() for one in written[:1]] if others else fix
    return InputError(reason, field="argument", value=first, fix=[", ".join(fixes)] if others and fixes else fixes)


def _meant(function: str, name: str, value: Any, flags: Mapping[str, str], writer: Writer) -> tuple[str, Sequence[str]]:
    """Return what a parameter was probably meant to be, in words and as code; both empty if that is unknown."""
    typed, text = snake_case(name), json.dumps(value) if isinstance(value, bool) else str(value)
    text = text if len(text) <= LONGEST_SHOWN else "…"  # the text of a file
    near = closest(typed, flags)
    if any(one.replace("_", "") == typed.replace("_", "") for one in near):
        return f"did you mean {near[0]}?", near[:1]
    takes_overrides = "overrides" in flags
    other = [one for one in PARAMETERS.get(typed, ()) if one in flags][:1]
    written = [writer.parameter(one, text) for one in other] or [
        _written(one, flags, writer)
        for one in meant_option(typed, text, flags.values(), takes_overrides, function, as_is)
    ]
    if written:
        return f"write {' or '.join(written)}", written
    if takes_overrides:
        found = as_override(typed, text)
        if found is not None and "=" in found[1] and not found[1].startswith("-"):
            written = [_written(found[1], flags, writer)]
            return f"it is a field of the recipe: {written[0]}", written
        if found is not None and not found[1]:
            return found[0], ()
    return (f"did you mean {' or '.join(near)}?", near) if near else ("", ())


def _written(option: str, flags: Mapping[str, str], writer: Writer) -> str:
    """Return --option VALUE or key=value as the surface writes it."""
    if not option.startswith("--"):
        key, _, value = option.partition("=")
        return writer.override(key, value)
    flag, _, value = option.partition(" ")
    name = next((name for name, one in flags.items() if one == flag), flag.lstrip("-").replace("-", "_"))
    return writer.parameter(name, value or "true")


def recipe_key(text: str) -> str | None:
    """Return the recipe key of a field in any framework's keys: layout.tp, tp, --tensor-model-parallel-size."""
    fields, word = recipe_fields(), text.partition("=")[0].strip().lstrip("-+~")
    variants = (word, word.replace("-", "_"))
    named = [key for key, info in fields.items() if info.flat in variants or key.partition(".")[2] in variants]
    foreign = next((found.field for name in variants if (found := override_keys().get(name))), None)
    if word in fields:
        return word
    return foreign or (named[0] if len(named) == 1 else None)


def is_removed_key(name: str) -> bool:
    """Return whether another trainer's option is something else here."""
    return name in REMOVED_KEYS


def as_override(option: str, value: str, options: Collection[str] = (), recipe: Recipe | None = None) -> Meant:
    """Return why an option of another tool is none of ours, and what a command with these options accepts instead.

    The values follow from the recipe that the command line names.
    """
    key = recipe_key(option)
    if key is not None:
        alias = override_keys().get(option)
        value = value or ("true" if isinstance(recipe_fields()[key].default, bool) else "VALUE")
        meant = f"{key}={_plain_length(key, translate_value(alias, value) if alias else value)}"
        return f"recipe fields are written as KEY=VALUE: {meant}", meant
    if option not in REMOVED_KEYS:
        return None
    if recipe is None:
        return f"{option} {REMOVED_KEYS[option][0]}", ""
    error = removed_key(option, value or "true", recipe, lambda one: accepts(one, recipe)).for_options(options)
    return f"{option} {error.reason}", str(error.fix[0]).replace("without ", "without --")


def _plain_length(key: str, value: str) -> str:
    """Return a sequence length in digits, as recipe fields take it: 8k is 8192; other values as they are."""
    try:
        return str(sequence_length(value)) if key == "data.seq_length" else value
    except InputError:
        return value


def missing_argument(function: str, names: Sequence[str], examples: Mapping[str, Any]) -> ArgumentError:
    """Return the error for a call without parameters that the function needs."""
    fix = [f"{name}={examples[name]!r}" for name in names if examples.get(name) is not None]
    return ArgumentError(
        f"{function}() needs {' and '.join(names)}", field=names[0], fix=[", ".join(fix)] if fix else []
    )
