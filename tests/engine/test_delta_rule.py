"""Our gated delta rule equals transformers' reference and saves only its inputs and a few states."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine import scans
from tests.engine.families import FAMILIES
from tests.engine.scans import kept_bytes
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from meshwright.engine.kernels import delta_rule, gated_norms
from meshwright.engine.kernels.delta_rule import gated_delta_rule, plan
from meshwright.engine.kernels.scan_patch import use_chunked_scans
from meshwright.engine.model.build import transformers_config

REFERENCE: Any = qwen.torch_chunk_gated_delta_rule
outcome = partial(scans.outcome, names=("out", "q", "k", "v", "g", "beta"))
differences = partial(scans.differences, floor=1e-6)


def inputs(
    rows: int, tokens: int, groups: int, heads: int, key: int, value: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v, g and beta of a layer, `heads` for each query and key; decays from weak to almost complete."""
    generator = torch.Generator().manual_seed(tokens * heads + key)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    every = groups * heads
    tensors = [numbers(rows, tokens, groups, key), numbers(rows, tokens, groups, key)]
    tensors += [numbers(rows, tokens, every, value)]
    low = [one.to(dtype) for one in tensors]
    g = -torch.linspace(0.01, 5.0, every) * numbers(rows, tokens, every).sigmoid()
    beta = numbers(rows, tokens, every).sigmoid().to(dtype)
    return [one.requires_grad_() for one in (*low, g, beta)]


def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool = True) -> Tensor:
    """The rule of transformers."""
    q, k = (one.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for one in (q, k))
    out: Tensor = REFERENCE(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=norm)[0]
    return out


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Our rule."""
    return gated_delta_rule(q, k, v, g, beta, norm=True)


@settings(max_examples=10)
@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 140),
    groups=st.integers(1, 3),
    heads=st.integers(1, 3),
    key=st.integers(2, 6),
    value=st.integers(1, 5),
    chunk=st.sampled_from([4, 16, 64]),
    states=st.sampled_from([1, 3, 1000]),
)
def test_rule_equals_transformers(
    rows: int, tokens: int, groups: int, heads: int, key: int, value: int, chunk: int, states: int
) -> None:
    tensors = inputs(rows, tokens, groups, heads, key, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_rule, "CHUNK", chunk)
        patch.setattr(delta_rule, "STATE_BYTES", states * 4 * groups * heads * key * value)
        found = outcome(ours, tensors)
    worst = differences(found, outcome(reference, tensors))
    assert worst.pop("g") < 1e-4  # the reference computes a small difference of large numbers; see the test below
    assert max(worst.values()) < 5e-5, worst  # its rounding and ours
    exact = differences(found, outcome(one_by_one, [one.detach().double().requires_grad_() for one in tensors]))
    assert max(exact.values()) < 1e-5, exact


def one_by_one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute the rule by its definition, token by token."""
    q, k = (one.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for one in (q, k))
    q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + delta_rule.EPSILON) for one in (q, k))
    state, seen = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for i in range(v.shape[1]):
        state = state * g[:, i, :, None, None].exp()
        known = (state * k[:, i, :, :, None]).sum(2)
        state = state + k[:, i, :, :, None] * (beta[:, i, :, None] * (v[:, i] - known))[:, :, None]
        seen.append((state * q[:, i, :, :, None]).sum(2) / k.shape[3] ** 0.5)
    return torch.stack(seen, 1)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_rule_is_as_exact_as_its_dtype(kind: torch.dtype) -> None:
    tensors = [one.detach().to(kind).requires_grad_() for one in inputs(2, 150, 2, 2, 6, 5)]
    with torch.no_grad():
        tensors[3][:, :40] = -40.0  # the logarithms of decays add up to thousands, and then change by a little
        tensors[3][:, 40:] *= 0.1
    high = [one.detach().double().requires_grad_() for one in tensors]
    worst = differences(outcome(ours, tensors), outcome(one_by_one, high))
    assert max(worst.values()) < (1e-5 if kind == torch.float32 else 1e-12), worst


def test_rule_without_normalized_queries_and_keys() -> None:
    q, k, v, g, beta = (one.detach() for one in inputs(2, 70, 2, 2, 8, 4))
    k = k / k.norm(dim=-1, keepdim=True)
    found = gated_delta_rule(q, k, v, g, beta)
    torch.testing.assert_close(found, reference(q, k, v, g, beta, norm=False), rtol=1e-5, atol=1e-5)


def test_bf16_rule_equals_fp32_up_to_rounding() -> None:
    low = inputs(2, 90, 2, 2, 8, 8, torch.bfloat16)
    high = [one.detach().float().requires_grad_() for one in low]
    found = outcome(ours, low)
    assert found["out"].dtype == torch.bfloat16
    worst = differences(found, outcome(reference, high))
    assert max(worst.values()) < 2**-7, worst


def test_bf16_gemms_equal_fp32_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(left: Tensor, right: Tensor) -> Tensor:
        seen.update((left.dtype, right.dtype))
        return left.float() @ right.float()

    seen: set[torch.dtype] = set()
    monkeypatch.setattr(delta_rule, "on_gpu", lambda _: True)  # a GPU multiplies bf16 and accumulates in fp32
    monkeypatch.setattr(delta_rule, "bmm_fp32", product)
    low = inputs(2, 300, 2, 2, 8, 8, torch.bfloat16)
    high = [one.detach().float().requires_grad_() for one in low]
    worst = differences(outcome(ours, low), outcome(reference, high))
    assert max(worst.values()) < 2**-5, worst
    assert seen == {torch.bfloat16}


def test_saves_the_inputs_and_the_states_before_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "CHUNK", 16)
    monkeypatch.setattr(delta_rule, "STATE_BYTES", 4 * 4 * 8 * 16 * 4)  # blocks of four chunks
    tensors = inputs(2, 256, 2, 2, 8, 16)
    states = 2 * (256 // 64 - 1) * 4 * 8 * 16 * 4
    assert kept_bytes(ours, tensors) == sum(one.nbytes for one in tensors) + states


@given(rows=st.integers(1, 600), tokens=st.integers(1, 200_000), heads=st.sampled_from([1, 4, 32, 64]))
def test_blocks_cover_every_token_within_the_memory_limit(rows: int, tokens: int, heads: int) -> None:
    found = plan(rows, tokens, heads, 128, 128)
    assert found.along()[-1].stop == tokens
    assert len(found.along()) == found.blocks
    assert sum(one.stop - one.start for one in found.of_rows()) == rows
    states = 4 * heads * 128**2 * found.block_rows * (found.block_tokens // found.chunk)
    assert states <= max(delta_rule.STATE_BYTES, 4 * heads * 128**2)


def test_flop_formula_counts_the_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "CHUNK", 8)
    monkeypatch.setattr(delta_rule, "STATE_BYTES", 3 * 4 * 6 * 4 * 5)  # blocks of three chunks
    q, k, v, g, beta = (one.detach() for one in inputs(2, 60, 2, 3, 4, 5))
    blocks = plan(2, 60, 6, 4, 5)

    def counted(products: delta_rule.GemmCounts) -> int:
        every = [(rows, tokens) for rows in blocks.of_rows() for tokens in blocks.along()]
        return sum(delta_rule._flop(rows, tokens, 8, k, v, products) for rows, tokens in every)

    with FlopCounterMode(display=False) as forward:
        out, starts = delta_rule._rule_forward(q, k, v, g, beta, True)
    with FlopCounterMode(display=False) as backward:
        delta_rule._rule_backward_impl(torch.ones_like(out), starts, q, k, v, g, beta, True)
    assert forward.get_total_flops() == counted(delta_rule.FORWARD)
    assert backward.get_total_flops() == counted(delta_rule.BACKWARD)


def mixer() -> Any:
    """The delta mixer of a tiny model."""
    config = transformers_config(FAMILIES["qwen3_next"])
    torch.manual_seed(3)
    made: Any = qwen.Qwen3NextGatedDeltaNet(config, config.layer_types.index("linear_attention"))
    return made


def outcome_of_mixer(module: Any, hidden: Tensor) -> dict[str, Tensor]:
    """The output of a mixer and the gradients of its input and weights."""
    out = module(hidden)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    names, every = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad((out * weights).sum(), (hidden, *every))
    return dict(zip(("out", "hidden", *names), (out.detach(), *found), strict=True))


def test_mixers_of_a_model_use_the_chunked_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, lean = mixer(), mixer()
    holder = torch.nn.ModuleList([lean, torch.nn.Linear(2, 2)])
    assert use_chunked_scans(holder) == 1
    assert gated_norms.fuse_gated_norms(holder) == 1
    hidden = torch.randn(2, 70, plain.hidden_size).requires_grad_()
    expected = outcome_of_mixer(plain, hidden)
    monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", None)  # it must not be called
    worst = differences(outcome_of_mixer(lean, hidden), expected)
    # Transformers' gradient of decays is a small difference of large numbers, whose error adds up over tokens.
    assert max(worst.pop(name) for name in ("A_log", "dt_bias")) < 1e-4
    assert max(worst.values()) < 1e-5, worst
    with pytest.raises(TypeError):
        plain(hidden)


def test_queries_and_keys_are_not_saved_per_head() -> None:
    plain, lean = mixer(), mixer()
    use_chunked_scans(torch.nn.ModuleList([lean]))
    gated_norms.fuse_gated_norms(lean)
    hidden = torch.randn(2, 256, plain.hidden_size).requires_grad_()
    tokens, qkv, z = 2 * 256, 2 * plain.key_dim + plain.value_dim, plain.value_dim
    weights = sum(one.nbytes for one in lean.parameters())
    convolved = 2 * qkv  # the convolution's input and output; a few numbers for each head
    numbers = plain.hidden_size + convolved + qkv + 2 * z + plain.value_dim + 12 * plain.num_v_heads
    states = 2 * plain.num_v_heads * plain.head_k_dim * plain.head_v_dim * 4
    assert kept_bytes(lean, [hidden]) <= 4 * tokens * numbers + states + 2 * weights
    assert kept_bytes(plain, [hidden]) > 2 * kept_bytes(lean, [hidden])


def test_generation_uses_the_cached_state() -> None:
    lean = mixer()
    use_chunked_scans(lean)
    seen = {}

    class Cache:
        layers = (None,) * 4

        def has_previous_state(self, *_: Any, **__: Any) -> bool:
            return False

        def update_conv_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
            return states

        def update_recurrent_state(self, state: Tensor, *_: Any, **__: Any) -> None:
            seen["state"] = state

    hidden = torch.randn(2, 9, lean.hidden_size)
    torch.testing.assert_close(lean(hidden, cache_params=Cache()), lean(hidden), rtol=1e-5, atol=1e-6)
    assert seen["state"].shape == (2, lean.num_v_heads, lean.head_k_dim, lean.head_v_dim)


@pytest.mark.parametrize("low", [False, True])
def test_norms_before_a_gate_save_only_their_inputs(low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_norms, "BLOCK_ELEMENTS", 3 * 24)  # rows come in blocks of three
    plain, lean = (qwen.Qwen3NextRMSNormGated(24) for _ in range(2))
    assert gated_norms.fuse_gated_norms(torch.nn.ModuleList([lean])) == 1
    kind = torch.bfloat16 if low else torch.float32
    generator = torch.Generator().manual_seed(2)
    x, gate = (torch.randn(14, 24, generator=generator).to(kind).requires_grad_() for _ in range(2))

    def through(norm: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2.0, 24))
        out = norm(x, gate)
        assert out.dtype == kind
        weights = torch.linspace(-1.0, 2.0, out.numel()).view(out.shape)
        found = torch.autograd.grad((out * weights).sum(), (x, gate, norm.weight))
        return dict(zip(("out", "x", "gate", "weight"), (out.detach(), *found), strict=True))

    worst = differences(through(lean), through(plain))
    assert max(worst.values()) < (2**-6 if low else 1e-5), worst
    assert kept_bytes(lean, [x, gate]) == x.nbytes + gate.nbytes + lean.weight.nbytes


@pytest.mark.slow
def test_a_compiled_mixer_is_one_graph() -> None:
    lean = mixer()
    use_chunked_scans(lean)
    hidden = torch.randn(2, 37, lean.hidden_size)
    expected = lean(hidden)
    lean.compile(fullgraph=True)
    torch.testing.assert_close(lean(hidden), expected, rtol=1e-5, atol=1e-6)
