"""Write a recipe as a torchtitan 0.2 TOML config and as commands for 0.3.0 and main."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.common import KEEP_ALL
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.initial_weights import in_folder, is_hub_id
from meshwright.frameworks.mapping import nest, relevant_fields, same_value, to_settings, without_defaults
from meshwright.frameworks.model_match import model_path, own_numbers
from meshwright.frameworks.run_tokenizer import model_folder
from meshwright.frameworks.torchtitan.derived_fields import ONE_STAGE
from meshwright.frameworks.torchtitan.format_override import flag
from meshwright.frameworks.torchtitan.models import PRESETS, flavor_of, preset_of
from meshwright.frameworks.torchtitan.own_flavor import CUSTOM_IMPORT, MODULE, own_flavor, with_type
from meshwright.frameworks.torchtitan.parse import CURRENT_DAY, LAST_02_DAY, VERSION_030, VERSION_MAIN
from meshwright.frameworks.types import ExportedConfig, OtherVersion, Program, UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes.capabilities import MODEL_LIMITS
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.key import to_framework_name
from meshwright.recipes.key_maps.local_batch import local_batch, same_passes
from meshwright.recipes.key_maps.torchtitan import (
    CONTEXT_LENGTH,
    DATASETS,
    DEFAULT_ASSETS,
    LOCAL_BATCH,
    MICRO_BATCH,
    MICRO_BATCH_TOKENS,
    STEP_TOKENS,
)
from meshwright.recipes.key_maps.value_maps import PIPELINE_SCHEDULES
from meshwright.recipes.types import Recipe, field_value

FILE = "config.toml"
SCRIPTS = {"run_0.3.0.sh": VERSION_030, "run.sh": VERSION_MAIN}
"""Scripts and their versions: batch sizes are in samples in 0.3.0 and in tokens on main."""
VERSION_WORDS = {VERSION_030: VERSION_030, VERSION_MAIN: f"of {CURRENT_DAY} (main branch)"}
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
AXIS_WORDS = {"pp": "pipelined", "cp": "context-parallel"}
PIPELINE_PREFIX = "parallelism.pipeline_parallel_"


def write(framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> ExportedConfig:
    """Write the TOML for 0.2.2, and commands for later versions if they have a preset of the model."""
    listed = flavor_of(model)
    model = with_type(recipe, model)
    numbers = tuple(key for key, _, _ in own_numbers(recipe))
    own = own_flavor(recipe, model) if listed is None or numbers else None
    name, flavor = (own.name, own.flavor) if own is not None else listed or ("", "")
    _check_axes(recipe, model)
    settings, unmapped = _settings(framework, recipe, model, on)
    settings = {"model.name": name, "model.flavor": flavor, **settings}
    if own is not None:
        settings[CUSTOM_IMPORT] = MODULE
    files = {FILE: _toml(framework, settings, recipe, on)}
    notes = [_tokenizer_note(settings["model.hf_assets_path"], recipe, model)]
    if own is not None:
        files[f"{MODULE}.py"] = own.text
        notes.append(f"{MODULE}.py registers the flavor {flavor}: run in its folder, or add that to PYTHONPATH")
    notes += _data_notes(recipe, unmapped)
    if recipe.checkpoint.pretrained and is_hub_id(recipe.checkpoint.pretrained):
        notes.append(
            f"checkpoint.initial_load_path must be a folder: download {recipe.checkpoint.pretrained} (python "
            f"scripts/download_hf_assets.py --repo_id {recipe.checkpoint.pretrained} --assets safetensors) and put it "
            f"in place of {settings['checkpoint.initial_load_path']}, or name it with checkpoint.pretrained=FOLDER"
        )
    preset = None if numbers else preset_of(model)  # a preset has the published numbers
    versions: dict[str, OtherVersion] = {}
    env = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if preset is not None:
        for name, version in SCRIPTS.items():
            batch_settings = _batch_in_samples if version == VERSION_030 else _batch_in_tokens
            flags = _current_flags(recipe, preset, settings, batch_settings(recipe, settings))
            files[name] = _script(flags, recipe, on, preset, VERSION_WORDS[version], settings, model)
            start = ("-m", "torchtitan.train", "--module", preset[0], "--config", preset[1])
            versions[version] = OtherVersion(name, Program(argv=(*start, *_words(flags)), env=env))
        lost = _lost_fields(framework, files["run.sh"], recipe, model, on, {field.field for field in unmapped})
        if lost:
            names = " and ".join(SCRIPTS)
            notes.append(f"{names} have no flags for {', '.join(lost)}: write a config function")
    else:
        notes.append("torchtitan 0.3.0 and main have no preset of this model: only the TOML for 0.2.2 is written")
    return ExportedConfig(
        framework=framework.name,
        files=files,
        program=Program(
            argv=("-m", "torchtitan.train", "--job.config_file", FILE),
            env=env,
            modules=(f"{MODULE}.py",) if own is not None else (),
        ),
        unmapped=unmapped,
        notes=tuple(notes),
        versions=versions,
        in_other_files=numbers,
    )


def _data_notes(recipe: Recipe, unmapped: Sequence[UnmappedField]) -> Iterator[str]:
    """Yield what torchtitan does not read of the data."""
    if recipe.data.blend or any(field.field == "data.dataset" for field in unmapped):
        which = f"blend of datasets ({', '.join(recipe.data.blend)})" if recipe.data.blend else recipe.data.dataset
        yield f"torchtitan has no {'' if recipe.data.blend else 'dataset '}{which}; the file uses c4 instead"
    elif recipe.data.dataset not in (*DATASETS, "mock"):
        yield (
            f"torchtitan reads datasets that its code registers (torchtitan/hf_datasets): register "
            f"{recipe.data.dataset} there; files of tools/preprocess_data.py (.bin, .idx) "
            "have to be written as text first"
        )


def _tokenizer_note(assets: str, recipe: Recipe, model: ModelSpec) -> str:
    if assets in (recipe.data.tokenizer, model_folder(recipe, model)):
        return f"torchtitan reads the tokenizer in {assets}: it needs a tokenizer.json"
    if model_path(recipe, model):
        return f"put the tokenizer into {assets}, where torchtitan reads it"
    return f"download the tokenizer to {assets} (scripts/download_hf_assets.py)"


def _check_axes(recipe: Recipe, model: ModelSpec) -> None:
    """Raise if the 0.2 line does not support an axis for a model."""
    for row in MODEL_LIMITS:
        degree = getattr(recipe.layout, row.field)
        if row.engine == "torchtitan" and degree > 1 and model.model_type in row.model_types:
            message = f"torchtitan 0.2 does not support {AXIS_WORDS[row.field]} {model.model_type}"
            raise InputError(message, field=f"layout.{row.field}", value=degree, fix=[f"layout.{row.field}=1"])


def _lost_fields(
    framework: Framework, script: str, recipe: Recipe, model: ModelSpec, on: Cluster, known: set[str]
) -> list[str]:
    """Return fields that the command would read back differently, beyond those torchtitan has no keys for."""
    from meshwright.frameworks.load import content_of
    from meshwright.frameworks.to_recipe import complete, import_recipe

    found = complete(import_recipe(framework, content_of(script, "run.sh", folder=None), model), on)
    recipe = in_folder(recipe, framework.engine)  # as the script names the weights
    return [
        key
        for key in relevant_fields(recipe, model)
        if key not in known
        and not (key == "data.tokenizer" and not recipe.data.tokenizer)  # a folder to put the model's into
        and not same_value(field_value(found, key), field_value(recipe, key))
        and not (key == "layout.pp_micro_batches" and same_passes(found, recipe, on.world))
    ]


def _settings(
    framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster
) -> tuple[dict[str, Any], tuple[UnmappedField, ...]]:
    fields = [key for key in relevant_fields(recipe, model) if key not in framework.derived_fields]
    found, unmapped = to_settings(framework, recipe, fields)
    settings = {key: value for key, value in found.items() if not _is_newer_key(key)}
    ranks = _data_parallel_ranks(recipe, on)
    settings |= _batch(recipe, on.world) | _stages(recipe, model) | _checkpoint_settings(recipe)
    settings["training.global_batch_size"] = recipe.train.global_batch_size
    tokenizer = recipe.data.tokenizer
    local = "" if is_hub_id(tokenizer) else tokenizer  # an id is downloaded to a folder first
    named = (tokenizer if tokenizer and not local else "") or model.hf_id or model.name
    settings["model.hf_assets_path"] = (
        local or (model_folder(recipe, model) if not tokenizer else "") or DEFAULT_ASSETS + named.split("/")[-1]
    )
    if tokenizer and not local and tokenizer != model.hf_id:
        reason = f"torchtitan reads it from a folder: download it to {settings['model.hf_assets_path']}"
        unmapped = (*unmapped, UnmappedField("data.tokenizer", tokenizer, reason))
    settings["debug.seed"] = recipe.train.seed
    settings["optimizer.name"] = "AdamW"
    if recipe.layout.recompute == "selective":
        settings["activation_checkpoint.selective_ac_option"] = "op"
    settings.setdefault("training.dataset", "c4")
    if not recipe.train.eval_steps:  # the whole set, which is the default there
        settings.pop("validation.steps", None)
    if not recipe.checkpoint.pretrained:
        settings.pop("checkpoint.initial_load_path", None)
    elif "checkpoint.initial_load_path" in settings:
        settings["checkpoint.initial_load_in_hf"] = True
        settings["checkpoint.initial_load_path"] = in_folder(recipe, framework.engine).checkpoint.pretrained
    if recipe.layout.strategy == "ddp":
        settings["parallelism.data_parallel_replicate_degree"] = ranks
        settings["parallelism.data_parallel_shard_degree"] = 1
    if recipe.kernels.tp_comm_overlap and not recipe.kernels.compile:
        settings.pop("parallelism.enable_async_tensor_parallel", None)
        reason = "torchtitan overlaps tensor-parallel communication only in compiled models"
        unmapped = (*unmapped, UnmappedField("kernels.tp_comm_overlap", True, reason))
    if model.moe is None:
        settings = {key: value for key, value in settings.items() if "expert" not in key}
    return settings, unmapped


def _is_newer_key(key: str) -> bool:
    """Return whether a key was added after the 0.2 line."""
    config_key = config_keys("torchtitan").get(key)
    return config_key is not None and config_key.since > LAST_02_DAY


def _data_parallel_ranks(recipe: Recipe, on: Cluster) -> int:
    """Return the number of data-parallel ranks on a cluster."""
    layout = recipe.layout
    return max(1, on.world // (layout.tp * layout.pp * layout.cp))


def _batch(recipe: Recipe, world: int) -> dict[str, Any]:
    """Return the local batch: one micro batch, or with a pipeline the samples of one pass, usually all of a rank."""
    micro = recipe.layout.micro_batch_size
    return (
        {LOCAL_BATCH: micro} if recipe.layout.pp == 1 else {LOCAL_BATCH: local_batch(recipe, world), MICRO_BATCH: micro}
    )


def _stages(recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    """Return the stage split; a split that torchtitan cannot express is left out and reported as lost."""
    layout = recipe.layout
    if layout.pp == 1:
        return {}
    if layout.stage_layers:
        return {"parallelism.module_fqns_per_model_part": _stage_modules(layout.stage_layers)}
    ends = {"first": int(layout.embedding_as_layer), "last": int(layout.head_as_layer)}
    settings: dict[str, Any] = {f"{PIPELINE_PREFIX}{end}_stage_less_layers": less for end, less in ends.items()}
    default_vp = 1 if _schedule(recipe).lower() in ONE_STAGE else 2
    layers = model.num_layers + sum(ends.values())
    per_stage = ceil(layers / (layout.pp * layout.vp))
    if layout.vp != default_vp and ceil(layers / per_stage) == layout.pp * layout.vp:
        settings[f"{PIPELINE_PREFIX}layers_per_stage"] = per_stage
    return settings


def _schedule(recipe: Recipe) -> str:
    return to_framework_name(PIPELINE_SCHEDULES, recipe.layout.pp_schedule)


def _stage_modules(stages: tuple[int, ...]) -> list[list[str]]:
    """Return the module names of every stage."""
    parts: list[list[str]] = []
    start = 0
    for count in stages:
        parts.append([f"layers.{index}" for index in range(start, start + count)])
        start += count
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "output"]] if len(parts) > 1 else parts


def _checkpoint_settings(recipe: Recipe) -> dict[str, Any]:
    """Return checkpoint settings; saving only at the end is an interval longer than the run."""
    checkpoint = recipe.checkpoint
    keep = {} if checkpoint.keep < KEEP_ALL else {"checkpoint.keep_latest_k": 0}
    if checkpoint.keep == 1:
        keep = {"checkpoint.keep_latest_k": 2}
    return {"checkpoint.enable": True, "checkpoint.interval": checkpoint.save_every or recipe.train.steps + 1, **keep}


def _toml(framework: Framework, settings: dict[str, Any], recipe: Recipe, on: Cluster) -> str:
    import tomlkit

    order = {key: place for place, key in enumerate(config_keys("torchtitan"))}
    ordered_settings = {
        key: settings[key] for key in sorted(settings, key=lambda key: order[key]) if settings[key] is not None
    }
    written = without_defaults(framework, ordered_settings, KEEP)
    if (listed := written.get("parallelism.module_fqns_per_model_part")) is not None:
        written["parallelism.module_fqns_per_model_part"] = tomlkit.item(listed).multiline(True)
    tables = nest({"job.description": f"{recipe.name} on {on}", **written})
    ordered = {name: tables[name] for name in (*SECTIONS, *tables) if name in tables}
    head = f"# {recipe.name} for torchtitan 0.2.2 on {on}, written by meshwright export\n\n"
    return head + tomlkit.dumps(ordered)


SHARED_KEYS = (
    *(key for key in KEEP if key.startswith("parallelism.")), "parallelism.expert_parallel_degree",
    "parallelism.pipeline_parallel_schedule", "parallelism.fsdp_reshard_after_forward",
    f"{PIPELINE_PREFIX}first_stage_less_layers", f"{PIPELINE_PREFIX}last_stage_less_layers",
    f"{PIPELINE_PREFIX}layers_per_stage", "training.steps",
    "training.max_norm", "training.dtype", "training.mixed_precision_param", "training.enable_cpu_offload",
    "lr_scheduler.warmup_steps", "lr_scheduler.decay_type", "lr_scheduler.decay_ratio", "lr_scheduler.total_steps",
    "lr_scheduler.min_lr_factor", "checkpoint.enable", "checkpoint.interval", "checkpoint.folder",
    "checkpoint.keep_latest_k", "checkpoint.async_mode", "checkpoint.last_save_in_hf", "checkpoint.initial_load_path",
    "checkpoint.initial_load_in_hf", "compile.enable", "metrics.log_freq", "debug.seed", "debug.deterministic",
    "debug.moe_force_load_balance",
)  # fmt: skip
"""Keys with the same name in the 0.2 line and in later flags."""
OPTIMIZER_KWARGS = "optimizer.param_groups.0.optimizer_kwargs."


def _batch_in_tokens(recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the batch in tokens, as main counts it."""
    layout, length = recipe.layout, recipe.data.seq_length
    found = {
        MICRO_BATCH_TOKENS: layout.micro_batch_size * length,
        CONTEXT_LENGTH: length,
        STEP_TOKENS: recipe.train.global_batch_size * length,
    }
    if layout.pp > 1:
        found["parallelism.num_pp_microbatches"] = settings[LOCAL_BATCH] // layout.micro_batch_size
    return found


def _batch_in_samples(recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the batch in samples, as 0.3.0 counts it."""
    found = {
        LOCAL_BATCH: settings[LOCAL_BATCH],
        "training.seq_len": recipe.data.seq_length,
        "training.global_batch_size": recipe.train.global_batch_size,
    }
    return found if recipe.layout.pp == 1 else {**found, MICRO_BATCH: recipe.layout.micro_batch_size}


def _current_flags(
    recipe: Recipe, preset: tuple[str, str], settings: dict[str, Any], batch: dict[str, Any]
) -> list[str]:
    """Return the flags that differ from the preset."""
    layout = recipe.layout
    flags_by_key = {key: settings[key] for key in SHARED_KEYS if key in settings}
    if flags_by_key.get("checkpoint.last_save_in_hf"):
        flags_by_key["checkpoint.last_save_model_only"] = True
    flags_by_key |= {
        **batch,
        f"{OPTIMIZER_KWARGS}lr": recipe.optimizer.lr,
        "hf_assets_path": settings["model.hf_assets_path"],
        "profiler.enable_profiling": recipe.train.profile,
        # torchtitan's CUDA graphs support neither pipelines nor the presets' token dispatch, which syncs with the CPU.
        "training.disable_cuda_graphs": recipe.kernels.cuda_graphs == "none" or max(layout.pp, layout.ep) > 1,
        "compile.enable_async_tensor_parallel": recipe.kernels.tp_comm_overlap and recipe.kernels.compile,
        "validator.enable": recipe.train.eval_every > 0,
    }
    if recipe.train.eval_every:
        flags_by_key |= {"validator.freq": recipe.train.eval_every, "validator.steps": recipe.train.eval_steps or -1}
    if layout.tp > 1:
        flags_by_key["parallelism.enable_sequence_parallel"] = layout.sp
    for key, value in (("eps", recipe.optimizer.eps), ("weight_decay", recipe.optimizer.weight_decay)):
        if value != config_keys("torchtitan")[f"optimizer.{key}"].default:
            flags_by_key[OPTIMIZER_KWARGS + key] = value
    base = dict(PRESETS[preset[0]][preset[1]].settings)
    flags = [
        flag(key, value) for key, value in flags_by_key.items() if key in batch or value != _value_if_unset(key, base)
    ]
    if (recipe.optimizer.beta1, recipe.optimizer.beta2) != (0.9, 0.95):
        flags.append(f"--{OPTIMIZER_KWARGS}betas {recipe.optimizer.beta1} {recipe.optimizer.beta2}")
    flags.append(f"activation-checkpoint:{layout.recompute}")  # a subcommand, which must come last
    return flags


def _words(flags: list[str]) -> Iterator[str]:
    """Yield the arguments of flags; only betas are several."""
    for text in flags:
        yield from text.split(" ") if text.startswith(f"--{OPTIMIZER_KWARGS}betas ") else (text,)


def _value_if_unset(key: str, base: dict[str, Any]) -> Any:
    """Return the value of a key that a command does not set: the preset's, or torchtitan's default."""
    if key in base:
        return base[key]
    if key in ("validator.enable", "profiler.enable_profiling", "compile.enable_async_tensor_parallel"):
        return False
    return {"training.disable_cuda_graphs": False, "parallelism.enable_sequence_parallel": True}.get(
        key, config_keys("torchtitan")[key].default
    )


def _to_adapt(settings: dict[str, Any], recipe: Recipe, model: ModelSpec) -> Iterator[str]:
    """Yield comments on what the user has to provide: the checkout, the tokenizer and the data."""
    assets, tokenizer = settings["model.hf_assets_path"], recipe.data.tokenizer
    source = (tokenizer if is_hub_id(tokenizer) else "") or model.hf_id or "REPO"
    yield "# Run it in a checkout of that version, or where torchtitan is installed; it writes below ./outputs."
    yield f"# Tokenizer: {assets}, e.g. from python scripts/download_hf_assets.py --repo_id {source} --assets tokenizer"
    name = recipe.data.dataset if recipe.data.dataset in DATASETS else "the preset's (c4)"
    other = "" if recipe.data.dataset in (*DATASETS, "mock") else f"; register {recipe.data.dataset} as one"
    yield f"# Data: {name}; others are registered in torchtitan/hf_datasets{other} and named by --dataloader.dataset."


def _script(
    flags: list[str],
    recipe: Recipe,
    on: Cluster,
    preset: tuple[str, str],
    version: str,
    settings: dict[str, Any],
    model: ModelSpec,
) -> str:
    nodes, per_node = max(1, on.nodes), on.gpus_per_node
    head = [
        "#!/bin/bash",
        f"# {recipe.name} for torchtitan {version} on {on}, written by meshwright export",
        *_to_adapt(settings, recipe, model),
        "# Run it on every node." if nodes > 1 else "# One node.",
        *([': "${HEAD_NODE:?hostname of the first node}"'] if nodes > 1 else []),
        "export PYTORCH_ALLOC_CONF=expandable_segments:True",
    ]
    meeting = '--rdzv_backend c10d --rdzv_endpoint "$HEAD_NODE:29500" ' if nodes > 1 else ""
    start = f"torchrun --nnodes {nodes} --nproc_per_node {per_node} {meeting}-m torchtitan.train"
    lines = [start, f"--module {preset[0]} --config {preset[1]}", *flags]
    return "\n".join([*head, " \\\n  ".join(lines), ""])
