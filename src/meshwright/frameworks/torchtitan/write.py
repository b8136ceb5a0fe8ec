"""Writing torchtitan: a TOML of the 0.2 line, and the command of today."""

from __future__ import annotations

from math import ceil
from typing import Any

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.mapping import nest, relevant_fields, same_value, to_settings, value_of, without_defaults
from meshwright.frameworks.torchtitan.derived_fields import EVERYTHING, ONE_STAGE
from meshwright.frameworks.torchtitan.format_override import flag
from meshwright.frameworks.torchtitan.models import PRESETS, flavor_of, preset_of
from meshwright.frameworks.torchtitan.parse import V02
from meshwright.frameworks.torchtitan.rules.layout import WITHOUT_CONTEXT, WITHOUT_STAGES
from meshwright.frameworks.types import ExportedConfig, Program, UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.torchtitan import (
    CONTEXT_LENGTH,
    DEFAULT_ASSETS,
    LOCAL_BATCH,
    MICRO_BATCH,
    MICRO_BATCH_TOKENS,
    STEP_TOKENS,
)
from meshwright.recipes.key_maps.value_maps import PIPELINE_SCHEDULES
from meshwright.recipes.types import Recipe, recipe_fields

FILE = "config.toml"
SCRIPTS = {"run_0.3.0.sh": "0.3.0", "run.sh": "of 2026-08-21 (main branch)"}
"""The commands of today with their versions: the release counts a batch in samples, the main branch in tokens."""
SECTIONS = (
    "job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training", "parallelism", "checkpoint",
    "activation_checkpoint", "compile", "quantize", "validation", "debug",
)  # fmt: skip
KEEP = frozenset(
    f"parallelism.{name}_degree"
    for name in (
        "data_parallel_shard", "data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel",
    )
) | {
    "optimizer.name", "optimizer.lr", "lr_scheduler.warmup_steps", "lr_scheduler.decay_type",
    "lr_scheduler.min_lr_factor", "training.dataset", LOCAL_BATCH, "training.global_batch_size", "training.seq_len",
    "training.steps", "checkpoint.enable", "checkpoint.interval", "activation_checkpoint.mode", "compile.enable",
}  # fmt: skip
SPLIT = "parallelism.pipeline_parallel_"


def write(framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> ExportedConfig:
    """The TOML for 0.2.2, and the command of today where it has a preset of the model."""
    if recipe.goal != "pretrain":
        raise InputError("torchtitan's configs pretrain; fine-tuning is code there", field="goal", value=recipe.goal)
    name, flavor = flavor_of(model)
    _refuse_axes(recipe, name)
    settings, unsaid = _settings(framework, recipe, model, on)
    settings = {"model.name": name, "model.flavor": flavor, **settings}
    files = {FILE: _toml(framework, settings, recipe, on)}
    notes = [f"download the tokenizer to {settings['model.hf_assets_path']} (scripts/download_hf_assets.py)"]
    if any(one.field == "data.dataset" for one in unsaid):
        notes.append(f"the data set {recipe.data.dataset} has no name in torchtitan; c4 stands in the file")
    preset = preset_of(model)
    if preset is not None:
        for name, version in SCRIPTS.items():
            counted = _samples if version == "0.3.0" else _tokens
            flags = _today(recipe, preset, settings, counted(recipe, settings))
            files[name] = _script(flags, recipe, on, preset, version)
        lost = _lost_today(framework, files["run.sh"], recipe, model, on, {one.field for one in unsaid})
        if lost:
            names = " and ".join(SCRIPTS)
            notes.append(f"{names}, commands of today, have no flags for {', '.join(lost)}: write a config function")
    else:
        notes.append("today's torchtitan has no preset of this model: only the file for 0.2.2 is written")
    return ExportedConfig(
        framework=framework.name,
        files=files,
        program=Program(
            argv=("-m", "torchtitan.train", "--job.config_file", FILE),
            env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        ),
        unmapped=unsaid,
        notes=tuple(notes),
    )


def _refuse_axes(recipe: Recipe, name: str) -> None:
    """Axes that the 0.2 line has not got for a model."""
    for axis, without, what in (("pp", WITHOUT_STAGES, "cut into stages"), ("cp", WITHOUT_CONTEXT, "cut over context")):
        degree = getattr(recipe.layout, axis)
        if degree > 1 and name in without:
            message = f"{name} cannot be {what} in torchtitan 0.2"
            raise InputError(message, field=f"layout.{axis}", value=degree, fix=[f"layout.{axis}=1"])


def _lost_today(
    framework: Framework, script: str, recipe: Recipe, model: ModelSpec, on: Cluster, known: set[str]
) -> list[str]:
    """Fields that the command of today would take otherwise, beyond those that torchtitan has no words for at all."""
    from meshwright.frameworks.load import content_of
    from meshwright.frameworks.to_recipe import complete, import_recipe

    found = complete(import_recipe(framework, content_of(script, "run.sh", folder=None), model), on)
    return [
        key
        for key in relevant_fields(recipe, model)
        if key not in known and not same_value(value_of(found, key), value_of(recipe, key))
    ]


def _settings(
    framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster
) -> tuple[dict[str, Any], tuple[UnmappedField, ...]]:
    fields = [key for key in relevant_fields(recipe, model) if key not in framework.derived_fields]
    found, unsaid = to_settings(framework, recipe, fields)
    settings = {key: value for key, value in found.items() if not _later(key)}
    ranks = _ranks(recipe, on)
    settings |= _batch(recipe, ranks) | _stages(recipe, model) | _saved(recipe)
    settings["training.global_batch_size"] = recipe.train.global_batch_size
    settings["model.hf_assets_path"] = (
        recipe.data.tokenizer or DEFAULT_ASSETS + (model.hf_id or model.name).split("/")[-1]
    )
    settings["debug.seed"] = recipe.train.seed
    settings["optimizer.name"] = "AdamW"
    if recipe.layout.recompute == "selective":
        settings["activation_checkpoint.selective_ac_option"] = "op"
    settings.setdefault("training.dataset", "c4")
    if not recipe.train.eval_every and recipe.train.eval_steps == recipe_fields()["train.eval_steps"].default:
        settings.pop("validation.steps", None)
    if not recipe.checkpoint.pretrained:
        settings.pop("checkpoint.initial_load_path", None)
    elif "checkpoint.initial_load_path" in settings:
        settings["checkpoint.initial_load_in_hf"] = True
    if recipe.layout.strategy == "ddp":
        settings["parallelism.data_parallel_replicate_degree"] = ranks
        settings["parallelism.data_parallel_shard_degree"] = 1
    if recipe.kernels.tp_comm_overlap and not recipe.kernels.compile:
        settings.pop("parallelism.enable_async_tensor_parallel", None)
        why = "torchtitan overlaps the exchanges of tensor parallelism in a compiled model only"
        unsaid = (*unsaid, UnmappedField("kernels.tp_comm_overlap", True, why))
    if model.moe is None:
        settings = {key: value for key, value in settings.items() if "expert" not in key}
    return settings, unsaid


def _later(key: str) -> bool:
    """Whether a key came only after the 0.2 line."""
    word = config_keys("torchtitan").get(key)
    return word is not None and word.since > V02


def _ranks(recipe: Recipe, on: Cluster) -> int:
    """Data-parallel ranks on these GPUs."""
    layout = recipe.layout
    return max(1, on.world // (layout.tp * layout.pp * layout.cp))


def _batch(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """One forward per micro batch; with a pipeline, the whole batch of a rank goes through it at once."""
    micro, batch = recipe.layout.micro_batch_size, recipe.train.global_batch_size
    if recipe.layout.pp == 1:
        return {LOCAL_BATCH: micro}
    local = batch // ranks if batch % (ranks * micro) == 0 else micro
    return {LOCAL_BATCH: local, MICRO_BATCH: micro}


def _stages(recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    """How the layers are cut; what their rules cannot make is left to the schedule, and told as unsaid."""
    layout = recipe.layout
    if layout.pp == 1:
        return {}
    if layout.stage_layers:
        return {"parallelism.module_fqns_per_model_part": _parts(layout.stage_layers)}
    ends = {"first": int(layout.embedding_as_layer), "last": int(layout.head_as_layer)}
    found: dict[str, Any] = {f"{SPLIT}{end}_stage_less_layers": less for end, less in ends.items()}
    natural = 1 if _schedule(recipe).lower() in ONE_STAGE else 2
    layers = model.num_layers + sum(ends.values())
    per_stage = ceil(layers / (layout.pp * layout.vp))
    if layout.vp != natural and ceil(layers / per_stage) == layout.pp * layout.vp:
        found[f"{SPLIT}layers_per_stage"] = per_stage
    return found


def _schedule(recipe: Recipe) -> str:
    return next(theirs for theirs, ours in PIPELINE_SCHEDULES.items() if ours == recipe.layout.pp_schedule)


def _parts(stages: tuple[int, ...]) -> list[list[str]]:
    """The modules of every stage chunk by name."""
    parts: list[list[str]] = []
    start = 0
    for count in stages:
        parts.append([f"layers.{index}" for index in range(start, start + count)])
        start += count
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "output"]] if len(parts) > 1 else parts


def _saved(recipe: Recipe) -> dict[str, Any]:
    """A checkpoint at the end only is one whose interval is never reached."""
    saved = recipe.checkpoint
    keep = {} if saved.keep < EVERYTHING else {"checkpoint.keep_latest_k": 0}
    if saved.keep == 1:
        keep = {"checkpoint.keep_latest_k": 2}
    return {"checkpoint.enable": True, "checkpoint.interval": saved.save_every or recipe.train.steps + 1, **keep}


def _toml(framework: Framework, settings: dict[str, Any], recipe: Recipe, on: Cluster) -> str:
    import tomlkit

    order = {key: place for place, key in enumerate(config_keys("torchtitan"))}
    given = {key: settings[key] for key in sorted(settings, key=lambda key: order[key]) if settings[key] is not None}
    said = without_defaults(framework, given, KEEP)
    if (listed := said.get("parallelism.module_fqns_per_model_part")) is not None:
        said["parallelism.module_fqns_per_model_part"] = tomlkit.item(listed).multiline(True)
    tables = nest({"job.description": f"{recipe.name} on {on}", **said})
    ordered = {name: tables[name] for name in (*SECTIONS, *tables) if name in tables}
    head = f"# {recipe.name} for torchtitan 0.2.2 on {on}, written by meshwright export\n\n"
    return head + tomlkit.dumps(ordered)


SHARED = (
    *(key for key in KEEP if key.startswith("parallelism.")), "parallelism.expert_parallel_degree",
    "parallelism.pipeline_parallel_schedule", "parallelism.fsdp_reshard_after_forward",
    f"{SPLIT}first_stage_less_layers", f"{SPLIT}last_stage_less_layers", f"{SPLIT}layers_per_stage", "training.steps",
    "training.max_norm", "training.dtype", "training.mixed_precision_param", "training.enable_cpu_offload",
    "lr_scheduler.warmup_steps", "lr_scheduler.decay_type", "lr_scheduler.decay_ratio", "lr_scheduler.total_steps",
    "lr_scheduler.min_lr_factor", "checkpoint.enable", "checkpoint.interval", "checkpoint.keep_latest_k",
    "checkpoint.async_mode", "checkpoint.last_save_in_hf", "checkpoint.initial_load_path",
    "checkpoint.initial_load_in_hf", "compile.enable", "metrics.log_freq", "debug.seed", "debug.deterministic",
    "debug.moe_force_load_balance",
)  # fmt: skip
"""Settings that today's flags say by the same names."""
GROUP = "optimizer.param_groups.0.optimizer_kwargs."


def _tokens(recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    """The batch as the main branch counts it."""
    layout, length = recipe.layout, recipe.data.seq_length
    found = {
        MICRO_BATCH_TOKENS: layout.micro_batch_size * length,
        CONTEXT_LENGTH: length,
        STEP_TOKENS: recipe.train.global_batch_size * length,
    }
    if layout.pp > 1:
        found["parallelism.num_pp_microbatches"] = settings[LOCAL_BATCH] // layout.micro_batch_size
    return found


def _samples(recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    """The batch as 0.3.0 counts it."""
    found = {
        LOCAL_BATCH: settings[LOCAL_BATCH],
        "training.seq_len": recipe.data.seq_length,
        "training.global_batch_size": recipe.train.global_batch_size,
    }
    return found if recipe.layout.pp == 1 else {**found, MICRO_BATCH: recipe.layout.micro_batch_size}


def _today(recipe: Recipe, preset: tuple[str, str], settings: dict[str, Any], batch: dict[str, Any]) -> list[str]:
    """The flags over the preset."""
    layout = recipe.layout
    wanted = {key: settings[key] for key in SHARED if key in settings}
    if wanted.get("checkpoint.last_save_in_hf"):
        wanted["checkpoint.last_save_model_only"] = True
    wanted |= {
        **batch,
        f"{GROUP}lr": recipe.optimizer.lr,
        "hf_assets_path": settings["model.hf_assets_path"],
        "profiler.enable_profiling": recipe.train.profile,
        # Their graphs hold neither a pipeline nor the presets' exchange of tokens, which waits for the CPU.
        "training.disable_cuda_graphs": recipe.kernels.cuda_graphs == "none" or max(layout.pp, layout.ep) > 1,
        "compile.enable_async_tensor_parallel": recipe.kernels.tp_comm_overlap and recipe.kernels.compile,
        "validator.enable": recipe.train.eval_every > 0,
    }
    if recipe.train.eval_every:
        wanted |= {"validator.freq": recipe.train.eval_every, "validator.steps": recipe.train.eval_steps}
    if layout.tp > 1:
        wanted["parallelism.enable_sequence_parallel"] = layout.sp
    for key, value in (("eps", recipe.optimizer.eps), ("weight_decay", recipe.optimizer.weight_decay)):
        if value != config_keys("torchtitan")[f"optimizer.{key}"].default:
            wanted[GROUP + key] = value
    base = dict(PRESETS[preset[0]][preset[1]].settings)
    flags = [flag(key, value) for key, value in wanted.items() if key in batch or value != _unless_said(key, base)]
    if (recipe.optimizer.beta1, recipe.optimizer.beta2) != (0.9, 0.95):
        flags.append(f"--{GROUP}betas {recipe.optimizer.beta1} {recipe.optimizer.beta2}")
    flags.append(f"activation-checkpoint:{layout.recompute}")  # a word of its own, and the last one
    return flags


def _unless_said(key: str, base: dict[str, Any]) -> Any:
    """The value of a key where a command does not say it: the preset's, or their default."""
    if key in base:
        return base[key]
    if key in ("validator.enable", "profiler.enable_profiling", "compile.enable_async_tensor_parallel"):
        return False
    return {"training.disable_cuda_graphs": False, "parallelism.enable_sequence_parallel": True}.get(
        key, config_keys("torchtitan")[key].default
    )


def _script(flags: list[str], recipe: Recipe, on: Cluster, preset: tuple[str, str], version: str) -> str:
    nodes, per_node = max(1, on.nodes), on.gpus_per_node
    head = [
        "#!/bin/bash",
        f"# {recipe.name} for torchtitan {version} on {on}, written by meshwright export",
        "# Over several nodes, add --rdzv_id, --rdzv_backend c10d and --rdzv_endpoint HOST:PORT to torchrun."
        if nodes > 1
        else "# One node.",
        "export PYTORCH_ALLOC_CONF=expandable_segments:True",
    ]
    start = f"torchrun --nnodes {nodes} --nproc_per_node {per_node} -m torchtitan.train"
    lines = [start, f"--module {preset[0]} --config {preset[1]}", *flags]
    return "\n".join([*head, " \\\n  ".join(lines), ""])
