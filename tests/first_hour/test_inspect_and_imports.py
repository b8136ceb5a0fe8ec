"""A narrower embedding, heads without a width, and what `recommend` imports."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.json_text import decode_float
from meshwright.models import inspection, spec_from_config

OPT_350M = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 24,
            "num_attention_heads": 16, "ffn_dim": 4096, "vocab_size": 50272, "max_position_embeddings": 2048,
            "word_embed_proj_dim": 512, "do_layer_norm_before": False}  # fmt: skip
GLM_4V = {"model_type": "glm4v_moe", "vision_config": {}, "text_config": {
            "model_type": "glm4v_moe_text", "hidden_size": 4096, "num_attention_heads": 96, "num_key_value_heads": 8,
            "num_hidden_layers": 4, "intermediate_size": 10944, "vocab_size": 151424}}  # fmt: skip


def test_an_embedding_narrower_than_the_layers_is_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from meshwright.engine.architecture import describe

    monkeypatch.setattr(inspection, "_described", lambda text: describe(json.loads(text, object_hook=decode_float)))
    spec = spec_from_config(OPT_350M, "opt_350m")
    assert spec.params.total == 331_196_416  # transformers' OPTForCausalLM of this config
    assert any("the embedding's width 512; the layers' is 1024" in one for one in spec.assumed)


def test_heads_that_do_not_divide_the_width_have_a_fix(tmp_path: Path, meshwright: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GLM_4V))
    found = meshwright("inspect", str(file))
    assert found.code == 2
    assert "text_config.num_attention_heads=96: hidden_size=4096 is not divisible" in found.err
    assert '"head_dim": N' in found.err


@pytest.mark.parametrize("package", ["api", "frameworks"])
def test_no_module_hides_a_name_that_is_loaded_on_first_use(package: str) -> None:
    found = importlib.import_module(f"meshwright.{package}")
    folder = Path(str(found.__file__)).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    lazy = found.__getattr__.names
    assert lazy
    assert not modules & lazy
    assert all(getattr(found, name) is not None for name in lazy)
