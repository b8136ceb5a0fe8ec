"""Attention on one rank and over cp equals its definition in double precision."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.attention_cases import CASES, Case, distance, expected, inputs, options
from tests.engine.ranks import run
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from meshwright.engine.attention import ContextAxis, attend, context_axis, positions, register
from meshwright.engine.attention.flex import _mask_mod, attend_flex, block_mask
from meshwright.engine.attention.mask_spec import AttentionSpec
from meshwright.errors import InputError

TOKENS = 32
LAYOUTS: list[Any] = [("ring", 2, 1), ("ring", 4, 1), ("a2a", 2, 1), ("allgather", 2, 1), ("a2a+ring", 4, 2)]
LAYOUTS += [pytest.param(comm, 4, 1, marks=pytest.mark.slow) for comm in ("a2a", "allgather")]


def attended(
    case: Case, given: dict[str, Tensor], axis: ContextAxis | None, kernel: str = "auto", again: bool = False
) -> dict[str, Tensor]:
    """Return this rank's output and gradients, those of the sinks summed over the cp axis."""
    mine = positions(TOKENS, axis)
    local = {name: given[name][:, :, mine].clone().requires_grad_() for name in ("q", "k", "v")}
    sinks = given["sinks"].clone().requires_grad_() if case.sinks else None
    more = options(case, given)
    if case.documents:
        more["documents"] = given["documents"][:, mine]
    module: Any = types.SimpleNamespace(context=axis, kernel=kernel)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(module, q, k, v, s_aux=sinks, **more)[0]

    out = checkpoint(layer, *local.values(), use_reentrant=False) if again else layer(*local.values())
    out.backward(given["grad"][:, mine].to(out.dtype))
    found = {"out": out.detach()} | {name: x.grad for name, x in local.items() if x.grad is not None}
    if sinks is not None and sinks.grad is not None:
        if axis is not None:
            dist.all_reduce(sinks.grad, group=axis.group)
        found["sinks"] = sinks.grad
    return found


def local_part(whole: dict[str, Tensor], axis: ContextAxis | None) -> dict[str, Tensor]:
    """Return this rank's part of the expected tensors."""
    mine = positions(TOKENS, axis)
    dims = {"out": 1, "q": 2, "k": 2, "v": 2}
    return {name: x.index_select(dims[name], mine) if name in dims else x for name, x in whole.items()}


def errors_of_rank(rank: int, world: int, comm: str, inner: int, kernel: str) -> dict[str, float]:
    axis = context_axis([range(world)], comm, inner) if world > 1 else None
    worst = {}
    for name, case in CASES.items():
        given = inputs(case, TOKENS)
        found, wanted = attended(case, given, axis, kernel), local_part(expected(case, given), axis)
        assert found.keys() == wanted.keys()
        worst |= {f"{name}: {part}": distance(found[part], wanted[part]) for part in wanted}
    return worst


def assert_small(ranks: list[dict[str, float]], tolerance: float = 1e-5) -> None:
    wrong = [(rank, name, error) for rank, found in enumerate(ranks) for name, error in found.items()]
    assert ranks[0]
    assert not [one for one in wrong if not one[2] < tolerance]


@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_on_one_rank_attention_equals_its_definition(kernel: str) -> None:
    assert_small(run(1, errors_of_rank, "", 1, kernel))


@pytest.mark.parametrize(("comm", "world", "inner"), LAYOUTS)
def test_over_cp_attention_equals_its_definition(comm: str, world: int, inner: int) -> None:
    assert_small(run(world, errors_of_rank, comm, inner, "auto"))


def test_the_ring_without_flash_kernels_is_the_same() -> None:
    assert_small(run(2, errors_of_rank, "ring", 1, "eager"))


def two_groups(rank: int, world: int) -> dict[str, float]:
    """Use four ranks as two interleaved cp groups, as tp inside of cp does."""
    axis = context_axis([[0, 2], [1, 3]], "ring")
    assert (axis.size, axis.rank) == (2, rank // 2)
    case = CASES["everything"]
    given = {name: x.roll(rank % 2, 1) if x.dim() > 1 else x for name, x in inputs(case, TOKENS).items()}
    found, wanted = attended(case, given, axis), local_part(expected(case, given), axis)
    return {name: distance(found[name], wanted[name]) for name in wanted}


def test_two_cp_groups_do_not_mix() -> None:
    assert_small(run(4, two_groups))


def recomputed(rank: int, world: int, comm: str, inner: int) -> list[bool]:
    axis = context_axis([range(world)], comm, inner)
    same = []
    for name in ("gqa", "everything"):
        given = inputs(CASES[name], TOKENS)
        once, twice = (attended(CASES[name], given, axis, again=again) for again in (False, True))
        same += [bool(torch.equal(once[part], twice[part])) for part in once]
    return same


@pytest.mark.parametrize(("comm", "world", "inner"), [("ring", 2, 1), ("allgather", 2, 1), ("a2a+ring", 4, 2)])
def test_recomputing_activations_changes_nothing(comm: str, world: int, inner: int) -> None:
    assert all(all(same) for same in run(world, recomputed, comm, inner))


def in_half_precision(rank: int, world: int, comm: str) -> dict[str, float]:
    axis = context_axis([range(world)], comm)
    worst = {}
    for name in ("gqa", "everything"):
        given = {part: x if x.dtype == torch.int64 else x.bfloat16() for part, x in inputs(CASES[name], TOKENS).items()}
        found, wanted = attended(CASES[name], given, axis), local_part(expected(CASES[name], given), axis)
        assert all(x.dtype == torch.bfloat16 for x in found.values())
        worst |= {f"{name}: {part}": distance(found[part], wanted[part]) for part in wanted}
    return worst


@pytest.mark.parametrize("comm", ["ring", "a2a", "allgather"])
def test_bfloat16_over_cp_stays_within_its_rounding(comm: str) -> None:
    assert_small(run(2, in_half_precision, comm), 0.02)


@st.composite
def axes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    comm = draw(st.sampled_from(["ring", "allgather", "a2a", "a2a+ring"]))
    ring = 1 if comm == "a2a" else draw(st.integers(2, 6))
    inner = draw(st.integers(2, 4)) if "a2a" in comm else 1
    return comm, ring * inner, inner, 2 * ring * inner * draw(st.integers(1, 5))


@settings(deadline=None, max_examples=30)
@given(axes())
def test_ranks_have_equal_tokens_and_causal_work(axis: tuple[str, int, int, int]) -> None:
    comm, size, inner, tokens = axis
    shares = [positions(tokens, ContextAxis(comm, size, rank, inner)).tolist() for rank in range(size)]
    assert sorted(at for share in shares for at in share) == list(range(tokens))
    assert {len(share) for share in shares} == {tokens // size}
    assert all(share == sorted(share) for share in shares)
    ring = size // inner
    # After the all-to-all a ring rank has all tokens of its inner ranks: visible keys, summed over its queries.
    work = [sum(at + 1 for rank in range(r * inner, (r + 1) * inner) for at in shares[rank]) for r in range(ring)]
    assert max(work) - min(work) <= (tokens // (2 * ring)) ** 2


def test_an_uneven_sequence_length_is_an_error_that_suggests_others() -> None:
    with pytest.raises(InputError, match="8 equal chunks") as refused:
        positions(30, ContextAxis("ring", 4, 0))
    assert refused.value.fix == ("seq_length=24", "seq_length=32")


def error_fields(rank: int, world: int) -> list[str]:
    fields = []
    whole: Any = [range(world)]
    q, kv = torch.zeros(1, 3, 8, 8), torch.zeros(1, 1, 8, 8)

    def call(**more: Any) -> Any:
        module: Any = types.SimpleNamespace(**{name: more.pop(name) for name in ("context", "kernel") if name in more})
        return attend(module, q, kv, kv, **more)

    for wrong in (
        lambda: context_axis(whole, "rink"),
        lambda: context_axis(whole, "a2a+ring", 2),
        lambda: call(context=context_axis(whole, "a2a")),
        lambda: call(context=context_axis(whole, "ring"), dropout=0.1),
        lambda: call(sliding_window=2, dropout=0.1),
        lambda: call(sliding_window=2, is_causal=False),
        lambda: call(attention_mask=torch.ones(8, 8)),
        lambda: call(kernel="fast"),
        lambda: attend(types.SimpleNamespace(), q[:, :, :4], kv, kv),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError) as refused:
            wrong()
        fields.append(refused.value.field)
    return fields


def test_unsupported_arguments_are_errors_that_name_them() -> None:
    fields = ["cp_comm", "cp_inner", "cp_comm", "attention_dropout", "attention_dropout", "sliding_window"]
    fields += ["attention_mask", "kernels.attention", "use_cache"]
    assert run(2, error_fields)[0] == fields


def flex_errors(rank: int, world: int) -> dict[str, float]:
    """Check mask and forward of flex attention; it has no backward on CPU and is not compiled here."""
    worst, device = {}, torch.device("cpu")
    for name, case in CASES.items():
        wide = replace(case, window=case.window and 20 * case.window)
        data = inputs(wide, 300)
        ids = data.get("documents")
        spec = AttentionSpec(wide.width**-0.5, wide.causal, wide.window, wide.softcap)
        ours = block_mask(300, spec, ids, device)
        if ours is not None:
            torchs = create_block_mask(
                _mask_mod(spec, ids), 2 if ids is not None else None, None, 300, 300, device="cpu"
            )
            # A window and documents may together empty a block that neither empties alone: it is visited and masked.
            assert bool((ours.to_dense() >= torchs.to_dense()).all())
            assert torch.equal(ours.to_dense(), torchs.to_dense()) or (ids is not None and wide.window)
            assert full_blocks(ours) == full_blocks(torchs)
        if name in ("gqa", "everything"):
            out = attend_flex(data["q"], data["k"], data["v"], spec, data.get("sinks"), ids)
            worst[name] = distance(out.transpose(1, 2), expected(wide, data)["out"])
    return worst


def full_blocks(mask: Any) -> list[list[int]]:
    counts, columns = mask.full_kv_num_blocks.flatten(), mask.full_kv_indices.flatten(0, 2)
    return [sorted(row[:n].tolist()) for n, row in zip(counts, columns, strict=True)]


def test_flex_visits_only_the_blocks_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.engine.attention.flex._compiled_flex", lambda: flex_attention)
    assert_small(run(1, flex_errors))


def test_registering_twice_changes_nothing() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    register()
    assert ALL_ATTENTION_FUNCTIONS["meshwright"] is attend
    assert ALL_MASK_ATTENTION_FUNCTIONS["meshwright"](1, a=2) is None


def test_compiled_layers_with_symbolic_heads_attend() -> None:
    """Nemotron-H, whose compiled blocks got symbolic numbers of heads on a GPU."""
    module: Any = types.SimpleNamespace(kernel="auto")

    def layer(hidden: Tensor, few: Tensor) -> Tensor:
        query, key = (part.view(1, TOKENS, -1, 16).transpose(1, 2) for part in (hidden, few))
        return attend(module, query, key, key)[0]

    hidden, few = torch.randn(1, TOKENS, 64), torch.randn(1, TOKENS, 32)
    expected = layer(hidden, few)
    for part in (hidden, few):
        torch._dynamo.mark_dynamic(part, 2)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(hidden, few), expected)
