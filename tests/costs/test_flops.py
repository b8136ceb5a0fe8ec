"""FLOPs per token compared with the figures that frameworks print."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import costs
from meshwright.models import config_of, find

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


def bridge_flops_of_deepseek_v4(config: dict[str, Any], seq: int, indexed: float) -> float:
    """Return training FLOPs per token as Megatron-Bridge counts them (training/utils/flop_utils.py, dsv4_hybrid).

    `indexed` is the share of all pairs for which the indexer scores compressed keys.
    """
    hidden, heads, head, q_rank = (config[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank"))
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    sparse, heavy = ratios.count(4), ratios.count(128)
    chosen = min(config["index_topk"], seq // 4)
    queries = q_rank * (hidden + heads * head + 1)
    output = heads * head * config["o_lora_rank"] + config["o_groups"] * config["o_lora_rank"] * hidden
    projections = len(ratios) * (queries + hidden * head + head + output)
    compressors = sparse * hidden * 2 * head * 2 + heavy * hidden * head * 2
    indexers = sparse * (hidden * 2 * index_dim * 2 + q_rank * index_heads * index_dim + hidden * index_heads)
    windows = len(ratios) * heads * config["sliding_window"] * head * 2
    selected = sparse * heads * chosen * (1 - chosen * 4 / (2 * seq)) * head * 2
    compressed = seq * heavy * heads * head / 128
    scores = seq * sparse * index_heads * index_dim / 4 * indexed
    experts = config["num_experts_per_tok"] + config["n_shared_experts"]
    blocks = len(ratios) * 3 * hidden * config["moe_intermediate_size"] * experts
    head_and_blocks = hidden * config["vocab_size"] + blocks
    return 6 * (projections + compressors + indexers + windows + selected + compressed + scores + head_and_blocks)


@pytest.mark.parametrize(("seq", "indexed"), [(4096, 1.0), (4096, 0.5), (65536, 0.5), (1_048_576, 0.5)])
def test_deepseek_v4_as_megatron_bridge_counts_it(seq: int, indexed: float) -> None:
    """Bridge scores masked pairs too in V4 (share 1) but not in V3.2's indexer (share 1/2), which is how we count."""
    theirs = bridge_flops_of_deepseek_v4(config_of("deepseek_v4_flash"), seq, indexed)
    ours = costs.flops_per_token(case(find("deepseek-v4-flash"), seq_length=seq), "causal")
    assert ours == pytest.approx(theirs, rel=0.01)


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
