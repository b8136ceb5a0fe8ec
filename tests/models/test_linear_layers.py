"""The linear layers of families that name them as Llama does are those of transformers' classes."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.models import find
from meshwright.models.linear_layers import ENCODERS, FAMILIES, LINEAR_LAYERS, OUTSIDE, missing_targets


def small(transformers: Any, family: str) -> Any:
    cls = getattr(transformers, f"{family}ForConditionalGeneration", None) or getattr(
        transformers, f"{family}ForCausalLM"
    )
    config = cls.config_class()
    for one in (config, config.get_text_config(), getattr(config, "vision_config", None)):
        for key in ("num_hidden_layers", "depth"):
            if getattr(one, key, None):
                setattr(one, key, 1)
        if getattr(one, "layer_types", None):
            one.layer_types = one.layer_types[:1]
    return cls(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_llamas_names_have_no_others(family: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = small(transformers, family)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    names = {name.rpartition(".")[2] for name in linear}
    encoder = {name.rpartition(".")[2] for name in linear if "vis" in name}
    assert {*LINEAR_LAYERS} <= names
    assert names - {*LINEAR_LAYERS, *OUTSIDE} <= ({*ENCODERS, "0", "2"} if encoder else set())


@pytest.mark.parametrize(
    ("model", "targets", "lacks"),
    [
        ("qwen3-14b", ("c_attn",), True),
        ("qwen3-14b", ("query_key_value", "dense"), True),
        ("qwen3-14b", ("model.layers.3.self_attn.q_proj", "w_pack"), False),
        ("qwen3-14b", (".*attn.*",), False),
        ("qwen3-14b", ("all-linear",), False),
        ("gemma-3-4b", ("fc1", "out_proj"), False),  # of its vision encoder
        ("gemma-3-4b", ("Wqkv",), True),
        ("phi-4", ("qkv_proj",), False),
        ("deepseek-v3", ("kv_b_proj",), False),
    ],
)
def test_targets_that_a_model_does_not_have(model: str, targets: tuple[str, ...], lacks: bool) -> None:
    assert (missing_targets(find(model), targets) == [*targets]) is lacks
