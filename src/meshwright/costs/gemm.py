"""The matmuls of a layer on one rank, and their seconds by shape."""

from __future__ import annotations

import msgspec

from meshwright.costs.activations import residual_shards
from meshwright.costs.speeds import OPERAND_BYTES, Speeds
from meshwright.costs.vectorize import BYTES, Column, larger, pick, where
from meshwright.models import MLA, Attention, Dense, Layer, LinearMixer, Mamba2, MoE
from meshwright.models.spec import Mixer, is_scan
from meshwright.recipes.capabilities import fp8_experts
from meshwright.recipes.case import Case

ALIGNED = 64
EXPERT_TILE = 64.0  # half a tile of 128 rows: average padding of each expert's tokens


class Linear(msgspec.Struct, frozen=True):
    """One matmul of (rows × inputs) by (inputs × outputs), done `copies` times (once per local expert)."""

    rows: Column
    outputs: Column
    inputs: Column
    copies: Column = 1
    name: str = ""  # name for adapters; empty: never adapted
    precision: str = ""  # empty: as the case's linears
    expert: bool = False


def linears(case: Case, speed: Speeds, layer: Layer, count: Column) -> list[Linear]:
    """Return every matmul of a layer's forward pass for `count` tokens."""
    found: list[Linear] = []
    for mixer in (layer.mixer, layer.cross):
        if mixer is not None:
            found += _mixer(case, mixer, count)
    if isinstance(layer.ffn, MoE):
        found += _moe(case, speed, layer.ffn, count)
    elif layer.ffn is not None:
        found += _dense(case, layer.ffn, count)
    return found


def _mixer(case: Case, mixer: Mixer, count: Column) -> list[Linear]:
    hidden, tp = case.model.hidden, case.tp
    if isinstance(mixer, MLA):
        return _mla(case, mixer, count)
    into: float
    if isinstance(mixer, Attention):
        gate = mixer.q_width if mixer.output_gate else 0
        into, out = mixer.q_width + gate + mixer.kv_out_width, mixer.out_width
    elif isinstance(mixer, Mamba2):
        into, out = mixer.inner + mixer.conv_width + mixer.heads, mixer.inner
    elif isinstance(mixer, LinearMixer):
        into, out = mixer.into + mixer.between / hidden, mixer.out
    else:
        into, out = 2 * mixer.k_width + 2 * mixer.v_width + 2 * mixer.v_heads, mixer.v_width
    names = ("mamba_in", "mamba_out") if is_scan(mixer) else ("qkv", "proj")
    return [Linear(count, into / tp, hidden, name=names[0]), Linear(count, hidden, out / tp, name=names[1])]


def _mla(case: Case, mixer: MLA, count: Column) -> list[Linear]:
    hidden, tp, own = case.model.hidden, case.tp, count / residual_shards(case)
    found = [Linear(own, mixer.kv_lora + mixer.qk_rope, hidden)]
    if mixer.q_lora:
        found.append(Linear(own, mixer.q_lora, hidden))
    found.append(Linear(count, mixer.heads * mixer.qk_head / tp, mixer.q_lora or hidden, name="qkv"))
    found.append(Linear(count, mixer.heads * (mixer.qk_nope + mixer.v_head) / tp, mixer.kv_lora, name="qkv"))
    return [*found, Linear(count, hidden, mixer.heads * mixer.v_head / tp, name="proj")]


def _dense(case: Case, block: Dense, count: Column) -> list[Linear]:
    hidden, width = case.model.hidden, block.width / case.tp
    into = (2 if block.gated else 1) * width
    return [Linear(count, into, hidden, name="fc1"), Linear(count, hidden, width, name="fc2")]


def _moe(case: Case, speed: Speeds, moe: MoE, count: Column) -> list[Linear]:
    """Return router, shared and parallel blocks, latent projections, and the experts as grouped matmuls."""
    hidden, own = case.model.hidden, count / residual_shards(case)
    etp = 1 if case.engine == "kempnerforge" else case.etp
    local = larger(moe.experts / case.ep, 1)
    each = own * moe.topk * etp * expert_rows(case, speed, moe) / local + EXPERT_TILE
    width, inner = moe.width / etp, moe.latent or hidden
    format = "bf16" if case.fp8 and not fp8_experts(case) else ""
    found = [
        Linear(own, moe.experts, hidden, precision="bf16"),
        Linear(each, (2 if moe.gated else 1) * width, inner, local, "fc1", format, expert=True),
        Linear(each, inner, width, local, "fc2", format, expert=True),
    ]
    if moe.latent:
        found += [Linear(own, moe.latent, hidden), Linear(own, hidden, moe.latent)]
    for block in (Dense(moe.shared_width, moe.gated) if moe.shared_width else None, moe.parallel):
        found += _dense(case, block, count) if block else []
    return found


def routing_imbalance(case: Case, speed: Speeds, moe: MoE) -> Column:
    """Return the load of the fullest rank over the mean: 1 if balance is forced, else the engine's figure.

    An untrained router sends most tokens to the same experts, which are on as many ranks.
    """
    if case.force_balance:
        return 1.0
    if not untrained_router(case):
        return speed.engine.imbalance
    share = speed.shared.untrained_share
    return share * larger(case.ep / moe.topk, 1) + (1 - share)


def expert_rows(case: Case, speed: Speeds, moe: MoE) -> Column:
    """Return the rows that a rank's experts compute over the mean number of tokens they should receive.

    An engine that pads gives every expert as many rows as the fullest one has.
    """
    loaded = routing_imbalance(case, speed, moe)
    if not speed.engine.pads_experts or case.force_balance or not untrained_router(case):
        return loaded
    return larger(loaded, speed.shared.untrained_share * moe.experts / moe.topk)


def untrained_router(case: Case) -> bool:
    """Return whether a run is too short for its router to learn balance: benchmarks of a few steps from scratch."""
    return bool(getattr(case, "untrained_router", False))


def linear_s(speed: Speeds, linear: Linear) -> Column:
    """Return the forward seconds of one matmul: arithmetic at the rate of large ones, and the traffic it does not hide.

    The second term is a soft roofline: a matmul with one small dimension moves as much as it computes.
    """
    rows, outputs, inputs = linear.rows, linear.outputs, linear.inputs
    precision = linear.precision or speed.precision
    rate = speed.linear_bf16 if linear.precision == "bf16" else speed.linear_experts if linear.expert else speed.linear
    arithmetic = 2.0 * rows * outputs * inputs / rate * _alignment(speed, outputs, inputs)
    if linear.expert:  # a single expert is a plain matmul
        arithmetic = arithmetic / speed.engine.grouped ** (1 - 1 / linear.copies)
    moved = OPERAND_BYTES[precision] * inputs * (rows + outputs) + 2.0 * rows * outputs
    return linear.copies * (arithmetic + speed.shared.matmul_traffic * moved / speed.hbm)


def _alignment(speed: Speeds, outputs: Column, inputs: Column) -> Column:
    """Return the slowdown if a width is not a multiple of 64, so that tiles do not fit (14,400 / 8 ranks = 1,800)."""
    odd = (outputs % ALIGNED != 0) | (inputs % ALIGNED != 0)
    return where(odd, speed.shared.misaligned, 1.0)


def gradient_s(case: Case, speed: Speeds, found: list[Linear]) -> Column:
    """Return the seconds to accumulate a micro batch's weight gradients, partly hidden, and to cast weights for it."""
    if case.goal == "peft":
        return 0.0
    weights = sum(linear.copies * linear.outputs * linear.inputs for linear in found)
    moved = 2 * pick(case.grads, BYTES) * speed.shared.matmul_traffic + speed.engine.weight_bytes
    return moved * weights / speed.hbm


def side_bytes(case: Case, speed: Speeds, found: list[Linear]) -> Column:
    """Return the bytes moved besides the matmuls of one micro batch: quantization of operands, and adapters."""
    each = speed.shared.quantize[case.matmul] * speed.engine.quantize
    targets = case.targets if case.goal == "peft" else ()
    total: Column = 0.0
    for linear in found:
        adapter = speed.shared.adapter_bytes * (1.0 if linear.expert else speed.engine.adapters)
        moved = (0.0 if linear.precision else each) + adapter * (linear.name in targets)
        if moved:
            total = total + moved * linear.copies * linear.rows * _outside(case, linear)
    return total


def _outside(case: Case, linear: Linear) -> Column:
    """Return the widths that are quantized by kernels of their own: not those between the matmuls of fused experts."""
    if linear.expert and fuses_experts(case):
        return linear.inputs if linear.name == "fc1" else linear.outputs
    return linear.inputs + linear.outputs


def fuses_experts(case: Case) -> bool:
    """Return whether an expert's activation and its quantization are part of its grouped matmuls.

    Megatron's recipes that capture the whole iteration do so in MXFP8 (use_transformer_engine_op_fuser).
    """
    return bool(case.engine == "megatron" and case.cuda_graphs == "full_iteration" and case.matmul == "mxfp8")
