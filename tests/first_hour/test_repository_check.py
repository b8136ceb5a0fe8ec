"""A platform team checks its repository: fixes in each front end's keys, dtypes of weights, and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from meshwright.frameworks import fixed_text
from meshwright.rules.search_values import nearest_split
from meshwright.web.app import Settings, create_app


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


AXOLOTL = """base_model: Qwen/Qwen2.5-14B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
output_dir: ./out
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 1e-5
gradient_checkpointing: true
attn_implementation: flash_attention_2
bf16: true
"""
FACTORY = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
do_train: true
finetuning_type: full
dataset: alpaca_en_demo
template: qwen
cutoff_len: 2048
output_dir: saves/qwen/full
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
bf16: true
"""
FACTORY_V1 = """model: Qwen/Qwen3-8B
train_dataset: data/v1_sft_demo.yaml
output_dir: outputs/full
micro_batch_size: 1
cutoff_len: 2048
learning_rate: 1.0e-5
max_steps: 100
bf16: true
"""
SWIFT = """NPROC_PER_NODE=8 \\
swift sft \\
    --model Qwen/Qwen2.5-{size}-Instruct \\
    --tuner_type full \\
    --dataset AI-ModelScope/alpaca-gpt4-data-en \\
    --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps 2 \\
    --learning_rate 1e-5 \\
    --max_length 2048 \\
    {dtype}--output_dir output
"""
SWIFT_YAML = """model: Qwen/Qwen2.5-14B-Instruct
tuner_type: full
dataset: AI-ModelScope/alpaca-gpt4-data-en
per_device_train_batch_size: 1
learning_rate: 1e-5
max_length: 2048
torch_dtype: bfloat16
output_dir: output
"""
TRL = """model_name_or_path: Qwen/Qwen2.5-7B
dataset_name: trl-lib/Capybara
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
max_length: 2048
num_train_epochs: 1
output_dir: out
"""
AUTOMODEL = """step_scheduler:
  global_batch_size: 64
  local_batch_size: {local}
  num_epochs: 1
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
distributed:
  _target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager
  dp_size: none
  tp_size: 1
  cp_size: 1
dataset:
  _target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset
  dataset_name: rajpurkar/squad
  split: train
optimizer:
  _target_: torch.optim.Adam
  lr: 1.0e-5
"""
DEEPSPEED = """{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 3
global_batch_size = 64
seq_len = 2048
steps = 1000
[optimizer]
lr = 3e-4
"""
MEGATRON = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 \\
  --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu \\
  --disable-bias-linear --untie-embeddings-and-output-weights --tensor-model-parallel-size 2 \\
  --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel \\
  --use-distributed-optimizer --micro-batch-size 1 --global-batch-size {batch} --train-iters 1000 --lr 1.5e-4 \\
  --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 100 --clip-grad 1.0 --bf16 --mock-data \\
  --tokenizer-type NullTokenizer --vocab-size 128256 --recompute-granularity full --recompute-method uniform \\
  --recompute-num-layers 1
"""
STATED = ["layout.micro_batch_size=1", "data.seq_length=2048"]
FILES = [
    ("a.yaml", AXOLOTL, [], "axolotl"),
    ("f.yaml", FACTORY, [], "llama-factory"),
    ("v1.yaml", FACTORY_V1, [], "llama-factory"),
    ("s.sh", SWIFT.format(size="14B", dtype="--torch_dtype bfloat16 \\\n    "), [], "ms-swift"),
    ("s.yaml", SWIFT_YAML, [], "ms-swift"),
    ("t.yaml", TRL, [], "trl"),
    ("am.yaml", AUTOMODEL.format(local=24), [], "automodel"),
    ("ds.json", DEEPSPEED, ["--model", "Qwen/Qwen3-8B", "data.seq_length=2048"], "deepspeed"),
    ("acc.yaml", ACCELERATE, ["--model", "Qwen/Qwen3-8B", "--goal", "finetune", *STATED], "accelerate"),
    ("titan.toml", TITAN, [], "torchtitan"),
    ("m.sh", MEGATRON.format(batch=63), [], "megatron-lm"),
]


@pytest.mark.parametrize(("name", "text", "words", "framework"), FILES, ids=[one[0] for one in FILES])
def test_a_file_with_its_fixes_is_one_of_the_same_framework_without_a_new_error(
    meshwright: Any, name: str, text: str, words: list[str], framework: str
) -> None:
    def check() -> dict[str, Any]:
        found: dict[str, Any] = meshwright("check", name, "--gpus", "8xH100", *words, "--json").json
        assert found["framework"] == framework
        return found

    Path(name).write_text(text)
    before = check()
    severe = [one for one in before["findings"] if one["severity"] != "advice"]
    assert severe
    fixes = before["repair"]["overrides"] if before.get("repair") else [fix for one in severe for fix in one["fix"]]
    assert fixes
    fixed = fixed_text(text, name, fixes)
    assert not fixed.left
    Path(name).write_text(fixed.text)
    after = check()
    assert not [one for one in after["findings"] if one["severity"] == "error"]
    known = {one["rule"] for one in before["findings"]}
    assert not [one for one in after["findings"] if one["severity"] == "warning" and one["rule"] not in known]
    assert "memory.state" not in {one["rule"] for one in after["findings"]}


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("f.yaml", FACTORY, ["deepspeed: examples/deepspeed/ds_z3_config.json"]),
        ("v1.yaml", FACTORY_V1, ["dist_config: {name: fsdp2}"]),
        ("t.yaml", TRL, ["accelerate_config: fsdp2"]),
        ("s.yaml", SWIFT_YAML, ["deepspeed: zero3"]),
        ("s.sh", SWIFT.format(size="14B", dtype=""), ["--deepspeed zero3"]),
        (
            "a.yaml",
            AXOLOTL,
            ["fsdp_version: 2", "fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP, reshard_after_forward: true}"],
        ),
    ],
)
def test_sharding_is_suggested_in_the_front_ends_own_keys(
    meshwright: Any, name: str, text: str, fix: list[str]
) -> None:
    Path(name).write_text(text)
    found = meshwright("check", name, "--gpus", "8xH100", "--json").json
    (state,) = (one for one in found["findings"] if one["rule"] == "memory.state")
    assert (state["field"], state["fix"]) == ("layout.strategy", fix)
    assert "precision.master" not in state["message"]


@pytest.mark.parametrize(
    ("text", "name", "bytes_per_parameter"),
    [
        (SWIFT.format(size="1.5B", dtype="--torch_dtype bfloat16 \\\n    "), "s.sh", 8),
        (SWIFT.format(size="1.5B", dtype="--torch_dtype float32 \\\n    "), "s.sh", 16),
        (SWIFT.format(size="1.5B", dtype=""), "s.sh", 8),
        (SWIFT.format(size="1.5B", dtype="--torch_dtype $DTYPE \\\n    "), "s.sh", 8),
        (AXOLOTL.replace("14B", "1.5B"), "a.yaml", 8),
        (AXOLOTL.replace("14B", "1.5B").replace("bf16: true", "bf16: auto"), "a.yaml", 8),
        (
            AXOLOTL.replace("14B", "1.5B").replace("bf16: true", "bf16: false").replace("flash_attention_2", "sdpa"),
            "a.yaml",
            16,
        ),
        (FACTORY.replace("7B", "1.5B"), "f.yaml", 16),
        (FACTORY.replace("7B", "1.5B") + "pure_bf16: true\n", "f.yaml", 8),
        (FACTORY_V1.replace("8B", "1.7B"), "v1.yaml", 16),
        (TRL.replace("7B", "1.5B"), "t.yaml", 16),
        (TRL.replace("7B", "1.5B") + "dtype: bfloat16\n", "t.yaml", 8),
    ],
)
def test_weights_are_trained_in_the_dtype_that_the_front_end_loads(
    meshwright: Any, text: str, name: str, bytes_per_parameter: int
) -> None:
    Path(name).write_text(text)
    found = meshwright("check", name, "--gpus", "8xH100", "--json").json
    memory = found["estimate"]["memory_gib"]
    gradients = memory["gradients"] / 2  # the other half are the buckets of DDP
    state = (memory["weights"] + gradients + memory["optimizer"]) * 2**30
    assert state / found["parameters"] == pytest.approx(bytes_per_parameter, rel=0.02)
    noted = [one for one in found["notes"] if "gradients and optimizer states" in one]
    assert len(noted) == (bytes_per_parameter == 8)


def test_axolotl_shards_bf16_weights_with_fsdp2_and_casts_them_with_fsdp1(meshwright: Any) -> None:
    def state(version: int) -> float:
        sharded = f"fsdp_version: {version}\nfsdp_config:\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        Path("a.yaml").write_text(AXOLOTL + sharded)
        memory = meshwright("check", "a.yaml", "--gpus", "8xH100", "--json").json["estimate"]["memory_gib"]
        return float(memory["weights"] + memory["optimizer"])

    assert state(1) == pytest.approx(2 * state(2), rel=0.05)


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "expected"),
    [
        (64, 24, 8, (64, 8)),
        (130, 1, 4, (128, 1)),
        (131, 1, 4, (132, 1)),
        (3, 2, 8, (8, 1)),
        (64, 4, 8, (64, 4)),
        (60, 4, 8, (64, 4)),
    ],
)
def test_the_batch_stays_if_a_micro_batch_splits_it(
    batch: int, micro: int, ranks: int, expected: tuple[int, int]
) -> None:
    assert nearest_split(batch, micro, ranks) == expected


def test_automodel_keeps_its_batch_and_deepspeed_too(meshwright: Any) -> None:
    Path("am.yaml").write_text(AUTOMODEL.format(local=24))
    (error,) = (one for one in meshwright("check", "am.yaml", "--gpus", "8xH100", "--json").json["findings"]
        if one["severity"] == "error")  # fmt: skip
    assert error["fix"] == ["step_scheduler.local_batch_size: 8"]
    Path("am.yaml").write_text(AUTOMODEL.format(local=1).replace("64", "63"))
    (error,) = (one for one in meshwright("check", "am.yaml", "--gpus", "8xH100", "--json").json["findings"]
        if one["severity"] == "error")  # fmt: skip
    assert error["fix"] == ["step_scheduler.global_batch_size: 64"]
    assert error["message"].endswith("the nearest batch is 64, a new experiment")
    Path("ds.json").write_text(DEEPSPEED)
    found = meshwright("check", "ds.json", "--gpus", "8xH100", "--json").json["findings"]
    (error,) = (one for one in found if one["rule"] == "deepspeed.batch-arithmetic")
    assert error["fix"] == ['"train_micro_batch_size_per_gpu": 2', '"gradient_accumulation_steps": 4']


def test_megatron_gets_the_nearest_batch_rather_than_another_layout(meshwright: Any) -> None:
    Path("m.sh").write_text(MEGATRON.format(batch=63))
    found = meshwright("check", "m.sh", "--gpus", "8xH100", "--json").json
    assert found["repair"]["overrides"] == ["--global-batch-size 64"]
    assert found["repair"]["contract"] is True


UNEVEN = """[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 8
{length} = 8192
{batch}

[parallelism]
tensor_parallel_degree = 3

[activation_checkpoint]
mode = "full"
"""


def test_a_batch_that_follows_ranks_that_cannot_start_is_not_kept(meshwright: Any) -> None:
    def repair(length: str, batch: str = "") -> set[str]:
        Path("titan.toml").write_text(UNEVEN.format(length=length, batch=batch))
        return {*meshwright("check", "titan.toml", "--gpus", "2x8xH200", "--json").json["repair"]["overrides"]}

    even = {"parallelism.tensor_parallel_degree = 2"}
    assert repair("sequence_length") == even | {"training.seq_len = 8192", "without training.sequence_length"}
    assert repair("seq_len", "global_batch_size = 40") == even | {"training.local_batch_size = 1"}


AUTO = """{"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "train_batch_size": "auto",
"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
"""


def test_auto_of_a_hugging_face_config_is_one_line(meshwright: Any) -> None:
    Path("ds.json").write_text(AUTO)
    lines = meshwright("check", "ds.json").out.splitlines()
    assert len([line for line in lines if "= auto" in line]) == 1


def test_a_head_that_the_environment_may_set_is_no_warning(meshwright: Any) -> None:
    text = MEGATRON.format(batch=64).replace(
        "--nproc_per_node 8 --nnodes 1", "--nproc_per_node 8 --nnodes 2 --rdzv_backend c10d --rdzv_endpoint $HEAD:6000"
    )
    for head, warns in (("localhost", True), ("${HEAD:-localhost}", False)):
        Path("m.sh").write_text(text.replace("torchrun", f"HEAD={head}\ntorchrun"))
        found = meshwright("check", "m.sh", "--gpus", "2x8xH100", "--json").json
        assert ("launch.head" in {one["rule"] for one in found["findings"]}) is warns
        assert any("unless the environment sets the variable" in one for one in found["notes"]) is not warns


def test_a_refused_export_into_a_folder_prints_its_reason_first(meshwright: Any) -> None:
    Path("am.yaml").write_text(AUTOMODEL.format(local=24))
    found = meshwright("export", "am.yaml", "--to", "megatron-lm", "--gpus", "8xH100", "--out", "x")
    assert found.code != 0
    assert not Path("x").exists()
    assert "pretrain_gpt.py" not in found.out.split("Findings")[0]


def test_a_list_with_a_number_is_no_number_of_gpus() -> None:
    with TestClient(create_app(Settings(workers=0)), base_url="http://127.0.0.1") as client:
        sent = {"model": "llama3-8b", "goal": "sft"}
        found = [client.post("/api/recommend", json={**sent, "gpus": one}).status_code for one in (["8xH100"], [1])]
    assert found == [200, 422]
