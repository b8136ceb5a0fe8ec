"""Tiny transformers models with our attention equal their own eager attention, also over cp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tests.engine.attention_cases import distance
from tests.engine.ranks import run
from torch import Tensor, nn

from meshwright.engine.attention import attend, context_axis, positions, register

TOKENS, VOCAB = 32, 64
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "use_cache": False,
    "initializer_range": 0.2,
}
MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 4,  # transformers' name for the rotary width
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma2": ("Gemma2", {"sliding_window": 9, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("GptOss", MOE | {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek_v3": ("DeepseekV3", MLA),
    "mixtral": ("Mixtral", MOE | {"sliding_window": 9}),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def built(name: str, attention: str) -> nn.Module:
    family, special = MODELS[name]
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**SHARED | special)
    config._attn_implementation = attention
    torch.manual_seed(3)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:  # as large as the scores, so that errors show
            nn.init.normal_(parameter)
    return model.train()


def step(model: nn.Module, tokens: Tensor, at: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients of a fixed loss."""
    logits = model(input_ids=tokens[:, at], position_ids=at[None].expand(len(tokens), -1)).logits
    (logits * weight[:, at]).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def data() -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(9)
    return torch.randint(1, VOCAB, (2, TOKENS), generator=noise), torch.randn(2, TOKENS, VOCAB, generator=noise) / 99


def model_errors(rank: int, world: int, name: str, comm: str, inner: int) -> dict[str, float]:
    register()
    tokens, weight = data()
    logits, wanted = step(built(name, "eager"), tokens, torch.arange(TOKENS), weight)
    model = built(name, "meshwright")
    at = torch.arange(TOKENS)
    if world > 1:
        axis = context_axis([range(world)], comm, inner)
        at = positions(TOKENS, axis)
        for module in model.modules():
            module.context = axis
    found_logits, found = step(model, tokens, at, weight)
    assert found.keys() == wanted.keys()
    if world > 1:
        for grad in found.values():
            dist.all_reduce(grad)
    worst = {"logits": distance(found_logits, logits[:, at].double())}
    return worst | {part: distance(found[part], wanted[part].double()) for part in wanted}


def assert_small(ranks: list[dict[str, float]]) -> None:
    assert not [(name, error) for found in ranks for name, error in found.items() if not error < 1e-5]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_its_eager_attention(name: str) -> None:
    assert_small(run(1, model_errors, name, "", 1))


@pytest.mark.parametrize(
    ("name", "comm", "world", "inner"),
    [
        ("llama", "ring", 2, 1),
        ("gemma3", "allgather", 2, 1),
        ("gpt_oss", "a2a", 2, 1),
        ("gpt_oss", "ring", 2, 1),
        ("deepseek_v3", "a2a+ring", 4, 2),
    ],
)
def test_a_model_over_cp_has_the_gradients_of_one_rank(name: str, comm: str, world: int, inner: int) -> None:
    assert_small(run(world, model_errors, name, comm, inner))


def compiled_errors(rank: int, world: int) -> dict[str, float]:
    layer = nn.Module()
    noise = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, TOKENS, 8, generator=noise, requires_grad=True) for heads in (4, 2, 2))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(layer, q * 2, k, v)[0].sin()

    results = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        out = function(q, k, v)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    return {str(i): distance(a, b.double()) for i, (a, b) in enumerate(zip(*results, strict=True))}


def test_plain_attention_compiles_without_a_graph_break() -> None:
    assert_small(run(1, compiled_errors))
