"""How NeMo AutoModel's keys are read and written that only make sense together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.recipes.key_maps import composite_keys
from meshwright.recipes.key_maps.key import CompositeKey, MappedFields, Texts, Values
from meshwright.recipes.key_maps.value_maps import DECAYS, SCHEDULES
from meshwright.recipes.types import Recipe

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
LOSS = "nemo_automodel.components.loss"
DATASETS = "nemo_automodel.components.datasets.llm"
MOCK = f"{DATASETS}.mock_iterable_dataset.MockIterableDataset"
TOKENS = f"{DATASETS}.megatron_dataset.MegatronPretraining"
CHAT = f"{DATASETS}.chat_dataset.ChatDataset"
COLUMNS = f"{DATASETS}.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset"
CPU_OFFLOAD = "torch.distributed.fsdp.CPUOffloadPolicy"


def _dtype(text: str) -> str:
    return next((our for their, our in DTYPES.items() if their == text.strip().lower()), "")


def target(text: str) -> str:
    """The last part of an import path, in small letters and without Config: what a section builds."""
    return text.strip().strip("'\"").rpartition(".")[2].lower().removesuffix("config").replace("_", "")


OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "flashadamw": "adamw",
    "muon": "muon",
    "normuon": "muon",
    "muown": "muon",
    "sgd": "sgd",
    "lion": "lion",
    "adamwschedulefree": "schedule_free_adamw",
}


def _keeps_masters(name: str, given: Texts) -> bool:
    """Whether an optimizer keeps weights of its own, wider than those of the model."""
    if name == "flashadamw":
        return True
    return name == "fusedadam" and given.get("optimizer.master_weights", "false").lower() == "true"


def _storage(given: Texts, recipe: Recipe) -> MappedFields:
    """The optimizer updates the weights as they are stored, unless it keeps wider ones itself."""
    name = target(given.get("optimizer._target_", TORCH_ADAMW))
    torch_own = name in ("adam", "adamw", "sgd")
    stored = _dtype(given.get("model.torch_dtype", "null"))
    if not stored:  # unset, or auto: as published, which is bf16 of nearly all models
        stored = "fp32" if torch_own and recipe.goal != "peft" else "bf16"
    if recipe.goal == "peft":
        stored = _dtype(given.get("peft.lora_dtype", "null")) or stored
    stored = "bf16" if stored == "fp16" else stored
    moments = stored
    if name == "fusedadam":
        moments = _dtype(given.get("optimizer.exp_avg_dtype", "null")) or "fp32"
    elif name == "flashadamw":
        moments = "bf16"
    said = {"precision.master": "fp32" if _keeps_masters(name, given) else stored, "precision.moments": moments}
    named = "optimizer._target_" in given and name in OPTIMIZERS
    return MappedFields({**said, "optimizer.name": OPTIMIZERS[name]} if named else said)


def _storage_keys(recipe: Recipe) -> Mapping[str, Any]:
    name, master, moments = recipe.optimizer.name, recipe.precision.master, recipe.precision.moments
    if name not in ("adamw", "muon", "sgd"):
        raise InputError(f"there is no {name} among its optimizers", field="optimizer.name")
    wide = {"fp32": "float32", "bf16": "bfloat16"}
    found: dict[str, Any] = {"model.torch_dtype": "bfloat16" if recipe.goal == "peft" else wide[master]}
    if recipe.goal == "peft":
        found["peft.lora_dtype"] = wide[master]
    paths = {"adamw": TORCH_ADAMW, "muon": "dion.Muon", "sgd": "torch.optim.SGD"}
    if master == moments:
        return {**found, "optimizer._target_": paths[name]}
    if name != "adamw" or recipe.goal == "peft":
        raise InputError(f"its moments are kept as the weights are, in {master}", field="precision.moments")
    return {
        "model.torch_dtype": "bfloat16",
        "optimizer._target_": FUSED_ADAM,
        "optimizer.master_weights": master == "fp32",
        "optimizer.exp_avg_dtype": wide[moments],
    }


def _is_ddp(recipe: Recipe) -> bool:
    return recipe.layout.strategy == "ddp"


def _compute(given: Texts, recipe: Recipe) -> MappedFields:
    """FSDP2 computes in a format of its own; plain replicas compute as they are stored, or under autocast."""
    cast = _dtype(given.get("distributed.autocast_dtype", "null"))
    if _is_ddp(recipe):
        stored = "bf16" if recipe.goal == "peft" else recipe.precision.master
        return MappedFields({"precision.compute": cast or stored})
    return MappedFields(
        {"precision.compute": cast or _dtype(given.get("distributed.mp_policy.param_dtype", "")) or "bf16"}
    )


def _compute_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.precision.compute
    spelled = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}[wanted]
    if _is_ddp(recipe):
        same = wanted == ("bf16" if recipe.goal == "peft" else recipe.precision.master)
        return {} if same else {"distributed.autocast_dtype": spelled}
    if recipe.layout.strategy == "megatron_fsdp":
        if wanted != "bf16":
            raise InputError("megatron_fsdp computes in bf16", field="precision.compute")
        return {}
    return {"distributed.mp_policy.param_dtype": spelled}


def _reduce(given: Texts, recipe: Recipe) -> MappedFields:
    if recipe.layout.strategy == "megatron_fsdp":
        wide = given.get("distributed.grad_reduce_in_fp32", "false").lower() == "true"
        return MappedFields({"precision.reduce": "fp32" if wide else "bf16"})
    if _is_ddp(recipe):
        return MappedFields({"precision.reduce": recipe.precision.master})
    text = given.get("distributed.mp_policy.reduce_dtype", "float32")
    return MappedFields({"precision.reduce": "fp32" if _dtype(text) == "fp32" else "bf16"})


def _reduce_keys(recipe: Recipe) -> Mapping[str, Any]:
    wide = recipe.precision.reduce == "fp32"
    if recipe.layout.strategy == "megatron_fsdp":
        return {"distributed.grad_reduce_in_fp32": wide}
    if _is_ddp(recipe):
        if recipe.precision.reduce != recipe.precision.master:
            raise InputError("ddp sums gradients as the weights are stored", field="precision.reduce")
        return {}
    return {"distributed.mp_policy.reduce_dtype": "float32" if wide else "bfloat16"}


IMPLEMENTATIONS = {
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "flash_attention_4": "flash",
    "sdpa": "sdpa",
    "eager": "eager",
    "flex_attention": "flex",
}
KERNELS = {
    "te": "te",
    "sdpa": "sdpa",
    "flex": "flex",
    "eager": "eager",
    "cudnn": "cudnn",
    "magi": "te",
    "tilelang": "te",
}
"""Their attention backends; magi and tilelang are kernels of the same kind as Transformer Engine's."""


def _attention(given: Texts, recipe: Recipe) -> MappedFields:
    backend = given.get("model.backend.attn", "null")
    if not composite_keys.null(backend):
        if backend.lower() not in KERNELS:
            raise InputError(f"allowed: {', '.join(KERNELS)}", field="model.backend.attn", value=backend)
        return MappedFields({"kernels.attention": KERNELS[backend.lower()]})
    known = IMPLEMENTATIONS.get(given.get("model.attn_implementation", "").lower())
    return MappedFields({"kernels.attention": known or "auto"})


def _attention_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.kernels.attention
    if wanted == "auto":
        return {}
    if wanted in ("flash", "eager", "sdpa"):
        return {"model.attn_implementation": next(key for key, our in IMPLEMENTATIONS.items() if our == wanted)}
    return {"model.backend.attn": wanted}


DISPATCHERS = {"torch": "allgather", "deepep": "deepep", "hybridep": "hybridep", "uccl_ep": "deepep", "mok": "deepep"}


def _dispatcher(given: Texts, recipe: Recipe) -> MappedFields:
    text = given.get("model.backend.dispatcher", "deepep").lower()
    if given.get("model.backend.enable_deepep", "").lower() == "false":
        text = "torch"
    if text not in DISPATCHERS:
        raise InputError(f"allowed: {', '.join(DISPATCHERS)}", field="model.backend.dispatcher", value=text)
    return MappedFields({"moe.dispatcher": DISPATCHERS[text]})


def _dispatcher_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.moe.dispatcher
    if wanted == "alltoall":
        raise InputError("its dispatchers gather (torch) or use deepep or hybridep", field="moe.dispatcher")
    return {"model.backend.dispatcher": "torch" if wanted == "allgather" else wanted}


LOSSES = {
    "plain": f"{LOSS}.masked_ce.MaskedCrossEntropy",
    "fused_linear": f"{LOSS}.linear_ce.FusedLinearCrossEntropy",
    "chunked": f"{LOSS}.chunked_ce.ChunkedCrossEntropy",
    "vocab_parallel": f"{LOSS}.te_parallel_ce.TEParallelCrossEntropy",
}


def _loss(given: Texts, recipe: Recipe) -> MappedFields:
    wanted = target(given.get("loss_fn._target_", ""))
    known = {target(path): name for name, path in LOSSES.items()}
    return MappedFields({"kernels.loss": known[wanted]} if wanted in known else {})


def _matmul(given: Texts, recipe: Recipe) -> MappedFields:
    """8-bit linear layers come from torchao (fp8) or from Transformer Engine (model.backend.te_fp8)."""
    engine = given.get("model.backend.te_fp8.recipe", "null").lower()
    if not composite_keys.null(engine):
        known = {"current": "fp8_tensor", "block": "fp8_block", "mxfp8": "mxfp8"}
        return MappedFields({"precision.matmul": known.get(engine, "same")})
    if given.get("fp8.enabled", "false").lower() != "true":
        return MappedFields({"precision.matmul": "same"})
    rows = given.get("fp8.recipe_name", "tensorwise").lower().startswith("rowwise")
    return MappedFields({"precision.matmul": "fp8_row" if rows else "fp8_tensor"})


def _matmul_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.precision.matmul
    torchao = {"fp8_tensor": "tensorwise", "fp8_row": "rowwise"}
    if wanted == "same":
        return {}
    if wanted in torchao:
        return {"fp8.enabled": True, "fp8.recipe_name": torchao[wanted]}
    if wanted not in ("fp8_block", "mxfp8"):
        raise InputError(f"there are no {wanted} layers", field="precision.matmul")
    return {"model.backend.linear": "te", "model.backend.te_fp8.recipe": wanted.removeprefix("fp8_")}


def _schedule(given: Texts, recipe: Recipe) -> MappedFields:
    """The order of micro batches, and how many chunks of layers a rank holds."""
    text = given.get("distributed.pipeline.pp_schedule", "1f1b")
    known = {their.lower(): our for their, our in SCHEDULES.items()}
    if text.lower() not in known:
        raise InputError(f"allowed: {', '.join(SCHEDULES)}", field="distributed.pipeline.pp_schedule", value=text)
    name = known[text.lower()]
    if recipe.layout.pp == 1:
        return MappedFields({"layout.pp_schedule": name})
    layers = given.get("distributed.pipeline.layers_per_stage", "null")
    if composite_keys.null(layers):
        return MappedFields({"layout.pp_schedule": name}, {"layout.vp": "1" if name in ("1f1b", "gpipe") else "2"})
    rounding = given.get("distributed.pipeline.round_virtual_stages_to_pp_multiple", "null")
    each = composite_keys.count("distributed.pipeline.layers_per_stage", layers, 1)
    chunks = chunks_of(_layers(recipe), each, recipe.layout.pp, rounding)
    return MappedFields({"layout.pp_schedule": name, "layout.vp": str(max(1, chunks))})


def _layers(recipe: Recipe) -> int:
    """The layers of the recipe's model; 0 where nobody knows it."""
    from meshwright.recipes.case import model_of

    if not recipe.model:
        return 0
    try:
        return model_of(recipe).num_layers
    except InputError:
        return 0


def chunks_of(layers: int, each: int, pp: int, rounding: str) -> int:
    """Chunks of layers per rank; what is no whole number without rounding rounds up here, and a rule tells."""
    stages = -(-layers // each)
    return stages // pp if rounding == "down" else -(-stages // pp)


def _schedule_keys(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    if layout.pp == 1:
        return {}
    if layout.pp_schedule == "dualpipe_v":
        raise InputError("DualPipeV is named there, but its stages are not placed in a V", field="layout.pp_schedule")
    found: dict[str, Any] = {
        "distributed.pipeline.pp_schedule": next(t for t, o in SCHEDULES.items() if o == layout.pp_schedule).lower()
    }
    if layout.vp == (1 if layout.pp_schedule in ("1f1b", "gpipe") else 2):
        return found
    layers = _layers(recipe)
    each = -(-layers // (layout.pp * layout.vp))
    if not each or chunks_of(layers, each, layout.pp, "up") != layout.vp:
        raise InputError(f"no layers_per_stage gives {layout.vp} chunks a rank", field="layout.vp")
    rounding = {"distributed.pipeline.round_virtual_stages_to_pp_multiple": "up"}
    whole = -(-layers // each) == layout.pp * layout.vp
    return {**found, "distributed.pipeline.layers_per_stage": each, **({} if whole else rounding)}


def _batch_keys(recipe: Recipe) -> Mapping[str, Any]:
    key = "distributed.pipeline.pp_microbatch_size" if recipe.layout.pp > 1 else "step_scheduler.local_batch_size"
    return {key: recipe.layout.micro_batch_size}


def _ranks_keys(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    return {} if layout.dp_shard < 1 else {"distributed.dp_size": layout.dp_shard * layout.dp_replicate}


def _packing(given: Texts, recipe: Recipe) -> MappedFields:
    size = next((text for text in given.values() if not composite_keys.null(text) and text != "0"), "0")
    key = next(iter(given))
    return composite_keys.packed_size({key: size}, recipe)


def _length_keys(recipe: Recipe) -> Mapping[str, Any]:
    length = recipe.data.seq_length
    if recipe.data.packing:
        return {"packed_sequence.packed_sequence_size": length}
    return {"dataset.seq_len" if recipe.data.dataset == "mock" else "dataset.seq_length": length}


PLACES = ("path_or_dataset_id", "path_or_dataset", "dataset_name", "paths", "file_pattern")


def _corpus(given: Texts, recipe: Recipe) -> MappedFields:
    """What is trained on: random tokens, token files with their weights, or a set of samples."""
    kind = target(given.get("dataset._target_", ""))
    if "mock" in kind or ".mock" in given.get("dataset._target_", ""):
        return MappedFields({"data.dataset": "mock"})
    place = next((given[f"dataset.{name}"] for name in PLACES if f"dataset.{name}" in given), "")
    named = place or kind.removeprefix("make").removesuffix("dataset")  # make_squad_dataset is squad
    said = {"data.dataset": named} if named else {}
    parts = [part.strip() for part in place.strip("[]").split(",")] if place.startswith("[") else []
    if len(parts) > 1 and len(parts) % 2 == 0 and all(_is_weight(part) for part in parts[::2]):
        pairs = zip(parts[1::2], parts[::2], strict=True)
        said |= {"data.blend": ",".join(f"{path}:{weight}" for path, weight in pairs)}
    if "megatron" not in kind and "dataset.split" in given and not composite_keys.null(given["dataset.split"]):
        said["data.split"] = given["dataset.split"]
    names = {"prompt": "question", "response": "answer"}
    columns = {ours: given.get(f"dataset.column_mapping.{theirs}", "") for ours, theirs in names.items()}
    if all(columns.values()):
        said["data.columns"] = ",".join(f"{ours}:{theirs}" for ours, theirs in columns.items())
    return MappedFields(said)


def _is_weight(text: str) -> bool:
    return text.replace(".", "", 1).isdigit() and float(text) > 0


def _corpus_keys(recipe: Recipe) -> Mapping[str, Any]:
    data = recipe.data
    if data.dataset == "mock":
        return {"dataset._target_": MOCK}
    if recipe.goal == "pretrain":
        weighted = [part for path, weight in data.blend.items() for part in (repr(weight), path)]
        return {"dataset._target_": TOKENS, "dataset.paths": weighted or data.dataset}
    if data.blend:
        raise InputError("its sets of conversations are not blended", field="data.blend")
    split = {"dataset.split": data.split}
    if not data.columns:
        return {"dataset._target_": CHAT, "dataset.path_or_dataset_id": data.dataset, **split}
    if set(data.columns) != {"prompt", "response"}:
        raise InputError("its column mapping names a question and an answer", field="data.columns")
    return {
        "dataset._target_": COLUMNS,
        "dataset.path_or_dataset_id": data.dataset,
        **split,
        "dataset.column_mapping.question": data.columns["prompt"],
        "dataset.column_mapping.answer": data.columns["response"],
    }


def _decay_keys(recipe: Recipe) -> Mapping[str, Any]:
    name, key = recipe.schedule.name, "lr_scheduler.lr_decay_style"
    if name == "rex":
        raise InputError("there is no rex decay", field="schedule.name")
    if name != "wsd":
        return {key: next((their for their, our in DECAYS.items() if our == name), name)}
    end = recipe.schedule.decay_steps or recipe.train.steps
    last = max(1, round(0.2 * (end - recipe.schedule.warmup_steps)))  # the part over which our own wsd decays
    return {key: "WSD", "lr_scheduler.wsd_decay_steps": last, "lr_scheduler.lr_wsd_decay_style": "minus_sqrt"}


def _decay(given: Texts, recipe: Recipe) -> MappedFields:
    text = given.get("lr_scheduler.lr_decay_style", "cosine")
    known = {"constant", "linear", "cosine"} | {their.lower() for their in DECAYS}
    if text.lower() not in known:
        raise InputError(
            f"allowed: constant, linear, cosine, {', '.join(DECAYS)}", field="lr_scheduler.lr_decay_style", value=text
        )
    return MappedFields(
        {"schedule.name": next((our for their, our in DECAYS.items() if their.lower() == text.lower()), text)}
    )


def _clip(given: Texts, recipe: Recipe) -> MappedFields:
    text = given.get("clip_grad_norm.max_norm", "1.0")
    return MappedFields({"optimizer.clip_grad": "1.0" if composite_keys.null(text) else text})


def _clip_keys(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.optimizer.clip_grad == 0:
        raise InputError("gradients are always clipped there: unset means 1.0", field="optimizer.clip_grad")
    return {"clip_grad_norm.max_norm": recipe.optimizer.clip_grad}


def _folder(given: Texts, recipe: Recipe) -> MappedFields:
    if given.get("checkpoint.model_save_format", "safetensors").lower() == "torch_save":
        return MappedFields({"checkpoint.export": "none"})
    whole = given.get("checkpoint.save_consolidated", "final").lower() != "false"
    return MappedFields({"checkpoint.export": "consolidated" if whole else "sharded"})


def _folder_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.checkpoint.export
    return {
        "checkpoint.model_save_format": "torch_save" if wanted == "none" else "safetensors",
        "checkpoint.save_consolidated": "final" if wanted == "consolidated" else False,
    }


def _offload(given: Texts, recipe: Recipe) -> MappedFields:
    text = next(iter(given.values()))
    return MappedFields({"layout.offload": "none" if composite_keys.null(text) else "params"})


def _offload_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.layout.offload
    if wanted not in ("none", "params"):
        raise InputError("only parameters can be kept in host memory", field="layout.offload")
    return {"distributed.offload_policy._target_": CPU_OFFLOAD} if wanted == "params" else {}


def _freeze(given: Texts, recipe: Recipe) -> MappedFields:
    parts = {"freeze_config.freeze_language_model": "language", "freeze_config.freeze_vision_tower": "vision"}
    frozen = [part for key, part in parts.items() if given.get(key, "false").lower() == "true"]
    return MappedFields({"train.freeze": f"[{','.join(frozen)}]"})


def _freeze_keys(recipe: Recipe) -> Mapping[str, Any]:
    frozen = recipe.train.freeze
    if "projector" in frozen:
        raise InputError("there is no switch for the projector", field="train.freeze")
    if not frozen:
        return {}
    return {
        "freeze_config.freeze_language_model": "language" in frozen,
        "freeze_config.freeze_vision_tower": "vision" in frozen,
    }


def _answers(given: Texts, recipe: Recipe) -> MappedFields:
    ((key, text),) = given.items()
    return MappedFields({"data.train_on": "last_answer" if composite_keys.truth(key, text) else "answers"})


def _answers_keys(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.data.train_on == "all":
        raise InputError("its conversations learn from answers only", field="data.train_on")
    return {"dataset.mask_history": recipe.data.train_on == "last_answer"}


def _adapter(given: Texts, recipe: Recipe) -> MappedFields:
    if recipe.goal == "peft" and given.get("quantization.load_in_4bit", "false").lower() == "true":
        return MappedFields({"peft.method": "qlora"})
    return MappedFields({"peft.method": "dora" if given.get("peft.use_dora", "false").lower() == "true" else "lora"})


def _adapter_keys(recipe: Recipe) -> Mapping[str, Any]:
    method = recipe.peft.method
    if recipe.goal != "peft" or method == "lora":
        return {}
    if method not in ("dora", "qlora"):
        raise InputError(f"there are no {method} adapters", field="peft.method")
    return {"peft.use_dora": True} if method == "dora" else {"quantization.load_in_4bit": True}


JOINTS: tuple[CompositeKey, ...] = (
    CompositeKey(
        (
            "model.torch_dtype",
            "peft.lora_dtype",
            "optimizer._target_",
            "optimizer.master_weights",
            "optimizer.exp_avg_dtype",
        ),
        ("precision.master", "precision.moments", "optimizer.name"),
        _storage,
        _storage_keys,
    ),
    CompositeKey(
        ("distributed.mp_policy.param_dtype", "distributed.autocast_dtype"),
        ("precision.compute",),
        _compute,
        _compute_keys,
    ),
    CompositeKey(
        ("distributed.mp_policy.reduce_dtype", "distributed.grad_reduce_in_fp32"),
        ("precision.reduce",),
        _reduce,
        _reduce_keys,
    ),
    CompositeKey(
        ("optimizer.betas",),
        ("optimizer.beta1", "optimizer.beta2"),
        composite_keys.betas,
        lambda recipe: {"optimizer.betas": [recipe.optimizer.beta1, recipe.optimizer.beta2]},
    ),
    CompositeKey(
        ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size"),
        ("data.packing", "data.seq_length"),
        _packing,
        _length_keys,
    ),
    CompositeKey(("distributed.dp_size",), ("layout.dp_shard",), composite_keys.dp_size, _ranks_keys),
    CompositeKey(
        ("step_scheduler.local_batch_size", "distributed.pipeline.pp_microbatch_size"),
        ("layout.micro_batch_size",),
        composite_keys.local_batch,
        _batch_keys,
    ),
    CompositeKey(
        (
            "distributed.pipeline.pp_schedule",
            "distributed.pipeline.layers_per_stage",
            "distributed.pipeline.round_virtual_stages_to_pp_multiple",
        ),
        ("layout.pp_schedule", "layout.vp"),
        _schedule,
        _schedule_keys,
    ),
    CompositeKey(
        ("model.backend.attn", "model.attn_implementation"), ("kernels.attention",), _attention, _attention_keys
    ),
    CompositeKey(
        ("model.backend.dispatcher", "model.backend.enable_deepep"), ("moe.dispatcher",), _dispatcher, _dispatcher_keys
    ),
    CompositeKey(
        ("loss_fn._target_",),
        ("kernels.loss",),
        _loss,
        lambda recipe: {"loss_fn._target_": LOSSES[recipe.kernels.loss]},
    ),
    CompositeKey(
        ("fp8.enabled", "fp8.recipe_name", "model.backend.te_fp8.recipe"), ("precision.matmul",), _matmul, _matmul_keys
    ),
    CompositeKey(
        (
            "dataset._target_",
            *(f"dataset.{name}" for name in PLACES),
            "dataset.split",
            "dataset.column_mapping.question",
            "dataset.column_mapping.answer",
        ),
        ("data.dataset", "data.blend", "data.split", "data.columns"),
        _corpus,
        _corpus_keys,
    ),
    CompositeKey(("lr_scheduler.lr_decay_style",), ("schedule.name",), _decay, _decay_keys),
    CompositeKey(("clip_grad_norm.max_norm",), ("optimizer.clip_grad",), _clip, _clip_keys),
    CompositeKey(
        ("checkpoint.model_save_format", "checkpoint.save_consolidated"),
        ("checkpoint.export",),
        _folder,
        _folder_keys,
    ),
    CompositeKey(("distributed.offload_policy._target_",), ("layout.offload",), _offload, _offload_keys),
    CompositeKey(
        ("freeze_config.freeze_language_model", "freeze_config.freeze_vision_tower"),
        ("train.freeze",),
        _freeze,
        _freeze_keys,
    ),
    CompositeKey(("dataset.mask_history",), ("data.train_on",), _answers, _answers_keys),
    CompositeKey(("peft.use_dora", "quantization.load_in_4bit"), ("peft.method",), _adapter, _adapter_keys),
)
