"""Export to KempnerForge: a TOML file and the program that reads it."""

from __future__ import annotations

from typing import Any

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.beyond_sizes import require_plain
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.kempnerforge.parse import data_ranks, model_of
from meshwright.frameworks.mapping import nest, relevant_fields, to_settings, without_defaults
from meshwright.frameworks.types import ExportedConfig, Program, SourcedValue
from meshwright.models import Attention, Dense, ModelSpec, MoE
from meshwright.recipes.model_changes import numerics_for
from meshwright.recipes.types import Recipe

DEFAULT_STD = 0.02
KEEP = (
    "train.batch_size", "train.seq_len", "train.max_steps", "train.grad_accum_steps", "train.mixed_precision",
    "train.activation_checkpointing", "train.compile_model", "optimizer.name", "optimizer.lr", "scheduler.name",
    "scheduler.warmup_steps", "scheduler.min_lr_ratio", "distributed.dp_shard", "distributed.tp", "distributed.pp",
    "distributed.ep",
)  # fmt: skip


def write(framework: Framework, recipe: Recipe, model: ModelSpec, cluster: Cluster) -> ExportedConfig:
    require_plain(recipe, model, framework.title)
    sizes = _sizes(model)
    derived = (*framework.derived_fields, "train.init_std")
    fields = [key for key in relevant_fields(recipe, model) if key not in derived]
    settings, unmapped = to_settings(framework, recipe, fields)
    ranks = recipe.layout.micro_batch_size * data_ranks(recipe, cluster)
    if recipe.train.global_batch_size % ranks:
        raise InputError(
            f"is not a multiple of micro batch × data-parallel ranks = {ranks}",
            field="train.global_batch_size",
            value=recipe.train.global_batch_size,
        )
    settings = {**settings, "train.grad_accum_steps": recipe.train.global_batch_size // ranks}
    for key in ("eval.steps", "checkpoint.interval"):  # 0 is refused; without the key, its default applies
        if not settings.get(key, 1):
            del settings[key]
    sizes["max_seq_len"] = max(recipe.data.seq_length, model.max_seq_length or 0)
    numbers, notes = _numerics(recipe, model)
    sizes |= numbers
    model_settings = {f"model.{key}": value for key, value in sizes.items()}
    tables = nest({**model_settings, **without_defaults(framework, settings, KEEP)})
    name = f"{recipe.name or 'recipe'}.toml"
    return ExportedConfig(
        framework=framework.name,
        files={name: _text(tables, recipe, framework)},
        program=Program(argv=("scripts/train.py", name)),
        unmapped=unmapped,
        notes=notes,
    )


def _numerics(recipe: Recipe, model: ModelSpec) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the RoPE base and the norm epsilon of the model, and what the file cannot express."""
    found = numerics_for(recipe)
    known = {"rope_theta": found.rope_theta, "norm_eps": found.norm_eps}
    missing = [f"model.{key}" for key, value in known.items() if value is None]
    notes = []
    if missing:
        notes.append(f"add {' and '.join(missing)} of {model.name}: not in the catalogue, so the defaults apply")
    if found.scaling_type:
        notes.append(f"the published RoPE is scaled ({found.scaling_type}); KempnerForge has no setting for that")
    known["init_std"] = found.init_std if recipe.train.init_std or found.init_std != DEFAULT_STD else None
    return {key: value for key, value in known.items() if value is not None}, tuple(notes)


def _sizes(model: ModelSpec) -> dict[str, Any]:
    """Return the model section; raise InputError if KempnerForge cannot build the model."""
    layers, mixer, ffn = model.layers, model.layers[0].mixer if model.layers else None, model.layers[-1].ffn
    same = all(layer.mixer == mixer for layer in layers)
    if model.kind != "causal_lm" or not same or not isinstance(mixer, Attention) or mixer.window or mixer.qkv_bias:
        raise InputError("KempnerForge supports plain Llama-like models only", field="model", value=model.name)
    plain = mixer.q_width == model.hidden and not (mixer.out_bias or mixer.output_gate or mixer.sinks)
    if not plain or model.activation != "silu" or model.learned_positions or not isinstance(ffn, Dense | MoE):
        raise InputError("KempnerForge supports plain Llama-like models only", field="model", value=model.name)
    sizes: dict[str, Any] = {
        "dim": model.hidden,
        "n_layers": model.num_layers,
        "n_heads": mixer.heads,
        "n_kv_heads": mixer.kv_heads,
        "vocab_size": model.vocab,
        "ffn_hidden_dim": ffn.width,
        "tie_embeddings": model.tied,
        "qk_norm": mixer.qk_norm != "none",
    }
    if isinstance(ffn, MoE):
        sizes |= {"num_experts": ffn.experts, "moe_top_k": ffn.topk}
        dense = next((layer.ffn for layer in layers if isinstance(layer.ffn, Dense)), None)
        if dense is not None:
            sizes |= {
                "moe_frequency": next(i for i, layer in enumerate(layers) if isinstance(layer.ffn, MoE)) + 1,
                "ffn_hidden_dim": dense.width,
                "moe_expert_ffn_multiplier": ffn.width / dense.width,
            }
    given = {f"model.{key}": SourcedValue(value, 0, "") for key, value in sizes.items()}
    built = model_of(given)
    if built is None or built.params.total != model.params.total:
        raise InputError("KempnerForge cannot build this model", field="model", value=model.name)
    return sizes


def _text(tables: dict[str, Any], recipe: Recipe, framework: Framework) -> str:
    import tomlkit

    head = f"# {recipe.name} for KempnerForge ({framework.version}), written by meshwright export\n\n"
    return head + tomlkit.dumps(tables)
