"""Key map of torchtitan: the TOML of the 0.2 line (until 2026-02-23) and the current flags (2026-08-21).

A key without dates exists in both. `until` is the last day of a key, or the month by which it was removed; `since` is
its first day. Keys removed before 0.2 are marked as removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from meshwright.errors import InputError, MeshwrightError, closest
from meshwright.models import find
from meshwright.recipes.case import model_of
from meshwright.recipes.key_maps import wsd_keys
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey, MappedFields, RawValues, to_framework_name
from meshwright.recipes.key_maps.local_batch import local_batch_settings, typed_local_batch
from meshwright.recipes.key_maps.shared_composite_keys import as_bool, as_count, as_float, is_null, plain
from meshwright.recipes.key_maps.value_maps import ASYNC_MODES, PIPELINE_SCHEDULES
from meshwright.recipes.types import Recipe, field_value

TOML_ENDED = "2026-02-23"
CURRENT = "2026-08"
"""Month since which the flags are unchanged."""
DECAY_TYPES = ("linear", "sqrt", "cosine")
SCHEDULE_NAMES = (*PIPELINE_SCHEDULES, "PipelineScheduleSingle", "PipelineScheduleMulti", "_PipelineScheduleRuntime")
CONVERTERS = ("quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
FLOAT8_RECIPES = {"tensorwise": "fp8_tensor", "rowwise": "fp8_row", "rowwise_with_gw_hp": "fp8_row"}
WSD_STYLES = {"sqrt": "minus_sqrt", "linear": "linear", "cosine": "cosine"}
DATASETS = ("c4", "c4_test", "c4_validation")
DEFAULT_ASSETS = "./assets/hf/"
"""Where torchtitan's download script puts tokenizers."""


def _unmapped(value_type: Any, *keys: str, **columns: Any) -> tuple[ConfigKey, ...]:
    """Return keys without a recipe field."""
    return tuple(ConfigKey(key, type=value_type, **columns) for key in keys)


def _removed(until: str, pairs: Mapping[str, str], switch: str = "") -> tuple[ConfigKey, ...]:
    """Return removed keys with their replacements."""
    return tuple(
        ConfigKey(key, until=until, status="removed", replacement=instead, switch=switch)
        for key, instead in pairs.items()
    )


def _invalid_value(key: str, text: str, allowed: Iterable[str]) -> InputError:
    """Return the error for a value that torchtitan's parser rejects."""
    names = list(allowed)
    near = closest(text, names, 1) or names[:1]
    return InputError(f"allowed: {', '.join(names)}", field=key, value=text, fix=[f"{key}={name}" for name in near])


def _value_map_key(key: str, field: str, values: Mapping[str, str], error: str) -> CompositeKey:
    """Return a key whose few values map to recipe values; other recipe values cannot be written."""

    def read(raw: RawValues, recipe: Recipe) -> MappedFields:
        text = raw[key].strip().lower()
        if text not in values:
            raise _invalid_value(key, raw[key], values)
        return MappedFields({field: values[text]})

    def write(recipe: Recipe) -> Mapping[str, Any]:
        value = field_value(recipe, field)
        name = to_framework_name(values, value)
        if not name:
            raise InputError(error, field=field, value=value)
        return {key: {"true": True, "false": False}.get(name, name)}

    return CompositeKey((key,), (field,), read, write)


SHARD_DEGREE = "parallelism.data_parallel_shard_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
LOCAL_BATCH, MICRO_BATCH = "training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"


def _schedule(raw: RawValues, recipe: Recipe) -> MappedFields:
    """torch's schedules by name, case-insensitive; the generic ones run a schedule from a CSV file."""
    text = raw[SCHEDULE].strip().lower()
    if text not in {name.lower() for name in SCHEDULE_NAMES}:
        raise _invalid_value(SCHEDULE, raw[SCHEDULE], SCHEDULE_NAMES)
    names = [value for name, value in PIPELINE_SCHEDULES.items() if name.lower() == text]
    return MappedFields({"layout.pp_schedule": names[0]} if names else {})


def _schedule_key(recipe: Recipe) -> Mapping[str, Any]:
    return {SCHEDULE: to_framework_name(PIPELINE_SCHEDULES, recipe.layout.pp_schedule)}


def _shard(raw: RawValues, recipe: Recipe) -> MappedFields:
    text = raw[SHARD_DEGREE].strip()
    return MappedFields({"layout.dp_shard": "-1" if text == "-1" else str(as_count(SHARD_DEGREE, text, 1))})


def _batch(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The local batch is one forward pass, or is split into micro batches by a pipeline."""
    local, micro = (as_count(key, raw[key], 1) if key in raw else None for key in (LOCAL_BATCH, MICRO_BATCH))
    if recipe.layout.pp == 1:
        if local is None:
            raise InputError(
                "is used with pipeline parallelism only",
                field=MICRO_BATCH,
                value=raw[MICRO_BATCH],
                fix=[f"{LOCAL_BATCH}={micro}"],
            )
        return MappedFields({"layout.micro_batch_size": str(local)})
    if local is not None and micro is not None and local % micro:
        raise InputError(f"is not a multiple of {MICRO_BATCH}={micro}", field=LOCAL_BATCH, value=raw[LOCAL_BATCH])
    return MappedFields({"layout.micro_batch_size": str(micro if micro is not None else local)})


def _typed_batch(raw: RawValues, recipe: Recipe) -> MappedFields:
    if recipe.layout.pp == 1:
        return _batch(raw, recipe)
    local, micro = (as_count(key, raw[key], 1) if key in raw else None for key in (LOCAL_BATCH, MICRO_BATCH))
    return typed_local_batch(local, micro, recipe, LOCAL_BATCH)


def _batch_keys(recipe: Recipe) -> Mapping[str, Any]:
    return local_batch_settings(recipe, LOCAL_BATCH, MICRO_BATCH)


MICRO_BATCH_TOKENS, CONTEXT_LENGTH, STEP_TOKENS = (
    "training.num_tokens_per_microbatch_per_dp_rank",
    "training.max_context_length",
    "training.num_tokens_per_train_step",
)

SAMPLE_KEYS = (LOCAL_BATCH, MICRO_BATCH, "training.global_batch_size", "training.seq_len")
TOKEN_KEYS = (MICRO_BATCH_TOKENS, CONTEXT_LENGTH, STEP_TOKENS, "parallelism.num_pp_microbatches")
"""Batch sizes are in samples in the 0.2 line and in 0.3.0 (2026-09-03), and in tokens on main."""
TOKEN_KEYS_OF = {
    LOCAL_BATCH: MICRO_BATCH_TOKENS,
    MICRO_BATCH: MICRO_BATCH_TOKENS,
    "training.global_batch_size": STEP_TOKENS,
}
"""Keys in samples in the 0.2 line, with the keys in tokens on main."""


def _tokens(raw: RawValues, recipe: Recipe) -> MappedFields:
    """On main, batches are in tokens; a forward pass shorter than the context is one short sample."""
    context = as_count(CONTEXT_LENGTH, raw[CONTEXT_LENGTH], 1) if CONTEXT_LENGTH in raw else recipe.data.seq_length
    tokens = as_count(MICRO_BATCH_TOKENS, raw[MICRO_BATCH_TOKENS], 1) if MICRO_BATCH_TOKENS in raw else None
    length = context if tokens is None else min(context, tokens)
    fields = {"data.seq_length": str(length)}
    if tokens is not None:
        fields["layout.micro_batch_size"] = str(-(-tokens // length))
    return MappedFields(fields)


def _step(raw: RawValues, recipe: Recipe) -> MappedFields:
    return MappedFields(
        {"train.global_batch_size": str(max(1, as_count(STEP_TOKENS, raw[STEP_TOKENS], 1) // recipe.data.seq_length))}
    )


def _recompute(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Selective recompute works per op; the compiler's memory budget also selects ops."""
    mode = raw.get("activation_checkpoint.mode", "selective").strip().lower()
    if mode not in ("selective", "full", "memory_budget", "none"):
        raise _invalid_value("activation_checkpoint.mode", mode, ("selective", "full", "memory_budget", "none"))
    return MappedFields({"layout.recompute": "selective" if mode == "memory_budget" else mode})


def _reshard(raw: RawValues, recipe: Recipe) -> MappedFields:
    """By default, parameters stay gathered between forward and backward only with a pipeline."""
    key = "parallelism.fsdp_reshard_after_forward"
    text = raw[key].strip().lower()
    if text not in ("default", "always", "never"):
        raise _invalid_value(key, text, ("default", "always", "never"))
    reshards = text == "always" or (text == "default" and recipe.layout.pp == 1)
    return MappedFields({"layout.reshard_after_forward": str(reshards).lower()})


def _reshard_key(recipe: Recipe) -> Mapping[str, Any]:
    reshards, default = recipe.layout.reshard_after_forward, recipe.layout.pp == 1
    text = "default" if reshards == default else "always" if reshards else "never"
    return {"parallelism.fsdp_reshard_after_forward": text}


DECAY_TYPE, DECAY_RATIO, TOTAL_STEPS = "lr_scheduler.decay_type", "lr_scheduler.decay_ratio", "lr_scheduler.total_steps"


def _decay(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Return the decay; with a ratio, the rate stays at its peak until that fraction of the steps is left."""
    shape = raw.get(DECAY_TYPE, "linear").strip().lower()
    if shape not in DECAY_TYPES:
        raise _invalid_value(DECAY_TYPE, shape, DECAY_TYPES)
    ratio = raw.get(DECAY_RATIO, "null")
    fraction = None if is_null(ratio) else as_float(DECAY_RATIO, ratio)
    text = raw.get(TOTAL_STEPS, "null")
    total = 0 if is_null(text) else as_count(TOTAL_STEPS, text)
    end = total or recipe.train.steps
    rest = max(0, end - recipe.schedule.warmup_steps)
    length = rest if fraction is None else min(rest, round(end * fraction))  # a longer decay is cut
    fields = {"schedule.name": shape, "schedule.decay_steps": str(total)}
    if fraction == 0:
        return MappedFields({**fields, "schedule.name": "constant"})
    if length and (length < rest or shape == "sqrt"):
        there = wsd_keys.ending_at(recipe, total)
        fields |= {"schedule.name": "wsd", **wsd_keys.fields_of(length, WSD_STYLES[shape], there)}
    return MappedFields({**fields, "schedule.name": "linear"} if fields["schedule.name"] == "sqrt" else fields)


def _decay_keys(recipe: Recipe) -> Mapping[str, Any]:
    name = recipe.schedule.name
    keys: dict[str, Any] = {"cosine": {DECAY_TYPE: "cosine"}, "linear": {DECAY_TYPE: "linear"}}.get(name, {})
    if name == "constant":
        keys = {DECAY_RATIO: 0.0}
    elif name == "wsd":
        end, length = wsd_keys.decay_end(recipe), wsd_keys.decay_length(recipe)
        keys = {DECAY_TYPE: wsd_keys.style_in(recipe, WSD_STYLES), DECAY_RATIO: _share(length, end)}
    elif not keys:
        raise InputError(
            "is not available: torchtitan has linear, cosine and sqrt decay", field="schedule.name", value=name
        )
    return {**keys, **({TOTAL_STEPS: recipe.schedule.decay_steps} if recipe.schedule.decay_steps else {})}


def _share(part: int, whole: int) -> float:
    """Return the shortest ratio that torchtitan rounds to these steps."""
    near = (round(part / whole, digits) for digits in range(1, 16))
    return next((ratio for ratio in near if round(whole * ratio) == part), part / whole)


def _min_lr(raw: RawValues, recipe: Recipe) -> MappedFields:
    factor = as_float("lr_scheduler.min_lr_factor", raw["lr_scheduler.min_lr_factor"])
    return MappedFields({"schedule.min_lr": repr(plain(factor * recipe.optimizer.lr))})


def _min_lr_key(recipe: Recipe) -> Mapping[str, Any]:
    return {"lr_scheduler.min_lr_factor": plain(recipe.schedule.min_lr / recipe.optimizer.lr)}


CONVERTERS_KEY = "model.converters"
FLOAT8_RECIPE, FLOAT8_GATHER = (
    "quantize.linear.float8.recipe_name",
    "quantize.linear.float8.enable_fsdp_float8_all_gather",
)


def split_list(text: str) -> list[str]:
    """Split a list such as [a,b] or a,b into its names."""
    return [name.strip().strip("'\"") for name in text.strip().strip("[]").split(",") if name.strip()]


def _matmul(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Converters enable FP8 linear layers; the quantize tables only configure them."""
    if CONVERTERS_KEY not in raw:
        raise InputError(
            f"has no effect without {CONVERTERS_KEY}", field=next(iter(raw)), fix=["precision.matmul=fp8_tensor"]
        )
    converters, name = split_list(raw[CONVERTERS_KEY]), raw.get(FLOAT8_RECIPE, "null")
    for converter in converters:
        if converter not in CONVERTERS:
            raise _invalid_value(CONVERTERS_KEY, converter, CONVERTERS)
    matmul = "same"
    if CONVERTERS[0] in converters:
        recipe_name = "tensorwise" if is_null(name) else name.strip().lower()
        if recipe_name not in FLOAT8_RECIPES:
            raise _invalid_value(FLOAT8_RECIPE, name, FLOAT8_RECIPES)
        matmul = FLOAT8_RECIPES[recipe_name]
    elif CONVERTERS[1] in converters:
        matmul = "mxfp8"
    gather = matmul == "fp8_tensor" and as_bool(FLOAT8_GATHER, raw.get(FLOAT8_GATHER, "false"))
    return MappedFields({"precision.matmul": matmul, "precision.fp8_gather": str(gather).lower()})


def _matmul_keys(recipe: Recipe) -> Mapping[str, Any]:
    matmul = recipe.precision.matmul
    keys: dict[str, dict[str, Any]] = {
        "same": {CONVERTERS_KEY: []},
        "fp8_tensor": {CONVERTERS_KEY: [CONVERTERS[0]], FLOAT8_GATHER: recipe.precision.fp8_gather},
        "fp8_row": {CONVERTERS_KEY: [CONVERTERS[0]], FLOAT8_RECIPE: "rowwise"},
        "mxfp8": {CONVERTERS_KEY: [CONVERTERS[1]]},
    }
    if matmul not in keys:
        raise InputError(
            "is not available: torchtitan 0.2 has tensorwise and rowwise float8, and mxfp8",
            field="precision.matmul",
            value=matmul,
        )
    return keys[matmul]


def _storage_dtype(raw: RawValues, recipe: Recipe) -> MappedFields:
    """One dtype for parameters, gradients and optimizer state."""
    text = raw["training.dtype"].strip().lower()
    if text not in ("float32", "bfloat16"):
        raise _invalid_value("training.dtype", text, ("float32", "bfloat16"))
    dtype = "fp32" if text == "float32" else "bf16"
    return MappedFields({f"precision.{part}": dtype for part in ("master", "moments", "grads")})


def _storage_dtype_key(recipe: Recipe) -> Mapping[str, Any]:
    return {"training.dtype": "float32" if recipe.precision.master == "fp32" else "bfloat16"}


def _cp_comm(raw: RawValues, recipe: Recipe) -> MappedFields:
    key = "parallelism.context_parallel_rotate_method"
    text = raw[key].strip().lower()
    if text not in ("allgather", "alltoall"):
        raise _invalid_value(key, text, ("allgather", "alltoall"))
    return MappedFields(
        {"layout.cp_comm": "allgather" if text == "allgather" else "ring"} if recipe.layout.cp > 1 else {}
    )


def _cp_comm_key(recipe: Recipe) -> Mapping[str, Any]:
    cp_comm = recipe.layout.cp_comm
    if recipe.layout.cp == 1:
        return {}
    if cp_comm not in ("allgather", "ring"):
        raise InputError(
            "must be allgather or ring: torchtitan gathers keys and values or rotates them",
            field="layout.cp_comm",
            value=cp_comm,
        )
    return {"parallelism.context_parallel_rotate_method": "allgather" if cp_comm == "allgather" else "alltoall"}


def _data(raw: RawValues, recipe: Recipe) -> MappedFields:
    path = raw.get("training.dataset_path", "null")
    return MappedFields({"data.dataset": raw.get("training.dataset", DATASETS[0]) if is_null(path) else path})


def _data_keys(recipe: Recipe) -> Mapping[str, Any]:
    name = recipe.data.dataset
    if name in DATASETS:
        return {"training.dataset": name}
    if name.startswith(("/", "./", "../", "~")):
        return {"training.dataset": "c4", "training.dataset_path": name}
    raise InputError(
        "is not a torchtitan dataset name; only c4 is, register others in its code", field="data.dataset", value=name
    )


def _assets(key: str) -> Callable[[RawValues, Recipe], MappedFields]:
    def read(raw: RawValues, recipe: Recipe) -> MappedFields:
        path = raw[key].strip()
        name = path.removesuffix("/").removeprefix(DEFAULT_ASSETS)
        is_default = False
        with suppress(MeshwrightError):  # of a model that nobody knows it is the user's own
            is_default = name != path and "/" not in name and find(name).vocab == model_of(recipe).vocab
        return MappedFields({"data.tokenizer": "" if is_default or is_null(path) else path})

    return read


def _validation(prefix: str) -> Callable[[RawValues, Recipe], MappedFields]:
    enable, freq = f"{prefix}.enable", f"{prefix}.freq"

    def read(raw: RawValues, recipe: Recipe) -> MappedFields:
        on = as_bool(enable, raw[enable]) if enable in raw else True
        every = str(as_count(freq, raw[freq], 1)) if freq in raw else str(recipe.train.eval_every or 10)
        return MappedFields({"train.eval_every": every if on else "0"})

    return read


def _validation_keys(recipe: Recipe) -> Mapping[str, Any]:
    every = recipe.train.eval_every
    return {"validation.enable": True, "validation.freq": every} if every else {"validation.enable": False}


def _compiled(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Blocks are compiled if compile is enabled and its components include the model."""
    on = as_bool("compile.enable", raw["compile.enable"]) if "compile.enable" in raw else recipe.kernels.compile
    parts = split_list(raw["compile.components"]) if "compile.components" in raw else ["model"]
    return MappedFields({"kernels.compile": str(on and "model" in parts).lower()})


KEYS: tuple[ConfigKey, ...] = (
    *_unmapped("str", "job.config_file", until=TOML_ENDED, replacement="--module and --config"),
    ConfigKey("job.dump_folder", type="str", default="./outputs", until=TOML_ENDED, replacement="--dump_folder"),
    ConfigKey("job.description", type="str", until=TOML_ENDED),
    ConfigKey("job.print_config", type="bool", until=TOML_ENDED, replacement="--debug.print_config"),
    ConfigKey("job.save_config_file", type="str", until=TOML_ENDED, replacement="--debug.save_config_file"),
    ConfigKey("job.custom_config_module", type="str", until=TOML_ENDED, note="keys of that module are not checked"),
    ConfigKey("model.name", type="str", default="llama3", until=TOML_ENDED, replacement="--module"),
    ConfigKey("model.flavor", type="str", default="debugmodel", until=TOML_ENDED, replacement="--config"),
    ConfigKey("model.hf_assets_path", type="str", until=TOML_ENDED, replacement="--hf_assets_path"),
    ConfigKey("model.tokenizer_path", type="str", until=TOML_ENDED, replacement="model.hf_assets_path"),
    ConfigKey(CONVERTERS_KEY, type="list", default=[], until=TOML_ENDED,
              replacement="a config function with converters"),
    ConfigKey("model.print_after_conversion", type="bool", until=TOML_ENDED),
    ConfigKey("profiling.enable_profiling", "train.profile", default=False, until=CURRENT,
              replacement="--profiler.enable_profiling"),
    *_unmapped("int", "profiling.profile_freq", "profiling.profiler_active", "profiling.profiler_warmup",
               until=CURRENT),
    *_unmapped("str", "profiling.save_traces_folder", "profiling.save_memory_snapshot_folder", until=CURRENT),
    ConfigKey("profiling.enable_memory_snapshot", type="bool", until=CURRENT,
              replacement="--profiler.enable_memory_snapshot"),
    ConfigKey("metrics.log_freq", "train.log_every", default=10),
    *_unmapped("bool", "metrics.enable_tensorboard", "metrics.disable_color_printing", "metrics.save_for_all_ranks",
             "metrics.enable_wandb"),
    ConfigKey("metrics.save_tb_folder", type="str"),
    ConfigKey("optimizer.name", default="AdamW", choices=("AdamW", "Adam"), any_case=True, until=CURRENT,
              replacement="--optimizer.param_groups.0.optimizer_name"),
    ConfigKey("optimizer.lr", "optimizer.lr", default=8e-4, until=CURRENT,
              replacement="--optimizer.param_groups.0.optimizer_kwargs.lr"),
    ConfigKey("optimizer.beta1", "optimizer.beta1", default=0.9, until=CURRENT,
              replacement="--optimizer.param_groups.0.optimizer_kwargs.betas"),
    ConfigKey("optimizer.beta2", "optimizer.beta2", default=0.95, until=CURRENT,
              replacement="--optimizer.param_groups.0.optimizer_kwargs.betas"),
    ConfigKey("optimizer.eps", "optimizer.eps", default=1e-8, until=CURRENT,
              replacement="--optimizer.param_groups.0.optimizer_kwargs.eps"),
    ConfigKey("optimizer.weight_decay", "optimizer.weight_decay", default=0.1, until=CURRENT,
              replacement="--optimizer.param_groups.0.optimizer_kwargs.weight_decay"),
    ConfigKey("optimizer.implementation", default="fused", choices=("for-loop", "foreach", "fused")),
    ConfigKey("optimizer.early_step_in_backward", type="bool", default=False, until=CURRENT),
    ConfigKey("lr_scheduler.warmup_steps", "schedule.warmup_steps", default=200),
    ConfigKey(DECAY_TYPE, default="linear", choices=DECAY_TYPES),
    ConfigKey(DECAY_RATIO, default=None, type="float"),
    ConfigKey(TOTAL_STEPS, default=None, type="int", note="unset: training.steps"),
    ConfigKey("lr_scheduler.min_lr_factor", default=0.0, type="float", note="fraction of the peak"),
    ConfigKey("training.dataset", type="str", default="c4_test", until=TOML_ENDED, replacement="--dataloader.dataset"),
    ConfigKey("training.dataset_path", type="str", default=None, until=TOML_ENDED,
              replacement="--dataloader.dataset_path"),
    ConfigKey(LOCAL_BATCH, type="int", default=8, until=CURRENT,
              replacement=f"--{MICRO_BATCH_TOKENS}, which is in tokens"),
    ConfigKey("training.global_batch_size", "train.global_batch_size", until=CURRENT,
              replacement=f"--{STEP_TOKENS}, in tokens",
              note="unset or -1: local_batch_size × data-parallel ranks"),
    ConfigKey("training.seq_len", "data.seq_length", default=2048, until=CURRENT, replacement=f"--{CONTEXT_LENGTH}"),
    ConfigKey("training.max_norm", "optimizer.clip_grad", default=1.0),
    ConfigKey("training.steps", "train.steps", default=10000),
    ConfigKey("training.enable_cpu_offload", type="bool", default=False),
    ConfigKey("training.dtype", default="float32", choices=("float32", "bfloat16")),
    ConfigKey("training.mixed_precision_param", default="bfloat16", choices=("bfloat16", "float32")),
    ConfigKey("training.mixed_precision_reduce", default="float32", choices=("float32",)),
    ConfigKey("training.gc_freq", type="int"),
    ConfigKey("training.gc_debug", type="bool"),
    ConfigKey("training.dataloader.num_workers", "data.workers", default=0, until=TOML_ENDED,
              replacement="--dataloader.num_workers"),
    *_unmapped("bool", "training.dataloader.persistent_workers", "training.dataloader.pin_memory", until=TOML_ENDED),
    ConfigKey("training.dataloader.prefetch_factor", type="int", until=TOML_ENDED),
    ConfigKey("parallelism.data_parallel_replicate_degree", "layout.dp_replicate", default=1),
    ConfigKey(SHARD_DEGREE, type="int", default=-1, note="-1 uses the remaining ranks; only this degree may be -1"),
    ConfigKey("parallelism.fsdp_reshard_after_forward", default="default", choices=("default", "always", "never")),
    ConfigKey("parallelism.tensor_parallel_degree", "layout.tp", default=1),
    ConfigKey("parallelism.disable_loss_parallel", type="bool", default=False, until=CURRENT),
    ConfigKey("parallelism.enable_async_tensor_parallel", "kernels.tp_comm_overlap", default=False, until=CURRENT,
              replacement="--compile.enable_async_tensor_parallel"),
    ConfigKey("parallelism.pipeline_parallel_degree", "layout.pp", default=1),
    ConfigKey("parallelism.module_fqns_per_model_part", type="list"),
    ConfigKey("parallelism.pipeline_parallel_first_stage_less_layers", type="int", default=1),
    ConfigKey("parallelism.pipeline_parallel_last_stage_less_layers", type="int", default=1),
    ConfigKey("parallelism.pipeline_parallel_layers_per_stage", type="int"),
    ConfigKey(SCHEDULE, default="1F1B", choices=SCHEDULE_NAMES, any_case=True),
    ConfigKey("parallelism.pipeline_parallel_schedule_csv", type="str"),
    ConfigKey(MICRO_BATCH, type="int", default=1, until=CURRENT, replacement="--parallelism.num_pp_microbatches"),
    ConfigKey("parallelism.pipeline_parallel_expert_parallel_overlap", type="bool", default=True, until=CURRENT),
    ConfigKey("parallelism.context_parallel_degree", "layout.cp", default=1),
    ConfigKey("parallelism.context_parallel_load_balancer", type="str", default="headtail"),
    ConfigKey("parallelism.context_parallel_rotate_method", default="allgather", choices=("allgather", "alltoall"),
              until=CURRENT),
    ConfigKey("parallelism.expert_parallel_degree", "layout.ep", default=1),
    ConfigKey("parallelism.expert_tensor_parallel_degree", "layout.etp", default=1, until=CURRENT),
    ConfigKey("parallelism.expert_parallel_comm_backend", default="standard", choices=("standard", "deepep"),
              until=CURRENT,
              replacement="a config function with moe_comm_backend"),
    ConfigKey("checkpoint.enable", type="bool", default=False),
    ConfigKey("checkpoint.interval", "checkpoint.save_every", default=500),
    ConfigKey("checkpoint.keep_latest_k", "checkpoint.keep", default=10, note="0 keeps all; 1 is rejected"),
    ConfigKey("checkpoint.async_mode", "checkpoint.async_save", ASYNC_MODES, default="disabled",
              choices=tuple(ASYNC_MODES), any_case=True),
    ConfigKey("checkpoint.last_save_in_hf", type="bool", default=False),
    ConfigKey("checkpoint.last_save_model_only", type="bool", default=True),
    ConfigKey("checkpoint.initial_load_path", "checkpoint.pretrained"),
    ConfigKey("checkpoint.initial_load_in_hf", type="bool", default=False),
    ConfigKey("checkpoint.initial_load_model_only", type="bool", default=True),
    *_unmapped("bool", "checkpoint.initial_load_in_hf_quantized", "checkpoint.enable_first_step_checkpoint",
             "checkpoint.create_seed_checkpoint", "checkpoint.load_only"),
    ConfigKey("checkpoint.enable_ft_dataloader_checkpoints", type="bool", until=CURRENT),
    ConfigKey("checkpoint.folder", "checkpoint.folder", default=""),
    ConfigKey("checkpoint.export_dtype", default="float32", choices=("float16", "bfloat16", "float32")),
    ConfigKey("checkpoint.load_step", type="int"),
    ConfigKey("checkpoint.exclude_from_loading", type="list"),
    ConfigKey("activation_checkpoint.mode", default="selective", choices=("selective", "full", "memory_budget", "none"),
              until=CURRENT, replacement="activation-checkpoint:full (also :selective, :none) as the last argument"),
    ConfigKey("activation_checkpoint.selective_ac_option", type="str", default="2", until=CURRENT,
              note="op, or an integer n: every nth layer is recomputed"),
    ConfigKey("activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", type="list", until=CURRENT),
    ConfigKey("activation_checkpoint.early_stop", type="bool", until=CURRENT),
    ConfigKey("activation_checkpoint.memory_budget", type="float"),
    *_unmapped("bool", "activation_checkpoint.visualize_memory_budget_pareto",
             "activation_checkpoint.preserve_rng_state", "activation_checkpoint.debug"),
    ConfigKey("activation_checkpoint.determinism_check", type="str"),
    ConfigKey("compile.enable", type="bool", default=False),
    ConfigKey("compile.components", type="list", default=["model", "loss"], choices=("model", "loss")),
    ConfigKey("compile.backend", type="str"),
    ConfigKey(FLOAT8_GATHER, type="bool", default=False, until=TOML_ENDED),
    ConfigKey("quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp", type="bool", until=TOML_ENDED),
    ConfigKey(FLOAT8_RECIPE, default=None, choices=(*FLOAT8_RECIPES, "null"), until=TOML_ENDED),
    ConfigKey("quantize.linear.float8.filter_fqns", type="list", until=TOML_ENDED),
    ConfigKey("quantize.linear.float8.emulate", type="bool", default=False, until=TOML_ENDED),
    ConfigKey("quantize.linear.mx.mxfp8_dim1_cast_kernel_choice", choices=("triton", "cuda", "torch"),
              until=TOML_ENDED),
    ConfigKey("quantize.linear.mx.recipe_name", type="str", until=TOML_ENDED),
    ConfigKey("quantize.linear.mx.filter_fqns", type="list", until=TOML_ENDED),
    ConfigKey("quantize.grouped_mm.float8.fqns", type="list", until=TOML_ENDED),
    ConfigKey("quantize.grouped_mm.mx.fqns", type="list", until=TOML_ENDED),
    ConfigKey("quantize.grouped_mm.mx.recipe_name", type="str", until=TOML_ENDED),
    *_unmapped("int", "comm.init_timeout_seconds", "comm.train_timeout_seconds", "comm.trace_buf_size"),
    *_unmapped("str", "comm.save_traces_folder", "comm.save_traces_file_prefix"),
    ConfigKey("comm.mode", default="default", choices=("default", "fake_backend", "local_tensor", "torchcomms")),
    *_unmapped("bool", "memory_estimation.enable", "memory_estimation.disable_fake_mode", until=TOML_ENDED),
    *_unmapped("bool", "fault_tolerance.enable", until=TOML_ENDED),
    *_unmapped("str", "fault_tolerance.process_group", "fault_tolerance.semi_sync_method", until=TOML_ENDED),
    *_unmapped("int", "fault_tolerance.process_group_timeout_ms", "fault_tolerance.replica_id",
             "fault_tolerance.group_size", "fault_tolerance.min_replica_size", until=TOML_ENDED),
    *_unmapped("str", "experimental.custom_import", "experimental.custom_args_module", until=TOML_ENDED),
    ConfigKey("validation.enable", type="bool", default=False, until=TOML_ENDED, replacement="--validator.enable"),
    ConfigKey("validation.freq", type="int", default=10, until=TOML_ENDED, replacement="--validator.freq"),
    ConfigKey("validation.steps", "train.eval_steps", until=TOML_ENDED, replacement="--validator.steps",
              note="unset or -1: the whole dataset"),
    *_unmapped("str", "validation.dataset", "validation.dataset_path", until=TOML_ENDED),
    *_unmapped("int", "validation.local_batch_size", "validation.seq_len", until=TOML_ENDED),
    *_unmapped("int", "validation.dataloader.num_workers", "validation.dataloader.prefetch_factor", until=TOML_ENDED),
    *_unmapped("bool", "validation.dataloader.persistent_workers", "validation.dataloader.pin_memory",
             until=TOML_ENDED),
    ConfigKey("debug.seed", "train.seed", note="unset: random"),
    ConfigKey("debug.deterministic", "kernels.deterministic", default=False),
    ConfigKey("debug.deterministic_warn_only", type="bool"),
    ConfigKey("debug.moe_force_load_balance", "moe.force_balance", default=False),
    # Current flags only:
    ConfigKey(MICRO_BATCH_TOKENS, type="int", since=CURRENT),
    ConfigKey(CONTEXT_LENGTH, type="int", since=CURRENT),
    ConfigKey(STEP_TOKENS, type="int", since=CURRENT, note="unset or -1: one micro batch per rank"),
    ConfigKey("parallelism.num_pp_microbatches", type="int", since=CURRENT),
    ConfigKey("training.disable_cuda_graphs", type="bool", since=CURRENT),
    ConfigKey("parallelism.enable_fsdp_symm_mem", type="bool", since=CURRENT),
    ConfigKey("parallelism.context_parallel_ptrr_mask_key", type="str", since=CURRENT),
    ConfigKey("activation_checkpoint.force_recompute_mm_shapes_by_fqns", type="list", since=CURRENT),
    ConfigKey("parallelism.enable_sequence_parallel", "layout.sp", since=TOML_ENDED),
    ConfigKey("parallelism.spmd_backend", choices=("spmd_types", "full_dtensor", "partial_dtensor"), since=TOML_ENDED),
    ConfigKey("compile.enable_async_tensor_parallel", "kernels.tp_comm_overlap", since=CURRENT),
    ConfigKey("optimizer.param_groups.0.optimizer_kwargs.lr", "optimizer.lr", since=CURRENT),
    ConfigKey("optimizer.param_groups.0.optimizer_kwargs.eps", "optimizer.eps", since=CURRENT),
    ConfigKey("optimizer.param_groups.0.optimizer_kwargs.weight_decay", "optimizer.weight_decay", since=CURRENT),
    ConfigKey("optimizer.param_groups.0.optimizer_kwargs.betas", type="list", since=CURRENT),
    ConfigKey("optimizer.param_groups.0.optimizer_name", type="str", since=CURRENT),
    ConfigKey("profiler.enable_profiling", "train.profile", since=CURRENT),
    ConfigKey("validator.enable", type="bool", since=TOML_ENDED),
    ConfigKey("validator.freq", type="int", since=TOML_ENDED),
    ConfigKey("validator.steps", "train.eval_steps", since=TOML_ENDED),
    ConfigKey("hf_assets_path", type="str", since=TOML_ENDED),
    ConfigKey("dump_folder", type="str", since=TOML_ENDED),
    ConfigKey("module", type="str", since=TOML_ENDED),
    ConfigKey("config", type="str", since=TOML_ENDED),
    ConfigKey("debug.print_config", type="bool", since=TOML_ENDED),
    ConfigKey("debug.save_config_file", type="str", since=TOML_ENDED),
    *_unmapped("bool", "debug.batch_invariant", "debug.detect_anomaly", "debug.enable_structured_logging",
             "debug.spmd_typechecking", since=TOML_ENDED),
    # Removed before or during the 0.2 line:
    *_removed("0.2.1", {
        "debug.ac_preserve_rng_state": "activation_checkpoint.preserve_rng_state",
        "debug.ac_determinism_check": "activation_checkpoint.determinism_check",
        "debug.ac_debug": "activation_checkpoint.debug",
    }),
    *_removed("0.2.0", {
        "training.seed": "debug.seed", "training.deterministic": "debug.deterministic",
        "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    }),
    *_removed("0.1", {
        "job.print_args": "job.print_config", "job.use_for_integration_test": "",
        "training.batch_size": LOCAL_BATCH, "training.compile": "compile.enable",
        "training.warmup_steps": "lr_scheduler.warmup_steps",
        "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
        "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
        "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
        "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
        "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
        "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
        "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
        "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
        "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
        "checkpoint.enable_checkpoint": "checkpoint.enable", "checkpoint.model_weights_only": "",
        "validation.enabled": "validation.enable", "memory_estimation.enabled": "memory_estimation.enable",
        "model.norm_type": "",
        "parallelism.enable_compiled_autograd": "", "fault_tolerance.sync_steps": "",
        "mx.recipe_name": "quantize.linear.mx.recipe_name", "mx.filter_fqns": "quantize.linear.mx.filter_fqns",
        "mx.mxfp8_dim1_cast_kernel_choice": "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice",
        "mx.moe_fqns_prototype": "quantize.grouped_mm.mx.fqns",
    }),
    *_removed("0.1", {"float8.enable_float8_linear": f'{CONVERTERS_KEY} = ["{CONVERTERS[0]}"]'}),
    *_removed("0.1", {
        "float8.recipe_name": FLOAT8_RECIPE, "float8.enable_fsdp_float8_all_gather": FLOAT8_GATHER,
        "float8.emulate": "quantize.linear.float8.emulate", "float8.force_recompute_fp8_weight_in_bwd": "",
        "float8.filter_fqns": "quantize.linear.float8.filter_fqns",
        "float8.precompute_float8_dynamic_scale_for_fsdp":
            "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        "float8.moe_fqns_prototype": "quantize.grouped_mm.float8.fqns",
        "float8.moe_fqns": "quantize.grouped_mm.float8.fqns",
    }, switch="float8.enable_float8_linear"),
    ConfigKey("optimizer.fused", until="0.1", status="removed", replacement='optimizer.implementation = "fused"',
              replacement_if_off='optimizer.implementation = "foreach"'),
    ConfigKey("metrics.enable_color_printing", until="0.1", status="removed",
              replacement="metrics.disable_color_printing = false",
              replacement_if_off="metrics.disable_color_printing = true"),
    ConfigKey("parallelism.pipeline_parallel_split_points", until="0.1", status="removed",
              note="parallelism.module_fqns_per_model_part lists all modules of each stage instead",
              replacement="without parallelism.pipeline_parallel_split_points"),
)  # fmt: skip

COMPOSITE_KEYS: tuple[CompositeKey, ...] = (
    CompositeKey((SHARD_DEGREE,), ("layout.dp_shard",), _shard, lambda recipe: {SHARD_DEGREE: recipe.layout.dp_shard}),
    CompositeKey((SCHEDULE,), ("layout.pp_schedule",), _schedule, _schedule_key),
    CompositeKey((LOCAL_BATCH, MICRO_BATCH), ("layout.micro_batch_size", "layout.pp_micro_batches"), _batch,
        _batch_keys, _typed_batch),
    CompositeKey((MICRO_BATCH_TOKENS, CONTEXT_LENGTH), ("data.seq_length", "layout.micro_batch_size"), _tokens),
    CompositeKey((STEP_TOKENS,), ("train.global_batch_size",), _step),
    CompositeKey(("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"), ("layout.recompute",),
        _recompute, lambda recipe: {"activation_checkpoint.mode": recipe.layout.recompute}),
    CompositeKey(("parallelism.fsdp_reshard_after_forward",), ("layout.reshard_after_forward",), _reshard,
        _reshard_key),
    CompositeKey((DECAY_TYPE, DECAY_RATIO, TOTAL_STEPS), 
        ("schedule.name", "schedule.decay_steps", *wsd_keys.FIELDS), _decay, _decay_keys),
    CompositeKey(("lr_scheduler.min_lr_factor",), ("schedule.min_lr",), _min_lr, _min_lr_key),
    CompositeKey((CONVERTERS_KEY, FLOAT8_RECIPE, FLOAT8_GATHER), ("precision.matmul", "precision.fp8_gather"), _matmul,
        _matmul_keys),
    CompositeKey(("training.dtype",), ("precision.master", "precision.moments", "precision.grads"), _storage_dtype,
        _storage_dtype_key),
    _value_map_key("training.mixed_precision_param", "precision.compute", {"bfloat16": "bf16", "float32": "fp32"},
        "is not available: torchtitan computes in bfloat16 or float32"),
    _value_map_key("training.mixed_precision_reduce", "precision.reduce", {"float32": "fp32"},
        "is not available: torchtitan 0.2 reduces gradients in float32"),
    _value_map_key("training.enable_cpu_offload", "layout.offload", {"true": "params", "false": "none"},
        "is not available: torchtitan offloads parameters with their gradients and optimizer state, or nothing"),
    _value_map_key("parallelism.disable_loss_parallel", "kernels.loss", {"false": "vocab_parallel", "true": "plain"},
        "is not available: torchtitan 0.2 has a vocabulary-parallel and a plain loss"),
    _value_map_key("parallelism.expert_parallel_comm_backend", "moe.dispatcher",
        {"standard": "alltoall", "deepep": "deepep"},
        "is not available: torchtitan 0.2 dispatches tokens by all-to-all or DeepEP"),
    _value_map_key("checkpoint.last_save_in_hf", "checkpoint.export", {"true": "consolidated", "false": "none"},
        "is not available: torchtitan writes one consolidated Hugging Face folder, or none"),
    _value_map_key("training.disable_cuda_graphs", "kernels.cuda_graphs", {"true": "none", "false": "full_iteration"},
        "is not available: torchtitan captures the forward and backward pass of a step, or nothing"),
    CompositeKey(("parallelism.context_parallel_rotate_method",), ("layout.cp_comm",), _cp_comm, _cp_comm_key),
    CompositeKey(("training.dataset", "training.dataset_path"), ("data.dataset",), _data, _data_keys),
    CompositeKey(("model.hf_assets_path",), ("data.tokenizer",), _assets("model.hf_assets_path")),
    CompositeKey(("hf_assets_path",), ("data.tokenizer",), _assets("hf_assets_path")),
    CompositeKey(("validation.enable", "validation.freq"), ("train.eval_every",), _validation("validation"),
        _validation_keys),
    CompositeKey(("validator.enable", "validator.freq"), ("train.eval_every",), _validation("validator")),
    CompositeKey(("compile.enable", "compile.components"), ("kernels.compile",), _compiled,
        lambda recipe: {"compile.enable": recipe.kernels.compile}),
)  # fmt: skip
