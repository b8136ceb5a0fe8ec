"""Recipe fields that mixed_precision, the runner or the model set without a key of their own."""

from __future__ import annotations

from math import lcm
from typing import Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import ParsedConfig
from meshwright.frameworks.megatron_bridge import bridge_recipes, precision
from meshwright.frameworks.megatron_bridge.parsed_config import ParsedRun, get_value, positive_int
from meshwright.frameworks.schedule_units import with_lengths
from meshwright.frameworks.types import Settings
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps.megatron_lm_composite_keys import validation_part
from meshwright.recipes.types import Recipe

SEQUENCE_LENGTH = "dataset.sequence_length"
"""Megatron-Core's name of the length: the same field as dataset.seq_length before 0.6, then overwritten by it."""


def reads_sequence_length(saved: bool, base: Recipe) -> bool:
    """Return whether dataset.sequence_length may set the length: only pretraining datasets have that field."""
    return saved or base.goal == "pretrain"


def derived_fields(run: ParsedRun, settings: Settings, base: Recipe, model: ModelSpec | None) -> dict[str, Any]:
    """Return the fields that mixed_precision, the runner or the model set."""
    fields: dict[str, Any] = {}
    formats = precision.effective(settings, base.precision)
    if get_value(settings, "mixed_precision", "") is not None:
        for field in ("compute", "matmul", "reduce", "fp8_gather", "first_last_bf16"):
            fields[f"precision.{field}"] = getattr(formats, field)
    if "optimizer.main_grads_dtype" not in settings or "bfloat16" not in str(
        settings["optimizer.main_grads_dtype"].value
    ):
        fields["precision.grads"] = formats.grads
    fields |= _length(run, settings, base)
    fields |= _layout(run, settings, base, model)
    if (
        run.form == "command"
        and run.goal in ("sft", "peft")
        and positive_int(settings, "model.context_parallel_size", base.layout.cp) > 1
    ):
        fields["train.per_token_loss"] = True  # set by the runner
    method = (
        str(get_value(settings, "--mode", "") or get_value(settings, "peft._target_", "")).rsplit(".", 1)[-1].lower()
    )
    if method == "dora":
        fields["peft.method"] = "dora"
    if str(get_value(settings, "--dataset", "mock")) == "mock" and "--dataset" in settings and base.goal != "pretrain":
        fields["data.dataset"] = base.data.dataset  # rejected: reported by a rule
    split = get_value(settings, "dataset.split")
    if isinstance(split, str) and get_value(settings, "dataset.data_path"):
        fields["data.validation_part"] = validation_part(split)
    if "--deterministic" in settings:
        fields["kernels.deterministic"] = True
    return fields


def _length(run: ParsedRun, settings: Settings, base: Recipe) -> dict[str, Any]:
    """The sequence length is that of the dataset; the runner copies it into the model."""
    if not {"model.seq_length", "dataset.seq_length", "dataset.sequence_length"} & settings.keys():
        return {}
    data = "dataset.seq_length" if get_value(settings, "dataset.seq_length") else None
    if data is None and reads_sequence_length(run.form == "saved", base) and get_value(settings, SEQUENCE_LENGTH):
        data = SEQUENCE_LENGTH
    elif data is None and run.form == "saved":
        data = "model.seq_length"
    if any(setting.unresolved for key, setting in settings.items() if key.endswith(("seq_length", "sequence_length"))):
        return {}
    length = positive_int(settings, data, 0) if data else base.data.seq_length
    return {"data.seq_length": length} if length else {}


def _layout(run: ParsedRun, settings: Settings, base: Recipe, model: ModelSpec | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tp = positive_int(settings, "model.tensor_model_parallel_size", base.layout.tp)
    if "model.sequence_parallel" not in settings and tp == 1:
        found["layout.sp"] = False
    pp = positive_int(settings, "model.pipeline_model_parallel_size", base.layout.pp)
    vp = positive_int(settings, "model.virtual_pipeline_model_parallel_size", base.layout.vp)
    layers = model.num_layers if model else 0
    first, last = (get_value(settings, f"model.num_layers_in_{stage}_pipeline_stage") for stage in ("first", "last"))
    if (first or last) and layers and get_value(settings, "model.pipeline_model_parallel_layout") is None:
        found["layout.stage_layers"] = uneven_stages(layers, pp, vp, first, last)
    elif base.layout.stage_layers and (pp, vp) != (base.layout.pp, base.layout.vp):
        stated = "model.pipeline_model_parallel_layout" in settings
        if run.form == "command" and not stated and layers and pp * vp <= layers:
            found["layout.stage_layers"] = spread_layers(layers, pp * vp)  # the runner recomputes the stage layout
    if base.layout.strategy == "megatron_fsdp" and get_value(settings, "ddp.use_megatron_fsdp") is False:
        found["layout.strategy"] = "zero1"
    return found


def uneven_stages(layers: int, pp: int, vp: int, first: Any, last: Any) -> tuple[int, ...]:
    """Return the layers per chunk if those of the first or last stage are given."""
    ends = [count for count in (first, last) if is_int(count)]
    between = pp - len(ends)
    rest = layers - sum(ends)
    each, left = divmod(rest, between) if between > 0 else (0, rest)
    if left or each < 0 or any(count % vp for count in (*ends, each)):
        return (rest,)  # does not divide: reported by the rule that counts chunks
    row = [*([first] if first else []), *[each] * between, *([last] if last else [])]
    chunks = tuple(count // vp for count in row) * vp
    return chunks if len(set(chunks)) > 1 else ()


def spread_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Distribute layers over chunks, longer chunks first; empty if even."""
    each, left = divmod(layers, chunks)
    return tuple(each + (at < left) for at in range(chunks)) if left else ()


def is_benchmark_run(settings: Settings) -> bool:
    """Return whether a saved run is a benchmark: mock data and forced MoE load balancing."""
    data = any(get_value(settings, key) for key in ("dataset.blend", "dataset.data_path", "dataset.blend_per_split"))
    return get_value(settings, "model.moe_router_force_load_balancing") is True and not data


def complete(recipe: Recipe, parsed: ParsedConfig, cluster: Cluster) -> Recipe:
    """Scale the global batch of a benchmark with the number of GPUs, and set the lengths stated in samples."""
    return with_lengths("megatron_bridge", _with_batch(recipe, parsed, cluster), parsed.settings)


def _with_batch(recipe: Recipe, parsed: ParsedConfig, cluster: Cluster) -> Recipe:
    row = bridge_recipes.find(parsed.name)
    if row is None or not row.benchmark or not row.gpus or "train.global_batch_size" in parsed.settings:
        return recipe
    batch, left = divmod(recipe.train.global_batch_size * cluster.world, row.gpus)
    if left or batch < 1:  # rejected: reported by a rule
        return recipe
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, global_batch_size=batch))


def min_gpus(recipe: Recipe) -> int:
    """Return the minimum number of GPUs for the layout."""
    layout = recipe.layout
    return layout.pp * lcm(layout.tp * layout.cp, layout.ep * layout.etp) * layout.dp_replicate
