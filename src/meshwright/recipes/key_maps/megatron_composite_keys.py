"""Megatron-LM's flags that mean something only together: how they are read, and how they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError, unknown
from meshwright.recipes.key_maps.composite_keys import null, recompute_keys, says, truth
from meshwright.recipes.key_maps.key import MappedFields, Texts
from meshwright.recipes.types import Recipe

Found = Mapping[str, Any]

NOT_OURS = frozenset(("full", "gdn", "gdn_norm_out", "mhc", "attn_norm", "kda"))
"""Modules that Megatron-LM can name and that have no counterpart here."""
MATMULS = {"delayed": "fp8_delayed", "tensorwise": "fp8_tensor", "blockwise": "fp8_block", "mxfp8": "mxfp8"}
FORMATS = {"fp8_delayed": "hybrid", "fp8_tensor": "hybrid", "fp8_block": "e4m3", "mxfp8": "e4m3"}
ROUTES = {"p2p": "ring", "all_gather": "allgather", "allgather": "allgather", "a2a": "a2a", "a2a+p2p": "a2a+ring"}
BALANCINGS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
SHARDED = {"no_shard": "ddp", "optim": "zero1", "optim_grads": "zero1", "optim_grads_params": "megatron_fsdp"}


def items(text: str) -> list[str]:
    """The words of a list as it is typed."""
    return [] if null(text) else [part.strip().strip("\"'") for part in text.strip().strip("[]").split(",") if part]


def _on(given: Texts, key: str) -> bool:
    return key in given and not null(given[key]) and truth(key, given[key])


def _text(given: Texts, key: str) -> str:
    """What is said for a key; empty when nothing is."""
    text = given.get(key, "")
    return "" if null(text) else text


def stages_of(drawing: str) -> tuple[int, ...]:
    """The decoder layers of every stage in a drawing such as E|(t|)*3,m|m||L; spaces and commas only adorn it."""
    text = re.sub(r"[,\s]", "", drawing)
    group = re.compile(r"\(([^()]*)\)\*(\d{1,4})")
    while found := group.search(text):
        text = text[: found.start()] + found[1] * int(found[2]) + text[found.end() :]
        if len(text) > 100_000:
            raise InputError("is longer than any model", field="pipeline_model_parallel_layout", value=drawing)
    text = re.sub(r"([a-zA-Z])\*(\d{1,4})", lambda one: one[1] * int(one[2]), text)
    if re.search(r"[^EtmLMA*|-]", text) or "(" in text:
        raise InputError(
            "stages are drawn with E (embedding), t (layer), m (prediction layer), L (loss) and | between them",
            field="pipeline_model_parallel_layout",
            value=drawing,
        )
    return tuple(stage.count("t") for stage in text.split("|"))


def _interleaved(vp: int) -> MappedFields:
    return says({"layout.vp": str(vp), "layout.pp_schedule": "interleaved_1f1b" if vp > 1 else "1f1b"})


def read_stages(given: Texts, recipe: Recipe) -> MappedFields:
    """Virtual stages by their number or by a drawing; by layers they need the model, and are read with it."""
    drawing = _text(given, "pipeline_model_parallel_layout")
    if drawing:
        layers = stages_of(drawing)
        if len(layers) % recipe.layout.pp:
            raise InputError(
                f"draws {len(layers)} stages, not a multiple of the {recipe.layout.pp} of the pipeline",
                field="pipeline_model_parallel_layout",
                value=drawing,
            )
        found = dict(_interleaved(len(layers) // recipe.layout.pp).said)
        return says({**found, "layout.stage_layers": "[" + ",".join(map(str, layers)) + "]"})
    number = _text(given, "num_virtual_stages_per_pipeline_rank")
    if not number:
        return says({})
    if not number.isdigit() or int(number) < 1:
        raise InputError(
            "a whole number of at least 1 is wanted", field="num_virtual_stages_per_pipeline_rank", value=number
        )
    return _interleaved(int(number))


def write_stages(recipe: Recipe) -> Found:
    layout = recipe.layout
    if layout.pp_schedule != ("interleaved_1f1b" if layout.vp > 1 else "1f1b"):
        raise InputError("Megatron-LM has 1F1B, and interleaves with virtual stages", field="layout.pp_schedule")
    if layout.stage_layers:
        return {"pipeline_model_parallel_layout": drawing_of(layout.stage_layers)}
    return {"num_virtual_stages_per_pipeline_rank": layout.vp} if layout.vp > 1 else {}


def drawing_of(layers: tuple[int, ...], prediction_layers: int = 0) -> str:
    """The drawing of stages with so many layers each, the embedding in the first and the loss in the last."""
    *before, last = ["t" * count for count in layers]
    return "E" + "|".join([*before, last + "m" * prediction_layers + "L"])


def read_context(given: Texts, recipe: Recipe) -> MappedFields:
    kinds = items(given.get("cp_comm_type", "p2p")) or ["p2p"]
    sizes = items(given.get("hierarchical_context_parallel_sizes", "null"))
    if kinds[0] not in ROUTES:
        raise unknown("cp_comm_type", kinds[0], ROUTES)
    said = {"layout.cp_comm": ROUTES[kinds[0]]}
    return says({**said, "layout.cp_inner": sizes[0]} if sizes else said)


def write_context(recipe: Recipe) -> Found:
    layout = recipe.layout
    found: dict[str, Any] = {"cp_comm_type": next(their for their, ours in ROUTES.items() if ours == layout.cp_comm)}
    if layout.cp_inner > 1 and layout.cp % layout.cp_inner == 0:
        found["hierarchical_context_parallel_sizes"] = [layout.cp_inner, layout.cp // layout.cp_inner]
    return found


def read_strategy(given: Texts, recipe: Recipe) -> MappedFields:
    """The distributed optimizer cuts optimizer state; Megatron-FSDP cuts what its sharding strategy says."""
    if _on(given, "use_megatron_fsdp"):
        kind = _text(given, "data_parallel_sharding_strategy") or "optim_grads_params"
        return says({"layout.strategy": SHARDED.get(kind, kind)})
    if _on(given, "use_torch_fsdp2"):
        return says({"layout.strategy": "fsdp2"})
    return says({"layout.strategy": "zero1" if _on(given, "use_distributed_optimizer") else "ddp"})


def write_strategy(recipe: Recipe) -> Found:
    flags: dict[str, dict[str, Any]] = {
        "zero1": {"use_distributed_optimizer": True},
        "fsdp2": {"use_torch_fsdp2": True},
        "megatron_fsdp": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
        "ddp": {},
    }
    return flags[recipe.layout.strategy]


def read_recompute(given: Texts, recipe: Recipe) -> MappedFields:
    """Full recompute is of every layer (uniform, in chunks) or of the first layers of each stage (block)."""
    granularity = _text(given, "recompute_granularity")
    kind = granularity or ("selective" if _on(given, "recompute_activations") else "none")
    number = _text(given, "recompute_num_layers")
    if number and (not number.isdigit() or int(number) < 1):
        raise InputError("a whole number of at least 1 is wanted", field="recompute_num_layers", value=number)
    block = kind == "full" and _text(given, "recompute_method").lower() == "block"
    said = {"layout.recompute": kind} if granularity or "recompute_granularity" in given or kind != "none" else {}
    return says({**said, "layout.recompute_layers": number if block and number else "0"})


def write_recompute(recipe: Recipe) -> Found:
    if recipe.layout.recompute != "full" and recipe.layout.recompute_layers:
        raise InputError("layers are counted for full recompute only", field="layout.recompute_layers")
    return recompute_keys(recipe)


def read_modules(given: Texts, recipe: Recipe) -> MappedFields:
    (text,) = given.values()
    return says({"layout.recompute_modules": _list(items(text))})


def write_modules(recipe: Recipe) -> Found:
    if "ops" in recipe.layout.recompute_modules:
        raise InputError("Megatron-LM recomputes modules, not single operations", field="layout.recompute_modules")
    return {"recompute_modules": list(recipe.layout.recompute_modules)} if recipe.layout.recompute_modules else {}


def _list(names: list[str]) -> str:
    return "[" + ",".join(name for name in names if name not in NOT_OURS) + "]"


def read_offload(given: Texts, recipe: Recipe) -> MappedFields:
    layers = _text(given, "cpu_offloading_num_layers") not in ("", "0")
    activations = layers or _on(given, "fine_grained_activation_offloading")
    kind = "optimizer" if _on(given, "optimizer_cpu_offload") else "activations" if activations else "none"
    return says({"layout.offload": kind})


def write_offload(recipe: Recipe) -> Found:
    if recipe.layout.offload == "params":
        raise InputError("Megatron-LM keeps parameters on the GPU", field="layout.offload")
    kinds = {"optimizer": {"optimizer_cpu_offload": True}, "activations": {"fine_grained_activation_offloading": True}}
    return kinds.get(recipe.layout.offload, {})


def read_compute(given: Texts, recipe: Recipe) -> MappedFields:
    kind = next((key for key in ("bf16", "fp16") if _on(given, key)), "fp32")
    return says({"precision.compute": kind})


def write_compute(recipe: Recipe) -> Found:
    return {} if recipe.precision.compute == "fp32" else {recipe.precision.compute: True}


def read_matmul(given: Texts, recipe: Recipe) -> MappedFields:
    """The format turns 8 bits on, and the recipe says how they are scaled."""
    if _text(given, "fp4_format"):
        return says({"precision.matmul": "nvfp4"})
    alone = "fp8_recipe" in given and "fp8_format" not in given
    if not _text(given, "fp8_format") and not alone:
        return says({"precision.matmul": "same"})
    return says({"precision.matmul": MATMULS.get(_text(given, "fp8_recipe") or "delayed", "fp8_tensor")})


def write_matmul(recipe: Recipe) -> Found:
    kind = recipe.precision.matmul
    if kind == "same":
        return {}
    if kind == "nvfp4":
        return {"fp4_format": "e2m1"}
    if kind not in FORMATS:
        raise InputError(f"Megatron-LM scales by {', '.join(MATMULS)}", field="precision.matmul", value=kind)
    return {
        "fp8_format": FORMATS[kind],
        "fp8_recipe": next(their for their, ours in MATMULS.items() if ours == kind),
    }


def read_scope(given: Texts, recipe: Recipe) -> MappedFields:
    names = [name for text in given.values() for name in items(text)]
    return says({"kernels.cuda_graph_scope": _list(names)})


def write_scope(recipe: Recipe) -> Found:
    scope = recipe.kernels.cuda_graph_scope
    return {"cuda_graph_modules": list(scope)} if scope else {}


def read_loss(given: Texts, recipe: Recipe) -> MappedFields:
    linear = _text(given, "cross_entropy_fusion_impl") == "linear" and _on(given, "cross_entropy_loss_fusion")
    return says({"kernels.loss": "fused_linear" if linear else "vocab_parallel"})


def write_loss(recipe: Recipe) -> Found:
    kind = recipe.kernels.loss
    if kind == "fused_linear":
        return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
    if kind != "vocab_parallel":
        raise InputError("Megatron-LM cuts the loss over the vocabulary", field="kernels.loss", value=kind)
    # The plain loss is the repeatable one.
    return {} if recipe.kernels.deterministic else {"cross_entropy_loss_fusion": True}


def read_balancing(given: Texts, recipe: Recipe) -> MappedFields:
    """A bias on the experts balances by itself; Sinkhorn routing needs no loss either."""
    if _on(given, "moe_router_enable_expert_bias"):
        return says({"moe.balancing": "bias"})
    kinds = items(given.get("moe_router_load_balancing_type", "aux_loss")) or ["none"]
    if kinds[0] not in (*BALANCINGS, "sinkhorn", "bias"):
        raise unknown("moe_router_load_balancing_type", kinds[0], (*BALANCINGS, "sinkhorn"))
    return says({"moe.balancing": "none" if kinds[0] == "sinkhorn" else kinds[0]})


def write_balancing(recipe: Recipe) -> Found:
    if recipe.moe.balancing != "bias":
        return {"moe_router_load_balancing_type": recipe.moe.balancing}
    return {
        "moe_router_load_balancing_type": "seq_aux_loss" if recipe.moe.aux_loss else "none",
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    }


def read_dispatcher(given: Texts, recipe: Recipe) -> MappedFields:
    """The flex dispatcher is whatever its backend is; DeepEP unless said."""
    backend = _text(given, "moe_flex_dispatcher_backend").lower()
    kind = _text(given, "moe_token_dispatcher_type").lower() or ("flex" if backend else "allgather")
    if kind not in ("allgather", "alltoall", "flex"):
        raise unknown("moe_token_dispatcher_type", kind, ("allgather", "alltoall", "flex"))
    if kind != "flex":
        return says({"moe.dispatcher": kind})
    return says({"moe.dispatcher": "hybridep" if backend == "hybridep" else "deepep"})


def write_dispatcher(recipe: Recipe) -> Found:
    kind = recipe.moe.dispatcher
    if kind in ("deepep", "hybridep"):
        return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": kind}
    return {"moe_token_dispatcher_type": kind}


def read_mtp(given: Texts, recipe: Recipe) -> MappedFields:
    """The weight counts once there are layers that predict further tokens."""
    layers, weight = _text(given, "mtp_num_layers"), _text(given, "mtp_loss_scaling_factor")
    if "mtp_num_layers" not in given:
        return says({"train.mtp_loss": weight})
    return says({"train.mtp_loss": (weight or "0.1") if layers not in ("", "0") else "0"})


def write_mtp(recipe: Recipe) -> Found:
    return {"mtp_loss_scaling_factor": recipe.train.mtp_loss} if recipe.train.mtp_loss else {}


def blend_of(paths: list[str]) -> tuple[str, dict[str, float]]:
    """The data set, or the sources and their weights, that a list of paths names."""
    weights = [_number(text) for text in paths[::2]]
    if len(paths) > 1 and len(paths) % 2 == 0 and all(weight is not None for weight in weights):
        return "", {path: weight for path, weight in zip(paths[1::2], weights, strict=True) if weight is not None}
    return " ".join(paths), {}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def read_data(given: Texts, recipe: Recipe) -> MappedFields:
    if _on(given, "mock_data"):
        return says({"data.dataset": "mock"})
    dataset, blend = blend_of(items(_text(given, "data_path") or _text(given, "train_data_path")))
    if blend:
        return says({"data.blend": ",".join(f"{path}:{weight}" for path, weight in blend.items())})
    return says({"data.dataset": dataset} if dataset else {})


def write_data(recipe: Recipe) -> Found:
    if recipe.data.blend:
        return {"data_path": [text for path, weight in recipe.data.blend.items() for text in (repr(weight), path)]}
    return {"mock_data": True} if recipe.data.dataset == "mock" else {"data_path": [recipe.data.dataset]}


def read_sft(given: Texts, recipe: Recipe) -> MappedFields:
    """Its fine-tuning data set always packs."""
    return says({"data.packing": "true" if _on(given, "sft") else "false"})


def write_sft(recipe: Recipe) -> Found:
    if recipe.data.packing != (recipe.goal == "sft"):
        raise InputError("Megatron-LM packs samples with --sft, and only then", field="data.packing")
    return {"sft": True} if recipe.goal == "sft" else {}


def read_checkpoint(given: Texts, recipe: Recipe) -> MappedFields:
    """Weights come from --pretrained-checkpoint, or from --load with --finetune; a plain --load goes on."""
    save, load, begins = _text(given, "save"), _text(given, "load"), _on(given, "finetune")
    said = {"checkpoint.pretrained": _text(given, "pretrained_checkpoint") or (load if begins else "")}
    return says({**said, "checkpoint.resume": "true" if load and not begins else "false"} if save else said)


def write_checkpoint(recipe: Recipe) -> Found:
    found: dict[str, Any] = {}
    if recipe.checkpoint.save_every:
        found["save"] = f"checkpoints/{recipe.name or 'run'}"
        if recipe.checkpoint.resume:
            found["load"] = found["save"]
    if recipe.checkpoint.pretrained:
        found["pretrained_checkpoint"] = recipe.checkpoint.pretrained
    return found


def read_eval(given: Texts, recipe: Recipe) -> MappedFields:
    """No iterations mean no evaluation."""
    every, steps = _text(given, "eval_interval"), given.get("eval_iters", "")
    if "eval_iters" in given and (null(steps) or steps.strip() == "0" or steps.strip().startswith("-")):
        return says({"train.eval_every": "0"})
    said = {"train.eval_steps": steps} if steps else {}
    return says({**said, "train.eval_every": every or "0"} if "eval_interval" in given else said)


def write_eval(recipe: Recipe) -> Found:
    return {"eval_interval": recipe.train.eval_every or None, "eval_iters": recipe.train.eval_steps}
