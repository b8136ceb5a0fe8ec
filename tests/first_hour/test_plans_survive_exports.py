"""A plan has only settings that its engine's own files can say: the exported file needs what the plan said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MOE = """{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
"intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
"vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
"tie_word_embeddings": false}"""
BATCH = "train.global_batch_size=768"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "engine", "to", "extra"),
    [
        ("moe.json", "torchtitan", "torchtitan", ("data.seq_length=8192", "train.global_batch_size=576")),
        ("llama3-8b", "kempnerforge", "kempnerforge", ("layout.tp=2", "layout.pp=3")),
        pytest.param("llama3-70b", "kempnerforge", "kempnerforge", (), marks=slow),
        pytest.param("mixtral-8x7b", "kempnerforge", "kempnerforge", (), marks=slow),
        pytest.param("moe.json", "automodel", "automodel", (), marks=slow),
        pytest.param("moe.json", "automodel", "automodel", ("layout.recompute=selective",), marks=slow),
        pytest.param("moe.json", "torchtitan", "torchtitan", ("layout.recompute=selective",), marks=slow),
        pytest.param("gpt-oss-20b", "torchtitan", "torchtitan", (), marks=slow),
        pytest.param("moe.json", "megatron", "megatron-lm", (), marks=slow),
        pytest.param("moe.json", "megatron", "megatron-bridge", (), marks=slow),
        pytest.param("moe.json", "fsdp1", "accelerate", (), marks=slow),
        pytest.param("moe.json", "deepspeed", "deepspeed", (), marks=slow),
    ],
)
def test_an_exported_plan_needs_what_the_plan_said(
    model: str, engine: str, to: str, extra: tuple[str, ...], meshwright: Any
) -> None:
    """The planner took modules for recompute that torchtitan's files cannot name: 72 GiB became 95."""
    Path("moe.json").write_text(MOE)
    size = ("--gpus", "24x8xH100", *(extra if any("batch" in one for one in extra) else (*extra, BATCH)))
    planned = meshwright("recommend", model, *size, "--goal", "pretrain", "--engine", engine, "--save", "plan.toml",
                         "--json")  # fmt: skip
    assert planned.code == 0, planned
    estimate = planned.json["estimate"]
    written = meshwright("export", "plan.toml", "--gpus", "24x8xH100", "--to", to, "--out", "job", "--json")
    assert written.code == 0, written
    assert not [one for one in written.json["unmapped"] if one["field"].startswith("layout.")]
    config = next(iter(written.json["files"]))
    own = ("--model", model) if to in ("accelerate", "deepspeed") else ()
    checked = meshwright("check", f"job/{config}", "--gpus", "24x8xH100", *own, "--json").json["estimate"]
    assert checked["memory_gib"]["total"] == pytest.approx(estimate["memory_gib"]["total"], rel=0.01)
    assert checked["step_s"] == pytest.approx(estimate["step_s"], rel=0.01)


def test_modules_that_the_engine_cannot_name_are_not_counted(meshwright: Any) -> None:
    """The export of modules that torchtitan has no key for passed with the memory of the modules."""
    Path("moe.json").write_text(MOE)
    typed = ("--gpus", "24x8xH100", "train.global_batch_size=576", "data.seq_length=8192", "layout.ep=1",
             "layout.micro_batch_size=3", "kernels.compile=true", "kernels.loss=vocab_parallel",
             "layout.recompute_modules=[layernorm,moe]")  # fmt: skip
    for verb in (("export", "--out", "job"), ("launch", "--write", "job", "--scheduler", "slurm")):
        found = meshwright(verb[0], "qwen3_30b_a3b_pretrain_config", "--to", "torchtitan", *verb[1:], *typed)
        assert found.code == 1, found
        assert "the estimated peak is" in found.out + found.err
        assert not Path("job").exists()


def test_advice_on_memory_names_what_the_engine_has(meshwright: Any) -> None:
    """The fix of the uncertain memory of a torchtitan plan was a list of modules."""
    Path("moe.json").write_text(MOE)
    found = meshwright("recommend", "moe.json", "--goal", "pretrain", "--gpus", "24x8xH100", "--engine", "torchtitan",
                       "train.global_batch_size=576", "data.seq_length=8192")  # fmt: skip
    assert found.code == 0, found
    assert "recompute_modules=[layernorm" not in found.out
    assert "recompute_modules=[moe" not in found.out
