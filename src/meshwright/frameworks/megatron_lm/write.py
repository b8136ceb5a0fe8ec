"""Export to Megatron-LM: a launch script with its arguments in arrays, and the program."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright import file_access
from meshwright.clusters import Cluster
from meshwright.display import plural
from meshwright.frameworks.beyond_sizes import require_plain
from meshwright.frameworks.common import hub_text_notes, pattern_notes, random_data_notes
from meshwright.frameworks.environment import required_variables
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.initial_weights import needs_converted, shell_word
from meshwright.frameworks.mapping import relevant_fields, text_of, to_settings, without_defaults
from meshwright.frameworks.megatron_lm.arguments import DEFAULT_TOKENIZER, flag_of
from meshwright.frameworks.megatron_lm.layouts import BLACKWELL, CONNECTIONS
from meshwright.frameworks.megatron_lm.numerics import ARRAY, numeric_flags, numeric_notes
from meshwright.frameworks.megatron_lm.sizes import is_hybrid, model_flags
from meshwright.frameworks.megatron_lm.techniques import OFFLOAD_V1, OFFLOADED_EXPERT_MODULES, OFFLOADED_MODULES
from meshwright.frameworks.megatron_lm.tokenizers import SENTENCEPIECE, SENTENCEPIECE_TOKENIZER
from meshwright.frameworks.model_match import tokenizer_vocabulary
from meshwright.frameworks.run_tokenizer import tokenizer_of
from meshwright.frameworks.types import ExportedConfig, Program, UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.megatron_lm import SCRIPT_ARRAYS
from meshwright.recipes.key_maps.megatron_lm_composite_keys import split_text
from meshwright.recipes.key_maps.pipeline_layout import format_pipeline_layout
from meshwright.recipes.types import Recipe, field_value

KEEP = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "micro_batch_size",
    "global_batch_size", "seq_length", "train_iters", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters",
    "weight_decay", "adam_beta1", "adam_beta2", "clip_grad", "eval_iters", "log_interval",
    "expert_tensor_parallel_size",
)  # fmt: skip
FSDP = ("fsdp2", "megatron_fsdp")
MOE_OVERLAP = "overlap_moe_expert_parallel_comm"
PRETRAINED = "pretrained_checkpoint"
RETAIN = "save_retain_interval"
VOCABULARY_FLAGS = ("vocab_size", "make_vocab_size_divisible_by")
CHECKPOINT_VARIABLE = "PRETRAINED_CHECKPOINT"
ARRAYS = {
    "use_precision_aware_optimizer": "PRECISION_ARGS",
    "no_gradient_accumulation_fusion": "MODEL_PARALLEL_ARGS",
    **ARRAY,
    "offload_modules": "MEMORY_ARGS",
    "ckpt_format": "RUN_ARGS",
    "use_persistent_ckpt_worker": "RUN_ARGS",
    "split": "RUN_ARGS",
    "exit_signal_handler": "RUN_ARGS",
}
"""Flags outside the key map, by the array they belong in; the rest describe the model."""

DERIVED = ("data.validation_part", "data.tokenizer", "train.init_std", "checkpoint.keep")
"""Fields whose flags follow from others, or from the model."""
ADAM_ONLY = {
    "main_grads_dtype": "precision.grads",
    "main_params_dtype": "precision.master",
    "exp_avg_dtype": "precision.moments",
    "optimizer_cpu_offload": "layout.offload",
}
"""Flags of the precision-aware optimizer, with their recipe fields."""


def write(framework: Framework, recipe: Recipe, model: ModelSpec, cluster: Cluster) -> ExportedConfig:
    require_plain(recipe, model, framework.title)
    skipped = (*DERIVED, *(["kernels.te_rng_tracker"] if _captures(recipe) else []))
    fields = [key for key in relevant_fields(recipe, model) if key not in skipped]
    settings, unmapped = to_settings(framework, recipe, fields)
    settings, rejected = _accepted(framework, settings, recipe)
    flags = {
        **without_defaults(framework, settings, KEEP),
        **model_flags(model, recipe),
        **numeric_flags(recipe, model),
        **dict(_required(recipe, model)),
    }
    if vocabulary_of_tokenizer(recipe, model):
        flags = {key: value for key, value in flags.items() if key not in VOCABULARY_FLAGS}
    if recipe.layout.stage_layers and model.mtp_layers and recipe.train.mtp_loss:
        flags["pipeline_model_parallel_layout"] = format_pipeline_layout(recipe.layout.stage_layers, model.mtp_layers)
    if model.moe is None:
        flags.pop("expert_tensor_parallel_size", None)
    retained = retention(recipe)
    if retained is not None:
        flags[RETAIN] = retained.every
        if retained.reason:
            rejected = (*rejected, UnmappedField("checkpoint.keep", recipe.checkpoint.keep, retained.reason))
    described = {}
    if needs_converted(recipe):
        flags[PRETRAINED] = f"${{{CHECKPOINT_VARIABLE}}}"
        source = recipe.checkpoint.pretrained or model.hf_id or model.name
        described = {CHECKPOINT_VARIABLE: f"a checkpoint in Megatron-LM format, converted from {source}"}
    given = {key: value for key, value in flags.items() if value is not None and value is not False}
    flags = {key: given[key] for keys in _groups(given).values() for key in keys}
    script = "pretrain_hybrid.py" if is_hybrid(model) else "pretrain_gpt.py"
    env = dict(_environment(recipe, cluster))
    name = f"{recipe.name or 'recipe'}.sh"
    argv = (script, *(config_key for key, value in flags.items() for config_key in _argv(key, value)))
    variables = required_variables(argv, described)
    return ExportedConfig(
        framework=framework.name,
        files={name: _text(flags, recipe, framework, cluster, env, script, variables)},
        program=Program(argv=argv, env=env, variables=variables),
        unmapped=(*unmapped, *rejected),
        notes=tuple(_notes(recipe, model)),
    )


def with_flags(
    framework: Framework,
    written: ExportedConfig,
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    recipe: Recipe,
    cluster: Cluster,
) -> ExportedConfig:
    """Return an export with other flags and another environment."""
    flags = {key: flags[key] for keys in _groups(flags).values() for key in keys}
    script = written.program.argv[0]
    argv = (script, *(word for key, value in flags.items() for word in _argv(key, value)))
    variables = required_variables(argv, written.program.variables)
    text = _text(flags, recipe, framework, cluster, env, script, variables)
    program = Program(argv=argv, env=env, variables=variables)
    return msgspec.structs.replace(written, files={next(iter(written.files)): text}, program=program)


class Retention(NamedTuple):
    """Checkpoints that Megatron-LM keeps beside the latest one: those of every so many steps."""

    every: int
    reason: str  # why it is not what the recipe asks for; empty if it is


def retention(recipe: Recipe) -> Retention | None:
    """Return the interval that keeps at most checkpoint.keep checkpoints; None if nothing has to be deleted.

    Megatron-LM deletes the previous checkpoint when the next one is written, unless its step is a multiple of
    --save-retain-interval; it cannot keep the last few.
    """
    checkpoint = recipe.checkpoint
    saves = recipe.train.steps // checkpoint.save_every if checkpoint.save_every else 0
    if checkpoint.milestone_every and checkpoint.keep > 1:
        reason = f"Megatron-LM keeps the latest checkpoint and one every {plural(checkpoint.milestone_every, 'step')}"
        return Retention(checkpoint.milestone_every, reason)
    if checkpoint.milestone_every or saves < checkpoint.keep:
        return None
    apart = saves + 1 if checkpoint.keep == 1 else -(-saves // (checkpoint.keep - 1))
    every = checkpoint.save_every * apart
    if checkpoint.keep == 1:
        return Retention(every, "")
    kept = f"the latest checkpoint and one every {plural(every, 'step')} (--save-retain-interval)"
    more = "checkpoint.milestone_every=N keeps those of every N steps"
    return Retention(every, f"Megatron-LM keeps {kept}, at most {checkpoint.keep} in all; {more}")


def _captures(recipe: Recipe) -> bool:
    return recipe.kernels.cuda_graphs != "none"


def _adam(recipe: Recipe) -> bool:
    return recipe.optimizer.name in ("adam", "adamw")


def _accepted(
    framework: Framework, settings: Mapping[str, Any], recipe: Recipe
) -> tuple[dict[str, Any], tuple[UnmappedField, ...]]:
    """Split settings into those the parser accepts and those it would reject."""
    table, kept, rejected = config_keys(framework.key_map), dict(settings), []
    if kept.get("tp_comm_overlap") and not recipe.layout.sp:
        del kept["tp_comm_overlap"]
        rejected.append(
            UnmappedField("kernels.tp_comm_overlap", True, "it overlaps the collectives of sequence parallelism")
        )
    warmup = recipe.schedule.warmup_steps
    if warmup >= (recipe.schedule.decay_steps or recipe.train.steps):
        kept.pop("lr_warmup_iters", None)
        rejected.append(UnmappedField("schedule.warmup_steps", warmup, "the warm-up must end before the decay does"))
    if not _adam(recipe):
        for key, field in ADAM_ONLY.items():
            if key in without_defaults(framework, kept):
                del kept[key]
                reason = "only Adam supports other state formats and offload"
                rejected.append(UnmappedField(field, field_value(recipe, field), reason))
    for key, value in settings.items():
        config_key = table.get(key)
        if config_key is None or not config_key.choices or value is None or text_of(value) in config_key.choices:
            continue
        del kept[key]
        reason = f"{framework.format_setting(key, True)} takes {', '.join(config_key.choices)}"
        rejected.append(UnmappedField(config_key.field, field_value(recipe, config_key.field), reason))
    return kept, tuple(rejected)


def _required(recipe: Recipe, model: ModelSpec) -> Iterator[tuple[str, Any]]:
    """Yield flags that other flags require, or that express a field indirectly."""
    precision, layout = recipe.precision, recipe.layout
    if _adam(recipe) and ("bf16" in (precision.grads, precision.moments) or layout.offload == "optimizer"):
        yield "use_precision_aware_optimizer", True
    if layout.strategy in FSDP:
        yield "no_gradient_accumulation_fusion", True
    if layout.strategy == "megatron_fsdp":
        yield "ckpt_format", "fsdp_dtensor"
    if layout.offload == "activations":
        recomputes_moe = layout.recompute == "selective" and "moe" in layout.recompute_modules
        yield (
            "offload_modules",
            [*OFFLOADED_MODULES, *(OFFLOADED_EXPERT_MODULES if model.moe is not None and not recomputes_moe else ())],
        )
    if recipe.checkpoint.async_save:
        yield "use_persistent_ckpt_worker", True
    yield "exit_signal_handler", True  # save when a scheduler ends the run; its default is to lose the steps
    yield "split", split_text(recipe.data.validation_part)
    yield from _tokenizer(recipe, model)


def vocabulary_of_tokenizer(recipe: Recipe, model: ModelSpec) -> str:
    """Return the tokenizer that alone knows the vocabulary of a model in sizes of its own; empty if the recipe does.

    Megatron-LM takes the vocabulary from the tokenizer. The recipe's may be assumed, and must not be written as a fact.
    """
    named = recipe.data.tokenizer
    own = recipe.architecture.vocab is not None and not recipe.checkpoint.pretrained
    return named if own and named and tokenizer_vocabulary(named) != model.vocab else ""


def _byte_pair_files(folder: str) -> tuple[str, str] | None:
    """Return the two files of GPT-2's kind of tokenizer in a folder of this machine that has no other tokenizer."""
    path = Path(folder).expanduser()
    if file_access.closed() or not path.is_dir():
        return None
    from meshwright.engine.data.tokenizers import byte_pair_files  # only for a folder that is here

    found = byte_pair_files(path)
    return None if found is None else (str(found[0]), str(found[1]))


def _tokenizer(recipe: Recipe, model: ModelSpec) -> Iterator[tuple[str, Any]]:
    if recipe.data.dataset == "mock" and not recipe.data.blend and not recipe.data.tokenizer:
        yield "tokenizer_type", "NullTokenizer"
        return
    named = tokenizer_of(recipe, model) or None
    if recipe.goal == "pretrain" and named and (pair := _byte_pair_files(named)):
        yield from (("tokenizer_type", DEFAULT_TOKENIZER), ("vocab_file", pair[0]), ("merge_file", pair[1]))
        return
    plain = SENTENCEPIECE_TOKENIZER if named and named.endswith(SENTENCEPIECE) else "HuggingFaceTokenizer"
    yield "tokenizer_type", "SFTTokenizer" if recipe.goal == "sft" else plain
    yield "tokenizer_model", named


def _needs_one_connection(recipe: Recipe, cluster: Cluster) -> bool:
    parallel = recipe.layout.tp > 1 or recipe.layout.cp > 1
    return parallel and cluster.gpu.capability < BLACKWELL and recipe.layout.strategy not in FSDP


def needed_environment(
    env: Mapping[str, str], flags: Mapping[str, Any], recipe: Recipe, cluster: Cluster
) -> Iterator[tuple[str, str, str]]:
    """Yield the variables of a user's file that this layout cannot run with, their value or none, and why."""
    value = env.get(CONNECTIONS, "")
    if value == "1" and recipe.layout.strategy in FSDP:
        yield CONNECTIONS, "", "FSDP needs several hardware queues"
    elif value not in ("", "1") and _needs_one_connection(recipe, cluster) and MOE_OVERLAP not in flags:
        yield CONNECTIONS, "1", "TP and CP need it on Hopper and older GPUs"


def _environment(recipe: Recipe, cluster: Cluster) -> Iterator[tuple[str, str]]:
    if _needs_one_connection(recipe, cluster):
        yield CONNECTIONS, "1"
    if recipe.layout.offload == "activations":
        yield OFFLOAD_V1, "1"
    if recipe.kernels.deterministic:
        yield "NCCL_ALGO", "Ring"
        yield "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"
        yield "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def _notes(recipe: Recipe, model: ModelSpec) -> Iterator[str]:
    named = vocabulary_of_tokenizer(recipe, model)
    yield from numeric_notes(recipe, model, with_padding=not named)
    if named:
        yield f"Megatron-LM takes the vocabulary from the tokenizer {named}; {model.vocab:,} is for the estimate only"
    given = recipe.checkpoint.pretrained
    if needs_converted(recipe):
        source = given or model.hf_id or "the weights"
        yield (
            f"convert {source} to Megatron-LM format and set {CHECKPOINT_VARIABLE} to its folder, "
            "or name that folder with checkpoint.pretrained=DIR"
        )
    elif given:
        yield f"{given} must be a checkpoint in Megatron-LM format (--pretrained-checkpoint); convert other weights"
    yield from random_data_notes(recipe, "--mock-data")
    yield from pattern_notes(recipe, "Megatron-LM")
    yield from hub_text_notes(recipe, "--data-path")
    if recipe.goal == "sft" and recipe.data.dataset != "mock":
        yield "--sft reads JSON lines with messages"
    elif recipe.data.dataset != "mock" or recipe.data.blend:
        yield "data paths are prefixes of files written by tools/preprocess_data.py"


def _argv(key: str, value: Any) -> list[str]:
    """Return a flag and its values as command-line arguments."""
    flag = flag_of(key)
    if value is True:
        return [flag]
    values = value if isinstance(value, list | tuple) else [value]
    return [flag, *(repr(one) if isinstance(one, float) else str(one) for one in values)]


def _text(
    flags: Mapping[str, Any],
    recipe: Recipe,
    framework: Framework,
    cluster: Cluster,
    env: Mapping[str, str],
    script: str,
    variables: Mapping[str, str],
) -> str:
    lines = [
        "#!/bin/bash",
        f"# {recipe.name} for {framework.title} ({framework.version}), written by meshwright export",
        f"# for {cluster}",
        "",
        "# MEGATRON_LM_DIR is the checkout of Megatron-LM; without it, run this script in the checkout.",
        'export PYTHONPATH="${MEGATRON_LM_DIR:-.}${PYTHONPATH:+:$PYTHONPATH}"',
        *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
        "",
        *_array("DISTRIBUTED_ARGS", _distributed(cluster)),
    ]
    names = ["DISTRIBUTED_ARGS"]
    for name, keys in _groups(flags).items():
        lines += _array(name, [" ".join(shell_word(one, variables) for one in _argv(key, flags[key])) for key in keys])
        names.append(name)
    first, *rest = [f'"${{{name}[@]}}"' for name in names]
    lines += [
        f'torchrun {first} "${{MEGATRON_LM_DIR:-.}}/{script}" \\',
        *(f"    {one} \\" for one in rest[:-1]),
        f"    {rest[-1]}",
    ]
    return "\n".join(lines) + "\n"


RANK = "${NODE_RANK:?number of this node, from 0}"
HEAD = "${HEAD_NODE:?hostname of the first node}"


def _distributed(cluster: Cluster) -> list[str]:
    return [
        f"--nnodes {cluster.nodes}",
        f"--nproc-per-node {cluster.gpus_per_node}",
        f'--node-rank "{RANK if cluster.nodes > 1 else "${NODE_RANK:-0}"}"',
        f'--master-addr "{HEAD if cluster.nodes > 1 else "${MASTER_ADDR:-localhost}"}"',
        '--master-port "${MASTER_PORT:-6000}"',
    ]


def _array(name: str, rows: list[str]) -> list[str]:
    return [f"{name}=(", *(f"    {row}" for row in rows), ")", ""]


def _groups(flags: Mapping[str, Any]) -> dict[str, list[str]]:
    """Group flags by array, in key-map order."""
    array_of = {config_key.key: name for name, group in SCRIPT_ARRAYS.items() for config_key in group} | ARRAYS
    found: dict[str, list[str]] = {name: [] for name in SCRIPT_ARRAYS}
    for key in flags:
        found[array_of.get(key, "GPT_MODEL_ARGS")].append(key)
    return {name: keys for name, keys in found.items() if keys}
