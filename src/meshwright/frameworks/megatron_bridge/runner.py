"""What follows from a file without standing in it: what mixed_precision decides, and what the runner does itself."""

from __future__ import annotations

from math import lcm
from typing import Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import ParsedConfig
from meshwright.frameworks.megatron_bridge import bridge_recipes, precision
from meshwright.frameworks.megatron_bridge.parsed_config import ParsedRun, as_int, value
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe


def decided(spoken: ParsedRun, settings: Settings, base: Recipe, model: ModelSpec | None) -> dict[str, Any]:
    """Fields that mixed_precision, the runner or the model itself decide."""
    own: dict[str, Any] = {}
    formats = precision.effective(settings, base.precision)
    if value(settings, "mixed_precision", "") is not None:
        for field in ("compute", "matmul", "reduce", "fp8_gather", "first_last_bf16"):
            own[f"precision.{field}"] = getattr(formats, field)
    if "optimizer.main_grads_dtype" not in settings or "bfloat16" not in str(
        settings["optimizer.main_grads_dtype"].value
    ):
        own["precision.grads"] = formats.grads
    own |= _length(spoken, settings, base)
    own |= _layout(spoken, settings, base, model)
    own |= _shape(settings, model)
    if (
        spoken.form == "command"
        and spoken.goal in ("sft", "peft")
        and as_int(settings, "model.context_parallel_size", base.layout.cp) > 1
    ):
        own["train.per_token_loss"] = True  # the runner sees to it
    method = str(value(settings, "--mode", "") or value(settings, "peft._target_", "")).rsplit(".", 1)[-1].lower()
    if method == "dora":
        own["peft.method"] = "dora"
    if str(value(settings, "--dataset", "mock")) == "mock" and "--dataset" in settings and base.goal != "pretrain":
        own["data.dataset"] = base.data.dataset  # refused: told by a rule
    if "--deterministic" in settings:
        own["kernels.deterministic"] = True
    return own


def _length(spoken: ParsedRun, settings: Settings, base: Recipe) -> dict[str, Any]:
    """The length of samples is that of the data; the runner copies it into the model."""
    if not {"model.seq_length", "dataset.seq_length", "dataset.sequence_length"} & settings.keys():
        return {}
    data = "dataset.seq_length" if value(settings, "dataset.seq_length") else None
    if data is None and spoken.form == "saved":  # older versions save one number under another name
        data = "dataset.sequence_length" if value(settings, "dataset.sequence_length") else "model.seq_length"
    if any(setting.unresolved for key, setting in settings.items() if key.endswith(("seq_length", "sequence_length"))):
        return {}
    length = as_int(settings, data, 0) if data else base.data.seq_length
    return {"data.seq_length": length} if length else {}


def _layout(spoken: ParsedRun, settings: Settings, base: Recipe, model: ModelSpec | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tp = as_int(settings, "model.tensor_model_parallel_size", base.layout.tp)
    if "model.sequence_parallel" not in settings and tp == 1:
        found["layout.sp"] = False
    pp = as_int(settings, "model.pipeline_model_parallel_size", base.layout.pp)
    vp = as_int(settings, "model.virtual_pipeline_model_parallel_size", base.layout.vp)
    layers = model.num_layers if model else 0
    first, last = (value(settings, f"model.num_layers_in_{place}_pipeline_stage") for place in ("first", "last"))
    if (first or last) and layers and value(settings, "model.pipeline_model_parallel_layout") is None:
        found["layout.stage_layers"] = uneven(layers, pp, vp, first, last)
    elif base.layout.stage_layers and (pp, vp) != (base.layout.pp, base.layout.vp):
        stated = "model.pipeline_model_parallel_layout" in settings
        if spoken.form == "command" and not stated and layers and pp * vp <= layers:
            found["layout.stage_layers"] = spread(layers, pp * vp)  # the runner draws the stages anew
    if base.layout.strategy == "megatron_fsdp" and value(settings, "ddp.use_megatron_fsdp") is False:
        found["layout.strategy"] = "zero1"
    return found


def uneven(layers: int, pp: int, vp: int, first: Any, last: Any) -> tuple[int, ...]:
    """Layers of every chunk where those of the first or last stage are given."""
    ends = [count for count in (first, last) if is_int(count)]
    between = pp - len(ends)
    rest = layers - sum(ends)
    each, left = divmod(rest, between) if between > 0 else (0, rest)
    if left or each < 0 or any(count % vp for count in (*ends, each)):
        return (rest,)  # does not divide: told by the rule that counts the listed chunks
    row = [*([first] if first else []), *[each] * between, *([last] if last else [])]
    chunks = tuple(count // vp for count in row) * vp
    return chunks if len(set(chunks)) > 1 else ()


def spread(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers over chunks, the longer ones first."""
    each, left = divmod(layers, chunks)
    return tuple(each + (at < left) for at in range(chunks)) if left else ()


SHAPES = {
    "model.num_layers": "layers",
    "model.hidden_size": "hidden",
    "model.ffn_hidden_size": "ffn",
    "model.num_attention_heads": "heads",
    "model.num_query_groups": "kv_heads",
    "model.num_moe_experts": "experts",
    "model.moe_router_topk": "topk",
}


def _shape(settings: Settings, model: ModelSpec | None) -> dict[str, Any]:
    """Sizes of the model that are said on top of the named one."""
    if model is None:
        return {}
    setting = {ours: value(settings, theirs) for theirs, ours in SHAPES.items() if theirs in settings}
    return {f"architecture.{name}": count for name, count in setting.items() if is_int(count) and count > 0}


def without_shape(settings: dict[str, SourcedValue], model: ModelSpec | None) -> dict[str, SourcedValue]:
    """A saved config lists every size of its model; only a number of layers that differs says something new."""
    kept = {"model.num_layers"} if model and value(settings, "model.num_layers") != model.num_layers else set()
    return {key: setting for key, setting in settings.items() if key not in SHAPES or key in kept}


def measures_only(settings: Settings) -> bool:
    """Whether a saved run sent equal loads to all experts on made-up data, as only benchmarks do."""
    data = any(value(settings, key) for key in ("dataset.blend", "dataset.data_path", "dataset.blend_per_split"))
    return value(settings, "model.moe_router_force_load_balancing") is True and not data


def complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    """Benchmarks keep their samples per GPU: on another number of GPUs the global batch grows or shrinks."""
    row = bridge_recipes.find(parsed.name)
    if row is None or not row.benchmark or not row.gpus or "train.global_batch_size" in parsed.settings:
        return recipe
    batch, left = divmod(recipe.train.global_batch_size * on.world, row.gpus)
    if left or batch < 1:  # refused: told by a rule
        return recipe
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, global_batch_size=batch))


def least_gpus(recipe: Recipe) -> int:
    """GPUs that the layout needs at least."""
    layout = recipe.layout
    return layout.pp * lcm(layout.tp * layout.cp, layout.ep * layout.etp) * layout.dp_replicate
