"""One row of the tables of measurements: what a run was, in the columns that every published run has."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping

from meshwright.costs.measurements_models import UnknownModelError, model_of_row
from meshwright.costs.runs_table import FRAMEWORKS, PRECISIONS, STRATEGIES
from meshwright.errors import MeshwrightError
from meshwright.models import Attention, Dense, ModelSpec, MoE, find
from meshwright.recipes.case import Case

TABLE_COLUMNS = (
    "row_id", "source", "source_url_or_path", "framework", "framework_version", "model", "hf_id_or_dims", "n_params_b",
    "mode", "gpu", "interconnect", "gpus_per_node", "n_gpus", "seq_len", "mbs", "gbs", "grad_accum", "precision", "tp",
    "pp", "vp", "cp", "ep", "etp", "dp_shard", "dp_replicate", "dp_strategy", "sp", "recompute", "offload",
    "compile_cudagraph", "optimizer", "attn_impl", "step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib_allocated",
    "peak_mem_gib_reserved", "status", "tier", "mem_tier", "precision_class", "recompute_class", "dp_class",
    "assumed_fields", "provenance", "notes", "flag", "tflops_per_gpu_model", "flops_convention",
)  # fmt: skip
"""The header of benchmarks/data/measurements.csv."""
ROW_ID_DIGITS = 10
SAME_PARAMETERS = 0.01  # relative difference that a shape in the short notation may have
_MATMUL = {"same": "", "fp8_tensor": "fp8", "fp8_block": "fp8_block", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
_LABELS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8-cs", "fp8_block": "fp8-block", "mxfp8": "fp8-mx"}
ENGINE_FRAMEWORKS = {
    "meshwright": "meshwright", "megatron": "Megatron-LM", "torchtitan": "torchtitan", "automodel": "AutoModel",
    "kempnerforge": "KempnerForge", "deepspeed": "DeepSpeed", "fsdp1": "FSDP",
}  # fmt: skip


def row_of(case: Case, framework: str, measured: Mapping[str, str]) -> dict[str, str]:
    """Return the row of a case that is known exactly; `measured` are the columns that the case does not have.

    Raises ValueError if the model is neither in the catalogue nor expressible in the short notation.
    """
    name, shape = model_columns(case.model)
    precision = _MATMUL.get(str(case.matmul), str(case.matmul)) or str(case.compute)
    strategy = str(case.strategy)
    ranks = int(case.cluster.world) // (int(case.tp) * int(case.pp) * int(case.cp))  # of data parallelism
    columns = {
        "framework": FRAMEWORKS.get(framework, ENGINE_FRAMEWORKS.get(framework, framework)),
        "model": name,
        "hf_id_or_dims": shape,
        "n_params_b": f"{case.model.params.total / 1e9:.3f}",
        "mode": case.recipe.goal,
        "gpu": case.cluster.gpu.name,
        "gpus_per_node": str(case.cluster.gpus_per_node),
        "n_gpus": str(case.cluster.world),
        "seq_len": str(case.seq_length),
        "mbs": str(case.micro_batch_size),
        "gbs": str(case.global_batch_size),
        "precision": _LABELS.get(precision, precision),
        **{axis: str(getattr(case, axis)) for axis in ("tp", "pp", "vp", "cp", "ep", "etp")},
        "dp_shard": str(ranks // int(case.dp_replicate)),
        "dp_replicate": str(case.dp_replicate),
        "grad_accum": str(max(int(case.global_batch_size) // (int(case.micro_batch_size) * ranks), 1)),
        "dp_strategy": strategy,
        "sp": str(bool(case.sp) and int(case.tp) > 1).lower(),
        "recompute": str(case.recompute),
        "offload": "" if str(case.offload) == "none" else str(case.offload),
        "compile_cudagraph": "compile" if case.recipe.kernels.compile else "",
        "optimizer": str(case.recipe.optimizer.name),
        "attn_impl": str(case.recipe.kernels.attention),
        "status": "ok",
        "precision_class": PRECISIONS.get(precision, _LABELS.get(precision, precision)),
        "recompute_class": str(case.recompute),
        "dp_class": STRATEGIES.get(strategy, strategy),
        "provenance": "verbatim",
    }
    row = {column: {**columns, **measured}.get(column, "") for column in TABLE_COLUMNS}
    digest = hashlib.blake2b("\n".join(row.values()).encode(), digest_size=8).hexdigest()
    return row | {"row_id": digest[:ROW_ID_DIGITS]}


def to_csv(row: Mapping[str, str]) -> str:
    """Return a table of one row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, TABLE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerow(dict(row))
    return text.getvalue()


def model_columns(model: ModelSpec) -> tuple[str, str]:
    """Return a model as a row names it: catalogue name and hub id, or its dimensions, never a user's own name."""
    try:
        known = find(model.name)
    except MeshwrightError:
        known = None
    if known is not None and known.params == model.params and known.num_layers == model.num_layers:
        return known.name, known.hf_id or known.name
    dims = dimensions(model)
    billions = model.params.total / 1e9
    return f"custom_{billions:.3g}b", dims


def dimensions(model: ModelSpec) -> str:
    """Return a model in the short notation; raise ValueError if it does not express the model."""
    reason = "its model is not in the catalogue, and a row cannot express its layers"
    if len(model.groups) != 1:
        raise ValueError(reason)
    layer = model.groups[0].layer
    mixer, ffn = layer.mixer, layer.ffn
    if not isinstance(mixer, Attention) or not isinstance(ffn, Dense | MoE):
        raise ValueError(reason)
    words = [f"L{model.num_layers}", f"H{model.hidden}", f"F{ffn.width}", f"A{mixer.heads}", f"KV{mixer.kv_heads}"]
    words += [f"D{mixer.head_dim}", f"V{model.vocab}"]
    if isinstance(ffn, MoE):
        words += [f"E{ffn.experts}", f"top{ffn.topk}", f"Fexp{ffn.width}"]
        words += [f"Fshared{ffn.shared_width}"] if ffn.shared_width else []
    words += ["swiglu" if ffn.gated else "plain", "tied" if model.tied else "untied"]
    text = " ".join(words)
    try:
        again = model_of_row("custom", text, 0.0)
    except UnknownModelError:
        raise ValueError(reason) from None
    if abs(again.params.total / model.params.total - 1) > SAME_PARAMETERS:
        raise ValueError(reason)
    return text
