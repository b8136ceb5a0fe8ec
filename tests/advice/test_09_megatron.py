"""Megatron checkpoints become Hugging Face folders, and their pickles execute nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.advice.megatron_files import arguments, megatron_tensors, write_legacy, write_torch_dist
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
         "num_key_value_heads": 2, "vocab_size": 90, "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}


def _model(kind: str) -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES, **MODELS[kind])
    config.head_dim = SIZES["head_dim"]
    model = AutoModelForCausalLM.from_config(config)
    for tensor in model.state_dict().values():
        torch.nn.init.normal_(tensor)
    return model


def _same(folder: Path, model: Any) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, model.eval()(tokens).logits)


QUICK = ("llama", "mixtral")
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS]


@pytest.mark.parametrize("kind", KINDS)
def test_torch_dist(kind: str, tmp_path: Path, meshwright: Any) -> None:
    model = _model(kind)
    run = tmp_path / "run"
    write_torch_dist(run / "iter_0000007", megatron_tensors(model), arguments(model.config))
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    answer = meshwright("convert", str(run), str(tmp_path / "out"), "--json")
    assert answer.code == 0, answer.err
    _same(tmp_path / "out", model)
    wrong = meshwright("convert", str(run), str(tmp_path / "other"), "--checkpoint", "9", "--json")
    assert wrong.json["error"]["fix"] == ["--checkpoint 7"]


LAYOUTS = [
    ("mixtral", 2, 2, 2),
    ("llama", 2, 2, 1),
    *(
        pytest.param(*layout, marks=pytest.mark.slow)
        for layout in (("llama", 1, 1, 1), ("qwen2", 2, 1, 1), ("qwen3_moe", 1, 1, 4))
    ),
]


@pytest.mark.parametrize(("kind", "tp", "pp", "ep"), LAYOUTS)
def test_legacy(kind: str, tp: int, pp: int, ep: int, tmp_path: Path, meshwright: Any) -> None:
    model = _model(kind)
    write_legacy(tmp_path / "iter", megatron_tensors(model), arguments(model.config), tp, pp, ep)
    answer = meshwright("convert", str(tmp_path / "iter"), str(tmp_path / "out"), "--json")
    assert answer.code == 0, answer.err
    _same(tmp_path / "out", model)
    if tp > 1:
        missing = next(one for one in (tmp_path / "iter").iterdir())
        missing.rename(tmp_path / "away")
        refused = meshwright("convert", str(tmp_path / "iter"), str(tmp_path / "again"), "--json")
        assert refused.code == 3
        assert not (tmp_path / "again").exists()


class _Harmful:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_pickles_execute_nothing(tmp_path: Path, meshwright: Any) -> None:
    model, marker = _model("llama"), tmp_path / "executed"
    tensors, args = megatron_tensors(model), arguments(model.config, rng=_Harmful(marker))
    write_torch_dist(tmp_path / "dist", tensors, args)
    write_legacy(tmp_path / "legacy", tensors, args)
    for name in ("dist", "legacy"):
        assert meshwright("convert", str(tmp_path / name), str(tmp_path / f"{name}-out")).code == 0
    (tmp_path / "dist" / ".metadata").write_bytes(pickle.dumps(_Harmful(marker)))
    assert meshwright("convert", str(tmp_path / "dist"), str(tmp_path / "third")).code == 3
    assert not marker.exists()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"swiglu": False}, "without a gated activation"),
        ({"normalization": "LayerNorm"}, "without RMSNorm"),
        ({"multi_latent_attention": True}, "multi-latent attention"),
        ({"num_layers": None}, "has no arguments of its run"),
    ],
)
def test_other_models_are_refused(changed: dict[str, Any], reason: str, tmp_path: Path, meshwright: Any) -> None:
    model = _model("llama")
    write_torch_dist(tmp_path / "dist", megatron_tensors(model), arguments(model.config, **changed))
    refused = meshwright("convert", str(tmp_path / "dist"), str(tmp_path / "out"), "--json")
    assert refused.code == 2
    assert reason in refused.json["error"]["message"]
    if changed == {"num_layers": None}:
        model.config.save_pretrained(tmp_path / "config")
        given = ("--model", str(tmp_path / "config"))
        assert meshwright("convert", str(tmp_path / "dist"), str(tmp_path / "out"), *given, "--json").code == 0
        _same(tmp_path / "out", model)
    evaluated = meshwright("evaluate", str(tmp_path / "dist"), "--dataset", "mock", "--json")
    assert evaluated.json["error"]["fix"] == [f"meshwright convert {tmp_path / 'dist'} OUT"]
