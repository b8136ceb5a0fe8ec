"""Readers and writers of NeMo AutoModel keys that are only meaningful together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.recipes.key_maps import length_keys, wsd_keys
from meshwright.recipes.key_maps import shared_composite_keys as shared
from meshwright.recipes.key_maps.key import CompositeKey, MappedFields, RawValues, Values, to_framework_name
from meshwright.recipes.key_maps.local_batch import local_batch_settings, typed_local_batch
from meshwright.recipes.key_maps.value_maps import DECAY_STYLES, PIPELINE_SCHEDULES
from meshwright.recipes.types import Recipe

LOCAL_BATCH, MICRO_BATCH = "step_scheduler.local_batch_size", "distributed.pipeline.pp_microbatch_size"

DTYPES: Values = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float16": "fp16",
    "bf16": "bf16",
    "fp32": "fp32",
    "fp16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float16": "fp16",
}

TORCH_ADAMW = "torch.optim.AdamW"
FUSED_ADAM = "transformer_engine.pytorch.optimizers.FusedAdam"
LOSS_PACKAGE = "nemo_automodel.components.loss"
DATASET_PACKAGE = "nemo_automodel.components.datasets.llm"
MOCK_DATASET = f"{DATASET_PACKAGE}.mock_iterable_dataset.MockIterableDataset"
TOKEN_DATASET = f"{DATASET_PACKAGE}.megatron_dataset.MegatronPretraining"
CHAT_DATASET = f"{DATASET_PACKAGE}.chat_dataset.ChatDataset"
COLUMN_DATASET = f"{DATASET_PACKAGE}.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset"
CPU_OFFLOAD = "torch.distributed.fsdp.CPUOffloadPolicy"


def _dtype(text: str) -> str:
    return DTYPES.get(text.strip().lower(), "")


def target_name(text: str) -> str:
    """Return the last part of an import path in lower case without Config: the class or function a section builds."""
    return text.strip().strip("'\"").rpartition(".")[2].lower().removesuffix("config").replace("_", "")


OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "adamw8bit": "adamw8bit",
    "fusedadam": "adamw",
    "flashadamw": "adamw",
    "muon": "muon",
    "normuon": "muon",
    "muown": "muon",
    "sgd": "sgd",
    "lion": "lion",
    "adamwschedulefree": "schedule_free_adamw",
}


def _keeps_master_weights(name: str, raw: RawValues) -> bool:
    """Return whether an optimizer keeps fp32 master weights."""
    if name == "flashadamw":
        return True
    return name == "fusedadam" and raw.get("optimizer.master_weights", "false").lower() == "true"


def _storage(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The optimizer updates weights in their storage dtype, unless it keeps master weights."""
    return _stored_in(raw, recipe, "bf16")  # unset or auto: the checkpoint's dtype, bf16 for nearly all models


def _storage_override(raw: RawValues, recipe: Recipe) -> MappedFields:
    """An override that names only the optimizer keeps the recipe's storage dtype."""
    return _stored_in(raw, recipe, "bf16" if recipe.goal == "peft" else recipe.precision.master)


def _stored_in(raw: RawValues, recipe: Recipe, unset: str) -> MappedFields:
    name = target_name(raw.get("optimizer._target_", TORCH_ADAMW))
    stored = _dtype(raw.get("model.torch_dtype", "null")) or unset
    if recipe.goal == "peft":
        stored = _dtype(raw.get("peft.lora_dtype", "null")) or stored
    stored = "bf16" if stored == "fp16" else stored
    moments = stored
    if name == "fusedadam":
        moments = _dtype(raw.get("optimizer.exp_avg_dtype", "null")) or "fp32"
    elif name == "flashadamw":
        moments = "bf16"
    fields = {"precision.master": "fp32" if _keeps_master_weights(name, raw) else stored, "precision.moments": moments}
    is_known = "optimizer._target_" in raw and name in OPTIMIZERS
    return MappedFields({**fields, "optimizer.name": OPTIMIZERS[name]} if is_known else fields)


def _storage_keys(recipe: Recipe) -> Mapping[str, Any]:
    name, master, moments = recipe.optimizer.name, recipe.precision.master, recipe.precision.moments
    if name not in ("adamw", "adamw8bit", "muon", "sgd"):
        raise InputError(f"{name} is not available in AutoModel", field="optimizer.name")
    dtypes = {"fp32": "float32", "bf16": "bfloat16"}
    keys: dict[str, Any] = {"model.torch_dtype": "bfloat16" if recipe.goal == "peft" else dtypes[master]}
    if recipe.goal == "peft":
        keys["peft.lora_dtype"] = dtypes[master]
    paths = {
        "adamw": TORCH_ADAMW,
        "adamw8bit": "torchao.optim.AdamW8bit",
        "muon": "dion.Muon",
        "sgd": "torch.optim.SGD",
    }
    if master == moments:
        return {**keys, "optimizer._target_": paths[name]}
    if name != "adamw" or recipe.goal == "peft":
        raise InputError(
            f"must equal precision.master ({master}): AutoModel keeps both in one dtype", field="precision.moments"
        )
    return {
        "model.torch_dtype": "bfloat16",
        "optimizer._target_": FUSED_ADAM,
        "optimizer.master_weights": master == "fp32",
        "optimizer.exp_avg_dtype": dtypes[moments],
    }


def _is_ddp(recipe: Recipe) -> bool:
    return recipe.layout.strategy == "ddp"


def _compute(raw: RawValues, recipe: Recipe) -> MappedFields:
    """FSDP2 has a compute dtype; DDP computes in the storage dtype or under autocast."""
    autocast = _dtype(raw.get("distributed.autocast_dtype", "null"))
    if _is_ddp(recipe):
        stored = "bf16" if recipe.goal == "peft" else recipe.precision.master
        return MappedFields({"precision.compute": autocast or stored})
    return MappedFields(
        {"precision.compute": autocast or _dtype(raw.get("distributed.mp_policy.param_dtype", "")) or "bf16"}
    )


def _compute_keys(recipe: Recipe) -> Mapping[str, Any]:
    compute = recipe.precision.compute
    dtype = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}[compute]
    if _is_ddp(recipe):
        same = compute == ("bf16" if recipe.goal == "peft" else recipe.precision.master)
        return {} if same else {"distributed.autocast_dtype": dtype}
    if recipe.layout.strategy == "megatron_fsdp":
        if compute != "bf16":
            raise InputError("must be bf16 with megatron_fsdp", field="precision.compute")
        return {}
    return {"distributed.mp_policy.param_dtype": dtype}


def _reduce(raw: RawValues, recipe: Recipe) -> MappedFields:
    if recipe.layout.strategy == "megatron_fsdp":
        fp32 = raw.get("distributed.grad_reduce_in_fp32", "false").lower() == "true"
        return MappedFields({"precision.reduce": "fp32" if fp32 else "bf16"})
    if _is_ddp(recipe):
        return MappedFields({"precision.reduce": recipe.precision.master})
    text = raw.get("distributed.mp_policy.reduce_dtype", "float32")
    return MappedFields({"precision.reduce": "fp32" if _dtype(text) == "fp32" else "bf16"})


def _reduce_keys(recipe: Recipe) -> Mapping[str, Any]:
    fp32 = recipe.precision.reduce == "fp32"
    if recipe.layout.strategy == "megatron_fsdp":
        return {"distributed.grad_reduce_in_fp32": fp32}
    if _is_ddp(recipe):
        if recipe.precision.reduce != recipe.precision.master:
            raise InputError("must equal precision.master with ddp", field="precision.reduce")
        return {}
    return {"distributed.mp_policy.reduce_dtype": "float32" if fp32 else "bfloat16"}


ATTN_IMPLEMENTATIONS = {
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "flash_attention_4": "flash",
    "sdpa": "sdpa",
    "eager": "eager",
    "flex_attention": "flex",
}
ATTN_BACKENDS = {
    "te": "te",
    "sdpa": "sdpa",
    "flex": "flex",
    "eager": "eager",
    "cudnn": "cudnn",
    "magi": "te",
    "tilelang": "te",
    "torch": "eager",
}
"""Attention backends; magi and tilelang are modeled as Transformer Engine's, torch (DeepSeek V4) as eager."""


def _attention(raw: RawValues, recipe: Recipe) -> MappedFields:
    backend = raw.get("model.backend.attn", "null")
    if not shared.is_null(backend):
        if backend.lower() not in ATTN_BACKENDS:
            raise InputError(f"allowed: {', '.join(ATTN_BACKENDS)}", field="model.backend.attn", value=backend)
        return MappedFields({"kernels.attention": ATTN_BACKENDS[backend.lower()]})
    known = ATTN_IMPLEMENTATIONS.get(raw.get("model.attn_implementation", "").lower())
    return MappedFields({"kernels.attention": known or "auto"})


def _attention_keys(recipe: Recipe) -> Mapping[str, Any]:
    attention = recipe.kernels.attention
    if attention == "auto":
        return {}
    if attention in ("flash", "eager", "sdpa"):
        return {"model.attn_implementation": next(key for key, our in ATTN_IMPLEMENTATIONS.items() if our == attention)}
    return {"model.backend.attn": attention}


DISPATCHERS = {"torch": "allgather", "deepep": "deepep", "hybridep": "hybridep", "uccl_ep": "deepep", "mok": "deepep"}


def _dispatcher(raw: RawValues, recipe: Recipe) -> MappedFields:
    text = raw.get("model.backend.dispatcher", "deepep").lower()
    if raw.get("model.backend.enable_deepep", "").lower() == "false":
        text = "torch"
    if text not in DISPATCHERS:
        raise InputError(f"allowed: {', '.join(DISPATCHERS)}", field="model.backend.dispatcher", value=text)
    return MappedFields({"moe.dispatcher": DISPATCHERS[text]})


def _dispatcher_keys(recipe: Recipe) -> Mapping[str, Any]:
    dispatcher = recipe.moe.dispatcher
    if dispatcher == "alltoall":
        raise InputError(
            "alltoall is not available: AutoModel has torch (allgather), deepep and hybridep", field="moe.dispatcher"
        )
    return {"model.backend.dispatcher": "torch" if dispatcher == "allgather" else dispatcher}


LOSSES = {
    "plain": f"{LOSS_PACKAGE}.masked_ce.MaskedCrossEntropy",
    "fused_linear": f"{LOSS_PACKAGE}.linear_ce.FusedLinearCrossEntropy",
    "chunked": f"{LOSS_PACKAGE}.chunked_ce.ChunkedCrossEntropy",
    "vocab_parallel": f"{LOSS_PACKAGE}.te_parallel_ce.TEParallelCrossEntropy",
}


def _loss(raw: RawValues, recipe: Recipe) -> MappedFields:
    name = target_name(raw.get("loss_fn._target_", ""))
    known = {target_name(path): name for name, path in LOSSES.items()}
    return MappedFields({"kernels.loss": known[name]} if name in known else {})


def _matmul(raw: RawValues, recipe: Recipe) -> MappedFields:
    """FP8 linear layers come from torchao (fp8) or from Transformer Engine (model.backend.te_fp8)."""
    te_recipe = raw.get("model.backend.te_fp8.recipe", "null").lower()
    if not shared.is_null(te_recipe):
        known = {"current": "fp8_tensor", "block": "fp8_block", "mxfp8": "mxfp8"}
        return MappedFields({"precision.matmul": known.get(te_recipe, "same")})
    if raw.get("fp8.enabled", "false").lower() != "true":
        return MappedFields({"precision.matmul": "same"})
    rowwise = raw.get("fp8.recipe_name", "tensorwise").lower().startswith("rowwise")
    return MappedFields({"precision.matmul": "fp8_row" if rowwise else "fp8_tensor"})


def _matmul_keys(recipe: Recipe) -> Mapping[str, Any]:
    matmul = recipe.precision.matmul
    torchao = {"fp8_tensor": "tensorwise", "fp8_row": "rowwise"}
    if matmul == "same":
        return {}
    if matmul in torchao:
        return {"fp8.enabled": True, "fp8.recipe_name": torchao[matmul]}
    if matmul not in ("fp8_block", "mxfp8"):
        raise InputError(f"{matmul} is not available in AutoModel", field="precision.matmul")
    return {"model.backend.linear": "te", "model.backend.te_fp8.recipe": matmul.removeprefix("fp8_")}


def _schedule(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Return the pipeline schedule and the number of virtual stages per rank."""
    text = raw.get("distributed.pipeline.pp_schedule", "1f1b")
    known = {key.lower(): value for key, value in PIPELINE_SCHEDULES.items()}
    if text.lower() not in known:
        raise InputError(
            f"allowed: {', '.join(PIPELINE_SCHEDULES)}", field="distributed.pipeline.pp_schedule", value=text
        )
    name = known[text.lower()]
    if recipe.layout.pp == 1:
        return MappedFields({"layout.pp_schedule": name})
    layers = raw.get("distributed.pipeline.layers_per_stage", "null")
    if shared.is_null(layers):
        return MappedFields({"layout.pp_schedule": name}, {"layout.vp": "1" if name in ("1f1b", "gpipe") else "2"})
    rounding = raw.get("distributed.pipeline.round_virtual_stages_to_pp_multiple", "null")
    per_stage = shared.as_count("distributed.pipeline.layers_per_stage", layers, 1)
    chunks = chunks_per_rank(_num_layers(recipe), per_stage, recipe.layout.pp, rounding)
    return MappedFields({"layout.pp_schedule": name, "layout.vp": str(max(1, chunks))})


def _num_layers(recipe: Recipe) -> int:
    """Return the layer count of the recipe's model, or 0 if it is unknown."""
    from meshwright.recipes.case import model_of

    if not recipe.model:
        return 0
    try:
        return model_of(recipe).num_layers
    except InputError:
        return 0


def chunks_per_rank(layers: int, per_stage: int, pp: int, rounding: str) -> int:
    """Return virtual stages per rank. An uneven count without rounding is rounded up; a rule reports it."""
    stages = -(-layers // per_stage)
    return stages // pp if rounding == "down" else -(-stages // pp)


def _schedule_keys(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    if layout.pp == 1:
        return {}
    if layout.pp_schedule == "dualpipe_v":
        raise InputError(
            "dualpipe_v is not available: AutoModel does not place stages in a V", field="layout.pp_schedule"
        )
    keys: dict[str, Any] = {
        "distributed.pipeline.pp_schedule": next(
            t for t, o in PIPELINE_SCHEDULES.items() if o == layout.pp_schedule
        ).lower()
    }
    if layout.vp == (1 if layout.pp_schedule in ("1f1b", "gpipe") else 2):
        return keys
    layers = _num_layers(recipe)
    per_stage = -(-layers // (layout.pp * layout.vp))
    if not per_stage or chunks_per_rank(layers, per_stage, layout.pp, "up") != layout.vp:
        raise InputError(f"no layers_per_stage gives {layout.vp} virtual stages per rank", field="layout.vp")
    rounding = {"distributed.pipeline.round_virtual_stages_to_pp_multiple": "up"}
    even = -(-layers // per_stage) == layout.pp * layout.vp
    return {**keys, "distributed.pipeline.layers_per_stage": per_stage, **({} if even else rounding)}


def _typed_batch(raw: RawValues, recipe: Recipe) -> MappedFields:
    if recipe.layout.pp == 1:
        return shared.local_batch(raw, recipe)
    local, micro = (shared.as_count(key, raw[key], 1) if key in raw else None for key in (LOCAL_BATCH, MICRO_BATCH))
    return typed_local_batch(local, micro, recipe, LOCAL_BATCH)


def _batch_keys(recipe: Recipe) -> Mapping[str, Any]:
    return local_batch_settings(recipe, LOCAL_BATCH, MICRO_BATCH)


def _ranks_keys(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    return {} if layout.dp_shard < 1 else {"distributed.dp_size": layout.dp_shard * layout.dp_replicate}


def _packing(raw: RawValues, recipe: Recipe) -> MappedFields:
    size = next((text for text in raw.values() if not shared.is_null(text) and text != "0"), "0")
    key = next(iter(raw))
    return shared.packed_size({key: size}, recipe)


def _length_keys(recipe: Recipe) -> Mapping[str, Any]:
    length = recipe.data.seq_length
    if recipe.data.packing:
        return {"packed_sequence.packed_sequence_size": length}
    return {"dataset.seq_len" if has_random_tokens(recipe) else "dataset.seq_length": length}


def has_random_tokens(recipe: Recipe) -> bool:
    """Return whether a recipe trains on random tokens: it names neither a dataset nor a blend of token files."""
    return recipe.data.dataset == "mock" and not (recipe.data.blend and recipe.goal == "pretrain")


DATASET_PATH_KEYS = ("path_or_dataset_id", "path_or_dataset", "dataset_name", "paths", "file_pattern")


def _dataset(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Return the dataset: random tokens, weighted token files, or samples."""
    builder = target_name(raw.get("dataset._target_", ""))
    if "mock" in builder or ".mock" in raw.get("dataset._target_", ""):
        return MappedFields({"data.dataset": "mock"})
    path = next((raw[f"dataset.{name}"] for name in DATASET_PATH_KEYS if f"dataset.{name}" in raw), "")
    name = path or builder.removeprefix("make").removesuffix("dataset")  # make_squad_dataset → squad
    fields = {"data.dataset": name} if name else {}
    parts = [part.strip() for part in path.strip("[]").split(",")] if path.startswith("[") else []
    if len(parts) > 1 and len(parts) % 2 == 0 and all(_is_weight(part) for part in parts[::2]):
        pairs = zip(parts[1::2], parts[::2], strict=True)
        fields = {"data.blend": ",".join(f"{path}:{weight}" for path, weight in pairs)}
    if "megatron" not in builder and "dataset.split" in raw and not shared.is_null(raw["dataset.split"]):
        fields["data.split"] = raw["dataset.split"]
    names = {"prompt": "question", "response": "answer"}
    columns = {column: raw.get(f"dataset.column_mapping.{key}", "") for column, key in names.items()}
    if all(columns.values()):
        fields["data.columns"] = ",".join(f"{column}:{name}" for column, name in columns.items())
    return MappedFields(fields)


def _is_weight(text: str) -> bool:
    return text.replace(".", "", 1).isdigit() and float(text) > 0


def _dataset_keys(recipe: Recipe) -> Mapping[str, Any]:
    data = recipe.data
    if has_random_tokens(recipe):
        return {"dataset._target_": MOCK_DATASET}
    if recipe.goal == "pretrain":
        weighted = [part for path, weight in data.blend.items() for part in (repr(weight), path)]
        return {"dataset._target_": TOKEN_DATASET, "dataset.paths": weighted or data.dataset}
    if data.blend:
        raise InputError("is not available: AutoModel does not blend chat datasets", field="data.blend")
    split = {"dataset.split": data.split}
    if not data.columns:
        return {"dataset._target_": CHAT_DATASET, "dataset.path_or_dataset_id": data.dataset, **split}
    if set(data.columns) != {"prompt", "response"}:
        raise InputError("must name prompt and response: AutoModel maps a question and an answer", field="data.columns")
    return {
        "dataset._target_": COLUMN_DATASET,
        "dataset.path_or_dataset_id": data.dataset,
        **split,
        "dataset.column_mapping.question": data.columns["prompt"],
        "dataset.column_mapping.answer": data.columns["response"],
    }


def _decay_keys(recipe: Recipe) -> Mapping[str, Any]:
    name, key = recipe.schedule.name, "lr_scheduler.lr_decay_style"
    if name == "rex":
        raise InputError("rex is not available in AutoModel", field="schedule.name")
    return {key: to_framework_name(DECAY_STYLES, name, name)}


_wsd, _wsd_write = wsd_keys.readers("lr_scheduler.wsd_decay_steps", "lr_scheduler.lr_wsd_decay_style", "minus_sqrt")


def _decay(raw: RawValues, recipe: Recipe) -> MappedFields:
    text = raw.get("lr_scheduler.lr_decay_style", "cosine")
    known = {"constant", "linear", "cosine"} | {style.lower() for style in DECAY_STYLES}
    if text.lower() not in known:
        raise InputError(
            f"allowed: constant, linear, cosine, {', '.join(DECAY_STYLES)}",
            field="lr_scheduler.lr_decay_style",
            value=text,
        )
    return MappedFields(
        {"schedule.name": next((name for style, name in DECAY_STYLES.items() if style.lower() == text.lower()), text)}
    )


def _clip(raw: RawValues, recipe: Recipe) -> MappedFields:
    text = raw.get("clip_grad_norm.max_norm", "1.0")
    return MappedFields({"optimizer.clip_grad": "1.0" if shared.is_null(text) else text})


def _clip_keys(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.optimizer.clip_grad == 0:
        raise InputError("cannot be 0: AutoModel always clips, at 1.0 if unset", field="optimizer.clip_grad")
    return {"clip_grad_norm.max_norm": recipe.optimizer.clip_grad}


def _export(raw: RawValues, recipe: Recipe) -> MappedFields:
    if raw.get("checkpoint.model_save_format", "safetensors").lower() == "torch_save":
        return MappedFields({"checkpoint.export": "none"})
    consolidated = raw.get("checkpoint.save_consolidated", "final").lower() != "false"
    return MappedFields({"checkpoint.export": "consolidated" if consolidated else "sharded"})


def _export_keys(recipe: Recipe) -> Mapping[str, Any]:
    export = recipe.checkpoint.export
    return {
        "checkpoint.model_save_format": "torch_save" if export == "none" else "safetensors",
        "checkpoint.save_consolidated": "final" if export == "consolidated" else False,
    }


def _offload(raw: RawValues, recipe: Recipe) -> MappedFields:
    text = next(iter(raw.values()))
    return MappedFields({"layout.offload": "none" if shared.is_null(text) else "params"})


def _offload_keys(recipe: Recipe) -> Mapping[str, Any]:
    offload = recipe.layout.offload
    if offload not in ("none", "params"):
        raise InputError("must be none or params: AutoModel offloads parameters only", field="layout.offload")
    return {"distributed.offload_policy._target_": CPU_OFFLOAD} if offload == "params" else {}


def _freeze(raw: RawValues, recipe: Recipe) -> MappedFields:
    parts = {"freeze_config.freeze_language_model": "language", "freeze_config.freeze_vision_tower": "vision"}
    frozen = [part for key, part in parts.items() if raw.get(key, "false").lower() == "true"]
    return MappedFields({"train.freeze": f"[{','.join(frozen)}]"})


def _freeze_keys(recipe: Recipe) -> Mapping[str, Any]:
    frozen = recipe.train.freeze
    if "projector" in frozen:
        raise InputError("projector cannot be frozen separately in AutoModel", field="train.freeze")
    if not frozen:
        return {}
    return {
        "freeze_config.freeze_language_model": "language" in frozen,
        "freeze_config.freeze_vision_tower": "vision" in frozen,
    }


def _train_on(raw: RawValues, recipe: Recipe) -> MappedFields:
    ((key, text),) = raw.items()
    return MappedFields({"data.train_on": "last_answer" if shared.as_bool(key, text) else "answers"})


def _train_on_keys(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.data.train_on == "all":
        raise InputError("cannot be all: AutoModel's chat datasets train on answers only", field="data.train_on")
    return {"dataset.mask_history": recipe.data.train_on == "last_answer"}


def _adapter(raw: RawValues, recipe: Recipe) -> MappedFields:
    if recipe.goal == "peft" and raw.get("quantization.load_in_4bit", "false").lower() == "true":
        return MappedFields({"peft.method": "qlora"})
    if recipe.goal == "peft" and raw.get("quantization.load_in_8bit", "false").lower() == "true":
        return MappedFields({"peft.method": "lora8bit"})
    return MappedFields({"peft.method": "dora" if raw.get("peft.use_dora", "false").lower() == "true" else "lora"})


def _adapter_keys(recipe: Recipe) -> Mapping[str, Any]:
    method = recipe.peft.method
    if recipe.goal != "peft" or method == "lora":
        return {}
    keys = {"dora": "peft.use_dora", "qlora": "quantization.load_in_4bit", "lora8bit": "quantization.load_in_8bit"}
    if method not in keys:
        raise InputError(f"{method} is not available in AutoModel", field="peft.method")
    return {keys[method]: True}


COMPOSITE_KEYS: tuple[CompositeKey, ...] = (
    length_keys.composite("step_scheduler.max_steps", "step_scheduler.num_epochs", length_keys.automodel),
    CompositeKey(("model.torch_dtype", "peft.lora_dtype", "optimizer._target_", "optimizer.master_weights",
        "optimizer.exp_avg_dtype"), ("precision.master", "precision.moments", "optimizer.name"), _storage,
        _storage_keys, _storage_override),
    CompositeKey(("distributed.mp_policy.param_dtype", "distributed.autocast_dtype"), ("precision.compute",), _compute,
        _compute_keys),
    CompositeKey(("distributed.mp_policy.reduce_dtype", "distributed.grad_reduce_in_fp32"), ("precision.reduce",),
        _reduce, _reduce_keys),
    CompositeKey(("optimizer.betas",), ("optimizer.beta1", "optimizer.beta2"), shared.betas,
        lambda recipe: {"optimizer.betas": [recipe.optimizer.beta1, recipe.optimizer.beta2]}),
    CompositeKey(("packed_sequence.packed_sequence_size", "packed_sequence.pack_size"),
        ("data.packing", "data.seq_length"), _packing, _length_keys),
    CompositeKey(("distributed.dp_size",), ("layout.dp_shard",), shared.dp_size, _ranks_keys),
    CompositeKey((LOCAL_BATCH, MICRO_BATCH), ("layout.micro_batch_size", "layout.pp_micro_batches"),
        shared.local_batch, _batch_keys, _typed_batch),
    CompositeKey(("distributed.pipeline.pp_schedule", "distributed.pipeline.layers_per_stage",
        "distributed.pipeline.round_virtual_stages_to_pp_multiple"), ("layout.pp_schedule", "layout.vp"), _schedule,
        _schedule_keys),
    CompositeKey(("model.backend.attn", "model.attn_implementation"), ("kernels.attention",), _attention,
        _attention_keys),
    CompositeKey(("model.backend.dispatcher", "model.backend.enable_deepep"), ("moe.dispatcher",), _dispatcher,
        _dispatcher_keys),
    CompositeKey(("loss_fn._target_",), ("kernels.loss",), _loss,
        lambda recipe: {"loss_fn._target_": LOSSES[recipe.kernels.loss]}),
    CompositeKey(("fp8.enabled", "fp8.recipe_name", "model.backend.te_fp8.recipe"), ("precision.matmul",), _matmul,
        _matmul_keys),
    CompositeKey(("dataset._target_", *(f"dataset.{name}" for name in DATASET_PATH_KEYS), "dataset.split",
        "dataset.column_mapping.question", "dataset.column_mapping.answer"),
        ("data.dataset", "data.blend", "data.split", "data.columns"), _dataset, _dataset_keys),
    CompositeKey(("lr_scheduler.lr_decay_style",), ("schedule.name",), _decay, _decay_keys),
    CompositeKey(("lr_scheduler.wsd_decay_steps", "lr_scheduler.lr_wsd_decay_style"), wsd_keys.FIELDS, _wsd,
        _wsd_write),
    CompositeKey(("clip_grad_norm.max_norm",), ("optimizer.clip_grad",), _clip, _clip_keys),
    CompositeKey(("checkpoint.model_save_format", "checkpoint.save_consolidated"), ("checkpoint.export",), _export,
        _export_keys),
    CompositeKey(("distributed.offload_policy._target_",), ("layout.offload",), _offload, _offload_keys),
    CompositeKey(("freeze_config.freeze_language_model", "freeze_config.freeze_vision_tower"), ("train.freeze",),
        _freeze, _freeze_keys),
    CompositeKey(("dataset.mask_history",), ("data.train_on",), _train_on, _train_on_keys),
    CompositeKey(("peft.use_dora", "quantization.load_in_4bit", "quantization.load_in_8bit"), ("peft.method",),
        _adapter, _adapter_keys),
)  # fmt: skip
