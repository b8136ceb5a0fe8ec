"""Fixes keep the meaning of old keys, CUDA graphs of dropless experts, and models that contradict the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.api.measure import _with_own_models
from meshwright.api.requests import Calibrate
from meshwright.clusters import cluster
from meshwright.doctor.remedies import graph_candidates
from meshwright.models import find
from meshwright.planner import case_of
from meshwright.recipes import load

TITAN = """[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
{optimizer}
[lr_scheduler]
warmup_steps = 2000
[training]
local_batch_size = 1
global_batch_size = 512
seq_len = 8192
steps = {steps}
dataset = "{dataset}"
[parallelism]
data_parallel_shard_degree = -1
[checkpoint]
enable = true
interval = 500
[activation_checkpoint]
mode = "selective"
{tables}
"""
GPUS = ("--gpus", "16x8xH100")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def titan(tables: str = "", optimizer: str = "", steps: int = 238_419, dataset: str = "c4") -> str:
    Path("titan.toml").write_text(TITAN.format(tables=tables, optimizer=optimizer, steps=steps, dataset=dataset))
    return "titan.toml"


def fixes(answer: Any, rule: str = "") -> dict[str, list[str]]:
    return {one["field"]: one["fix"] for one in answer.json["findings"] if one["rule"].startswith(rule)}


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("float8.enable_float8_linear", "false", "without float8.enable_float8_linear"),
        ("float8.enable_float8_linear", "true", 'model.converters = ["quantize.linear.float8"]'),
        ("optimizer.fused", "false", 'optimizer.implementation = "foreach"'),
        ("optimizer.fused", "true", 'optimizer.implementation = "fused"'),
        ("metrics.enable_color_printing", "true", "metrics.disable_color_printing = false"),
        ("metrics.enable_color_printing", "false", "metrics.disable_color_printing = true"),
        ("experimental.enable_async_tensor_parallel", "false", "parallelism.enable_async_tensor_parallel = false"),
    ],
)
def test_a_moved_key_keeps_the_meaning_of_its_value(meshwright: Any, key: str, value: str, fix: str) -> None:
    section, _, name = key.partition(".")
    line = f"{name} = {value}"
    file = titan(optimizer=line) if section == "optimizer" else titan(f"[{section}]\n{line}")
    assert fixes(meshwright("check", file, *GPUS, "--json"), "key.")[key] == [fix]
    assert f"Fix: {fix}" in meshwright("check", file, *GPUS, "--format", "github").out


def test_options_of_a_table_that_is_off_are_left_out(meshwright: Any) -> None:
    file = titan('[float8]\nenable_float8_linear = false\nrecipe_name = "rowwise"')
    found = fixes(meshwright("check", file, *GPUS, "--json"), "key.")
    assert found["float8.recipe_name"] == ["without float8.recipe_name"]
    file = titan('[float8]\nenable_float8_linear = true\nrecipe_name = "rowwise"')
    found = fixes(meshwright("check", file, *GPUS, "--json"), "key.")
    assert found["float8.recipe_name"] == ['quantize.linear.float8.recipe_name = "rowwise"']


def test_deepspeed_sections_that_are_off_are_left_out(meshwright: Any) -> None:
    sections = '"amp": {"enabled": %s}, "elasticity": {"enabled": %s}, "curriculum_learning": {"enabled": %s}'
    text = """{"train_batch_size": 64, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2,
"cpu_offload_use_pin_memory": false}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 0.5}}, """
    Path("ds.json").write_text(text + sections % (("false",) * 3) + "}")
    words = ("check", "ds.json", "--gpus", "8xH100", "--model", "llama3-8b", "--json")
    found = fixes(meshwright(*words), "key.")
    for key in ("amp", "elasticity", "curriculum_learning"):
        assert found[key] == [f"without {key}"]
    assert found["optimizer.params.max_grad_norm"] == ['"gradient_clipping": 0.5']
    assert found["zero_optimization.cpu_offload_use_pin_memory"][0].endswith('"pin_memory": false}}')
    Path("ds.json").write_text(text + sections % (("true",) * 3) + "}")
    found = fixes(meshwright(*words), "key.")
    assert found["amp"] == ['"bf16": {"enabled": true}']
    assert found["elasticity"] == ['"train_batch_size": N']


def test_accelerate_keys_keep_their_values(meshwright: Any) -> None:
    Path("acc.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
        "num_machines: 1\nfsdp_config:\n  fsdp_version: 2\n  fsdp_cpu_offload: false\n"
        "  fsdp_backward_prefetch_policy: BACKWARD_POST\n"
    )
    found = fixes(meshwright("check", "acc.yaml", "--gpus", "8xH100", "--model", "llama3-8b", "--json"), "key.")
    assert found["fsdp_config.fsdp_cpu_offload"] == ["fsdp_config: {fsdp_offload_params: false}"]
    (fix,) = found["fsdp_config.fsdp_backward_prefetch_policy"]
    assert fix == "fsdp_config: {fsdp_backward_prefetch: BACKWARD_POST}"


MOE_JOB = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 16 --nproc-per-node 8 pretrain_gpt.py --num-layers 44 --hidden-size 2048 --ffn-hidden-size 6144 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --seq-length 4096 \\
  --max-position-embeddings 4096 --position-embedding-type rope --swiglu --normalization RMSNorm \\
  --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \\
  --num-experts 96 --moe-router-topk 6 --moe-ffn-hidden-size 1024 --moe-grouped-gemm --expert-model-parallel-size 8 \\
  --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 \\
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size 1 \\
  --global-batch-size 1024 --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \\
  --lr-warmup-iters 2000 --lr-decay-iters 100000 --weight-decay 0.1 --clip-grad 1.0 --bf16 \\
  --data-path /data/uni_text_document --tokenizer-type NullTokenizer --vocab-size 151936 --split 99,1,0 \\
  --save /ckpt --load /ckpt --save-interval 500 --te-rng-tracker {flags}
"""
WHOLE = "graphs.experts-need-capacity"


def moe_job(flags: str) -> str:
    Path("moe.sh").write_text(MOE_JOB.format(flags=flags))
    return "moe.sh"


@pytest.mark.parametrize("flags", ["local", "local --cuda-graph-scope full", "transformer_engine"])
def test_graphs_of_whole_layers_with_dropless_experts_are_refused(meshwright: Any, flags: str) -> None:
    answer = meshwright("check", moe_job(f"--cuda-graph-impl {flags}"), *GPUS, "--json")
    assert answer.code == 1
    (one,) = [each for each in answer.json["findings"] if each["rule"] == WHOLE]
    assert one["severity"] == "error"
    assert "--cuda-graph-modules attn moe_router moe_preprocess" in " ".join(one["fix"])


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router moe_preprocess", ""),
        ("--cuda-graph-impl local --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", ""),
        ("--cuda-graph-impl local --moe-expert-capacity-factor 1.0", "megatron-lm.graphs-of-unpadded-experts"),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router --recompute-granularity selective "
            "--recompute-modules moe",
            "graphs.router-recompute",
        ),
        (
            "--cuda-graph-impl transformer_engine --moe-expert-rank-capacity-factor 1.5 --moe-paged-stash "
            "--use-transformer-engine-op-fuser --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
            "",
        ),
    ],
)
def test_graphs_beside_experts(meshwright: Any, flags: str, rule: str) -> None:
    answer = meshwright("check", moe_job(flags), *GPUS, "--json")
    graphs = [one["rule"] for one in answer.json["findings"] if "graphs" in one["rule"] and one["severity"] == "error"]
    assert graphs == ([rule] if rule else [])


def test_remedies_name_graphs_that_can_be_captured() -> None:
    for model, impl in (("qwen3_30b_a3b", "transformer_engine"), ("llama3_8b", "local")):
        spec = find(model)
        (change,) = graph_candidates(case_of(load(f"{model}_pretrain_config"), spec, cluster("16x8xH100"), "megatron"))
        assert change.values["kernels.cuda_graphs"] == impl
        assert bool(change.values.get("kernels.cuda_graph_scope")) == (impl != "local")


ARGUMENTS = {
    "num_layers": 44, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 4, "kv_channels": 128, "seq_length": 4096, "swiglu": True,
    "num_experts": 96, "moe_router_topk": 6, "moe_ffn_hidden_size": 1024, "expert_model_parallel_size": 8,
    "micro_batch_size": 1, "global_batch_size": 1024, "padded_vocab_size": 151936, "bf16": True, "world_size": 128,
    "untie_embeddings_and_output_weights": True, "use_distributed_optimizer": True, "train_iters": 100000,
}  # fmt: skip
MEGATRON_STEP = (
    " [2026-11-10 09:{minute:02}:{second:09.6f}] iteration {step:8}/  100000 | consumed samples: {samples:12} | "
    "elapsed time per iteration (ms): 4600.0 | throughput per GPU (TFLOP/s/GPU): 143.2 | learning rate: 3.0E-04 | "
    "global batch size:  1024 | lm loss: 3.1{step:02}000E+00 | loss scale: 1.0 | grad norm: 0.441 |"
)
TITAN_HEAD = """[rank0]:[titan] 2026-11-12 10:01:15,001 - root - INFO - Building llama3 8B with ModelArgs(dim=4096)
[rank0]:[titan] 2026-11-12 10:01:16,101 - root - INFO - Model llama3 8B size: 8,030,261,248 total parameters
[rank0]:[titan] 2026-11-12 10:01:18,501 - root - INFO - Trainer is initialized with local batch size 2, global batch \
size 512, gradient accumulation steps 2, sequence length 8192, total steps 1000 (warmup 100).
"""
TITAN_STEP = (
    "[rank0]:[titan] 2026-11-12 10:03:{second:02},178 - root - INFO - step: {step}  loss: 3.1{step:02}  grad_norm:  "
    "0.46  memory: 47.32GiB(59.82%)  tps: 6,248  tflops: 361.66  mfu: 36.57%"
)


def write_logs() -> None:
    """Write megatron.log, which prints its arguments, bare.log without them, and titan.log of llama3_8b."""
    clock = {step: divmod(4.6 * step, 60) for step in range(1, 50)}
    steps = [
        MEGATRON_STEP.format(minute=int(minute), second=second, step=step, samples=1024 * step)
        for step, (minute, second) in clock.items()
    ]
    arguments = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in ARGUMENTS.items()]
    begin, end = (f"{'-' * 24} {words} {'-' * 24}" for words in ("arguments", "end of arguments"))
    world = "using world size: 128, data-parallel size: 128, tensor-model-parallel size: 1"
    Path("megatron.log").write_text("\n".join([world, begin, *arguments, end, *steps]))
    Path("bare.log").write_text("\n".join(steps))
    titan_steps = [TITAN_STEP.format(second=step, step=step) for step in range(1, 50)]
    Path("titan.log").write_text(TITAN_HEAD.replace("\\\n", "") + "\n".join(titan_steps))


@pytest.mark.parametrize(
    ("log", "model", "said"),
    [
        ("titan.log", "qwen3-30b-a3b", "titan.log is of llama3_8b, a model of 32 layers and 8.03 B parameters, not of"),
        ("megatron.log", "qwen3-30b-a3b", "megatron.log is of a model of 44 layers"),
        ("megatron.log", "llama3-8b", "not of llama3_8b, a model of 32 layers and 8.03 B parameters"),
    ],
)
def test_a_model_that_contradicts_the_log_is_refused(meshwright: Any, log: str, model: str, said: str) -> None:
    write_logs()
    for verb in ("doctor", "calibrate"):
        answer = meshwright(verb, log, *GPUS, "--model", model)
        assert answer.code == 2
        assert said in answer.err
        assert "without --model" in answer.err
        assert meshwright(verb, log, *GPUS).code != 2


def test_a_model_that_agrees_with_the_log_is_accepted(meshwright: Any) -> None:
    write_logs()
    for model in ("llama3-8b", "llama31_8b"):
        assert meshwright("doctor", "titan.log", *GPUS, "--model", model, "--json").json["model"].startswith("llama3")


def test_a_model_is_for_the_log_that_names_none(meshwright: Any) -> None:
    write_logs()
    request = Calibrate(("bare.log", "titan.log"), model="qwen3-30b-a3b")
    assert _with_own_models(request.runs, request) == ["titan.log"]
    answer = meshwright("calibrate", "megatron.log", "titan.log", *GPUS, "--model", "llama3-8b")
    assert answer.code == 2
    assert "megatron.log is of a model of 44 layers" in answer.err


def test_the_suggested_gpus_are_as_many_as_the_log_has(meshwright: Any) -> None:
    write_logs()
    assert "--gpus 128xH100" in meshwright("doctor", "megatron.log").out
    assert meshwright("doctor", "megatron.log", "--gpus", "128xH100").code != 2


def test_test_data_and_frequent_traces_of_a_long_training_are_reported(meshwright: Any) -> None:
    traces = "[profiling]\nenable_profiling = true\nprofile_freq = 10"
    found = fixes(meshwright("check", titan(traces, dataset="c4_test"), *GPUS, "--json"), "torchtitan.")
    assert found["training.dataset"] == ['training.dataset = "c4"']
    assert found["profiling.profile_freq"] == ["profiling.enable_profiling = false"]
    found = fixes(meshwright("check", titan(traces, dataset="c4_test", steps=1000), *GPUS, "--json"), "torchtitan.")
    assert not found.keys() & {"training.dataset", "profiling.profile_freq"}


def test_a_price_with_a_decimal_comma_is_written_as_one_word(meshwright: Any) -> None:
    words = ("recommend", "qwen3-8b", "--goal", "sft", "--gpus", "8xH100", "--tokens", "1B")
    assert "--price 1.80EUR\n" in meshwright(*words, "--price", "1,80 EUR").err
    assert meshwright(*words, "--price", "1.80EUR").code == 0


def test_losses_of_different_models_are_said_to_be_so(meshwright: Any) -> None:
    write_logs()
    answer = meshwright("compare", "megatron.log", "titan.log").out
    assert "different models" in " ".join(answer.split())
    assert "different models" not in meshwright("compare", "megatron.log", "bare.log").out
