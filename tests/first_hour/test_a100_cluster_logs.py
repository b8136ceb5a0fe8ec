"""An A100 cluster compared with rented H100: logs of its runs, and files without a known model."""

from __future__ import annotations

import json
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


OWN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 32,
    "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 8192,
    "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 1000000,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
TITAN = """[model]
name = "qwen3"
flavor = "3B"
converters = []
[optimizer]
name = "AdamW"
lr = 6e-4
[training]
local_batch_size = 4
global_batch_size = 256
seq_len = 4096
steps = 286000
dataset = "c4"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
TITAN_HEAD = """[titan] 2026-11-10 10:00:00,000 - root - INFO - Building 1-D device mesh with ['dp_shard'], [64]
[titan] 2026-11-10 10:00:00,000 - root - INFO - CUDA capacity: NVIDIA A100-SXM4-80GB with 79.15GiB memory
[titan] 2026-11-10 10:00:00,000 - root - INFO - Model qwen3 3B size: {size} total parameters
[titan] 2026-11-10 10:00:00,000 - root - INFO - Applied selective activation checkpointing to the model
[titan] 2026-11-10 10:00:00,000 - root - INFO - Applied FSDP to the model
[titan] 2026-11-10 10:00:00,000 - root - INFO - Trainer is initialized with local batch size 4, global batch size 256, \
gradient accumulation steps 1, sequence length 4096, total steps 286000 (warmup 2000)
"""


def own_model() -> int:
    """Write a model that no catalogue has, and its torchtitan file; return its parameters."""
    from meshwright import models

    Path("q3b").mkdir()
    Path("q3b/config.json").write_text(json.dumps(OWN))
    Path("ran.toml").write_text(TITAN)
    return int(models.find("./q3b").params.total)


def titan_log(path: str, size: int, tps: int = 5060) -> None:
    """Write a log of torchtitan whose model is a flavor of the user's own."""
    line = "[titan] 2026-11-10 10:00:32,625 - root - INFO - step: {step}  loss: {loss:.5f}  grad_norm:  0.9480  "
    line += "memory: 31.42GiB(39.70%)  tps: {tps:,}  tflops: 97.68  mfu: 31.31%\n"
    steps = (
        line.format(step=step, loss=3 + 9 * math.exp(-step / 200), tps=tps + step % 7) for step in range(1, 400, 10)
    )
    Path(path).write_text(TITAN_HEAD.format(size=f"{size:,}") + "".join(steps))


@pytest.mark.parametrize(
    "typed",
    [("estimate", "q3b", "--goal", "pretrain", "--engine", "torchtitan"), ("estimate", "ran.toml", "--model", "q3b")],
)
def test_like_takes_the_model_of_the_plan_for_a_log_of_an_unknown_one(meshwright: Any, typed: tuple[str, ...]) -> None:
    titan_log("titan.log", own_model())
    same = ("train.global_batch_size=256", "layout.micro_batch_size=4", "layout.recompute=selective", "layout.tp=1")
    same += ("layout.sp=false", "layout.pp=1", "layout.cp=1", "kernels.compile=false")
    line = (*typed, "--gpus", "uni.toml", "--like", "titan.log")
    found = meshwright(*line, *(() if "ran.toml" in typed else same), "--json")
    assert found.code == 0, found.err
    assert found.json["estimate"]["step_s"] == pytest.approx(256 * 4096 / 64 / 5063, rel=0.02)
    assert "whose model qwen3 3B is not in the catalogue: " in " ".join(meshwright(*line).out.split())


def test_a_log_that_names_no_nodes_ran_on_those_of_the_users_file(meshwright: Any) -> None:
    titan_log("titan.log", own_model())
    typed = ("recommend", "q3b", "--gpus", "uni.toml", "--goal", "pretrain", "--engine", "torchtitan")
    assert meshwright(*typed, "--save", "own.toml", "layout.recompute=selective", "kernels.compile=false").code == 0
    flags = {name.replace("_", "-"): value for name, value in ARGUMENTS.items() if value not in ("False", "None")}
    flags = {name: f"'{value}'" if " " in value else value.replace("True", "") for name, value in flags.items()}
    words = " ".join(
        f"--{name} {value}" for name, value in flags.items() if name not in ("world-size", "train-samples")
    )
    Path("job.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=16\n#SBATCH --gpus-per-node=4\n"
        f"srun torchrun --nnodes 16 --nproc-per-node 4 --rdzv-backend c10d pretrain_gpt.py {words} --train-iters 9\n"
    )
    for target, more, gpus in (
        ("own.toml", (), "16x4xA100-80"),
        ("own.toml", ("--gpus", "A100-80"), "16x4xA100-80"),
        ("own.toml", ("--gpus", "8x8xA100-80"), "8x8xA100-80"),
        ("ran.toml", ("--model", "q3b"), "8x8xA100-80"),
    ):
        found = meshwright("doctor", "titan.log", "--recipe", target, *more, "--json")
        assert (found.json["gpus"], found.json["model"]) == (gpus, "q3b"), (target, more)
    megatron_log("run.log")
    found = meshwright("doctor", "run.log", "--recipe", "job.sh", "--gpus", "A100-80", "--json")
    assert found.json.get("gpus") == "16x4xA100-80", found.json


def test_the_fix_of_a_calibration_whose_file_differs_from_the_log_works(meshwright: Any) -> None:
    titan_log("titan.log", own_model())
    typed = ("recommend", "q3b", "--gpus", "uni.toml", "--goal", "pretrain", "--engine", "torchtitan")
    assert meshwright(*typed, "--save", "own.toml", "layout.recompute=none").code == 0
    error = meshwright("calibrate", "titan.log", "--recipe", "own.toml", "--json").json["error"]
    assert "recompute=selective" in error["message"]
    words = error["fix"][0].partition(" in place of --recipe")[0].split()
    assert words == ["--model", str(Path("q3b").resolve())]
    assert meshwright("calibrate", "titan.log", *words).code == 0


def test_like_refuses_the_log_of_a_model_of_another_size(meshwright: Any) -> None:
    own_model()
    titan_log("titan.log", 16_291_332_096)
    found = meshwright("estimate", "ran.toml", "--model", "q3b", "--gpus", "uni.toml", "--like", "titan.log")
    assert found.code == 2
    assert "has 16.3 B parameters" in found.err
    assert "--recipe" not in found.err


def test_like_takes_the_file_of_the_plan_for_arguments_that_lack_the_model(meshwright: Any) -> None:
    megatron_log("run.log", num_layers="None", hidden_size="None")
    typed = ("estimate", "deepseek_v2_lite", "--goal", "pretrain", "--engine", "megatron", "--gpus", "uni.toml")
    found = meshwright(*typed, "--like", "run.log")
    assert found.code == 0, found.out + found.err
    assert "min_lr" not in found.err
    assert "which has no known model: deepseek_v2_lite is assumed" in " ".join(found.out.split())


def test_a_jump_of_a_falling_loss_is_seen_and_measured_from_the_level_just_before(meshwright: Any) -> None:
    megatron_log("run.log", spikes=(400, 410, 800))
    found = meshwright("doctor", "run.log", "--gpus", "uni.toml", "--json").json
    (spikes,) = [one for one in found["findings"] if one["rule"] == "loss.spikes"]
    assert spikes["steps"] == [400, 800]
    highest = next(one for one in spikes["evidence"] if one["name"] == "highest loss")
    before = 2.4 + 8.8 * math.exp(-390 / 220)
    assert highest["against"] == pytest.approx(before, rel=0.06)


def test_a_format_that_the_gpu_lacks_is_an_error_without_a_model(meshwright: Any) -> None:
    own_model()
    text = Path("ran.toml").read_text()
    Path("fp8.toml").write_text(text.replace("converters = []", 'converters = ["quantize.linear.float8"]'))
    found = " ".join(meshwright("check", "fp8.toml", "--gpus", "uni.toml").out.split())
    assert "A100-80 does not support FP8" in found
    assert "fix: model.converters = []" in found
    assert "does not support FP8" not in meshwright("check", "fp8.toml", "--gpus", "8xH100").out
    Path("old.toml").write_text(text.replace("converters = []", 'converters = ["float8"]'))
    found = meshwright("check", "old.toml", "--gpus", "uni.toml").out
    assert "fix: model.converters" not in found
    assert "30B-A3B" not in found.partition("Repair")[2]  # another size is another model
    assert (
        'fix: model.converters = ["quantize.linear.float8"]' in meshwright("check", "old.toml", "--gpus", "8xH100").out
    )


@pytest.mark.parametrize("model", ["llama3_8b", "deepseek_v2_lite", "qwen3_30b_a3b"])
def test_rules_of_gpus_read_nothing_about_the_model(model: str) -> None:
    from meshwright import models, rules
    from meshwright.clusters import cluster
    from meshwright.frameworks.model_free import GPU_RULES
    from meshwright.planner import case_of
    from meshwright.recipes import index, overrides

    stated = ("precision.matmul=fp8_tensor", "kernels.attention=flash", "layout.tp=8", "layout.sp=true")
    recipe = overrides.apply(index.load("llama3_8b_pretrain_config"), stated)
    broken = {
        one: bool(rules.RULES[one].broken(case_of(recipe, models.find(model), cluster("4x4xV100-32"))))
        for one in GPU_RULES
    }
    assert broken == {one: one != "precision.block-scaled-gpu" for one in GPU_RULES}


def test_a_repair_removes_all_keys_of_a_format_that_the_gpu_lacks(meshwright: Any) -> None:
    own_model()
    text = Path("ran.toml").read_text().replace("converters = []", 'converters = ["float8"]')
    text = text.replace("local_batch_size = 4", "local_batch_size = 8")
    keys = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
    Path("old.toml").write_text(text + "[quantize.linear.float8]\n" + "".join(f"{key} = true\n" for key in keys))
    repair = meshwright("check", "old.toml", "--gpus", "uni.toml", "--model", "q3b").out.partition("Repair")[2]
    for key in keys:
        assert f"without quantize.linear.float8.{key}" in repair
    assert "leaves torchtitan.quantize-ignored" not in repair


MOE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.39.3",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}


@pytest.mark.parametrize(("tokens", "suggested"), [("200B", False), ("4T", True)])
def test_no_batch_is_suggested_that_leaves_too_few_steps(meshwright: Any, tokens: str, suggested: bool) -> None:
    Path("moe16").mkdir()
    Path("moe16/config.json").write_text(json.dumps(MOE))
    typed = ("recommend", "moe16", "--gpus", "uni.toml", "--goal", "pretrain", "--tokens", tokens)
    assert ("scale the batch" in meshwright(*typed).out) == suggested


def test_targets_on_two_clusters_are_compared_by_days_and_cost(meshwright: Any) -> None:
    own_model()
    Path("h64.toml").write_text('gpu = "H100"\nnodes = 8\ngpus_per_node = 8\nprice = 2.1\ncurrency = "USD"\n')
    for name, cluster in (("a", "uni.toml"), ("b", "h64.toml")):
        text = f'name = "{name}"\nmodel = "./q3b"\ngoal = "pretrain"\ncluster = "{cluster}"\n'
        Path(f"{name}.toml").write_text(text + "[train]\nglobal_batch_size = 256\nsteps = 286103\n")
    found = meshwright("compare", "a.toml", "b.toml")
    text = " ".join(found.out.split())
    assert "286,103 steps take" in text, found.err
    assert "USD" in text
    assert "its cost is unknown" in text
    assert "a network of 100 Gb/s per GPU" in text
