"""Writing Megatron-LM: a script with its arguments in arrays, and the program that it starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.mapping import relevant_fields, text_of, to_settings, value_of, without_defaults
from meshwright.frameworks.megatron_lm.layouts import BLACKWELL, CONNECTIONS
from meshwright.frameworks.megatron_lm.sizes import is_hybrid, model_flags
from meshwright.frameworks.megatron_lm.techniques import OF_EXPERTS, OFFLOAD_V1, OFFLOADED
from meshwright.frameworks.types import ExportedConfig, Program, UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.megatron_lm import SCRIPT_ARRAYS
from meshwright.recipes.key_maps.pipeline_layout import format_pipeline_layout
from meshwright.recipes.types import Recipe

KEEP = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "micro_batch_size",
    "global_batch_size", "seq_length", "train_iters", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters",
    "weight_decay", "adam_beta1", "adam_beta2", "clip_grad", "eval_iters", "log_interval",
    "expert_tensor_parallel_size",
)  # fmt: skip
PRETRAINED = "pretrained_checkpoint"
ASKED_FOR = '"${PRETRAINED_CHECKPOINT:?a checkpoint in the format of Megatron-LM}"'
PLACES = {
    "use_precision_aware_optimizer": "PRECISION_ARGS",
    "no_gradient_accumulation_fusion": "MODEL_PARALLEL_ARGS",
    "moe_router_score_function": "MOE_ARGS",
    "lr_wsd_decay_iters": "TRAINING_ARGS",
    "lr_wsd_decay_style": "TRAINING_ARGS",
    "offload_modules": "MEMORY_ARGS",
    "ckpt_format": "RUN_ARGS",
    "use_persistent_ckpt_worker": "RUN_ARGS",
    "split": "RUN_ARGS",
}
"""Flags without a row of their own meaning, by the array that they belong in; the rest describe the model."""

ADAM_ONLY = {
    "main_grads_dtype": "precision.grads",
    "main_params_dtype": "precision.master",
    "exp_avg_dtype": "precision.moments",
    "optimizer_cpu_offload": "layout.offload",
}
"""Flags of the precision-aware optimizer, with what they say."""


def write(framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> ExportedConfig:
    if recipe.goal == "peft":
        raise InputError(
            "Megatron-LM trains all weights; Megatron-Bridge has adapters",
            field="goal",
            value=recipe.goal,
            fix=["--to megatron-bridge"],
        )
    skipped = ("data.validation_part", "data.tokenizer", *(["kernels.te_rng_tracker"] if _captures(recipe) else []))
    fields = [key for key in relevant_fields(recipe, model) if key not in skipped]
    settings, unsaid = to_settings(framework, recipe, fields)
    settings, refused = _offered(framework, settings, recipe)
    flags = {
        **without_defaults(framework, settings, KEEP),
        **model_flags(model, recipe),
        **dict(_needed(recipe, model)),
    }
    if recipe.layout.stage_layers and model.mtp_layers and recipe.train.mtp_loss:
        flags["pipeline_model_parallel_layout"] = format_pipeline_layout(recipe.layout.stage_layers, model.mtp_layers)
    if model.moe is None:
        flags.pop("expert_tensor_parallel_size", None)
    said = {key: value for key, value in flags.items() if value is not None and value is not False}
    flags = {key: said[key] for keys in _groups(said).values() for key in keys}
    script = "pretrain_hybrid.py" if is_hybrid(model) else "pretrain_gpt.py"
    env = dict(_environment(recipe, on))
    name = f"{recipe.name or 'recipe'}.sh"
    return ExportedConfig(
        framework=framework.name,
        files={name: _text(flags, recipe, framework, on, env, script)},
        program=Program(argv=(script, *(word for key, value in flags.items() for word in _words(key, value))), env=env),
        unmapped=(*unsaid, *refused),
        notes=tuple(_notes(recipe, model)),
    )


def _captures(recipe: Recipe) -> bool:
    return recipe.kernels.cuda_graphs != "none"


def _adam(recipe: Recipe) -> bool:
    return recipe.optimizer.name in ("adam", "adamw")


def _offered(
    framework: Framework, settings: Mapping[str, Any], recipe: Recipe
) -> tuple[dict[str, Any], tuple[UnmappedField, ...]]:
    """Settings that their parser takes as they are, and those it would stop at."""
    table, kept, refused = config_keys(framework.key_map), dict(settings), []
    if kept.get("tp_comm_overlap") and not recipe.layout.sp:
        del kept["tp_comm_overlap"]
        refused.append(UnmappedField("kernels.tp_comm_overlap", True, "it overlaps what sequence parallelism sends"))
    warmup = recipe.schedule.warmup_steps
    if warmup >= (recipe.schedule.decay_steps or recipe.train.steps):
        kept.pop("lr_warmup_iters", None)
        refused.append(UnmappedField("schedule.warmup_steps", warmup, "the warm-up ends before the decay does"))
    if not _adam(recipe):
        for key, own in ADAM_ONLY.items():
            if key in without_defaults(framework, kept):
                del kept[key]
                reason = "only Adam keeps its numbers in other formats or places"
                refused.append(UnmappedField(own, value_of(recipe, own), reason))
    for key, value in settings.items():
        word = table.get(key)
        if word is None or not word.choices or value is None or text_of(value) in word.choices:
            continue
        del kept[key]
        reason = f"{framework.format_setting(key, True)} takes {', '.join(word.choices)}"
        refused.append(UnmappedField(word.field, value_of(recipe, word.field), reason))
    return kept, tuple(refused)


def _needed(recipe: Recipe, model: ModelSpec) -> Iterator[tuple[str, Any]]:
    """Flags that others ask for, or that say a field in another way."""
    precision, layout = recipe.precision, recipe.layout
    if _adam(recipe) and ("bf16" in (precision.grads, precision.moments) or layout.offload == "optimizer"):
        yield "use_precision_aware_optimizer", True
    if layout.strategy in ("fsdp2", "megatron_fsdp"):
        yield "no_gradient_accumulation_fusion", True
    if layout.strategy == "megatron_fsdp":
        yield "ckpt_format", "fsdp_dtensor"
    if layout.offload == "activations":
        whole = layout.recompute == "selective" and "moe" in layout.recompute_modules
        yield "offload_modules", [*OFFLOADED, *(OF_EXPERTS if model.moe is not None and not whole else ())]
    if recipe.checkpoint.async_save:
        yield "use_persistent_ckpt_worker", True
    if recipe.schedule.name == "wsd":
        end = recipe.schedule.decay_steps or recipe.train.steps
        yield "lr_wsd_decay_iters", max(1, (end - recipe.schedule.warmup_steps) // 5)
        yield "lr_wsd_decay_style", "minus_sqrt"
    yield "split", _split(recipe.data.validation_part)
    yield from _tokenizer(recipe, model)


def _split(part: float) -> str:
    held = f"{100 * part:.10f}".rstrip("0").rstrip(".")
    rest = f"{100 - 100 * part:.10f}".rstrip("0").rstrip(".")
    return f"{rest},{held},0"


def _tokenizer(recipe: Recipe, model: ModelSpec) -> Iterator[tuple[str, Any]]:
    if recipe.data.dataset == "mock" and not recipe.data.blend and not recipe.data.tokenizer:
        yield "tokenizer_type", "NullTokenizer"
        return
    yield "tokenizer_type", "SFTTokenizer" if recipe.goal == "sft" else "HuggingFaceTokenizer"
    yield "tokenizer_model", recipe.data.tokenizer or model.hf_id or None


def _environment(recipe: Recipe, on: Cluster) -> Iterator[tuple[str, str]]:
    cut = recipe.layout.tp > 1 or recipe.layout.cp > 1
    if cut and on.gpu.capability < BLACKWELL and recipe.layout.strategy not in ("fsdp2", "megatron_fsdp"):
        yield CONNECTIONS, "1"
    if recipe.layout.offload == "activations":
        yield OFFLOAD_V1, "1"
    if recipe.kernels.deterministic:
        yield "NCCL_ALGO", "Ring"
        yield "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"
        yield "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def _notes(recipe: Recipe, model: ModelSpec) -> Iterator[str]:
    if not model.learned_positions:
        yield "a recipe does not hold the rotary base, the norm's epsilon and a router's scores: add them as published"
    if recipe.goal == "sft" and not recipe.checkpoint.pretrained:
        yield "convert the weights to Megatron-LM's format and set PRETRAINED_CHECKPOINT to their folder"
    if recipe.data.dataset != "mock" or recipe.data.blend:
        yield "data paths are prefixes of files that tools/preprocess_data.py makes"
    if recipe.data.dataset != "mock" and not (recipe.data.tokenizer or model.hf_id):
        yield "no tokenizer is known for this model: add --tokenizer-model"


def _words(key: str, value: Any) -> list[str]:
    """A flag and its values as words of a command."""
    flag = "--" + key.replace("_", "-")
    if value is True:
        return [flag]
    values = value if isinstance(value, list | tuple) else [value]
    return [flag, *(repr(one) if isinstance(one, float) else str(one) for one in values)]


def _text(
    flags: Mapping[str, Any], recipe: Recipe, framework: Framework, on: Cluster, env: Mapping[str, str], script: str
) -> str:
    lines = [
        "#!/bin/bash",
        f"# {recipe.name} for {framework.title} ({framework.version}), written by meshwright export",
        f"# for {on}",
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
        "",
        *_array("DISTRIBUTED_ARGS", _distributed(on)),
    ]
    names = ["DISTRIBUTED_ARGS"]
    for name, keys in _groups(flags).items():
        rows = [" ".join(_quoted(_words(key, flags[key]))) for key in keys]
        if name == "RUN_ARGS" and recipe.goal == "sft" and PRETRAINED not in flags:
            rows.append(f"--{PRETRAINED.replace('_', '-')} {ASKED_FOR}")
        lines += _array(name, rows)
        names.append(name)
    first, *rest = [f'"${{{name}[@]}}"' for name in names]
    lines += [f"torchrun {first} {script} \\", *(f"    {one} \\" for one in rest[:-1]), f"    {rest[-1]}"]
    return "\n".join(lines) + "\n"


def _distributed(on: Cluster) -> list[str]:
    return [
        f"--nnodes {on.nodes}",
        f"--nproc-per-node {on.gpus_per_node}",
        '--node-rank "${NODE_RANK:-0}"',
        '--master-addr "${MASTER_ADDR:-localhost}"',
        '--master-port "${MASTER_PORT:-6000}"',
    ]


def _array(name: str, rows: list[str]) -> list[str]:
    return [f"{name}=(", *(f"    {row}" for row in rows), ")", ""]


def _quoted(words: list[str]) -> list[str]:
    return [shlex.quote(word) for word in words]


def _groups(flags: Mapping[str, Any]) -> dict[str, list[str]]:
    """The flags by the array that they stand in, in the order of the table."""
    home = {word.key: name for name, group in SCRIPT_ARRAYS.items() for word in group} | PLACES
    found: dict[str, list[str]] = {name: [] for name in SCRIPT_ARRAYS}
    for key in flags:
        found[home.get(key, "GPT_MODEL_ARGS")].append(key)
    return {name: keys for name, keys in found.items() if keys}
