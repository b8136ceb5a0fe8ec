"""torchtitan's keys: the TOML of the 0.2 line (until 2026-02-23), and the flags of today (2026-08-21).

A row without dates is in both. `until` is the day a key was last there, or the month in which it is known to be gone;
`since` the first one. Rows that are gone from the 0.2 line already say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshwright.errors import InputError, closest
from meshwright.recipes.key_maps.composite_keys import count, null, number, says, truth
from meshwright.recipes.key_maps.key import UNSET, CompositeKey, ConfigKey, MappedFields, Texts
from meshwright.recipes.key_maps.value_maps import SAVES, SCHEDULES
from meshwright.recipes.types import Recipe

TOML_ENDED = "2026-02-23"
FROZEN = "2026-08"
"""By this month the flags were what they are today."""
DECAYS = ("linear", "sqrt", "cosine")
SCHEDULE_NAMES = (*SCHEDULES, "PipelineScheduleSingle", "PipelineScheduleMulti", "_PipelineScheduleRuntime")
CONVERTERS = ("quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
FLOAT8 = {"tensorwise": "fp8_tensor", "rowwise": "fp8_row", "rowwise_with_gw_hp": "fp8_row"}
SHORT_DECAY = 0.5  # of the steps: with less, the long plateau is what counts
WSD_RATIO = 0.2
DATA_SETS = ("c4", "c4_test", "c4_validation")
OWN_ASSETS = "./assets/hf/"
"""Where their download script puts the files of a model."""


def _unread(takes: Any, *keys: str, **columns: Any) -> tuple[ConfigKey, ...]:
    """Keys that mean nothing of ours."""
    return tuple(ConfigKey(key, takes=takes, **columns) for key in keys)


def _gone(until: str, pairs: Mapping[str, str]) -> tuple[ConfigKey, ...]:
    """Keys of the past, with what to write instead."""
    return tuple(ConfigKey(key, until=until, fate="gone", instead=instead) for key, instead in pairs.items())


def _refused(key: str, text: str, allowed: Iterable[str]) -> InputError:
    """A value that their parser does not take."""
    names = list(allowed)
    near = closest(text, names, 1) or names[:1]
    return InputError(f"allowed: {', '.join(names)}", field=key, value=text, fix=[f"{key}={name}" for name in near])


def _listed(key: str, own: str, values: Mapping[str, str], lacking: str) -> CompositeKey:
    """A key with a few values, each of which is one of ours; other values of ours have no word there."""

    def read(given: Texts, recipe: Recipe) -> MappedFields:
        text = given[key].strip().lower()
        if text not in values:
            raise _refused(key, given[key], values)
        return says({own: values[text]})

    def write(recipe: Recipe) -> Mapping[str, Any]:
        section, field = own.split(".")
        value = getattr(getattr(recipe, section), field)
        for theirs, ours in values.items():
            if ours == value:
                return {key: {"true": True, "false": False}.get(theirs, theirs)}
        raise InputError(lacking, field=own, value=value)

    return CompositeKey((key,), (own,), read, write)


SHARD = "parallelism.data_parallel_shard_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
LOCAL, MICRO = "training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"


def _schedule(given: Texts, recipe: Recipe) -> MappedFields:
    """Torch's schedules by name, in any case; the general ones run an order from a file."""
    text = given[SCHEDULE].strip().lower()
    if text not in {name.lower() for name in SCHEDULE_NAMES}:
        raise _refused(SCHEDULE, given[SCHEDULE], SCHEDULE_NAMES)
    ours = [ours for theirs, ours in SCHEDULES.items() if theirs.lower() == text]
    return says({"layout.pp_schedule": ours[0]} if ours else {})


def _schedule_key(recipe: Recipe) -> Mapping[str, Any]:
    return {SCHEDULE: next(theirs for theirs, ours in SCHEDULES.items() if ours == recipe.layout.pp_schedule)}


def _shard(given: Texts, recipe: Recipe) -> MappedFields:
    text = given[SHARD].strip()
    return says({"layout.dp_shard": "-1" if text == "-1" else str(count(SHARD, text, 1))})


def _batch(given: Texts, recipe: Recipe) -> MappedFields:
    """The local batch is one forward, or with a pipeline is cut into micro batches."""
    local, micro = (count(key, given[key], 1) if key in given else None for key in (LOCAL, MICRO))
    if recipe.layout.pp == 1:
        if local is None:
            raise InputError("is read with a pipeline only", field=MICRO, value=given[MICRO], fix=[f"{LOCAL}={micro}"])
        return says({"layout.micro_batch_size": str(local)})
    if local is not None and micro is not None and local % micro:
        raise InputError(f"is not a multiple of {MICRO}={micro}", field=LOCAL, value=given[LOCAL])
    return says({"layout.micro_batch_size": str(micro if micro is not None else local)})


def _batch_key(recipe: Recipe) -> Mapping[str, Any]:
    """One forward; how many of them a pipeline takes at once depends on the GPUs."""
    return {LOCAL if recipe.layout.pp == 1 else MICRO: recipe.layout.micro_batch_size}


TOKENS, CONTEXT, STEP = (
    "training.num_tokens_per_microbatch_per_dp_rank",
    "training.max_context_length",
    "training.num_tokens_per_train_step",
)

IN_SAMPLES = (LOCAL, MICRO, "training.global_batch_size", "training.seq_len")
IN_TOKENS = (TOKENS, CONTEXT, STEP, "parallelism.num_pp_microbatches")
"""How a batch is counted: in samples in the 0.2 line and in 0.3.0 of 2026-09-03, in tokens in the main branch."""


def _tokens(given: Texts, recipe: Recipe) -> MappedFields:
    """Today a batch is counted in tokens; a forward shorter than the context is one short sample."""
    context = count(CONTEXT, given[CONTEXT], 1) if CONTEXT in given else recipe.data.seq_length
    tokens = count(TOKENS, given[TOKENS], 1) if TOKENS in given else None
    length = context if tokens is None else min(context, tokens)
    said = {"data.seq_length": str(length)}
    if tokens is not None:
        said["layout.micro_batch_size"] = str(-(-tokens // length))
    return says(said)


def _step(given: Texts, recipe: Recipe) -> MappedFields:
    return says({"train.global_batch_size": str(max(1, count(STEP, given[STEP], 1) // recipe.data.seq_length))})


def _recompute(given: Texts, recipe: Recipe) -> MappedFields:
    """Selective recompute is of single operations; the compiler's memory budget is a choice of operations too."""
    mode = given.get("activation_checkpoint.mode", "selective").strip().lower()
    if mode not in ("selective", "full", "memory_budget", "none"):
        raise _refused("activation_checkpoint.mode", mode, ("selective", "full", "memory_budget", "none"))
    return says({"layout.recompute": "selective" if mode == "memory_budget" else mode})


def _reshard(given: Texts, recipe: Recipe) -> MappedFields:
    """Left alone, parameters stay gathered between forward and backward only where there is a pipeline."""
    key = "parallelism.fsdp_reshard_after_forward"
    text = given[key].strip().lower()
    if text not in ("default", "always", "never"):
        raise _refused(key, text, ("default", "always", "never"))
    frees = text == "always" or (text == "default" and recipe.layout.pp == 1)
    return says({"layout.reshard_after_forward": str(frees).lower()})


def _reshard_key(recipe: Recipe) -> Mapping[str, Any]:
    frees, natural = recipe.layout.reshard_after_forward, recipe.layout.pp == 1
    text = "default" if frees == natural else "always" if frees else "never"
    return {"parallelism.fsdp_reshard_after_forward": text}


DECAY_TYPE, DECAY_RATIO, TOTAL = "lr_scheduler.decay_type", "lr_scheduler.decay_ratio", "lr_scheduler.total_steps"


def _decay(given: Texts, recipe: Recipe) -> MappedFields:
    """The shape of the decay; with a ratio the rate stays at its peak until that share of the steps is left."""
    shape = given.get(DECAY_TYPE, "linear").strip().lower()
    if shape not in DECAYS:
        raise _refused(DECAY_TYPE, shape, DECAYS)
    ratio = given.get(DECAY_RATIO, "null")
    share = None if null(ratio) else number(DECAY_RATIO, ratio)
    name = {"sqrt": "linear"}.get(shape, shape)
    if share is not None:
        name = "constant" if share == 0 else "wsd" if share < SHORT_DECAY else name
    total = given.get(TOTAL, "null")
    return says({"schedule.name": name, "schedule.decay_steps": "0" if null(total) else str(count(TOTAL, total))})


def _decay_keys(recipe: Recipe) -> Mapping[str, Any]:
    name = recipe.schedule.name
    keys: dict[str, Any] = {"cosine": {DECAY_TYPE: "cosine"}, "linear": {DECAY_TYPE: "linear"}}.get(name, {})
    if name == "constant":
        keys = {DECAY_RATIO: 0.0}
    elif name == "wsd":
        keys = {DECAY_TYPE: "sqrt", DECAY_RATIO: WSD_RATIO}
    elif not keys:
        raise InputError("torchtitan decays linear, cosine or sqrt", field="schedule.name", value=name)
    return {**keys, **({TOTAL: recipe.schedule.decay_steps} if recipe.schedule.decay_steps else {})}


def _floor(given: Texts, recipe: Recipe) -> MappedFields:
    factor = number("lr_scheduler.min_lr_factor", given["lr_scheduler.min_lr_factor"])
    return says({"schedule.min_lr": repr(factor * recipe.optimizer.lr)})


def _floor_key(recipe: Recipe) -> Mapping[str, Any]:
    return {"lr_scheduler.min_lr_factor": recipe.schedule.min_lr / recipe.optimizer.lr}


CONVERTED = "model.converters"
RECIPE, GATHER = "quantize.linear.float8.recipe_name", "quantize.linear.float8.enable_fsdp_float8_all_gather"


def names_in(text: str) -> list[str]:
    """The names in a list as typed: [a,b] or a,b."""
    return [name.strip().strip("'\"") for name in text.strip().strip("[]").split(",") if name.strip()]


def _matmul(given: Texts, recipe: Recipe) -> MappedFields:
    """Linear layers compute in 8 bits when a converter says so; the quantize tables only say how."""
    if CONVERTED not in given:
        raise InputError(f"is read only with {CONVERTED}", field=next(iter(given)), fix=["precision.matmul=fp8_tensor"])
    converters, name = names_in(given[CONVERTED]), given.get(RECIPE, "null")
    for converter in converters:
        if converter not in CONVERTERS:
            raise _refused(CONVERTED, converter, CONVERTERS)
    kind = "same"
    if CONVERTERS[0] in converters:
        recipe_name = "tensorwise" if null(name) else name.strip().lower()
        if recipe_name not in FLOAT8:
            raise _refused(RECIPE, name, FLOAT8)
        kind = FLOAT8[recipe_name]
    elif CONVERTERS[1] in converters:
        kind = "mxfp8"
    gathers = kind == "fp8_tensor" and truth(GATHER, given.get(GATHER, "false"))
    return says({"precision.matmul": kind, "precision.fp8_gather": str(gathers).lower()})


def _matmul_keys(recipe: Recipe) -> Mapping[str, Any]:
    kind = recipe.precision.matmul
    keys: dict[str, dict[str, Any]] = {
        "same": {CONVERTED: []},
        "fp8_tensor": {CONVERTED: [CONVERTERS[0]], GATHER: recipe.precision.fp8_gather},
        "fp8_row": {CONVERTED: [CONVERTERS[0]], RECIPE: "rowwise"},
        "mxfp8": {CONVERTED: [CONVERTERS[1]]},
    }
    if kind not in keys:
        raise InputError("torchtitan 0.2 has float8 by tensor or row, and mxfp8", field="precision.matmul", value=kind)
    return keys[kind]


def _stored(given: Texts, recipe: Recipe) -> MappedFields:
    """One number format for parameters, their gradients and the optimizer's state."""
    text = given["training.dtype"].strip().lower()
    if text not in ("float32", "bfloat16"):
        raise _refused("training.dtype", text, ("float32", "bfloat16"))
    ours = "fp32" if text == "float32" else "bf16"
    return says({f"precision.{part}": ours for part in ("master", "moments", "grads")})


def _stored_key(recipe: Recipe) -> Mapping[str, Any]:
    return {"training.dtype": "float32" if recipe.precision.master == "fp32" else "bfloat16"}


def _exchange(given: Texts, recipe: Recipe) -> MappedFields:
    key = "parallelism.context_parallel_rotate_method"
    text = given[key].strip().lower()
    if text not in ("allgather", "alltoall"):
        raise _refused(key, text, ("allgather", "alltoall"))
    return says({"layout.cp_comm": "allgather" if text == "allgather" else "ring"} if recipe.layout.cp > 1 else {})


def _exchange_key(recipe: Recipe) -> Mapping[str, Any]:
    kind = recipe.layout.cp_comm
    if recipe.layout.cp == 1:
        return {}
    if kind not in ("allgather", "ring"):
        raise InputError("torchtitan gathers keys and values or passes them on", field="layout.cp_comm", value=kind)
    return {"parallelism.context_parallel_rotate_method": "allgather" if kind == "allgather" else "alltoall"}


def _data(given: Texts, recipe: Recipe) -> MappedFields:
    path = given.get("training.dataset_path", "null")
    return says({"data.dataset": given.get("training.dataset", DATA_SETS[0]) if null(path) else path})


def _data_keys(recipe: Recipe) -> Mapping[str, Any]:
    name = recipe.data.dataset
    if name in DATA_SETS:
        return {"training.dataset": name}
    if name.startswith(("/", "./", "../", "~")):
        return {"training.dataset": "c4", "training.dataset_path": name}
    raise InputError("torchtitan knows c4 by name; register others in its code", field="data.dataset", value=name)


def _assets(key: str) -> Callable[[Texts, Recipe], MappedFields]:
    def read(given: Texts, recipe: Recipe) -> MappedFields:
        path = given[key].strip()
        own = path.removesuffix("/").startswith(OWN_ASSETS) and path.count("/") == OWN_ASSETS.count("/")
        return says({"data.tokenizer": "" if own or null(path) else path})

    return read


def _validation(prefix: str) -> Callable[[Texts, Recipe], MappedFields]:
    enable, freq = f"{prefix}.enable", f"{prefix}.freq"

    def read(given: Texts, recipe: Recipe) -> MappedFields:
        on = truth(enable, given[enable]) if enable in given else True
        every = str(count(freq, given[freq], 1)) if freq in given else str(recipe.train.eval_every or 10)
        return says({"train.eval_every": every if on else "0"})

    return read


def _validation_keys(recipe: Recipe) -> Mapping[str, Any]:
    every = recipe.train.eval_every
    return {"validation.enable": True, "validation.freq": every} if every else {"validation.enable": False}


def _compiled(given: Texts, recipe: Recipe) -> MappedFields:
    """Blocks are compiled when compilation is on and the model is among what is compiled."""
    on = truth("compile.enable", given["compile.enable"]) if "compile.enable" in given else recipe.kernels.compile
    parts = names_in(given["compile.components"]) if "compile.components" in given else ["model"]
    return says({"kernels.compile": str(on and "model" in parts).lower()})


WORDS: tuple[ConfigKey, ...] = (
    *_unread("text", "job.config_file", until=TOML_ENDED, instead="--module and --config"),
    ConfigKey("job.dump_folder", takes="text", until=TOML_ENDED, instead="--dump_folder"),
    ConfigKey("job.description", takes="text", until=TOML_ENDED),
    ConfigKey("job.print_config", takes="truth", until=TOML_ENDED, instead="--debug.print_config"),
    ConfigKey("job.save_config_file", takes="text", until=TOML_ENDED, instead="--debug.save_config_file"),
    ConfigKey("job.custom_config_module", takes="text", until=TOML_ENDED, note="keys of that module are not judged"),
    ConfigKey("model.name", takes="text", default="llama3", until=TOML_ENDED, instead="--module"),
    ConfigKey("model.flavor", takes="text", default="debugmodel", until=TOML_ENDED, instead="--config"),
    ConfigKey("model.hf_assets_path", takes="text", until=TOML_ENDED, instead="--hf_assets_path"),
    ConfigKey("model.tokenizer_path", takes="text", until=TOML_ENDED, instead="model.hf_assets_path"),
    ConfigKey(CONVERTED, takes="list", default=[], until=TOML_ENDED, instead="a config function with converters"),
    ConfigKey("model.print_after_conversion", takes="truth", until=TOML_ENDED),
    ConfigKey("profiling.enable_profiling", "train.profile", default=False, until=FROZEN,
         instead="--profiler.enable_profiling"),
    *_unread("int", "profiling.profile_freq", "profiling.profiler_active", "profiling.profiler_warmup", until=FROZEN),
    *_unread("text", "profiling.save_traces_folder", "profiling.save_memory_snapshot_folder", until=FROZEN),
    ConfigKey("profiling.enable_memory_snapshot", takes="truth", until=FROZEN, instead="--profiler.enable_memory_snapshot"),
    ConfigKey("metrics.log_freq", "train.log_every", default=10),
    *_unread("truth", "metrics.enable_tensorboard", "metrics.disable_color_printing", "metrics.save_for_all_ranks",
             "metrics.enable_wandb"),
    ConfigKey("metrics.save_tb_folder", takes="text"),
    ConfigKey("optimizer.name", default="AdamW", choices=("AdamW", "Adam"), until=FROZEN,
         instead="--optimizer.param_groups.0.optimizer_name"),
    ConfigKey("optimizer.lr", "optimizer.lr", default=8e-4, until=FROZEN,
         instead="--optimizer.param_groups.0.optimizer_kwargs.lr"),
    ConfigKey("optimizer.beta1", "optimizer.beta1", default=0.9, until=FROZEN,
         instead="--optimizer.param_groups.0.optimizer_kwargs.betas"),
    ConfigKey("optimizer.beta2", "optimizer.beta2", default=0.95, until=FROZEN,
         instead="--optimizer.param_groups.0.optimizer_kwargs.betas"),
    ConfigKey("optimizer.eps", "optimizer.eps", default=1e-8, until=FROZEN,
         instead="--optimizer.param_groups.0.optimizer_kwargs.eps"),
    ConfigKey("optimizer.weight_decay", "optimizer.weight_decay", default=0.1, until=FROZEN,
         instead="--optimizer.param_groups.0.optimizer_kwargs.weight_decay"),
    ConfigKey("optimizer.implementation", default="fused", choices=("for-loop", "foreach", "fused")),
    ConfigKey("optimizer.early_step_in_backward", takes="truth", default=False, until=FROZEN),
    ConfigKey("lr_scheduler.warmup_steps", "schedule.warmup_steps", default=200),
    ConfigKey(DECAY_TYPE, default="linear", choices=DECAYS),
    ConfigKey(DECAY_RATIO, default=None, takes="float"),
    ConfigKey(TOTAL, default=None, takes="int", note="unset means training.steps"),
    ConfigKey("lr_scheduler.min_lr_factor", default=0.0, takes="float", note="a share of the peak"),
    ConfigKey("training.dataset", takes="text", default="c4_test", until=TOML_ENDED, instead="--dataloader.dataset"),
    ConfigKey("training.dataset_path", takes="text", default=None, until=TOML_ENDED, instead="--dataloader.dataset_path"),
    ConfigKey(LOCAL, takes="int", default=8, until=FROZEN, instead=f"--{TOKENS}, which is in tokens"),
    ConfigKey("training.global_batch_size", "train.global_batch_size", until=FROZEN, instead=f"--{STEP}, in tokens",
         note="unset or -1 means local_batch_size × data-parallel ranks"),
    ConfigKey("training.seq_len", "data.seq_length", default=2048, until=FROZEN, instead=f"--{CONTEXT}"),
    ConfigKey("training.max_norm", "optimizer.clip_grad", default=1.0),
    ConfigKey("training.steps", "train.steps", default=10000),
    ConfigKey("training.enable_cpu_offload", takes="truth", default=False),
    ConfigKey("training.dtype", default="float32", choices=("float32", "bfloat16")),
    ConfigKey("training.mixed_precision_param", default="bfloat16", choices=("bfloat16", "float32")),
    ConfigKey("training.mixed_precision_reduce", default="float32", choices=("float32",)),
    ConfigKey("training.gc_freq", takes="int"),
    ConfigKey("training.gc_debug", takes="truth"),
    ConfigKey("training.dataloader.num_workers", "data.workers", default=0, until=TOML_ENDED,
         instead="--dataloader.num_workers"),
    *_unread("truth", "training.dataloader.persistent_workers", "training.dataloader.pin_memory", until=TOML_ENDED),
    ConfigKey("training.dataloader.prefetch_factor", takes="int", until=TOML_ENDED),
    ConfigKey("parallelism.data_parallel_replicate_degree", "layout.dp_replicate", default=1),
    ConfigKey(SHARD, takes="int", default=-1, note="-1 takes the ranks that are left; only this degree may"),
    ConfigKey("parallelism.fsdp_reshard_after_forward", default="default", choices=("default", "always", "never")),
    ConfigKey("parallelism.tensor_parallel_degree", "layout.tp", default=1),
    ConfigKey("parallelism.disable_loss_parallel", takes="truth", default=False, until=FROZEN),
    ConfigKey("parallelism.enable_async_tensor_parallel", "kernels.tp_comm_overlap", default=False, until=FROZEN,
         instead="--compile.enable_async_tensor_parallel"),
    ConfigKey("parallelism.pipeline_parallel_degree", "layout.pp", default=1),
    ConfigKey("parallelism.module_fqns_per_model_part", takes="list"),
    ConfigKey("parallelism.pipeline_parallel_first_stage_less_layers", takes="int", default=1),
    ConfigKey("parallelism.pipeline_parallel_last_stage_less_layers", takes="int", default=1),
    ConfigKey("parallelism.pipeline_parallel_layers_per_stage", takes="int"),
    ConfigKey(SCHEDULE, default="1F1B", choices=SCHEDULE_NAMES),
    ConfigKey("parallelism.pipeline_parallel_schedule_csv", takes="text"),
    ConfigKey(MICRO, takes="int", default=1, until=FROZEN, instead="--parallelism.num_pp_microbatches"),
    ConfigKey("parallelism.pipeline_parallel_expert_parallel_overlap", takes="truth", default=True, until=FROZEN),
    ConfigKey("parallelism.context_parallel_degree", "layout.cp", default=1),
    ConfigKey("parallelism.context_parallel_load_balancer", takes="text", default="headtail"),
    ConfigKey("parallelism.context_parallel_rotate_method", default="allgather", choices=("allgather", "alltoall"),
         until=FROZEN),
    ConfigKey("parallelism.expert_parallel_degree", "layout.ep", default=1),
    ConfigKey("parallelism.expert_tensor_parallel_degree", "layout.etp", default=1, until=FROZEN),
    ConfigKey("parallelism.expert_parallel_comm_backend", default="standard", choices=("standard", "deepep"), until=FROZEN,
         instead="a config function with moe_comm_backend"),
    ConfigKey("checkpoint.enable", takes="truth", default=False),
    ConfigKey("checkpoint.interval", "checkpoint.save_every", default=500),
    ConfigKey("checkpoint.keep_latest_k", "checkpoint.keep", default=10, note="0 keeps all; 1 is refused"),
    ConfigKey("checkpoint.async_mode", "checkpoint.async_save", SAVES, default="disabled"),
    ConfigKey("checkpoint.last_save_in_hf", takes="truth", default=False),
    ConfigKey("checkpoint.last_save_model_only", takes="truth", default=True),
    ConfigKey("checkpoint.initial_load_path", "checkpoint.pretrained"),
    ConfigKey("checkpoint.initial_load_in_hf", takes="truth", default=False),
    ConfigKey("checkpoint.initial_load_model_only", takes="truth", default=True),
    *_unread("truth", "checkpoint.initial_load_in_hf_quantized", "checkpoint.enable_first_step_checkpoint",
             "checkpoint.create_seed_checkpoint", "checkpoint.load_only"),
    ConfigKey("checkpoint.enable_ft_dataloader_checkpoints", takes="truth", until=FROZEN),
    ConfigKey("checkpoint.folder", takes="text"),
    ConfigKey("checkpoint.export_dtype", default="float32", choices=("float16", "bfloat16", "float32")),
    ConfigKey("checkpoint.load_step", takes="int"),
    ConfigKey("checkpoint.exclude_from_loading", takes="list"),
    ConfigKey("activation_checkpoint.mode", default="selective", choices=("selective", "full", "memory_budget", "none"),
         until=FROZEN, instead="activation-checkpoint:full (also :selective, :none) as the last word of the command"),
    ConfigKey("activation_checkpoint.selective_ac_option", takes="text", default="2", until=FROZEN,
         note="op, or a whole number n: every nth layer is recomputed"),
    ConfigKey("activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", takes="list", until=FROZEN),
    ConfigKey("activation_checkpoint.early_stop", takes="truth", until=FROZEN),
    ConfigKey("activation_checkpoint.memory_budget", takes="float"),
    *_unread("truth", "activation_checkpoint.visualize_memory_budget_pareto",
             "activation_checkpoint.preserve_rng_state", "activation_checkpoint.debug"),
    ConfigKey("activation_checkpoint.determinism_check", takes="text"),
    ConfigKey("compile.enable", takes="truth", default=False),
    ConfigKey("compile.components", takes="list", default=["model", "loss"]),
    ConfigKey("compile.backend", takes="text"),
    ConfigKey(GATHER, takes="truth", default=False, until=TOML_ENDED),
    ConfigKey("quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp", takes="truth", until=TOML_ENDED),
    ConfigKey(RECIPE, default=None, choices=(*FLOAT8, "null"), until=TOML_ENDED),
    ConfigKey("quantize.linear.float8.filter_fqns", takes="list", until=TOML_ENDED),
    ConfigKey("quantize.linear.float8.emulate", takes="truth", default=False, until=TOML_ENDED),
    ConfigKey("quantize.linear.mx.mxfp8_dim1_cast_kernel_choice", choices=("triton", "cuda", "torch"), until=TOML_ENDED),
    ConfigKey("quantize.linear.mx.recipe_name", takes="text", until=TOML_ENDED),
    ConfigKey("quantize.linear.mx.filter_fqns", takes="list", until=TOML_ENDED),
    ConfigKey("quantize.grouped_mm.float8.fqns", takes="list", until=TOML_ENDED),
    ConfigKey("quantize.grouped_mm.mx.fqns", takes="list", until=TOML_ENDED),
    ConfigKey("quantize.grouped_mm.mx.recipe_name", takes="text", until=TOML_ENDED),
    *_unread("int", "comm.init_timeout_seconds", "comm.train_timeout_seconds", "comm.trace_buf_size"),
    *_unread("text", "comm.save_traces_folder", "comm.save_traces_file_prefix"),
    ConfigKey("comm.mode", default="default", choices=("default", "fake_backend", "local_tensor")),
    *_unread("truth", "memory_estimation.enable", "memory_estimation.disable_fake_mode", until=TOML_ENDED),
    *_unread("truth", "fault_tolerance.enable", until=TOML_ENDED),
    *_unread("text", "fault_tolerance.process_group", "fault_tolerance.semi_sync_method", until=TOML_ENDED),
    *_unread("int", "fault_tolerance.process_group_timeout_ms", "fault_tolerance.replica_id",
             "fault_tolerance.group_size", "fault_tolerance.min_replica_size", until=TOML_ENDED),
    *_unread("text", "experimental.custom_import", "experimental.custom_args_module", until=TOML_ENDED),
    ConfigKey("validation.enable", takes="truth", default=False, until=TOML_ENDED, instead="--validator.enable"),
    ConfigKey("validation.freq", takes="int", default=10, until=TOML_ENDED, instead="--validator.freq"),
    ConfigKey("validation.steps", "train.eval_steps", until=TOML_ENDED, instead="--validator.steps",
         note="unset or -1 takes the whole data set"),
    *_unread("text", "validation.dataset", "validation.dataset_path", until=TOML_ENDED),
    *_unread("int", "validation.local_batch_size", "validation.seq_len", until=TOML_ENDED),
    *_unread("int", "validation.dataloader.num_workers", "validation.dataloader.prefetch_factor", until=TOML_ENDED),
    *_unread("truth", "validation.dataloader.persistent_workers", "validation.dataloader.pin_memory",
             until=TOML_ENDED),
    ConfigKey("debug.seed", "train.seed", note="unset draws one"),
    ConfigKey("debug.deterministic", "kernels.deterministic", default=False),
    ConfigKey("debug.deterministic_warn_only", takes="truth"),
    ConfigKey("debug.moe_force_load_balance", "moe.force_balance", default=False),
    # Only today:
    ConfigKey(TOKENS, takes="int", since=FROZEN),
    ConfigKey(CONTEXT, takes="int", since=FROZEN),
    ConfigKey(STEP, takes="int", since=FROZEN, note="unset or -1 means one micro batch of every rank"),
    ConfigKey("parallelism.num_pp_microbatches", takes="int", since=FROZEN),
    ConfigKey("training.disable_cuda_graphs", takes="truth", since=FROZEN),
    ConfigKey("parallelism.enable_fsdp_symm_mem", takes="truth", since=FROZEN),
    ConfigKey("parallelism.context_parallel_ptrr_mask_key", takes="text", since=FROZEN),
    ConfigKey("activation_checkpoint.force_recompute_mm_shapes_by_fqns", takes="list", since=FROZEN),
    ConfigKey("parallelism.enable_sequence_parallel", "layout.sp", since=TOML_ENDED),
    ConfigKey("parallelism.spmd_backend", choices=("spmd_types", "full_dtensor", "partial_dtensor"), since=TOML_ENDED),
    ConfigKey("compile.enable_async_tensor_parallel", "kernels.tp_comm_overlap", since=FROZEN),
    ConfigKey("optimizer.param_groups.0.optimizer_kwargs.lr", "optimizer.lr", since=FROZEN),
    ConfigKey("optimizer.param_groups.0.optimizer_kwargs.eps", "optimizer.eps", since=FROZEN),
    ConfigKey("optimizer.param_groups.0.optimizer_kwargs.weight_decay", "optimizer.weight_decay", since=FROZEN),
    ConfigKey("optimizer.param_groups.0.optimizer_kwargs.betas", takes="list", since=FROZEN),
    ConfigKey("optimizer.param_groups.0.optimizer_name", takes="text", since=FROZEN),
    ConfigKey("profiler.enable_profiling", "train.profile", since=FROZEN),
    ConfigKey("validator.enable", takes="truth", since=TOML_ENDED),
    ConfigKey("validator.freq", takes="int", since=TOML_ENDED),
    ConfigKey("validator.steps", "train.eval_steps", since=TOML_ENDED),
    ConfigKey("hf_assets_path", takes="text", since=TOML_ENDED),
    ConfigKey("dump_folder", takes="text", since=TOML_ENDED),
    ConfigKey("module", takes="text", since=TOML_ENDED),
    ConfigKey("config", takes="text", since=TOML_ENDED),
    ConfigKey("debug.print_config", takes="truth", since=TOML_ENDED),
    ConfigKey("debug.save_config_file", takes="text", since=TOML_ENDED),
    *_unread("truth", "debug.batch_invariant", "debug.detect_anomaly", "debug.enable_structured_logging",
             "debug.spmd_typechecking", since=TOML_ENDED),
    # No more, not even in the 0.2 line:
    *_gone("0.2.1", {
        "debug.ac_preserve_rng_state": "activation_checkpoint.preserve_rng_state",
        "debug.ac_determinism_check": "activation_checkpoint.determinism_check",
        "debug.ac_debug": "activation_checkpoint.debug",
    }),
    *_gone("0.2.0", {
        "training.seed": "debug.seed", "training.deterministic": "debug.deterministic",
        "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    }),
    *_gone("0.1", {
        "job.print_args": "job.print_config", "job.use_for_integration_test": "",
        "training.batch_size": LOCAL, "training.compile": "compile.enable",
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
        "optimizer.fused": 'optimizer.implementation = "fused"',
        "checkpoint.enable_checkpoint": "checkpoint.enable", "checkpoint.model_weights_only": "",
        "validation.enabled": "validation.enable", "memory_estimation.enabled": "memory_estimation.enable",
        "metrics.enable_color_printing": "metrics.disable_color_printing", "model.norm_type": "",
        "parallelism.enable_compiled_autograd": "", "fault_tolerance.sync_steps": "",
        "parallelism.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
        "float8.enable_float8_linear": f'{CONVERTED} = ["{CONVERTERS[0]}"]', "float8.recipe_name": RECIPE,
        "float8.enable_fsdp_float8_all_gather": GATHER, "float8.emulate": "quantize.linear.float8.emulate",
        "float8.filter_fqns": "quantize.linear.float8.filter_fqns", "float8.force_recompute_fp8_weight_in_bwd": "",
        "float8.precompute_float8_dynamic_scale_for_fsdp":
            "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        "float8.moe_fqns_prototype": "quantize.grouped_mm.float8.fqns",
        "float8.moe_fqns": "quantize.grouped_mm.float8.fqns",
        "mx.recipe_name": "quantize.linear.mx.recipe_name", "mx.filter_fqns": "quantize.linear.mx.filter_fqns",
        "mx.mxfp8_dim1_cast_kernel_choice": "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice",
        "mx.moe_fqns_prototype": "quantize.grouped_mm.mx.fqns",
    }),
)  # fmt: skip

JOINTS: tuple[CompositeKey, ...] = (
    CompositeKey((SHARD,), ("layout.dp_shard",), _shard, lambda recipe: {SHARD: recipe.layout.dp_shard}),
    CompositeKey((SCHEDULE,), ("layout.pp_schedule",), _schedule, _schedule_key),
    CompositeKey((LOCAL, MICRO), ("layout.micro_batch_size",), _batch, _batch_key),
    CompositeKey((TOKENS, CONTEXT), ("data.seq_length", "layout.micro_batch_size"), _tokens),
    CompositeKey((STEP,), ("train.global_batch_size",), _step),
    CompositeKey(
        ("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"),
        ("layout.recompute",),
        _recompute,
        lambda recipe: {"activation_checkpoint.mode": recipe.layout.recompute},
    ),
    CompositeKey(
        ("parallelism.fsdp_reshard_after_forward",), ("layout.reshard_after_forward",), _reshard, _reshard_key
    ),
    CompositeKey((DECAY_TYPE, DECAY_RATIO, TOTAL), ("schedule.name", "schedule.decay_steps"), _decay, _decay_keys),
    CompositeKey(("lr_scheduler.min_lr_factor",), ("schedule.min_lr",), _floor, _floor_key),
    CompositeKey((CONVERTED, RECIPE, GATHER), ("precision.matmul", "precision.fp8_gather"), _matmul, _matmul_keys),
    CompositeKey(
        ("training.dtype",), ("precision.master", "precision.moments", "precision.grads"), _stored, _stored_key
    ),
    _listed(
        "training.mixed_precision_param",
        "precision.compute",
        {"bfloat16": "bf16", "float32": "fp32"},
        "torchtitan computes in bfloat16 or float32",
    ),
    _listed(
        "training.mixed_precision_reduce",
        "precision.reduce",
        {"float32": "fp32"},
        "torchtitan 0.2 sums gradients in float32",
    ),
    _listed(
        "training.enable_cpu_offload",
        "layout.offload",
        {"true": "params", "false": "none"},
        "torchtitan offloads parameters with their gradients and optimizer state, or nothing",
    ),
    _listed(
        "parallelism.disable_loss_parallel",
        "kernels.loss",
        {"false": "vocab_parallel", "true": "plain"},
        "torchtitan 0.2 has the loss over the cut vocabulary and the plain one",
    ),
    _listed(
        "parallelism.expert_parallel_comm_backend",
        "moe.dispatcher",
        {"standard": "alltoall", "deepep": "deepep"},
        "torchtitan 0.2 sends tokens by all-to-all or DeepEP",
    ),
    _listed(
        "checkpoint.last_save_in_hf",
        "checkpoint.export",
        {"true": "consolidated", "false": "none"},
        "torchtitan writes one consolidated Hugging Face folder, or none",
    ),
    _listed(
        "training.disable_cuda_graphs",
        "kernels.cuda_graphs",
        {"true": "none", "false": "full_iteration"},
        "torchtitan captures the forward and backward pass of a step, or nothing",
    ),
    CompositeKey(("parallelism.context_parallel_rotate_method",), ("layout.cp_comm",), _exchange, _exchange_key),
    CompositeKey(("training.dataset", "training.dataset_path"), ("data.dataset",), _data, _data_keys),
    CompositeKey(("model.hf_assets_path",), ("data.tokenizer",), _assets("model.hf_assets_path")),
    CompositeKey(("hf_assets_path",), ("data.tokenizer",), _assets("hf_assets_path")),
    CompositeKey(
        ("validation.enable", "validation.freq"), ("train.eval_every",), _validation("validation"), _validation_keys
    ),
    CompositeKey(("validator.enable", "validator.freq"), ("train.eval_every",), _validation("validator")),
    CompositeKey(
        ("compile.enable", "compile.components"),
        ("kernels.compile",),
        _compiled,
        lambda recipe: {"compile.enable": recipe.kernels.compile},
    ),
)

__all__ = ["CONVERTERS", "DATA_SETS", "JOINTS", "OWN_ASSETS", "SCHEDULE_NAMES", "UNSET", "WORDS", "names_in"]
