"""A university compares its A100 cluster with rented H100: logs of its runs, and files without a known model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

CLUSTER = """gpu = "A100-80"
nodes = 16
gpus_per_node = 4
nvlink_domain = 4
network_gb_s_per_node = "400 Gb/s"
host_gib = 512
"""
ARGUMENTS = {
    "bf16": "True", "ffn_hidden_size": "10944", "global_batch_size": "500", "hidden_size": "2048",
    "kv_lora_rank": "512", "lr": "0.00042", "micro_batch_size": "1", "moe_ffn_hidden_size": "1408",
    "moe_router_topk": "6", "multi_latent_attention": "True", "num_attention_heads": "16", "num_experts": "64",
    "moe_layer_freq": "[0" + ", 1" * 27 + "]", "moe_shared_expert_intermediate_size": "2816",
    "padded_vocab_size": "102400", "vocab_size": "102400", "qk_head_dim": "128", "qk_pos_emb_head_dim": "64",
    "v_head_dim": "128", "swiglu": "True", "untie_embeddings_and_output_weights": "True", "normalization": "RMSNorm",
    "add_bias_linear": "False", "position_embedding_type": "rope", "q_lora_rank": "None", "num_layers": "28",
    "expert_model_parallel_size": "2", "expert_tensor_parallel_size": "2", "pipeline_model_parallel_size": "4",
    "seq_length": "4096", "sequence_parallel": "True", "tensor_model_parallel_size": "2",
    "use_distributed_optimizer": "True", "world_size": "64", "train_samples": "48828125",
}  # fmt: skip
"""Of a DeepSeek-type model with one dense layer, as Megatron-LM prints them."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("uni.toml").write_text(CLUSTER)


def megatron_log(path: str, spikes: tuple[int, ...] = (), **arguments: str) -> None:
    """Write a log whose learning rate rises to its end and whose loss falls quickly."""
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * (47 - len(name))} {value}" for name, value in {**ARGUMENTS, **arguments}.items()]
    lines += ["-------------------- end of arguments ---------------------"]
    for step in range(10, 1001, 10):
        jump = step in spikes
        loss = 2.4 + 8.8 * math.exp(-step / 220) + 0.02 * math.sin(step) + 2.3 * jump
        lines.append(
            f" [2026-11-11 08:01:52] iteration {step:8d}/   97656 | consumed samples: {500 * step} | elapsed time per "
            f"iteration (ms): {11000 + step % 70}.0 | learning rate: {2e-7 * step:.6E} | global batch size:   500 | "
            f"lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {31.4 if jump else 0.74:.3f} | "
            "number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    Path(path).write_text("\n".join(lines) + "\n")


def test_a_longer_warmup_in_samples_has_no_figure_that_nobody_gave(meshwright: Any) -> None:
    megatron_log("run.log", spikes=(800,))
    found = meshwright("doctor", "run.log", "--gpus", "uni.toml").out
    assert "--lr-warmup-samples <longer than now>" in found
    assert "632098304" not in found
    assert "1234567" not in found


@pytest.mark.parametrize("pattern", ["[0" + ", 1" * 27 + "]", "([0]+[1]*27)", "([0]*1+[1]*27)"])
def test_the_layers_with_experts_of_a_printed_argument_are_read(meshwright: Any, pattern: str) -> None:
    megatron_log("run.log", moe_layer_freq=pattern, recompute_modules="['core_attn', 'moe_act']")
    found = meshwright("doctor", "run.log", "--gpus", "uni.toml").out
    assert "no estimate" not in found
    assert "MFU" in found.split("peak memory")[0]


def test_a_printed_list_is_one_value_or_several_as_its_flag_takes_it() -> None:
    from meshwright.doctor.formats.megatron import _shell_words

    assert _shell_words("moe_layer_freq", "[0, 1]") == "'[0, 1]'"
    assert _shell_words("recompute_modules", "['core_attn', 'moe_act']") == "core_attn moe_act"
    assert _shell_words("data_path", "['0.5', '/data/my text']") == "0.5 '/data/my text'"
