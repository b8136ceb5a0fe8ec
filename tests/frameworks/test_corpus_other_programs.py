"""Files that other repositories run with a framework's flags or keys: programs and keys of their own are no errors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshwright import check
from meshwright.frameworks import CheckResult

RAY = """#!/bin/bash
MODEL_ARGS=(--num-layers 28 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 16
   --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
   --normalization "RMSNorm" --swiglu --vocab-size 151936)
ROLLOUT_ARGS=(--prompt-data /data/dapo.jsonl --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 100)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --optimizer-cpu-offload --use-precision-aware-optimizer)
RUNTIME_ENV_JSON="{\\"env_vars\\": {\\"CUDA_DEVICE_MAX_CONNECTIONS\\": \\"1\\"}}"
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${RUNTIME_ENV_JSON}" -- python3 train.py \\
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --sequence-parallel \\
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]}
"""
PATCHED = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 finetune_megatron_qwen.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \\
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --lr 1e-5 --bf16 \\
  --epochs 2 --patch-size 14 --patch-tokenizer-type Qwen2Tokenizer --dataset JSON-SFT --save out
"""
HANDBOOK = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dtype: bfloat16
dataset_mixture:
  datasets:
    - {id: HuggingFaceH4/ultrachat_200k, split: train_sft, weight: 1.0}
chat_template: "{{ messages }}"
system_prompt: You are a helpful assistant.
bf16: true
learning_rate: 1.0e-05
max_length: 2048
per_device_train_batch_size: 8
output_dir: out
"""


def checked(text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> CheckResult:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    return check(name, **options)


def rules(found: CheckResult, severity: str) -> list[str]:
    return [one.rule for one in found.findings if one.severity == severity]


def test_a_ray_job_with_flags_of_its_own_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(RAY, "run.sh", tmp_path, monkeypatch, gpus="8xH100")
    assert rules(found, "error") == []
    unused = [one.field for one in found.findings if one.rule == "key.unused"]
    assert {"rollout_batch_size", "prompt_data"} <= set(unused)


def test_a_typing_error_in_a_ray_job_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = RAY.replace("--hidden-size", "--hiden-size")
    assert "key.unknown" in rules(checked(text, "run.sh", tmp_path, monkeypatch), "error")


def test_variables_of_the_runtime_environment_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = RAY.replace("CUDA_DEVICE_MAX_CONNECTIONS", "OTHER")
    found = checked(text, "run.sh", tmp_path, monkeypatch, gpus="8xH100")
    assert "megatron-lm.max-connections" in rules(found, "error")


def test_a_program_with_its_own_length_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules(checked(PATCHED, "run.sh", tmp_path, monkeypatch), "error") == []


def test_arguments_of_a_model_without_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "MODEL_ARGS=(--num-layers 28 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 16)\n"
    assert rules(checked(text, "qwen3.sh", tmp_path, monkeypatch), "error") == []


def test_many_unknown_flags_take_no_longer_than_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = " ".join(f"--rollout-setting-{place}-of-mine {place}" for place in range(60))
    text = RAY.replace("python3 train.py", f"python3 pretrain_gpt.py {flags}")
    start = time.process_time()
    checked(text, "run.sh", tmp_path, monkeypatch)
    assert time.process_time() - start < 15  # each fix that was tried compared every flag with the table: 60 s


def test_a_file_of_a_program_that_trains_with_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(HANDBOOK, "config.yaml", tmp_path, monkeypatch)
    assert (found.framework, rules(found, "error")) == ("trl", [])
    assert {one.field for one in found.findings if one.rule == "key.unused"} >= {"chat_template", "system_prompt"}


@pytest.mark.parametrize(
    ("line", "rule", "fix"),
    [
        ("learnig_rate: 1.0e-5", "key.unknown", "learning_rate: 1e-05"),
        ("torch_dtype: bfloat16", "key.removed", "dtype: bfloat16"),
        ("max_seq_length: 2048", "key.removed", "max_length: 2048"),
        ("max_prompt_length: 512", "key.removed", "without max_prompt_length"),
    ],
)
def test_typing_errors_and_removed_keys_of_trl(
    line: str, rule: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [one for one in HANDBOOK.splitlines() if one.split(":")[0] not in fix]
    found = checked("\n".join([*kept, line]), "config.yaml", tmp_path, monkeypatch)
    (finding,) = (one for one in found.findings if one.rule == rule)
    assert finding.fix == (fix,)


def test_a_ring_does_not_concern_attention_with_compressed_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "./scripts/training/train.sh --nodes 16 --gpus-per-node 4 "
        "--recipe deepseek_v4_flash_sft_openmath_thinking_packed_config --pretrained_checkpoint work/model "
        "model.pipeline_model_parallel_size=4 'model.pipeline_model_parallel_layout=Et*11|t*11|t*11|t*10mL' "
        "model.context_parallel_size=2 model.expert_model_parallel_size=8 dataset.seq_length=1024\n"
    )
    found = checked(text, "run.sh", tmp_path, monkeypatch)
    assert "sequence.sliding-window-ring" not in rules(found, "error")


def test_adapter_targets_below_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = r"""
base_model: Qwen/Qwen3-8B
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_modules: 'model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj'
datasets:
  - {path: mhenrichsen/alpaca_2k_test, type: alpaca}
sequence_len: 2048
sample_packing: true
attn_implementation: eager
use_dsv4_kernels: true
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 0.0002
output_dir: out
"""
    assert rules(checked(text, "lora.yaml", tmp_path, monkeypatch), "error") == []


@pytest.mark.parametrize("option", ["-E NCCL_ALGO=Ring -E HF_HOME=/cache", "-ce NCCL_ALGO=Ring,HF_HOME=/cache"])
def test_environment_options_of_the_performance_launcher(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        f"python scripts/performance/setup_experiment.py --account a --partition p {option} -g h100 -ng 8 -gn 8 "
        "-c bf16 --task pretrain -mr llama3_8b train.train_iters=50\n"
    )
    found = checked(text, "launch.sh", tmp_path, monkeypatch)
    assert [one for one in found.findings if one.field in ("NCCL_ALGO", "HF_HOME")] == []
