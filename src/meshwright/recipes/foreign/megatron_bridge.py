"""Megatron-Bridge's keys (commit 067f987, 2026-08-22).

A recipe there is a complete config, so the default of every key is the value that the named recipe has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError, unknown
from meshwright.recipes.foreign import together
from meshwright.recipes.foreign.together import null, says, truth
from meshwright.recipes.foreign.values import (
    ADAPTED,
    ATTENTION,
    DECAYS,
    FP32_FLAG,
    FSDP_FLAG,
    NULL_IS_0,
    NULL_IS_1,
    NULL_IS_EMPTY,
    NULL_IS_NONE,
    OPTIMIZERS,
    PRECISION_NAMES,
    READ_NULL_AS_1,
    READ_NULL_AS_NONE,
    RINGS,
    TORCH_DTYPES,
)
from meshwright.recipes.foreign.word import Joint, Meaning, Texts, Word
from meshwright.recipes.types import Recipe

KEEP_ALL = "1000000"
"""Checkpoints kept where none is deleted; -1 there."""
LATENT = dict.fromkeys(
    ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"), "qkv"
)
"""The linears of latent attention that make queries, keys and values."""
MODULES = (
    "core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts", "mhc", "gdn_norm_out",
    "extra_moe_act",
)  # fmt: skip
PRETRAINING_SETS = ("mock", "megatron-indexed", "energon")
FINE_TUNING_SETS = (
    "squad", "tulu3", "openmathinstruct2", "openmathinstruct2-thinking", "gsm8k", "local-jsonl", "cord-v2", "medpix",
    "raven", "rdr", "llava-video-178k", "local-vlm", "energon",
)  # fmt: skip
SETS = tuple(dict.fromkeys((*PRETRAINING_SETS, *FINE_TUNING_SETS)))
SOURCES = ("megatron-indexed", "energon", "local-jsonl", "local-vlm")
"""Selectors that need a path of their own."""
VLM_FILES = "dataset.source.load_kwargs.data_files.train"
OLD_SETS = {
    "llm-pretrain": "megatron-indexed",
    "llm-pretrain-mock": "mock",
    "llm-finetune": "squad",
    "llm-finetune-preloaded": "local-jsonl",
    "squad-packed": "squad",
    "vlm-energon": "energon",
    "vlm-hf": "cord-v2",
    "vlm-preloaded": "local-vlm",
    "preloaded-vlm": "local-vlm",
    "dclm": "megatron-indexed",
    "rp2": "megatron-indexed",
    "c4": "megatron-indexed",
}
"""Names that older guides teach, with what they are called today."""
MISPLACED = {
    "ddp.use_custom_fsdp": "ddp.use_megatron_fsdp",
    "scheduler.min_lr": "optimizer.min_lr",
    "scheduler.lr": "optimizer.lr",
    "optimizer.lr_warmup_iters": "scheduler.lr_warmup_iters",
    "train.lr": "optimizer.lr",
    "train.save_interval": "checkpoint.save_interval",
    "train.log_interval": "logger.log_interval",
    "train.seq_length": "dataset.seq_length",
    "model.micro_batch_size": "train.micro_batch_size",
    "model.global_batch_size": "train.global_batch_size",
    "checkpoint.save_dir": "checkpoint.save",
    "checkpoint.load_dir": "checkpoint.load",
    "optim.lr": "optimizer.lr",
}
"""Fields that are often looked for in another section, or under an older name."""
PARTS = {
    "model.freeze_language_model": "language",
    "model.freeze_vision_model": "vision",
    "model.freeze_vision_projection": "projector",
}

WORDS: tuple[Word, ...] = (
    Word("model.tensor_model_parallel_size", "layout.tp"),
    Word("model.pipeline_model_parallel_size", "layout.pp"),
    Word("model.virtual_pipeline_model_parallel_size", "layout.vp", NULL_IS_1),
    Word("model.pipeline_model_parallel_layout", takes="text"),
    Word("model.num_layers_in_first_pipeline_stage"),
    Word("model.num_layers_in_last_pipeline_stage"),
    Word("model.account_for_embedding_in_pipeline_split", "layout.embedding_as_layer"),
    Word("model.account_for_loss_in_pipeline_split", "layout.head_as_layer"),
    Word("model.context_parallel_size", "layout.cp"),
    Word("model.cp_comm_type", "layout.cp_comm", {**RINGS, "null": "ring"}),
    Word("model.hierarchical_context_parallel_sizes", takes="list"),
    Word("model.expert_model_parallel_size", "layout.ep"),
    Word("model.expert_tensor_parallel_size", "layout.etp", READ_NULL_AS_1),
    Word("model.sequence_parallel", "layout.sp"),
    Word("train.global_batch_size", "train.global_batch_size"),
    Word("train.micro_batch_size", "layout.micro_batch_size"),
    Word("dataset.seq_length", "data.seq_length"),
    Word("dataset.sequence_length", "data.seq_length", note="the same number as saved by older versions"),
    Word("model.seq_length", "data.seq_length", note="the runner overwrites it with dataset.seq_length"),
    Word("train.train_iters", "train.steps"),
    Word("validation.eval_interval", "train.eval_every", NULL_IS_0),
    Word("validation.eval_iters", "train.eval_steps"),
    Word("train.eval_interval", "train.eval_every", NULL_IS_0, note="older place; wins over validation.eval_interval"),
    Word("train.eval_iters", "train.eval_steps", note="older place; wins over validation.eval_iters"),
    Word("logger.log_interval", "train.log_every"),
    Word("rng.seed", "train.seed"),
    Word("--mode", choices=("pretrain", "sft", "lora", "dora")),
    Word("--dataset"),
    Word("dataset.dataset_root", takes="text"),
    Word("dataset.data_path"),
    Word("dataset.path", takes="text"),
    Word(VLM_FILES, takes="text"),
    Word("dataset.num_workers", "data.workers"),
    Word("dataset.enable_offline_packing", "data.packing"),
    Word("dataset.offline_packing_specs"),
    Word("dataset.offline_packing_specs.packed_sequence_size", takes="int"),
    Word("dataset.pad_to_max_length", "data.pad_to_max_length"),
    Word("dataset.dataset_kwargs.pad_to_max_length", "data.pad_to_max_length"),
    Word("tokenizer.tokenizer_model", "data.tokenizer", NULL_IS_EMPTY),
    Word("optimizer.optimizer", "optimizer.name", OPTIMIZERS, choices=("adam", "sgd", "muon", "dist_muon", "lion")),
    Word("optimizer.lr", "optimizer.lr"),
    Word("optimizer.min_lr", "schedule.min_lr"),
    Word("optimizer.weight_decay", "optimizer.weight_decay"),
    Word("optimizer.adam_beta1", "optimizer.beta1"),
    Word("optimizer.adam_beta2", "optimizer.beta2"),
    Word("optimizer.adam_eps", "optimizer.eps"),
    Word("optimizer.clip_grad", "optimizer.clip_grad"),
    Word("optimizer.muon_momentum", "optimizer.muon_momentum"),
    Word("optimizer.muon_num_ns_steps", "optimizer.muon_ns_steps"),
    Word(
        "scheduler.lr_decay_style",
        "schedule.name",
        DECAYS,
        choices=("cosine", "linear", "constant", "inverse-square-root", "WSD"),
    ),
    Word("scheduler.lr_warmup_iters", "schedule.warmup_steps"),
    Word("scheduler.lr_decay_iters", "schedule.decay_steps", NULL_IS_0),
    Word("mixed_precision"),
    Word("mixed_precision.grad_reduce_in_fp32", takes="truth"),
    Word("mixed_precision.fp8_param_gather", takes="truth"),
    Word("mixed_precision.first_last_layers_bf16", takes="truth"),
    Word("ddp.grad_reduce_in_fp32", "precision.reduce", FP32_FLAG, note="overwritten by that of mixed_precision"),
    Word("ddp.fp8_param_gather", "precision.fp8_gather", note="overwritten by that of mixed_precision"),
    Word("model.first_last_layers_bf16", "precision.first_last_bf16", note="overwritten by that of mixed_precision"),
    Word("optimizer.use_precision_aware_optimizer", takes="truth"),
    Word("optimizer.main_params_dtype", "precision.master", TORCH_DTYPES),
    Word("optimizer.exp_avg_dtype", "precision.moments", TORCH_DTYPES),
    Word("optimizer.main_grads_dtype", "precision.grads", TORCH_DTYPES),
    Word("ddp.use_megatron_fsdp", "layout.strategy", FSDP_FLAG),
    Word("dist.use_megatron_fsdp", "layout.strategy", FSDP_FLAG),
    Word("dist.use_torch_fsdp2", takes="truth"),
    Word("ddp.use_distributed_optimizer", takes="truth"),
    Word("optimizer.use_distributed_optimizer", takes="truth"),
    Word("ddp.num_distributed_optimizer_instances", "layout.dp_replicate"),
    Word("ddp.overlap_grad_reduce", "kernels.overlap_grad_reduce"),
    Word("ddp.overlap_param_gather", "kernels.overlap_param_gather"),
    Word("comm_overlap.tp_comm_overlap", "kernels.tp_comm_overlap"),
    Word("model.tp_comm_overlap", "kernels.tp_comm_overlap"),
    Word("model.recompute_granularity", "layout.recompute", NULL_IS_NONE),
    Word("model.recompute_method"),
    Word("model.recompute_num_layers"),
    Word("model.recompute_modules", "layout.recompute_modules", {"null": "[]"}),
    Word("model.cpu_offloading", takes="truth"),
    Word("optimizer.optimizer_cpu_offload", takes="truth"),
    Word("model.moe_token_dispatcher_type"),
    Word("model.moe_flex_dispatcher_backend"),
    Word("model.moe_grouped_gemm", "moe.grouped_gemm"),
    Word("model.moe_shared_expert_overlap", "moe.shared_expert_overlap"),
    Word("comm_overlap.overlap_moe_expert_parallel_comm", "moe.ep_overlap"),
    Word("model.overlap_moe_expert_parallel_comm", "moe.ep_overlap"),
    Word("model.moe_router_force_load_balancing", "moe.force_balance"),
    Word("model.moe_router_load_balancing_type", "moe.balancing"),
    Word("model.moe_router_enable_expert_bias", takes="truth"),
    Word("model.moe_aux_loss_coeff", "moe.aux_loss"),
    Word("model.moe_z_loss_coeff", "moe.router_z_loss", NULL_IS_0),
    Word("model.moe_expert_capacity_factor", "moe.capacity_factor", NULL_IS_0),
    Word("model.moe_router_dtype", "moe.router_dtype", {"null": "bf16"}, choices=("fp32", "fp64", "null")),
    Word(
        "model.attention_backend",
        "kernels.attention",
        {**ATTENTION, "null": "auto"},
        choices=("auto", "flash", "fused", "unfused", "local", "null"),
    ),
    Word("model.cuda_graph_impl", "kernels.cuda_graphs", READ_NULL_AS_NONE),
    Word("model.cuda_graph_scope", "kernels.cuda_graph_scope", {"null": "[]", "full": "[]"}),
    Word("rng.te_rng_tracker", "kernels.te_rng_tracker"),
    Word("model.use_te_rng_tracker", "kernels.te_rng_tracker"),
    Word("model.deterministic_mode", "kernels.deterministic"),
    Word("model.calculate_per_token_loss", "train.per_token_loss"),
    Word("model.mtp_num_layers"),
    Word("model.mtp_loss_scaling_factor", "train.mtp_loss", NULL_IS_0),
    *(Word(key, takes="truth") for key in PARTS),
    Word("rerun_state_machine.check_for_nan_in_loss", "train.check_nan"),
    Word("peft.dim", "peft.rank"),
    Word("peft.alpha", "peft.alpha"),
    Word("peft.dropout", "peft.dropout"),
    Word("peft.target_modules", "peft.targets", {**ADAPTED, **LATENT}),
    Word("checkpoint.pretrained_checkpoint", "checkpoint.pretrained", NULL_IS_EMPTY),
    Word("checkpoint.save_interval", "checkpoint.save_every", NULL_IS_0),
    Word("checkpoint.save_retain_interval", "checkpoint.milestone_every", NULL_IS_0),
    Word("checkpoint.most_recent_k", "checkpoint.keep", {"-1": KEEP_ALL}),
    Word("checkpoint.async_save", "checkpoint.async_save"),
    Word("model.num_layers", "architecture.layers"),
    Word("model.hidden_size", "architecture.hidden"),
    Word("model.ffn_hidden_size", "architecture.ffn"),
    Word("model.num_attention_heads", "architecture.heads"),
    Word("model.num_query_groups", "architecture.kv_heads"),
    Word("model.kv_channels", "architecture.head_dim"),
    Word("model.vocab_size", "architecture.vocab"),
    Word("model.num_moe_experts", "architecture.experts"),
    Word("model.moe_router_topk", "architecture.topk"),
    Word(
        "dataset.packed_sequence_specs.packed_sequence_size",
        fate="gone",
        instead="dataset.offline_packing_specs.packed_sequence_size=…",
        note="packing ahead of time is called offline_packing",
    ),
    Word(
        "dataset.packed_sequence_specs.pad_seq_to_mult",
        fate="gone",
        instead="dataset.offline_packing_specs.pad_seq_to_mult=…",
        note="packing ahead of time is called offline_packing",
    ),
    Word("dataset.pack_sequences_in_batch", fate="gone", instead="dataset.enable_in_batch_packing=…"),
    Word("dataset.maker_name", fate="gone", instead="dataset.source.schema_adapter=…"),
    Word("model.enable_cuda_graph", fate="gone", instead="model.cuda_graph_impl=local"),
    Word("model.external_cuda_graph", fate="gone", instead="model.cuda_graph_impl=transformer_engine"),
    Word("model.fp8_hybrid", fate="gone", instead="mixed_precision=bf16_with_fp8_current_scaling_mixed"),
    Word("model.fp8_e4m3", fate="gone", instead="mixed_precision=bf16_with_fp8_current_scaling_mixed"),
    *(Word(key, fate="gone", instead=f"{other}=…", note=f"the field is {other}") for key, other in MISPLACED.items()),
)


def _virtual_stages(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    if layout.pp_schedule != ("1f1b" if layout.vp == 1 else "interleaved_1f1b"):
        raise InputError("stages run 1F1B there, interleaved when there are chunks", field="layout.pp_schedule")
    return {"model.virtual_pipeline_model_parallel_size": None if layout.vp == 1 else layout.vp}


def _recompute(recipe: Recipe) -> Mapping[str, Any]:
    keys = dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))
    return {f"model.{key}": value for key, value in {**keys, **together.recompute_keys(recipe)}.items()}


def _dispatcher(recipe: Recipe) -> Mapping[str, Any]:
    return {f"model.{key}": value for key, value in together.dispatcher_keys(recipe.moe.dispatcher).items()}


def _precision(recipe: Recipe) -> Mapping[str, Any]:
    pair = (recipe.precision.compute, recipe.precision.matmul)
    if pair not in PRECISION_NAMES["megatron_bridge"]:
        raise InputError(f"{pair[0]} with {pair[1]} matrix products has no name there", field="precision.matmul")
    return {"mixed_precision": PRECISION_NAMES["megatron_bridge"][pair]}


def _offload(recipe: Recipe) -> Mapping[str, Any]:
    kind = recipe.layout.offload
    if kind == "params":
        raise InputError("parameters are not offloaded there", field="layout.offload")
    return {"model.cpu_offloading": kind == "activations", "optimizer.optimizer_cpu_offload": kind == "optimizer"}


def _strategy(given: Texts, recipe: Recipe) -> Meaning:
    """FSDP where it is asked for; else the distributed optimizer, unless both of its flags are off."""
    on = {key.rsplit(".", 1)[1] for key, text in given.items() if truth(key, text)}
    said = {key.rsplit(".", 1)[1] for key in given}
    if {"use_megatron_fsdp", "use_torch_fsdp2"} <= on:
        raise InputError("Megatron-FSDP and torch FSDP2 exclude each other", field="dist.use_torch_fsdp2", value=True)
    if "use_megatron_fsdp" in on:
        return says({"layout.strategy": "megatron_fsdp"})
    if "use_torch_fsdp2" in on:
        return says({"layout.strategy": "fsdp2"})
    flags = [key for key in given if key.endswith("use_distributed_optimizer")]
    if "use_distributed_optimizer" in on:
        return says({"layout.strategy": "zero1"})
    if len(flags) == 2 or (flags and recipe.layout.strategy == "ddp"):
        return says({"layout.strategy": "ddp"})
    if recipe.layout.strategy == "megatron_fsdp" and "use_megatron_fsdp" in said:
        return says({"layout.strategy": "fsdp2"})
    return Meaning({})


def _strategy_keys(recipe: Recipe) -> Mapping[str, Any]:
    strategy = recipe.layout.strategy
    shared = strategy in ("zero1", "megatron_fsdp")
    return {
        "ddp.use_megatron_fsdp": strategy == "megatron_fsdp",
        "dist.use_torch_fsdp2": strategy == "fsdp2",
        "ddp.use_distributed_optimizer": shared,
        "optimizer.use_distributed_optimizer": shared,
    }


EVALUATION = ("validation.eval_interval", "validation.eval_iters", "train.eval_interval", "train.eval_iters")


def _evaluation(given: Texts, recipe: Recipe) -> Meaning:
    """How often and how long; the older keys under train win, and no batches means no evaluation."""
    latest: dict[str, str] = {}
    for key in EVALUATION:
        name = key.split("_")[-1]
        if key in given and not (key.startswith("train.") and null(given[key])):
            latest[name] = "0" if null(given[key]) else str(together.count(key, given[key]))
    said: dict[str, str] = {}
    if latest.get("iters") == "0":
        return says({"train.eval_every": "0"})
    if "iters" in latest:
        said["train.eval_steps"] = latest["iters"]
    if "interval" in latest:
        said["train.eval_every"] = latest["interval"]
    return says(said)


def _evaluation_keys(recipe: Recipe) -> Mapping[str, Any]:
    if not recipe.train.eval_every:
        return {"validation.eval_iters": 0}
    return {"validation.eval_interval": recipe.train.eval_every, "validation.eval_iters": recipe.train.eval_steps}


def _prediction(given: Texts, recipe: Recipe) -> Meaning:
    """Without layers there is no loss of theirs; with them it has a tenth of the weight unless said."""
    layers = given.get("model.mtp_num_layers")
    if layers is not None and (null(layers) or layers.strip() == "0"):
        return says({"train.mtp_loss": "0"})
    factor = given.get("model.mtp_loss_scaling_factor", str(recipe.train.mtp_loss or 0.1))
    return says({"train.mtp_loss": "0" if null(factor) else factor})


def _prediction_keys(recipe: Recipe) -> Mapping[str, Any]:
    weight = recipe.train.mtp_loss
    return {"model.mtp_loss_scaling_factor": weight} if weight else {"model.mtp_num_layers": None}


BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def _balancing(given: Texts, recipe: Recipe) -> Meaning:
    """A bias instead of a loss is said with two keys; a bias beside a loss changes nothing that is modelled here."""
    kind = given.get("model.moe_router_load_balancing_type", "").strip().lower()
    bias = given.get("model.moe_router_enable_expert_bias", "false").strip().lower() == "true"
    if bias and (kind == "none" or (not kind and recipe.moe.balancing in ("none", "bias"))):
        return says({"moe.balancing": "bias"})
    return says({"moe.balancing": kind} if kind in (*BALANCING, "bias") else {})


def _balancing_keys(recipe: Recipe) -> Mapping[str, Any]:
    kind = recipe.moe.balancing
    if kind == "bias":
        return {"model.moe_router_load_balancing_type": "none", "model.moe_router_enable_expert_bias": True}
    return {"model.moe_router_load_balancing_type": kind}


def _frozen(given: Texts, recipe: Recipe) -> Meaning:
    kept = set(recipe.train.freeze)
    for key, text in given.items():
        kept = kept | {PARTS[key]} if truth(key, text) else kept - {PARTS[key]}  # type: ignore[arg-type]  # by name
    return says({"train.freeze": "[" + ",".join(part for part in PARTS.values() if part in kept) + "]"})


def _frozen_keys(recipe: Recipe) -> Mapping[str, Any]:
    return {key: part in recipe.train.freeze for key, part in PARTS.items()}


def _packing(given: Texts, recipe: Recipe) -> Meaning:
    enabled = given.get("dataset.enable_offline_packing")
    return Meaning({}) if enabled is None else says({"data.packing": str(truth("data.packing", enabled)).lower()})


def _packing_keys(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.data.packing:
        size = recipe.data.seq_length
        return {
            "dataset.enable_offline_packing": True,
            "dataset.offline_packing_specs.packed_sequence_size": size,
        }
    return {"dataset.enable_offline_packing": False, "dataset.offline_packing_specs": None}


DATA = ("--dataset", "dataset.dataset_root", "dataset.data_path", "dataset.path", VLM_FILES)


def _dataset(given: Texts, recipe: Recipe) -> Meaning:
    """A path is the data; a preset goes by its name."""
    path = next((given[key] for key in DATA[1:] if key in given and not null(given[key])), None)
    named = given.get("--dataset")
    if named is not None and named not in SETS:
        if named in OLD_SETS:
            new = OLD_SETS[named]
            raise InputError(f"is called {new} today", field="--dataset", value=named, fix=[f"--dataset {new}"])
        raise unknown("--dataset", named, SETS)
    if path is not None:
        return says({"data.dataset": path})
    return Meaning({}) if named is None else says({"data.dataset": named})


def _dataset_keys(recipe: Recipe) -> Mapping[str, Any]:
    name = recipe.data.dataset
    if recipe.benchmark:
        if name != "mock":
            raise InputError("benchmark recipes keep their own data there", field="data.dataset", value=name)
        return {}
    if name in SETS:
        return {"--dataset": name}
    if recipe.data.images:
        return {"--dataset": "local-vlm", VLM_FILES: name}
    if recipe.goal == "pretrain":
        return {"--dataset": "megatron-indexed", "dataset.data_path": name}
    return {"--dataset": "local-jsonl", "dataset.dataset_root": name}


def _stage_layers(given: Texts, recipe: Recipe) -> Meaning:
    text = given["model.pipeline_model_parallel_layout"]
    if null(text):
        return says({"layout.stage_layers": "[]"})
    counts = stages(text)
    even = len(set(counts)) == 1
    return says({"layout.stage_layers": "[]" if even else "[" + ",".join(map(str, counts)) + "]"})


def stages(drawing: str) -> tuple[int, ...]:
    """Layers of every stage chunk in a pipeline drawing such as Et*3|(tt|)*2tmL."""
    text = re.sub(r"[\s,'\"]", "", drawing)
    for _ in range(20):
        text, count = re.subn(r"\(([^()]*)\)\*(\d{1,3})|\(([^()]*)\)(?!\*)", _repeated, text)
        text, more = re.subn(r"([EtmL|])\*(\d{1,3})", lambda part: part[1] * int(part[2]), text)
        if len(text) > 100_000 or not count + more:
            break
    if not text or re.search(r"[^EtmL|]", text) or len(text) > 100_000:
        raise InputError(
            "is no drawing of stages: E embedding, t layer, m prediction layer, L loss, | between stages, *n repeats",
            field="model.pipeline_model_parallel_layout",
            value=drawing,
        )
    return tuple(part.count("t") for part in text.split("|"))


def _repeated(part: re.Match[str]) -> str:
    return part[1] * int(part[2]) if part[2] else part[3]


def _stage_keys(recipe: Recipe) -> Mapping[str, Any]:
    key = "model.pipeline_model_parallel_layout"
    listed = recipe.layout.stage_layers
    if not listed:
        return {key: None}
    prediction = "m" if recipe.train.mtp_loss else ""
    chunks = ["t" * count for count in listed]
    return {key: "|".join(["E" + chunks[0], *chunks[1:]]) + prediction + "L"}


def _hierarchy(given: Texts, recipe: Recipe) -> Meaning:
    ((key, text),) = given.items()
    if null(text):
        return says({"layout.cp_inner": "1"})
    first = text.strip().strip("[]()").split(",")[0]
    return says({"layout.cp_inner": str(together.count(key, first.strip(), 1))})


def _hierarchy_keys(recipe: Recipe) -> Mapping[str, Any]:
    key, layout = "model.hierarchical_context_parallel_sizes", recipe.layout
    if layout.cp_comm != "a2a+ring":
        if layout.cp_inner != 1:
            raise InputError("is only said for a2a+p2p there", field="layout.cp_inner", value=layout.cp_inner)
        return {key: None}
    return {key: [layout.cp_inner, max(1, layout.cp // layout.cp_inner)]}


JOINTS: tuple[Joint, ...] = (
    Joint(
        ("model.virtual_pipeline_model_parallel_size",),
        ("layout.vp", "layout.pp_schedule"),
        together.virtual_stages,
        _virtual_stages,
    ),
    Joint(
        ("model.recompute_granularity", "model.recompute_method", "model.recompute_num_layers"),
        ("layout.recompute", "layout.recompute_layers"),
        together.recompute,
        _recompute,
    ),
    Joint(
        ("model.moe_token_dispatcher_type", "model.moe_flex_dispatcher_backend"),
        ("moe.dispatcher",),
        together.dispatcher,
        _dispatcher,
    ),
    Joint(("mixed_precision",), ("precision.compute", "precision.matmul"), together.mixed_precision, _precision),
    Joint(("model.cpu_offloading", "optimizer.optimizer_cpu_offload"), ("layout.offload",), together.offload, _offload),
    Joint(
        (
            "ddp.use_megatron_fsdp",
            "dist.use_megatron_fsdp",
            "dist.use_torch_fsdp2",
            "ddp.use_distributed_optimizer",
            "optimizer.use_distributed_optimizer",
        ),
        ("layout.strategy",),
        _strategy,
        _strategy_keys,
    ),
    Joint(EVALUATION, ("train.eval_every", "train.eval_steps"), _evaluation, _evaluation_keys),
    Joint(
        ("model.mtp_num_layers", "model.mtp_loss_scaling_factor"), ("train.mtp_loss",), _prediction, _prediction_keys
    ),
    Joint(
        ("model.moe_router_load_balancing_type", "model.moe_router_enable_expert_bias"),
        ("moe.balancing",),
        _balancing,
        _balancing_keys,
    ),
    Joint(tuple(PARTS), ("train.freeze",), _frozen, _frozen_keys),
    Joint(
        (
            "dataset.enable_offline_packing",
            "dataset.offline_packing_specs",
            "dataset.offline_packing_specs.packed_sequence_size",
        ),
        ("data.packing",),
        _packing,
        _packing_keys,
    ),
    Joint(DATA, ("data.dataset",), _dataset, _dataset_keys),
    Joint(("model.pipeline_model_parallel_layout",), ("layout.stage_layers",), _stage_layers, _stage_keys),
    Joint(("model.hierarchical_context_parallel_sizes",), ("layout.cp_inner",), _hierarchy, _hierarchy_keys),
)
