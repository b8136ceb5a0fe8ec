"""--like follows the run's own speed, and every command gives the same figures for one question."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import meshwright as package

CLUSTER = """\
gpu = "GH200"
nodes = 24
gpus_per_node = 4
network_gb_s_per_node = "800 Gb/s"
"""
OWN_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MEGATRON_ARGUMENTS = {
    "num_layers": 40, "hidden_size": 5120, "ffn_hidden_size": 13824, "num_attention_heads": 40, "num_query_groups": 8,
    "group_query_attention": True, "seq_length": 8192, "padded_vocab_size": 128256, "global_batch_size": 576,
    "micro_batch_size": 3, "tensor_model_parallel_size": 2, "context_parallel_size": 2,
    "pipeline_model_parallel_size": 1, "world_size": 96, "bf16": True, "lr": 0.0003, "clip_grad": 1.0,
    "train_iters": 317892, "swiglu": True, "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True, "sequence_parallel": True, "overlap_grad_reduce": True,
    "overlap_param_gather": True, "position_embedding_type": "rope", "normalization": "RMSNorm",
    "cross_entropy_loss_fusion": True, "recompute_granularity": None, "add_bias_linear": False, "kv_channels": 128,
    "rotary_base": 500000, "transformer_impl": "transformer_engine", "data_parallel_size": 24, "num_experts": None,
}  # fmt: skip
MEGATRON_STEP = (
    " iteration {step:8d}/  317892 | consumed samples: {samples:12d} | elapsed time per iteration (ms): {ms:.1f} | "
    "learning rate: 3.000000E-04 | global batch size:   576 | lm loss: 2.2E+00 | loss scale: 1.0 | grad norm: 0.387 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
SAME_RUN = (
    "train.global_batch_size=576", "layout.strategy=zero1", "layout.tp=2", "layout.cp=2", "layout.pp=1",
    "layout.sp=true", "layout.micro_batch_size=3", "layout.recompute=none", "layout.offload=none",
)  # fmt: skip
TITAN_LOG = """\
[titan] 2026-11-12 03:00:01,000 - root - INFO - Building 1-D device mesh with ['dp_shard'], [96]
[titan] 2026-11-12 03:00:06,000 - root - INFO - CUDA capacity: NVIDIA GH200 120GB with 95.00GiB memory
[titan] 2026-11-12 03:00:07,000 - root - INFO - Model llama3 8B size: 8,030,261,248 total parameters
[titan] 2026-11-12 03:00:08,000 - root - INFO - Applied full activation checkpointing to the model
[titan] 2026-11-12 03:00:09,000 - root - INFO - Compiling each TransformerBlock with torch.compile
[titan] 2026-11-12 03:00:09,000 - root - INFO - Applied FSDP to the model
[titan] 2026-11-12 03:00:12,000 - root - INFO - Trainer is initialized with local batch size 2, global batch size 192, \
gradient accumulation steps 1, sequence length 8192, total steps 20000 (warmup 200)
[titan] 2026-11-12 03:00:15,000 - root - INFO - Training starts at step 1
"""
TITAN_STEP = (
    "[titan] 2026-11-12 03:{minute:02d}:35,000 - root - INFO - step: {step}  loss: 11.7000  grad_norm:  3.1000  "
    "memory: 48.20GiB(50.74%)  tps: {tps}  tflops: 399.61  mfu: 40.39%\n"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    (tmp_path / "m13").mkdir()
    (tmp_path / "m13" / "config.json").write_text(json.dumps(OWN_MODEL), encoding="utf-8")
    return tmp_path


def megatron_log(path: Path, seconds: float) -> None:
    head = "using world size: 96, data-parallel size: 24, context-parallel size: 2, tensor-model-parallel size: 2, "
    lines = [head + "pipeline-model-parallel size: 1\n", "----------------- arguments -----------------\n"]
    lines += [f"  {name} {'.' * (47 - len(name))} {value}\n" for name, value in MEGATRON_ARGUMENTS.items()]
    lines += [MEGATRON_STEP.format(step=n, samples=n * 576, ms=1e3 * seconds) for n in range(10, 310, 10)]
    path.write_text("".join(lines), encoding="utf-8")


def seconds(result: Any) -> float:
    assert result.code == 0, result.out + result.err
    return float(json.loads(result.out)["estimate"]["step_s"])


@pytest.mark.parametrize("measured", [8.604, 10.5])
def test_like_gives_the_speed_of_the_run_it_follows(meshwright: Any, here: Path, measured: float) -> None:
    megatron_log(here / "full.log", measured)
    typed = ("estimate", "m13", "--engine", "megatron", "--goal", "pretrain", "--seq", "8k", "--gpus", "cluster.toml")
    found = meshwright(*typed, *SAME_RUN, "--like", "full.log", "--json")
    assert seconds(found) == pytest.approx(measured, rel=0.02)
    text = " ".join(meshwright(*typed, *SAME_RUN, "--like", "full.log").out.split())
    assert "full.log, which does not name its GPUs: 24x4xGH200 is assumed" in text


def test_recommend_like_promises_no_more_than_the_run_reaches(meshwright: Any, here: Path) -> None:
    megatron_log(here / "full.log", 8.604)
    typed = ("recommend", "m13", "--gpus", "1x4xGH200", "--goal", "pretrain", "--seq", "8k", "--like", "full.log")
    found = json.loads(meshwright(*typed, "--json").out)
    assert found["estimate"]["mfu"] < 0.6


@pytest.mark.parametrize("tps", [6903, 5400])
def test_like_reads_recompute_and_compile_of_a_torchtitan_log(meshwright: Any, here: Path, tps: int) -> None:
    steps = "".join(TITAN_STEP.format(minute=n, step=10 * n, tps=f"{tps:,}") for n in range(1, 40))
    (here / "tt.log").write_text(TITAN_LOG + steps, encoding="utf-8")
    typed = ("estimate", "llama3-8b", "--engine", "torchtitan", "--goal", "pretrain", "--seq", "8k")
    same = ("train.global_batch_size=192", "layout.micro_batch_size=2", "layout.recompute=full", "layout.tp=1")
    same += ("layout.sp=false", "layout.pp=1", "layout.cp=1", "kernels.compile=true")
    found = meshwright(*typed, "--gpus", "cluster.toml", *same, "--like", "tt.log", "--json")
    assert seconds(found) == pytest.approx(192 * 8192 / 96 / tps, rel=0.02)


PEER_RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "peer_speed.json"
BF16_STATES = ("precision.master=bf16", "precision.moments=bf16", "precision.grads=bf16", "precision.reduce=bf16")


def own_torchtitan_runs() -> list[dict[str, Any]]:
    """Return what torchtitan reached on one H200, with the overrides of each run."""
    rows = json.loads(PEER_RUNS.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["tries"].get("torchtitan")]


@pytest.mark.parametrize("row", own_torchtitan_runs(), ids=lambda row: row["name"])
def test_torchtitan_is_estimated_as_we_measured_it(meshwright: Any, here: Path, row: dict[str, Any]) -> None:
    _, model, *words = row["asked"].split()
    measured = row["tries"]["torchtitan"][-1]
    layout = ("layout.micro_batch_size=4", "layout.recompute=none", "layout.tp=1", "layout.sp=false", "layout.ep=1")
    found = meshwright("estimate", model, *words, "--engine", "torchtitan", *layout, "kernels.compile=true", "--json")
    estimate = json.loads(found.out)["estimate"]
    assert estimate["tokens_per_s_per_gpu"] == pytest.approx(measured["tokens_per_s"], rel=0.04)
    parts = estimate["memory_gib"]
    allocated = parts["total"] - parts["overhead"]
    assert allocated == pytest.approx(measured["peak_allocated_gib"], rel=0.02)
    assert estimate["fits"]


def test_compare_does_not_contradict_our_measurement(meshwright: Any, here: Path) -> None:
    typed = ("compare", "llama3-8b", "--gpus", "1xH200", "--goal", "pretrain", "--seq", "4k")
    found = meshwright(*typed, "--engines", "meshwright,torchtitan", "train.global_batch_size=4", *BF16_STATES)
    assert found.code == 0, found.err
    assert "within the uncertainty" in found.out
    assert "faster than" not in found.out


@pytest.mark.parametrize("engine", ["meshwright", "torchtitan"])
def test_plans_compile_where_the_engine_can(meshwright: Any, here: Path, engine: str) -> None:
    asked = ("m13", "--gpus", "cluster.toml", "--goal", "pretrain", "--seq", "8k", "train.global_batch_size=576")
    plan = json.loads(meshwright("recommend", *asked, "--engine", engine, "--json").out)
    assert any("kernels.compile=true" in command for command in plan["commands"].values())
    compared = json.loads(meshwright("compare", *asked, "--engines", "meshwright,torchtitan", "--json").out)
    side = next(one for one in compared["sides"] if one["name"] == engine)
    assert side["estimate"]["step_s"] == pytest.approx(plan["estimate"]["step_s"], rel=1e-3)


UNBUILDABLE = (
    "layout.micro_batch_size=4", "layout.recompute=selective", "layout.tp=1", "layout.pp=1", "layout.cp=1",
    "train.global_batch_size=576",
)  # fmt: skip


def test_a_layout_that_cannot_be_built_has_no_figures(meshwright: Any, here: Path) -> None:
    found = package.estimate("m13", "cluster.toml", "pretrain", overrides=list(UNBUILDABLE), seq="8k")
    assert not found.ok
    assert not found.estimate.fits
    assert math.isnan(found.estimate.step_s)
    assert math.isnan(found.estimate.mfu)
    assert "no figures" in str(found)
    typed = ("estimate", "m13", "--gpus", "cluster.toml", "--goal", "pretrain", "--seq", "8k", *UNBUILDABLE)
    printed = json.loads(meshwright(*typed, "--json").out)
    assert printed["estimate"]["fits"] is False
    speeds = ("step_s", "step_parts_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
    assert [printed["estimate"][name] for name in speeds] == [None] * 5
    assert any(one["severity"] == "error" and "576" in one["message"] for one in printed["findings"])
    assert "no figures: this layout cannot be built" in meshwright(*typed).out


MOE_MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2560,
    "intermediate_size": 8192, "moe_intermediate_size": 1280, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
MOE_SCRIPT = """\
torchrun --nproc_per_node 4 --nnodes 24 pretrain_gpt.py --num-layers 48 --hidden-size 2560 --num-attention-heads 32 \\
  --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --seq-length 8192 \\
  --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm \\
  --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.0 \\
  --hidden-dropout 0.0 --num-experts 128 --moe-router-topk 8 --moe-grouped-gemm --ffn-hidden-size 8192 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --expert-model-parallel-size 16 \\
  --expert-tensor-parallel-size 1 --sequence-parallel --use-distributed-optimizer --micro-batch-size 1 \\
  --global-batch-size 768 --train-iters 1000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --bf16 \\
  --data-path /data/corpus --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tok --vocab-size 128256
"""


def test_a_forgotten_width_of_experts_is_found(meshwright: Any, here: Path) -> None:
    (here / "moe.sh").write_text(MOE_SCRIPT, encoding="utf-8")
    (here / "moe60").mkdir()
    (here / "moe60" / "config.json").write_text(json.dumps(MOE_MODEL), encoding="utf-8")
    typed = ("check", "moe.sh", "--gpus", "cluster.toml")
    alone = " ".join(meshwright(*typed).out.split())
    assert "388.35 B parameters, 25.96 B active" in alone
    assert "--moe-ffn-hidden-size is not set: each of the 128 experts is 8,192 wide" in alone
    given = " ".join(meshwright(*typed, "--model", "moe60").out.split())
    assert "62.20 B parameters, 5.58 B active" in given
    assert "the file trains 388.35 B parameters, the figures here are of moe60 with 62.20 B" in given
    assert "Repair --moe-ffn-hidden-size 1280" in given  # with the fixes of other errors
    assert "remove --model" not in given
    written = MOE_SCRIPT.replace("--ffn-hidden-size 8192", "--ffn-hidden-size 8192 --moe-ffn-hidden-size 1280")
    (here / "moe.sh").write_text(written, encoding="utf-8")
    fixed = meshwright(*typed).out
    assert "62.20 B parameters" in fixed
    assert "--moe-ffn-hidden-size is not set" not in fixed


def test_a_log_without_a_model_is_calibrated_on_the_gpus_that_it_names(meshwright, tmp_path):
    step = " iteration {} | elapsed time per iteration (ms): {} | lm loss: 1.7E+00 | grad norm: 0.6 |"
    lines = [step.format(f"{n:8d}/   23841", 80400 + n % 7) for n in range(10, 400, 10)]
    head = (
        "using world size: 128, data-parallel size: 4, tensor-model-parallel size: 8, pipeline-model-parallel size: 4"
    )
    (tmp_path / "train.log").write_text("\n".join([head, *lines]))
    typed = ("llama3-70b", "--goal", "pretrain", "--like", str(tmp_path / "train.log"))
    assert "--recipe FILE --gpus 16x8xH100 --out" in meshwright("size", *typed, "--gpu", "H100").err
    (tmp_path / "own.toml").write_text('gpu = "H100"\nnodes = 2\ngpus_per_node = 4\n')
    assert (
        f"--gpus 32x{tmp_path}/own.toml --out" in meshwright("recommend", *typed, "--gpus", f"{tmp_path}/own.toml").err
    )
