"""Experts on one rank and sharded over ep and etp equal transformers' own loop on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.expert_cases import FAMILIES, E, H, I, K, block_of, differ, forward, inputs, ours, slice_of
from tests.engine.ranks import run
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend without ranks
from torch.utils.checkpoint import checkpoint

from meshwright.engine import experts as moe
from meshwright.engine.experts.dispatch import ExchangeCounts, ExpertAxis, balanced_counts, experts_forward, round_robin
from meshwright.engine.experts.grouped_mm import grouped_mm, one_by_one


def alone(rank: int, world: int, family: str) -> float:
    x, probe = inputs()
    eager, own = block_of(family), ours(family)
    results = []
    for block in (eager, own):
        leaf = x.clone().requires_grad_()
        out = forward(block, leaf)
        (out * probe).sum().backward()
        results.append((out.detach(), leaf.grad))
    worst = max(differ(found, wanted) for found, wanted in zip(results[1], results[0], strict=True))
    for name, parameter in eager.named_parameters():
        grad = own.get_parameter(name).grad
        worst = max(worst, differ(grad.view(parameter.shape), parameter.grad))
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_our_function_on_one_rank_equals_each_familys_loop(family: str) -> None:
    assert run(1, alone, family)[0] < 1e-5


def tokens_per_rank(world: int, tokens: int, empty: bool) -> list[int]:
    return [tokens, *[0] * (world - 1)] if empty else [tokens // world] * world


def over_ranks(rank: int, world: int, family: str, ep: int, etp: int, empty: bool, recompute: bool) -> float:
    """Return the largest difference of outputs and gradients from one process with all ranks' tokens."""
    x, probe = (one.reshape(1, -1, H) for one in inputs())
    whole = block_of(family)
    leaf = x.clone().requires_grad_()
    wanted = forward(whole, leaf)
    (wanted * probe).sum().backward()

    axis = ExpertAxis(ep, etp, dist.group.WORLD, rank)
    block = ours(family, axis)
    mine = slice(sum(tokens_per_rank(world, 12, empty)[:rank]), sum(tokens_per_rank(world, 12, empty)[: rank + 1]))
    own = x[:, mine].clone().requires_grad_()
    out = checkpoint(forward, block, own, use_reentrant=False) if recompute else forward(block, own)
    (out * probe[:, mine]).sum().backward()

    worst = max(differ(out, wanted[:, mine]), differ(own.grad, leaf.grad[:, mine]))
    return max(worst, *gradient_differences(whole, block, axis))


def gradient_differences(whole: Any, block: Any, axis: ExpertAxis) -> list[float]:
    """Sum the ranks' gradients in a full tensor (replicas on etp ranks count once) and compare."""
    differences = []
    specs = moe.shard_specs(block.experts)
    every = {name: parameter.grad for name, parameter in whole.named_parameters()}
    moe.reshape_experts(whole.experts)
    for name, parameter in block.named_parameters():
        wanted = every[name]
        grad = parameter.grad
        grad = grad.to_local() if isinstance(grad, DTensor) else grad
        if name.startswith("experts."):
            short = name.removeprefix("experts.")
            total = torch.zeros(getattr(whole.experts, short).shape)
            slice_of(total, specs[short], axis).copy_(grad / (axis.etp if specs[short].etp_dim is None else 1))
        else:
            total = grad.clone()
        dist.all_reduce(total)
        differences.append(differ(total.view(wanted.shape), wanted))
    return differences


@pytest.mark.parametrize("family", FAMILIES)
def test_ep_times_etp_equals_one_process(family: str) -> None:
    assert max(run(4, over_ranks, family, 2, 2, False, False)) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.slow), (1, 2)])
def test_ep_or_etp_equals_one_process(family: str, ep: int, etp: int) -> None:
    assert max(run(ep * etp, over_ranks, family, ep, etp, False, False)) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_ranks_without_tokens_compute_for_the_others(family: str) -> None:
    assert max(run(4, over_ranks, family, 2, 2, True, False)) < 1e-5


def test_recomputed_layers_dispatch_their_tokens_again() -> None:
    assert max(run(2, over_ranks, "deepseek_v3", 2, 1, False, True)) < 1e-5


def one_expert(rank: int, world: int) -> list[float]:
    """Send all tokens to the last expert: the others, and rank 0, have zero gradients."""
    axis = ExpertAxis(2, 1, dist.group.WORLD, rank)
    experts = ours("gpt_oss", axis).experts
    x = inputs()[0].view(-1, H).requires_grad_()
    index, weights = torch.full((12, 1), E - 1), torch.ones(12, 1)
    experts(x, index, weights).square().sum().backward()
    return [float(experts.gate_up_proj.grad[e].abs().sum()) for e in range(E // 2)]


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    first, last = run(2, one_expert)
    assert first == [0.0] * 4
    assert last[:3] == [0.0] * 3
    assert last[3] > 0


def sharded(rank: int, world: int) -> float:
    """Store parameters as DTensors, as the engine does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    axis = ExpertAxis(2, 2, dist.group.WORLD, rank)
    block = ours("gpt_oss", axis)
    for name, spec in moe.shard_specs(block.experts).items():
        placements = [Shard(spec.ep_dim), Shard(spec.etp_dim)] if spec.etp_dim else [Shard(spec.ep_dim)]
        over = mesh if spec.etp_dim else mesh["ep"]
        stored = DTensor.from_local(getattr(block.experts, name).data, over, placements)
        setattr(block.experts, name, nn.Parameter(stored))
    whole = block_of("gpt_oss")
    x, probe = (one.reshape(1, -1, H) for one in inputs())
    (forward(whole, x) * probe).sum().backward()
    mine = slice(3 * rank, 3 * rank + 3)
    (forward(block, x[:, mine]) * probe[:, mine]).sum().backward()
    assert tuple(block.experts.gate_up_proj.shape) == (E, H, I, 2)
    return max(gradient_differences(whole, block, axis))


def test_parameters_may_be_dtensors() -> None:
    assert max(run(4, sharded)) < 1e-5


def stored_shapes(rank: int, world: int, family: str) -> None:
    for device in ("cpu", "meta"):
        experts = block_of(family, device).experts
        names = [name for name, _ in experts.named_parameters()]
        before = {name: getattr(experts, name).data for name in names}
        for _ in range(2):
            moe.reshape_experts(experts)
        assert [name for name, _ in experts.named_parameters()] == names
        assert set(moe.shard_specs(experts)) == set(names)
        for name, old in before.items():
            new = getattr(experts, name)
            assert moe.fused_shape(experts, name) == tuple(old.shape)
            assert new.shape[0] == E
            etp_dim = moe.shard_specs(experts)[name].etp_dim
            assert etp_dim is None or new.shape[etp_dim] == I
            if device == "cpu":
                assert new.data_ptr() == old.data_ptr()
                assert torch.equal(new.view(moe.fused_shape(experts, name)), old)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_storage_is_split_in_place_and_can_be_fused_again(family: str) -> None:
    run(1, stored_shapes, family)


def blocks_found(rank: int, world: int) -> None:
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), "one": block_of("gpt_oss"), "two": block_of("deepseek_v3")})
    found = list(moe.expert_blocks(model))
    assert [one.name for one in found] == ["one", "two"]
    assert found[0].router is model["one"].router
    assert found[1].experts is model["two"].experts


def test_blocks_are_found_in_a_model() -> None:
    run(1, blocks_found)


def both_products(rank: int, world: int) -> float:
    """Compare the grouped kernel and one GEMM per expert in bf16, with one empty expert."""
    torch.manual_seed(0)
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    results = []
    for product in (grouped_mm, one_by_one):
        torch.manual_seed(1)
        rows = torch.randn(10, 16).bfloat16().requires_grad_()
        matrices = torch.randn(3, 8, 16).bfloat16().requires_grad_()
        out = product(rows, matrices.transpose(-2, -1), ends)
        (out * 2).sum().backward()
        results.append((out, rows.grad, matrices.grad))
    return max(differ(found, wanted) for found, wanted in zip(*results, strict=True))


def test_the_grouped_kernel_equals_one_gemm_per_expert() -> None:
    assert run(1, both_products)[0] < 1e-2


def odd_widths(rank: int, world: int) -> None:
    rows, columns = torch.randn(10, 6).bfloat16(), torch.randn(3, 6, 5).bfloat16()  # 12 bytes per row: not aligned
    out = grouped_mm(rows, columns, torch.tensor([4, 4, 10], dtype=torch.int32))
    torch.testing.assert_close(out, torch.cat((rows[:4] @ columns[0], rows[4:] @ columns[2])))


def test_odd_widths_are_computed_one_expert_at_a_time() -> None:
    run(1, odd_widths)


def without_values(rank: int, world: int, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    axis = ExpertAxis(2, 2, dist.new_group([0], backend="fake"), rank, exchange=balanced_counts)
    with FakeTensorMode():
        block = ours("gpt_oss", axis)
        x = torch.randn(2, 5, H, requires_grad=True)
        forward(block, x).square().sum().backward()
        assert all(one.grad is not None and one.grad.shape == one.shape for one in (x, *block.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dry_run_needs_no_values(dtype: torch.dtype) -> None:
    run(1, without_values, dtype)


def forced(rank: int, world: int) -> list[int]:
    seen: list[int] = []

    def spy(counts: torch.Tensor, rows: int, axis: ExpertAxis) -> ExchangeCounts:
        seen.extend(counts.flatten().tolist())
        counted, assumed = moe.exchange_counts(counts, rows, axis), balanced_counts(counts, rows, axis)
        assert (counted.send, counted.receive) == (assumed.send, assumed.receive)
        assert torch.equal(counted.by_expert, assumed.by_expert)
        return counted

    experts = ours("qwen3_moe", ExpertAxis(2, 1, dist.group.WORLD, rank, force_balance=True, exchange=spy)).experts
    x = inputs(32)[0].view(-1, H)
    experts(x, torch.zeros(32, K, dtype=torch.long), torch.rand(32, K))
    return seen


def test_forced_balance_loads_every_expert_equally() -> None:
    assert run(2, forced) == [[32 * K // E] * E] * 2


def odd_loads(rank: int, world: int) -> None:
    index = torch.zeros(5, 3, dtype=torch.long)
    both = torch.cat([round_robin(index, 8, rank) for rank in range(2)])
    assert all(len(set(row)) == 3 for row in both.tolist())
    counts = torch.bincount(both.flatten(), minlength=8)
    assert int(counts.max() - counts.min()) <= 1


def test_forced_balance_continues_where_the_previous_rank_stopped() -> None:
    run(1, odd_loads)


def bf16_close_to_fp32(rank: int, world: int) -> float:
    experts = ours("qwen3_moe").experts
    x = inputs()[0].view(-1, H)
    index, weights = torch.arange(24).view(12, 2) % E, torch.rand(12, 2)
    wanted = experts_forward(experts, x, index, weights)
    with torch.autocast("cpu", torch.bfloat16):
        found = experts_forward(experts, x, index, weights)
    assert found.dtype == torch.float32
    assert not torch.equal(found, wanted)
    return differ(found, wanted)


def test_autocast_reaches_the_experts() -> None:
    assert run(1, bf16_close_to_fp32)[0] < 2e-2
