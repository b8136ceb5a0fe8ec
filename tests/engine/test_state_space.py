"""Our Mamba-2 scan equals transformers' reference and saves only its inputs and a few states."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine import scans
from tests.engine.families import FAMILIES
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

from meshwright.engine.kernels import gated_norms, state_space
from meshwright.engine.kernels.scan_patch import use_chunked_scans
from meshwright.engine.kernels.state_space import plan, state_space_scan
from meshwright.engine.model.build import transformers_config

REFERENCE: Any = nemotron.mamba2_chunk_scan
LIMITS = (0.3, 2.5)  # some steps are outside
outcome = partial(scans.outcome, names=("out", "x", "dt", "A_log", "B", "C", "D", "dt_bias"))
differences = partial(scans.differences, floor=1e-12)


def inputs(
    rows: int, tokens: int, groups: int, heads: int, width: int, state: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """x, dt, A_log, B, C, D and dt_bias of a layer, `heads` for each group; decays from weak to complete."""
    generator = torch.Generator().manual_seed(tokens * heads + state)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    every = groups * heads
    tensors = [numbers(rows, tokens, every, width), numbers(rows, tokens, every), torch.linspace(-3, 4, every)]
    tensors += [numbers(rows, tokens, groups, state), numbers(rows, tokens, groups, state)]
    tensors += [numbers(every), numbers(every)]
    low = {0, 1, 3, 4}  # parameters of a layer stay in fp32 here
    return [one.to(dtype if i in low else torch.float32).requires_grad_() for i, one in enumerate(tensors)]


def ours(x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor) -> Tensor:
    """Our scan."""
    return state_space_scan(x, dt, -a_log.exp(), b, c, d, bias, softplus=True, limits=LIMITS)


def reference(x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor) -> Tensor:
    """The scan of transformers."""
    options = {"D": d, "dt_bias": bias, "dt_softplus": True, "dt_limit": LIMITS}
    out: Tensor = REFERENCE(x, dt, -a_log.exp(), b, c, chunk_size=16, **options)
    return out


@settings(max_examples=12)
@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 70),
    groups=st.integers(1, 3),
    heads=st.integers(1, 3),
    width=st.integers(1, 5),
    state=st.integers(1, 5),
    chunk=st.sampled_from([4, 16, 128]),
    matrices=st.sampled_from([1, 3, 1000]),
)
def test_scan_equals_transformers(
    rows: int, tokens: int, groups: int, heads: int, width: int, state: int, chunk: int, matrices: int
) -> None:
    tensors = inputs(rows, tokens, groups, heads, width, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_space, "CHUNK", chunk)
        patch.setattr(state_space, "MATRIX_BYTES", matrices * 4 * groups * heads * min(chunk, tokens) ** 2)
        found = outcome(ours, tensors)
    exact = [one.detach().double().requires_grad_() for one in tensors]  # in fp32 the reference is less exact than ours
    worst = differences(found, outcome(reference, exact))
    assert max(worst.values()) < 1e-5, worst


def test_small_decays_after_large_ones_are_exact() -> None:
    tensors = inputs(1, 100, 1, 2, 4, 4)
    with torch.no_grad():
        tensors[1][:, :50] = 40.0  # the logarithms of decays add up to thousands, and then change by a little
        tensors[1][:, 50:] = -4.0
    found, expected = (outcome(partial(unlimited, scan), tensors) for scan in (state_space_scan, REFERENCE))
    worst = differences(found, expected)
    assert max(worst.values()) < 1e-5, worst


def unlimited(scan: Any, x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor) -> Tensor:
    """Run either scan without step limits."""
    if scan is state_space_scan:
        return state_space_scan(x, dt, -a_log.exp(), b, c, d, bias, softplus=True)
    out: Tensor = scan(x, dt, -a_log.exp(), b, c, 16, D=d, dt_bias=bias, dt_softplus=True)
    return out


def test_bf16_scan_equals_fp32_up_to_rounding() -> None:
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
    monkeypatch.setattr(state_space, "on_gpu", lambda _: True)  # a GPU multiplies bf16 and accumulates in fp32
    monkeypatch.setattr(state_space, "bmm_fp32", product)
    low = inputs(2, 300, 2, 2, 8, 8, torch.bfloat16)
    high = [one.detach().float().requires_grad_() for one in low]
    worst = differences(outcome(ours, low), outcome(reference, high))
    assert max(worst.values()) < 2**-6, worst
    assert torch.bfloat16 in seen


def test_scan_without_skip_bias_and_softplus() -> None:
    x, dt, a_log, b, c, _, _ = (one.detach() for one in inputs(2, 20, 1, 2, 3, 4))
    steps = dt.abs()
    found = state_space_scan(x, steps, -a_log.exp(), b, c)
    torch.testing.assert_close(found, REFERENCE(x, steps, -a_log.exp(), b, c, 16), rtol=1e-5, atol=1e-5)


def test_saves_the_inputs_and_the_states_before_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_space, "CHUNK", 16)
    monkeypatch.setattr(state_space, "MATRIX_BYTES", 4 * 4 * 16**2 * 4)  # blocks of four chunks
    tensors = inputs(2, 256, 2, 2, 8, 16)
    states = 2 * (256 // 64 - 1) * 4 * 8 * 16 * 4
    parameters = 4 * 4 * 5  # of four heads: A_log, its exponential and that one's negative, D and the bias
    assert scans.kept_bytes(ours, tensors) <= sum(tensors[i].nbytes for i in (0, 1, 3, 4)) + states + parameters


@given(rows=st.integers(1, 600), tokens=st.integers(1, 200_000), heads=st.sampled_from([1, 8, 96, 256]))
def test_blocks_cover_every_token_within_the_memory_limit(rows: int, tokens: int, heads: int) -> None:
    found = plan(rows, tokens, heads)
    assert [one.start for one in found.along()] == list(range(0, tokens, found.block_tokens))
    assert found.along()[-1].stop == tokens
    assert len(found.along()) == found.blocks
    assert sum(one.stop - one.start for one in found.of_rows()) == rows
    together = 4 * heads * found.chunk * found.block_tokens * found.block_rows
    assert together <= max(state_space.MATRIX_BYTES, 4 * heads * found.chunk**2)


def mixer() -> Any:
    """The Mamba-2 mixer of a tiny model, with weights that make it sensitive."""
    config = transformers_config(FAMILIES["nemotron_h"])
    torch.manual_seed(3)
    made: Any = nemotron.NemotronHMamba2Mixer(config, config.layer_types.index("linear_attention"))
    return made


def test_only_mixers_of_a_model_use_the_chunked_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, lean = mixer(), mixer()
    assert use_chunked_scans(torch.nn.ModuleList([lean, torch.nn.Linear(2, 2)])) == 1
    hidden = torch.randn(2, 37, plain.hidden_size)
    expected = plain(hidden)
    monkeypatch.setattr(nemotron, "mamba2_chunk_scan", None)  # it must not be called
    torch.testing.assert_close(lean(hidden), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError):
        plain(hidden)
    assert use_chunked_scans(torch.nn.ModuleList([torch.nn.Linear(2, 2)])) == 0


@pytest.mark.parametrize("low", [False, True])
def test_gated_norms_save_only_their_inputs(low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_norms, "BLOCK_ELEMENTS", 3 * 24)  # rows come in blocks of three
    plain, lean = (nemotron.Zamba2RMSNormGated(24, 8) for _ in range(2))
    holder = torch.nn.ModuleList([lean])
    assert gated_norms.fuse_gated_norms(holder) == 1
    assert gated_norms.fuse_gated_norms(holder) == 0
    kind = torch.bfloat16 if low else torch.float32
    both = torch.randn(2, 7, 60, generator=torch.Generator().manual_seed(2)).to(kind).requires_grad_()
    kept = []

    def through(norm: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2.0, 24))
        with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
            out = norm(both[..., :24], both[..., 30:54])  # parts of one tensor, as in a mixer
        weights = torch.linspace(-1.0, 2.0, out.numel()).view(out.shape)
        found = torch.autograd.grad((out * weights).sum(), (both, norm.weight))
        return dict(zip(("out", "both", "weight"), (out.detach(), *found), strict=True))

    found = through(lean)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
    assert sum(storages.values()) == both.nbytes + lean.weight.nbytes
    worst = differences(found, through(plain))
    assert max(worst.values()) < (2**-7 if low else 1e-5), worst


@pytest.mark.slow
def test_a_compiled_mixer_is_one_graph() -> None:
    lean = mixer()
    use_chunked_scans(lean)
    hidden = torch.randn(2, 37, lean.hidden_size)
    expected = lean(hidden)
    lean.compile(fullgraph=True)
    torch.testing.assert_close(lean(hidden), expected, rtol=1e-5, atol=1e-6)
