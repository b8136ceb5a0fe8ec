"""How keys of Megatron-Bridge that only make sense together are read and written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError, unknown
from meshwright.recipes.key_maps import composite_keys
from meshwright.recipes.key_maps.composite_keys import null, says, truth
from meshwright.recipes.key_maps.key import MappedFields, Texts
from meshwright.recipes.key_maps.value_maps import PRECISION_NAMES
from meshwright.recipes.types import Recipe

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
PARTS = {
    "model.freeze_language_model": "language",
    "model.freeze_vision_model": "vision",
    "model.freeze_vision_projection": "projector",
}


def virtual_stages(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    if layout.pp_schedule != ("1f1b" if layout.vp == 1 else "interleaved_1f1b"):
        raise InputError("stages run 1F1B there, interleaved when there are chunks", field="layout.pp_schedule")
    return {"model.virtual_pipeline_model_parallel_size": None if layout.vp == 1 else layout.vp}


def recompute(recipe: Recipe) -> Mapping[str, Any]:
    keys = dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))
    return {f"model.{key}": value for key, value in {**keys, **composite_keys.recompute_keys(recipe)}.items()}


def dispatcher(recipe: Recipe) -> Mapping[str, Any]:
    return {f"model.{key}": value for key, value in composite_keys.dispatcher_keys(recipe.moe.dispatcher).items()}


def precision(recipe: Recipe) -> Mapping[str, Any]:
    pair = (recipe.precision.compute, recipe.precision.matmul)
    if pair not in PRECISION_NAMES["megatron_bridge"]:
        raise InputError(f"{pair[0]} with {pair[1]} matrix products has no name there", field="precision.matmul")
    return {"mixed_precision": PRECISION_NAMES["megatron_bridge"][pair]}


def offload(recipe: Recipe) -> Mapping[str, Any]:
    kind = recipe.layout.offload
    if kind == "params":
        raise InputError("parameters are not offloaded there", field="layout.offload")
    return {"model.cpu_offloading": kind == "activations", "optimizer.optimizer_cpu_offload": kind == "optimizer"}


def strategy(given: Texts, recipe: Recipe) -> MappedFields:
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
    return MappedFields({})


def strategy_keys(recipe: Recipe) -> Mapping[str, Any]:
    strategy = recipe.layout.strategy
    shared = strategy in ("zero1", "megatron_fsdp")
    return {
        "ddp.use_megatron_fsdp": strategy == "megatron_fsdp",
        "dist.use_torch_fsdp2": strategy == "fsdp2",
        "ddp.use_distributed_optimizer": shared,
        "optimizer.use_distributed_optimizer": shared,
    }


EVALUATION = ("validation.eval_interval", "validation.eval_iters", "train.eval_interval", "train.eval_iters")


def evaluation(given: Texts, recipe: Recipe) -> MappedFields:
    """How often and how long; the older keys under train win, and no batches means no evaluation."""
    latest: dict[str, str] = {}
    for key in EVALUATION:
        name = key.split("_")[-1]
        if key in given and not (key.startswith("train.") and null(given[key])):
            latest[name] = "0" if null(given[key]) else str(composite_keys.count(key, given[key]))
    said: dict[str, str] = {}
    if latest.get("iters") == "0":
        return says({"train.eval_every": "0"})
    if "iters" in latest:
        said["train.eval_steps"] = latest["iters"]
    if "interval" in latest:
        said["train.eval_every"] = latest["interval"]
    return says(said)


def evaluation_keys(recipe: Recipe) -> Mapping[str, Any]:
    if not recipe.train.eval_every:
        return {"validation.eval_iters": 0}
    return {"validation.eval_interval": recipe.train.eval_every, "validation.eval_iters": recipe.train.eval_steps}


def prediction(given: Texts, recipe: Recipe) -> MappedFields:
    """Without layers there is no loss of theirs; with them it has a tenth of the weight unless said."""
    layers = given.get("model.mtp_num_layers")
    if layers is not None and (null(layers) or layers.strip() == "0"):
        return says({"train.mtp_loss": "0"})
    factor = given.get("model.mtp_loss_scaling_factor", str(recipe.train.mtp_loss or 0.1))
    return says({"train.mtp_loss": "0" if null(factor) else factor})


def prediction_keys(recipe: Recipe) -> Mapping[str, Any]:
    weight = recipe.train.mtp_loss
    return {"model.mtp_loss_scaling_factor": weight} if weight else {"model.mtp_num_layers": None}


BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def balancing(given: Texts, recipe: Recipe) -> MappedFields:
    """A bias instead of a loss is said with two keys; a bias beside a loss changes nothing that is modelled here."""
    kind = given.get("model.moe_router_load_balancing_type", "").strip().lower()
    bias = given.get("model.moe_router_enable_expert_bias", "false").strip().lower() == "true"
    if bias and (kind == "none" or (not kind and recipe.moe.balancing in ("none", "bias"))):
        return says({"moe.balancing": "bias"})
    return says({"moe.balancing": kind} if kind in (*BALANCING, "bias") else {})


def balancing_keys(recipe: Recipe) -> Mapping[str, Any]:
    kind = recipe.moe.balancing
    if kind == "bias":
        return {"model.moe_router_load_balancing_type": "none", "model.moe_router_enable_expert_bias": True}
    return {"model.moe_router_load_balancing_type": kind}


def frozen(given: Texts, recipe: Recipe) -> MappedFields:
    kept = set(recipe.train.freeze)
    for key, text in given.items():
        kept = kept | {PARTS[key]} if truth(key, text) else kept - {PARTS[key]}  # type: ignore[arg-type]  # by name
    return says({"train.freeze": "[" + ",".join(part for part in PARTS.values() if part in kept) + "]"})


def frozen_keys(recipe: Recipe) -> Mapping[str, Any]:
    return {key: part in recipe.train.freeze for key, part in PARTS.items()}


def packing(given: Texts, recipe: Recipe) -> MappedFields:
    enabled = given.get("dataset.enable_offline_packing")
    return MappedFields({}) if enabled is None else says({"data.packing": str(truth("data.packing", enabled)).lower()})


def packing_keys(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.data.packing:
        size = recipe.data.seq_length
        return {
            "dataset.enable_offline_packing": True,
            "dataset.offline_packing_specs.packed_sequence_size": size,
        }
    return {"dataset.enable_offline_packing": False, "dataset.offline_packing_specs": None}


DATA = ("--dataset", "dataset.dataset_root", "dataset.data_path", "dataset.path", VLM_FILES)


def dataset(given: Texts, recipe: Recipe) -> MappedFields:
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
    return MappedFields({}) if named is None else says({"data.dataset": named})


def dataset_keys(recipe: Recipe) -> Mapping[str, Any]:
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


def stage_layers(given: Texts, recipe: Recipe) -> MappedFields:
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


def stage_keys(recipe: Recipe) -> Mapping[str, Any]:
    key = "model.pipeline_model_parallel_layout"
    listed = recipe.layout.stage_layers
    if not listed:
        return {key: None}
    prediction = "m" if recipe.train.mtp_loss else ""
    chunks = ["t" * count for count in listed]
    return {key: "|".join(["E" + chunks[0], *chunks[1:]]) + prediction + "L"}


def hierarchy(given: Texts, recipe: Recipe) -> MappedFields:
    ((key, text),) = given.items()
    if null(text):
        return says({"layout.cp_inner": "1"})
    first = text.strip().strip("[]()").split(",")[0]
    return says({"layout.cp_inner": str(composite_keys.count(key, first.strip(), 1))})


def hierarchy_keys(recipe: Recipe) -> Mapping[str, Any]:
    key, layout = "model.hierarchical_context_parallel_sizes", recipe.layout
    if layout.cp_comm != "a2a+ring":
        if layout.cp_inner != 1:
            raise InputError("is only said for a2a+p2p there", field="layout.cp_inner", value=layout.cp_inner)
        return {key: None}
    return {key: [layout.cp_inner, max(1, layout.cp // layout.cp_inner)]}
