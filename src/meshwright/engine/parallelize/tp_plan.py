"""Which modules are tensor-parallel and how their parameters are sharded: one table for every model family.

A tensor-parallel module takes full hidden states, computes this rank's heads or columns, and returns a partial sum.
Only its parameters are sharded; the module's own code runs on the local shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

Segments = Callable[[Any], tuple[int, ...]]


@dataclass(frozen=True)
class ShardSpec:
    """A parameter sharded along a dimension; a fused one (query, key, value) segment by segment."""

    dim: int
    segments: Segments | None = None
    heads: str = "q"  # "kv": sharded by key/value heads, of which there may be fewer than ranks


ROWS, COLUMNS = ShardSpec(0), ShardSpec(1)
KV_ROWS = ShardSpec(0, heads="kv")
ONCE = "once"  # a bias after the partial sum: only the first rank adds it


@dataclass(frozen=True)
class TPModule:
    """A type of module, recognized by its children, and how its parameters are sharded."""

    name: str
    children: tuple[str, ...]
    shards: Mapping[str, ShardSpec | str]
    divided: tuple[str, ...] = ()  # attributes that count heads or widths: divided by the number of ranks
    mixes_tokens: bool = False  # context-parallel ranks must gather the full sequence (and share the heads)
    child_divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the same, of children


def linear_shards(name: str, spec: ShardSpec) -> dict[str, ShardSpec | str]:
    """Return the specs of a linear layer sharded by rows (with its bias) or by columns (its bias is added once)."""
    bias: ShardSpec | str = ShardSpec(0, spec.segments, spec.heads) if spec.dim == 0 else ONCE
    return {f"{name}.weight": spec, f"{name}.bias": bias}


def _mamba_in(m: Any) -> tuple[int, ...]:
    states = m.n_groups * m.ssm_state_size
    return (m.intermediate_size, m.intermediate_size, states, states, m.num_heads)


def _mamba_conv(m: Any) -> tuple[int, ...]:
    states = m.n_groups * m.ssm_state_size
    return (m.intermediate_size, states, states)


def _delta_qkv(m: Any) -> tuple[int, ...]:
    return (m.key_dim, m.key_dim, m.value_dim)


def _gpt2_qkv(m: Any) -> tuple[int, ...]:
    return (m.embed_dim,) * 3


DELTA: dict[str, ShardSpec | str] = {
    "conv1d.weight": ShardSpec(0, _delta_qkv),
    "A_log": ROWS,
    "dt_bias": ROWS,
    "out_proj.weight": COLUMNS,
}
DELTA_DIVIDED = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")

TP_MODULES = (
    TPModule(
        "latent attention",
        ("kv_b_proj", "o_proj"),
        {
            **linear_shards("q_proj", ROWS),
            **linear_shards("q_b_proj", ROWS),
            **linear_shards("kv_b_proj", ROWS),
            **linear_shards("o_proj", COLUMNS),
        },
        divided=("num_heads",),
    ),
    TPModule(
        "attention",
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        {
            **linear_shards("q_proj", ROWS),
            **linear_shards("k_proj", KV_ROWS),
            **linear_shards("v_proj", KV_ROWS),
            **linear_shards("o_proj", COLUMNS),
            "sinks": ROWS,
        },
    ),
    TPModule(
        "fused attention",
        ("c_attn", "c_proj"),
        {
            "c_attn.weight": ShardSpec(1, _gpt2_qkv),
            "c_attn.bias": ShardSpec(0, _gpt2_qkv),
            "c_proj.weight": ROWS,
            "c_proj.bias": ONCE,
        },
        divided=("split_size",),
        child_divided={"c_attn": ("nf",)},
    ),
    TPModule(
        "state space",
        ("in_proj", "conv1d", "out_proj"),
        {
            **linear_shards("in_proj", ShardSpec(0, _mamba_in)),
            **linear_shards("conv1d", ShardSpec(0, _mamba_conv)),
            "A_log": ROWS,
            "D": ROWS,
            "dt_bias": ROWS,
            "norm.weight": ROWS,
            **linear_shards("out_proj", COLUMNS),
        },
        divided=("intermediate_size", "conv_dim", "num_heads", "n_groups"),
        mixes_tokens=True,
    ),
    TPModule(
        "gated delta",
        ("in_proj_qkvz", "in_proj_ba", "conv1d", "out_proj"),
        {"in_proj_qkvz.weight": ROWS, "in_proj_ba.weight": ROWS, **DELTA},
        divided=DELTA_DIVIDED,
        mixes_tokens=True,
    ),
    TPModule(
        "gated delta, separate",
        ("in_proj_qkv", "in_proj_z", "conv1d", "out_proj"),
        {
            "in_proj_qkv.weight": ShardSpec(0, _delta_qkv),
            "in_proj_z.weight": ROWS,
            "in_proj_b.weight": ROWS,
            "in_proj_a.weight": ROWS,
            **DELTA,
        },
        divided=DELTA_DIVIDED,
        mixes_tokens=True,
    ),
    TPModule(
        "feed-forward",
        ("up_proj", "down_proj"),
        {**linear_shards("gate_proj", ROWS), **linear_shards("up_proj", ROWS), **linear_shards("down_proj", COLUMNS)},
    ),
    TPModule(
        "fused feed-forward",
        ("c_fc", "c_proj"),
        {"c_fc.weight": ShardSpec(1), "c_fc.bias": ShardSpec(0), "c_proj.weight": ROWS, "c_proj.bias": ONCE},
        child_divided={"c_fc": ("nf",)},
    ),
)


def adapter_shards(module: nn.Module, plan: TPModule) -> Iterator[tuple[str, ShardSpec]]:
    """Yield how adapters are sharded: B and magnitudes with the outputs of their linear layer, A with its inputs.

    A four-bit weight is sharded like the weight; along its rows there are fewer codes and scales than weights.
    """
    for path, spec in plan.shards.items():
        child, _, name = path.rpartition(".")
        linear: Any = getattr(module, child, None)
        if name != "weight" or not isinstance(spec, ShardSpec):
            continue
        if hasattr(linear, "base_codes"):
            yield f"{child}.base_codes", _packed_shard(spec, 2)
            yield f"{child}.base_scales", _packed_shard(spec, linear.base_block)
        if not hasattr(linear, "lora_A"):
            continue
        if spec.dim == int(linear.lora_inputs_first):
            outputs = ShardSpec(0, spec.segments, spec.heads)
            yield f"{child}.lora_B", outputs
            yield f"{child}.lora_magnitude", outputs
        else:
            yield f"{child}.lora_A", COLUMNS


def _packed_shard(spec: ShardSpec, per_code: int) -> ShardSpec:
    segments = spec.segments
    if spec.dim == 0 or segments is None:
        return spec
    return ShardSpec(spec.dim, lambda module: tuple(width // per_code for width in segments(module)), spec.heads)


def tp_module_of(module: nn.Module) -> TPModule | None:
    """Return the plan of a tensor-parallel module, or None for any other module; a user's plan goes first."""
    custom: TPModule | None = getattr(module, "custom_tp_plan", None)
    if custom is not None:
        return custom
    children = {name for name, child in module.named_children() if child is not None}
    return next((plan for plan in TP_MODULES if children.issuperset(plan.children)), None)
