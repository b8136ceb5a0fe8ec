"""Parses the columns of a measurement table: engine, strategy, precision, recompute, kernels, links."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.costs.flops import Convention

Row = Mapping[str, str]

STRATEGY = {"zero3_fsdp": "fsdp2", "hsdp": "fsdp2", "zero1": "zero1", "zero2": "zero1", "ddp": "ddp", "none": "ddp"}
_MODULES = re.compile(r"core_attn|layernorm|moe_act|mla_up_proj|shared_experts|shared_expert|mlp|moe|norm\b|act\b")
_MODULE_NAMES = {"norm": "layernorm", "act": "moe_act", "shared_expert": "shared_experts"}
_YEAR = re.compile(r"\b(20[12]\d)\b|ngc(\d\d)\.|(?:NeMo|container|dgxc v?)\s*(\d\d)\.\d\d")
_CONTAINER_MONTH = re.compile(r"(?:ngc|NeMo |container |dgxc v)(\d\d)\.(\d\d)")
SYNC_FREE_MONTH = 202606  # containers from it on capture the whole iteration of MoE transformers in MXFP8
FA3_MONTH = 202406  # containers before it ran FlashAttention-2 or kernels of its speed on Hopper
_PER_GPU = re.compile(r"(\d+)\s*Gb(?:ps|/s)?\b[^;,]*per GPU")
_PORTS = re.compile(r"(\d+)x\s?(?:[A-Za-z]+ )?(\d+)\s?(Gb|GB)")
_PER_NODE = re.compile(r"(\d+)\s*Gbps")
_RECIPE = re.compile(r"\brecipe v[\d.]+:\w+ \{")
_FULL_ATTENTION = re.compile(r"non-causal|no causal|full attention", re.IGNORECASE)
_CAUSAL_ATTENTION = re.compile(r"causal|mcore|Megatron-LM \(median", re.IGNORECASE)


class Framework(msgspec.Struct, frozen=True):
    """How rows of a framework are interpreted."""

    match: str
    engine: str = ""
    profile: str = ""
    since: int = 0  # year and month: 202511
    until: int = 9999
    unsupported: str = ""
    defaults: dict[str, Any] = msgspec.field(default_factory=dict)


@cache
def frameworks() -> tuple[Framework, ...]:
    """Return the table of frameworks, in matching order."""
    table = tomllib.loads(Path(__file__).with_name("measurements_frameworks.toml").read_text())
    return tuple(Framework(**entry) for entry in table["framework"])


@cache
def framework_of(name: str, version: str) -> Framework | None:
    """Return the entry that matches a framework's name and version."""
    year = _year(version)
    month = min(_month(version), 100 * year + 12)
    for entry in frameworks():
        if re.search(entry.match, name) and entry.since <= month and year <= entry.until:
            return entry
    return None


def _month(version: str) -> int:
    """Return year × 100 + month of a container's version; one without a month counts as current."""
    found = _CONTAINER_MONTH.search(version)
    return 100 * (2000 + int(found[1])) + int(found[2]) if found else 999912


def _year(version: str) -> int:
    """Return the year of a version; one without a year counts as current."""
    found = _YEAR.search(version)
    if not found:
        return 9998
    return int(found[1]) if found[1] else 2000 + int(found[2] or found[3])


def as_int(row: Row, column: str, default: int = 1) -> int:
    """Return a count; blank or invalid cells take the default."""
    try:
        return int(float(row.get(column, "")))
    except (ValueError, OverflowError):
        return default


def number(row: Row, column: str) -> float:
    """Return a positive measurement; 0 if the cell is blank or invalid."""
    try:
        value = float(row.get(column, ""))
        return value if math.isfinite(value) and value > 0 else 0.0
    except ValueError:
        return 0.0


def network_gb_s(interconnect: str, gpus_per_node: int) -> float:
    """Return the stated GB/s per GPU between nodes; 0 if there is none."""
    if found := _PER_GPU.search(interconnect):
        return float(found[1]) / 8
    for count, rate, unit in _PORTS.findall(interconnect):
        if unit == "GB" and float(rate) > 64:  # and similar: a memory size
            continue
        return int(count) * float(rate) / (8 if unit == "Gb" else 1) / gpus_per_node
    if found := _PER_NODE.search(interconnect):
        return float(found[1]) / 8 / gpus_per_node
    return 0.0


def flops_convention(row: Row) -> Convention | None:
    """Return how the FLOPs of a stated TFLOP/s count attention; None if the row does not say."""
    text = row.get("flops_convention", "")
    if _FULL_ATTENTION.search(text):
        return "full"
    return "causal" if _CAUSAL_ATTENTION.search(text) else None


def strategy_of(row: Row, world: int) -> str:
    """Return how data-parallel ranks share state."""
    text = row.get("dp_strategy", "").lower().replace("-", "_")
    if "megatron_fsdp" in text:
        return "megatron_fsdp"
    if world == 1:
        return "ddp"
    return STRATEGY.get(row.get("dp_class", ""), "zero1")  # unknown: usual optimizer sharding


def precision_of(row: Row) -> dict[str, Any]:
    """Return compute and matmul formats; classes name the 8-bit recipe, the free text the details."""
    text, kind = row.get("precision", "").lower(), row.get("precision_class", "")
    names: dict[str, Any] = {"compute": "fp16" if text.startswith("fp16") else "bf16", "matmul": "same"}
    if kind == "nvfp4" or "nvfp4" in text:
        names["matmul"] = "nvfp4"
    elif kind == "fp8-mx" or "fp8-mx" in text:
        names["matmul"] = "mxfp8"
    elif "fp8-block" in text:
        names["matmul"] = "fp8_block"
    elif "fp8-delayed" in text:
        names["matmul"] = "fp8_delayed"
    elif kind.startswith("fp8"):
        names["matmul"] = "fp8_tensor"
    if "(linears)" in text:
        names["quantized_experts"] = False
    if text.startswith("bf16-true"):
        names["master"] = "bf16"
    return names


def recompute_of(row: Row, defaults: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Return none, selective with its modules, or full; unknown takes the framework's default, else none."""
    kind, text = row.get("recompute_class", ""), row.get("recompute", "")
    level = {"full": "full", "selective": "selective"}.get(kind, "none")
    if kind in ("unknown", ""):
        level = defaults.get("recompute", "none")
    modules: tuple[str, ...] = ()
    if level == "selective" and engine == "megatron":
        found = [_MODULE_NAMES.get(m, m) for m in _MODULES.findall(text.lower())]
        modules = tuple(dict.fromkeys(found)) or ("core_attn",)
    return {"recompute": level, "recompute_modules": modules}


def kernels_of(row: Row) -> dict[str, Any]:
    """Return compilation, CUDA graphs, attention kernel, loss and offload."""
    text, attention = row.get("compile_cudagraph", ""), row.get("attn_impl", "").lower()
    names: dict[str, Any] = {"compile": "compile" in text}
    if text:
        names["cuda_graphs"] = _graphs(text)
    if re.search(r"\btorch\b|unfused|no flash|^local", attention):
        names |= {"attention": "eager", "attention_kernel": "eager"}
    elif attention == "fused":  # the scores are still materialized
        names |= {"attention": "eager", "attention_kernel": "fused_softmax"}
    elif re.search(r"flash_attentionv1|flashattention v1|^flashattention$|triton/cuda", attention):
        names |= {"attention": "flash", "attention_kernel": "flash1"}
    elif re.search(r"fa4|flash\w*[ -]?(?:attention)?[ -]?4", attention):
        names |= {"attention": "flash", "attention_kernel": "flash4"}
    elif re.search(r"fa3|flash\w*[ -]?3|cudnn", attention):
        names |= {"attention": "flash", "attention_kernel": "best"}
    elif re.search(r"flash|sdpa|fa\d", attention):
        names |= {"attention": "flash", "attention_kernel": ""}
    elif _month(row.get("framework_version", "")) < FA3_MONTH and re.match("H[12]0", row.get("gpu", "")):
        names["attention_kernel"] = "flash2"
    if "async" in text.lower() or "tp-comm-overlap" in row.get("dp_strategy", ""):
        names["tp_comm_overlap"] = True
    if re.search(r"rms kernel|\bte\b", attention):
        names["norm_kernel"] = "fused"
    if "no comm overlap" in attention:
        names |= {"overlap_grad_reduce": False, "overlap_param_gather": False, "tp_comm_overlap": False}
    if "liger" in text.lower() or "fused linear cross entropy" in row.get("notes", ""):
        names["loss"] = "fused_linear"
    return names | _offload(row.get("offload", "").lower())


def _graphs(text: str) -> str:
    if "impl=none" in text or not re.search(r"graph|\"implementation\"", text):
        return "none"
    if "full_iteration" in text:
        return "full_iteration"
    return "transformer_engine"


def _offload(text: str) -> dict[str, Any]:
    if "optimizer" in text or "adam" in text:
        return {"offload": "optimizer"}
    if "act" in text:
        return {"offload": "activations"}
    return {"offload": "params"} if text == "cpu" else {}


def usual_graphs(row: Row, moe: bool, hybrid: bool, matmul: str) -> dict[str, Any]:
    """Return graphs and overlap of a row of Megatron-Bridge that states neither graphs nor its recipe.

    Since 26.06 the MXFP8 recipes of MoE transformers know all shapes in advance, capture the whole iteration and
    overlap the exchange of tokens; those of hybrids capture parts.
    """
    known = row.get("compile_cudagraph") or _RECIPE.search(row.get("notes", ""))
    if known or not moe or hybrid or matmul != "mxfp8" or _month(row.get("framework_version", "")) < SYNC_FREE_MONTH:
        return {}
    return {"cuda_graphs": "full_iteration", "ep_overlap": True}


def routing_of(row: Row) -> dict[str, Any]:
    """Return dispatcher, overlap and balance of experts, and multi-token prediction, from the notes."""
    text = " ".join(row.get(c, "") for c in ("notes", "flag", "attn_impl")).lower()
    names: dict[str, Any] = {}
    if _RECIPE.search(row.get("notes", "")):  # what a recipe that is known does not set is off
        names |= {"dispatcher": "alltoall"} | ({} if row.get("compile_cudagraph") else {"cuda_graphs": "none"})
    if "hybridep" in text:
        names["dispatcher"] = "hybridep"
    elif "deepep" in text:
        names["dispatcher"] = "deepep"
    elif "dispatcher alltoall" in text:
        names["dispatcher"] = "alltoall"
    if re.search(r"natural (moe )?routing", text) or ("dropless" in text and "forced" not in text):
        names["force_balance"] = False
    if "truncated" in text:  # nobody has weights of such a model
        names["untrained_router"] = True
    if "functional run" in text:  # default kernels, no graphs, real data, logging at every step
        names |= {"speed_profile": "megatron_untuned", "cuda_graphs": "none"}
    if "a2a_overlap': true" in text or "1f1b overlap" in text or "ep overlap on" in text:
        names["ep_overlap"] = True
    elif _RECIPE.search(row.get("notes", "")) or "ep overlap off" in text:
        names["ep_overlap"] = False
    if "ci golden run" in text:  # AutoModel's own defaults, which its benchmarks change
        names |= {"defer_grad_sync": True, "force_balance": False}
    if "token-drop" in text or "tokendrop" in text:
        names["capacity_factor"] = 1.0
    if "unpacked experts" in text:
        names["grouped_gemm"] = False
    if "w/o mtp" in text:
        names["mtp"] = False
    if "no gradient bucketing/overlap" in row.get("dp_strategy", ""):
        names |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
    return names


def open_knobs(row: Row, values: Mapping[str, Any], stated: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that decide the speed of a row and that neither the row nor its recipe states."""
    found = ["vp"] if values["pp"] > 1 and not row.get("vp") else []
    if values["ep"] > 1:
        found += [name for name in ("dispatcher", "ep_overlap") if name not in stated]
        found += ["cuda_graphs"] if "cuda_graphs" not in stated else []
    if row.get("recompute_class", "") == "unknown" and not row.get("recompute"):
        found.append("recompute")
    return tuple(found)
