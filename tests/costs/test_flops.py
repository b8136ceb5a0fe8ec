"""FLOPs per token compared with the figures that frameworks print."""

from __future__ import annotations

import pytest

from meshwright import costs
from meshwright.models import find

from .helpers import case, diffusion, llama, mixtral


def test_llama_8b_as_megatron_and_as_torchtitan_count_it():
    one = case(llama(), seq_length=4096)
    assert costs.flops_per_token(one, "causal") / 1e9 == pytest.approx(48.25, rel=0.003)
    assert costs.flops_per_token(one, "full") / 1e9 == pytest.approx(51.47, rel=0.003)


def test_llama_70b_as_megatron_bridge_counts_it():
    model = find("llama3-70b")
    assert costs.flops_per_token(case(model, seq_length=8192), "causal") / 1e9 == pytest.approx(449, rel=0.003)
    assert costs.flops_per_token(case(model, seq_length=8192), "full") / 1e9 == pytest.approx(481.5, rel=0.003)
    assert costs.flops_per_token(case(model, seq_length=4096), "full") / 1e9 == pytest.approx(449.22, rel=0.003)


def test_deepseek_v3_with_and_without_prediction_modules():
    model = find("deepseek-v3")
    plain = costs.flops_per_token(case(model, seq_length=4096)) / 1e9
    with_mtp = costs.flops_per_token(case(model, seq_length=4096, mtp_loss=0.1)) / 1e9
    assert plain == pytest.approx(249.7, rel=0.01)
    assert with_mtp == pytest.approx(260, rel=0.01)


def test_frozen_weights_have_no_weight_gradient():
    tuned = costs.flops_per_token(case(llama(), goal="peft", seq_length=4096))
    assert tuned / costs.flops_per_token(case(llama(), seq_length=4096)) == pytest.approx(2 / 3, abs=0.03)


def test_only_the_chosen_experts_count():
    few, many = (costs.flops_per_token(case(mixtral(experts=n))) for n in (8, 64))
    assert few == many


def test_a_window_bounds_attention():
    model = find("gpt-oss-20b")
    short, long = (costs.flops_per_token(case(model, seq_length=s)) for s in (4096, 8192))
    full_layers = llama(24, 2880, 2880, 64, 8, 201088)
    dense_short, dense_long = (costs.flops_per_token(case(full_layers, seq_length=s)) for s in (4096, 8192))
    assert long - short < 0.8 * (dense_long - dense_short)


def test_diffusion_is_bidirectional_and_has_no_head():
    one = case(diffusion(), seq_length=32760)
    assert costs.flops_per_token(one, "causal") == costs.flops_per_token(one, "full")
