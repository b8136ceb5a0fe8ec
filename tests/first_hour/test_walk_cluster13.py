"""Plans for a cluster: V-shaped schedules, what Megatron scripts leave out, and files that move between frameworks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 64000,
}


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path / "config.json")


def test_a_v_has_the_head_on_the_first_rank(meshwright: Any, small: str) -> None:
    """Dry runs of these layouts: 7.42 GiB (zbv) and 7.66 GiB (dualpipe_v), of which the head's logits are 0.74 GiB."""
    words = (small, "--goal", "pretrain", "--gpus", "4xH100", "layout.tp=1", "layout.cp=1", "data.seq_length=4096")
    words = (*words, "layout.pp=4", "layout.vp=2", "train.micro_batch_size=1", "train.global_batch_size=16", "--json")
    for schedule, dry in (("zbv", 7.42), ("dualpipe_v", 7.66)):
        stages = meshwright("estimate", *words, f"layout.pp_schedule={schedule}").json
        first, *_, last = stages["memory_by_stage_gib"].values()
        assert first["total"] == pytest.approx(dry, rel=0.06)
        assert first["logits"] == pytest.approx(0.74, rel=0.02)
        assert last["logits"] == 0
        assert last["weights"] < first["weights"] / 3  # neither embedding nor head
