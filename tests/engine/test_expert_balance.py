"""Balancing losses, biases and statistics of routers equal the formulas on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.expert_cases import E, K, block_of, differ, forward, inputs, ours
from tests.engine.ranks import run
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.engine import experts as moe
from meshwright.engine.experts.dispatch import ExpertAxis
from meshwright.errors import InputError

SCALE = 0.25
SIGMOID = ("deepseek_v3", "glm4_moe", "nemotron_h")
LOSSES = {
    "aux_loss": {"kind": "aux_loss", "aux_loss": 3.0},
    "seq_aux_loss": {"kind": "seq_aux_loss", "aux_loss": 3.0, "samples": 2},
    "z_loss": {"kind": "none", "router_z_loss": 2.0},
    "both": {"kind": "aux_loss", "aux_loss": 3.0, "router_z_loss": 2.0},
}


def settings_of(family: str, **settings: Any) -> moe.Balancing:
    return moe.Balancing(experts=E, topk=K, score="sigmoid" if family in SIGMOID else "softmax", **settings)


def attach(family: str, block: Any, **settings: Any) -> moe.RouterState:
    state = moe.attach_router(block.gate, block, settings_of(family, **settings))
    state.scale = SCALE
    return state


def reference_loss(family: str, gate: nn.Module, x: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Return the losses by the papers' formulas, expert by expert."""
    logits, _, chosen = gate(x.reshape(-1, x.shape[-1]))
    scores = logits.sigmoid() if family in SIGMOID else logits.softmax(-1)
    probabilities = scores / scores.sum(-1, keepdim=True)
    sequences = settings.get("samples", 1)
    aux = logits.new_zeros(())
    for p, c in zip(probabilities.chunk(sequences), chosen.chunk(sequences), strict=True):
        for expert in range(E):
            tokens_to_it = (c == expert).sum() / c.shape[0]
            aux = aux + E / K * tokens_to_it * p[:, expert].mean() / sequences
    z = (logits.exp().sum(-1).log() ** 2).mean()
    return settings.get("aux_loss", 0.0) * aux + settings.get("router_z_loss", 0.0) * z


def split_sequences(rank: int, world: int, family: str, settings: dict[str, Any]) -> float:
    """Give each rank a shard of both sequences; return the largest difference of the summed gradients."""
    x, probe = inputs()
    whole = block_of(family)
    leaf = x.clone().requires_grad_()
    loss = reference_loss(family, whole.gate, leaf, settings)
    ((forward(whole, leaf) * probe).sum() + SCALE * loss).backward()

    group = dist.group.WORLD if world > 1 else None
    block = ours(family)
    state = attach(family, block, group=group, **settings)
    own = x.chunk(world, 1)[rank].clone().requires_grad_()
    out = forward(block, own)
    (out * probe.chunk(world, 1)[rank]).sum().backward()
    total = block.gate.weight.grad.clone()
    if group is not None:
        dist.all_reduce(total)
    statistics = moe.statistics([state], group)
    reported = torch.tensor(statistics["aux_loss"] + statistics["z_loss"])
    return max(
        differ(total, whole.gate.weight.grad),
        differ(own.grad, leaf.grad.chunk(world, 1)[rank]),
        differ(reported, loss.detach()),
    )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_over_sequence_shards_equals_the_formula(loss: str, family: str, world: int) -> None:
    assert max(run(world, split_sequences, family, LOSSES[loss])) < 1e-5


def other_sequences(rank: int, world: int, kind: str) -> float:
    """Use two dp ranks: global_aux_loss takes the fractions over all sequences, the others per rank."""
    x, _ = inputs()
    whole = block_of("qwen3_moe")
    _, _, every = whole.gate(x.view(-1, x.shape[-1]))
    for one in x:
        logits, _, chosen = whole.gate(one)
        fraction = torch.bincount((every if kind == "global_aux_loss" else chosen).flatten(), minlength=E).float()
        loss = 3.0 * E * (fraction / fraction.sum() * logits.softmax(-1).mean(0)).sum()
        (SCALE * loss).backward()

    block = ours("qwen3_moe")
    attach("qwen3_moe", block, kind=kind, aux_loss=3.0, dp_group=dist.group.WORLD)
    (forward(block, x[rank][None]) * 0).sum().backward()
    total = block.gate.weight.grad.clone()
    dist.all_reduce(total)
    return differ(total, whole.gate.weight.grad)


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_only_the_global_loss_counts_other_sequences(kind: str) -> None:
    assert max(run(2, other_sequences, kind)) < 1e-5


def recomputed(rank: int, world: int, recompute: bool) -> tuple[list[int], dict[str, float], list[float]]:
    block = ours("deepseek_v3", ExpertAxis(2, 1, dist.group.WORLD, rank))
    state = attach("deepseek_v3", block, kind="seq_aux_loss", aux_loss=3.0, samples=2)
    for _ in range(2):
        x = inputs()[0].requires_grad_()
        out = checkpoint(forward, block, x, use_reentrant=False) if recompute else forward(block, x)
        out.square().sum().backward()
    assert state.counts is not None
    return state.counts.tolist(), moe.statistics([state], dist.group.WORLD), block.gate.weight.grad.flatten().tolist()


def test_recomputing_counts_nothing_twice() -> None:
    counts, statistics, grads = run(2, recomputed, False)[0]
    again = run(2, recomputed, True)[0]
    assert sum(counts) == 2 * 12 * K
    assert again[0] == counts
    assert again[1] == pytest.approx(statistics)
    assert again[2] == pytest.approx(grads, rel=1e-5)


def biased(rank: int, world: int) -> tuple[list[float], list[float], list[int]]:
    block = ours("deepseek_v3")
    state = attach("deepseek_v3", block, kind="bias")
    before = block.gate.e_score_correction_bias.clone()
    with torch.no_grad():
        forward(block, inputs()[0].chunk(world)[rank])
    assert state.counts is not None
    counts = state.counts.clone()
    dist.all_reduce(counts)
    moe.update_biases(moe.router_states(block), dist.group.WORLD, 0.5)
    moe.reset([state])
    assert state.counts is None
    return before.tolist(), block.gate.e_score_correction_bias.tolist(), counts.tolist()


def test_biases_move_against_the_load_of_all_ranks() -> None:
    first, second = run(2, biased)
    before, after, counts = first
    assert second[1] == after
    mean = sum(counts) / E
    moves = [0.5 * ((mean > count) - (mean < count)) for count in counts]
    assert len(set(moves)) > 1
    assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx(moves)


def counted(rank: int, world: int) -> None:
    block = ours("qwen3_moe")
    state = attach("qwen3_moe", block, kind="none", router_in_fp32=False)
    nn.init.zeros_(block.gate.weight)  # all experts equal: the first K of them get every token
    forward(block, inputs()[0])
    block.eval()
    forward(block, inputs()[0])
    statistics = moe.statistics([state], None)
    idle = sum(count == 0 for count in state.counts.tolist()) / E
    assert statistics == pytest.approx({
        "max_over_mean_load": E / K,
        "experts_without_tokens": idle,
        "aux_loss": 0.0,
        "z_loss": 0.0,
        "entropy": torch.tensor(float(E)).log().item(),
    })  # fmt: skip
    assert idle == 1 - K / E
    assert moe.statistics([], None) == {}


def test_statistics_of_a_step_count_training_only() -> None:
    run(1, counted)


def in_fp32(rank: int, world: int, family: str, autocast: bool) -> None:
    block = ours(family)
    router = getattr(block, "gate", None) or block.router
    if not autocast:
        block.to(torch.bfloat16)
    x = inputs()[0].to(router.weight.dtype).view(-1, router.weight.shape[1])
    bias = None if getattr(router, "bias", None) is None else router.bias.float()
    wanted = nn.functional.linear(x.float(), router.weight.float(), bias)
    moe.attach_router(router, block, settings_of(family, kind="aux_loss", aux_loss=1.0))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits, weights, _ = router(x)
        out = forward(block, x[None])
    assert (logits.dtype, weights.dtype) == (torch.float32, torch.float32)
    assert torch.equal(logits, wanted)
    assert autocast or out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert router.weight.grad.dtype == router.weight.dtype
    assert float(router.weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_a_router_computes_in_fp32(family: str, autocast: bool) -> None:
    run(1, in_fp32, family, autocast)


def bf16_bias(rank: int, world: int) -> None:
    block = ours("deepseek_v3").to(torch.bfloat16)
    attach("deepseek_v3", block, kind="bias")
    assert block.gate.e_score_correction_bias.dtype == torch.float32
    assert "gate.e_score_correction_bias" in block.state_dict()


def test_a_bias_is_kept_in_fp32() -> None:
    run(1, bf16_bias)


def test_a_router_without_a_bias_cannot_be_balanced_by_one() -> None:
    with pytest.raises(InputError, match="has no bias"):
        moe.attach_router(nn.Linear(2, 2), nn.Module(), settings_of("qwen3_moe", kind="bias"))


def uneven(rank: int, world: int) -> None:
    block = ours("qwen3_moe")
    attach("qwen3_moe", block, kind="seq_aux_loss", aux_loss=1.0, samples=5)
    with pytest.raises(InputError, match="not 5 sequences"):
        forward(block, inputs()[0])


def test_sequences_of_uneven_length_are_an_error() -> None:
    run(1, uneven)
