"""Other frameworks' files: changed shapes, own architectures, FP8 words, storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BRIDGE = """from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

cfg = llama3_8b_pretrain_config()
{changes}
cfg.train.train_iters = 5000
cfg.train.global_batch_size = 512
pretrain(cfg, forward_step)
"""
WIDER = ("num_layers = 40", "hidden_size = 5120", "ffn_hidden_size = 13824", "num_attention_heads = 40")
GPUS = ("--gpus", "8xH100")


def _bridge(folder: Path, *changes: str) -> str:
    path = folder / "pretrain.py"
    path.write_text(BRIDGE.format(changes="\n".join(f"cfg.{one}" for one in changes)))
    return str(path)


def _rules(answer: dict[str, Any]) -> dict[str, Any]:
    return {one["rule"]: one for one in answer["findings"]}


def test_every_command_sees_the_shape_that_a_bridge_file_changes(meshwright: Any, tmp_path: Path) -> None:
    path = _bridge(tmp_path, *(f"model.{one}" for one in WIDER))
    imported = meshwright("import", path, *GPUS).out
    assert 'model = "llama3_8b"' in imported
    assert "layers = 40\nhidden = 5120\nffn = 13824\nheads = 40" in imported
    for verb in ("check", "estimate"):
        answer = meshwright(verb, path, *GPUS, "--json").json["estimate"]
        assert answer["memory_gib"]["weights"] == pytest.approx(22.95, rel=0.02), verb
    kept = meshwright("import", _bridge(tmp_path, "model.hidden_size = 5120"), *GPUS).out
    assert "head_dim = 128" in kept  # kv_channels of the recipe's model does not follow the width
    moe = meshwright("check", _bridge(tmp_path, "model.num_moe_experts = 8"), *GPUS)
    assert "model.num_moe_experts=8: llama3_8b has no experts; the changed model was not checked" in moe.out


def test_shortened_parallel_sizes_and_late_checkpoints_of_a_bridge_file_are_findings(
    meshwright: Any, tmp_path: Path
) -> None:
    for name in ("context_parallel", "tensor_parallel_size"):
        meant = {"context_parallel": "context_parallel_size"}.get(name, "tensor_model_parallel_size")
        found = _rules(meshwright("check", _bridge(tmp_path, f"model.{name} = 2"), *GPUS, "--json").json)
        assert found["key.unknown"]["fix"] == [f"model.{meant}=2"]
    late = _bridge(tmp_path, "checkpoint.save_interval = 1000000")
    for gpus in (GPUS, ()):
        found = _rules(meshwright("check", late, *gpus, "--json").json)["saving.only-at-the-end"]
        assert (found["line"], found["field"]) == (6, "checkpoint.save_interval")
        fixed = _bridge(tmp_path, found["fix"][0])
        assert "saving.only-at-the-end" not in _rules(meshwright("check", fixed, *gpus, "--json").json)
        late = _bridge(tmp_path, "checkpoint.save_interval = 1000000")


OWN = {
    "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 64000,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
NODES = ("--gpus", "4x8xH100")


def _own(folder: Path, name: str = "my13b", **changes: Any) -> str:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps({**OWN, **changes}))
    return str(folder / name)


def test_an_own_config_is_exported_to_the_frameworks_that_can_build_it(meshwright: Any, tmp_path: Path) -> None:
    own = _own(tmp_path)
    expected = {
        "megatron-bridge": ("train.py", f'AutoBridge.from_hf_config(AutoConfig.from_pretrained("{own}"))'),
        "automodel": ("my13b_pretrain.yaml", f"pretrained_model_name_or_path: {own}"),
        "torchtitan": ("own_model.py", 'llama3_args["my13b"] = TransformerModelArgs(\n    dim=5120,'),
    }
    for framework, (name, text) in expected.items():
        out = tmp_path / framework
        assert meshwright("export", own, "--to", framework, *NODES, "--out", str(out)).code == 0, framework
        assert text in (out / name).read_text()
        first = out / ("config.toml" if framework == "torchtitan" else name)
        checked = meshwright("check", str(first), *NODES, "--json").json
        assert (checked["ok"], bool(checked["estimate"])) == (True, True), framework  # the shape of the folder
        assert f'model = "{own}"' in meshwright("import", str(first), *NODES).out
    toml = (tmp_path / "torchtitan" / "config.toml").read_text()
    assert 'flavor = "my13b"' in toml
    assert 'custom_import = "own_model"' in toml
    module = (tmp_path / "torchtitan" / "own_model.py").read_text()
    assert "multiple_of=13824" in module
    assert "RoPEScalingArgs(scaling_factor=1.0)" in module
    written = tmp_path / "job"
    words = ("--to", "torchtitan", "--scheduler", "torchrun", "--head", "n1", "--write", str(written))
    assert f"PYTHONPATH={written}" in meshwright("launch", own, *NODES, *words).out
    resized = ("export", "llama31_8b", "--goal", "pretrain", "--to", "automodel", *NODES, "architecture.layers=40")
    assert "num_hidden_layers: 40" in meshwright(*resized).out


def test_an_engine_that_cannot_build_an_own_config_says_why_in_every_command(meshwright: Any, tmp_path: Path) -> None:
    tied = _own(tmp_path, "tied", tie_word_embeddings=True)
    why = "its llama3 does not tie the embeddings"
    exported = meshwright("export", tied, "--to", "torchtitan", *NODES)
    assert exported.code == 2
    assert why in exported.err
    assert "--to megatron-lm" in exported.err
    checked = meshwright("check", tied, *NODES, "--engine", "torchtitan")
    compared = meshwright("compare", tied, *NODES, "--engines", "torchtitan")
    assert (checked.code, compared.code) == (1, 1)
    assert why in checked.out
    assert why in compared.out
    toml = tmp_path / "custom.toml"
    toml.write_text(
        '[model]\nname = "llama3"\nflavor = "mine"\n[experimental]\ncustom_import = "mine"\n'
        "[training]\nseq_len = 4096\nlocal_batch_size = 1\nsteps = 1000\n[optimizer]\nlr = 3e-4\n"
    )
    given = (str(toml), "--model", tied, *NODES)
    assert meshwright("check", *given).code == meshwright("compare", *given, "--engines", "torchtitan").code == 0
    starcoder = _own(tmp_path, "sc", model_type="starcoder2")
    assert (
        "no bridge for Starcoder2ForCausalLM" in meshwright("export", starcoder, "--to", "megatron-bridge", *NODES).err
    )


RECOMMEND = ("recommend", "llama31_8b", "--goal", "pretrain", *GPUS)


def test_fp8_words_of_other_frameworks_lead_to_the_format_of_matmuls(meshwright: Any) -> None:
    for word in ("fp8=true", "fp8=hybrid", "float8=true", "enable_float8=true"):
        refused = meshwright(*RECOMMEND, word)
        assert refused.code == 2
        assert "fix:   precision.matmul=fp8_tensor" in refused.err, word
    for words, matmul in (
        (("fp8_format=hybrid",), "fp8_delayed"),  # Megatron-LM's default scaling
        (("fp8_recipe=tensorwise",), "fp8_tensor"),
        (("fp8_format=hybrid", "fp8_recipe=tensorwise"), "fp8_tensor"),
        (("--engine", "megatron", "fp8_format=e4m3", "fp8_recipe=blockwise"), "fp8_block"),
    ):
        assert f"precision.matmul same → {matmul} (contract)  requested" in meshwright(*RECOMMEND, *words).out, words
    for word in ("fp8", "float8", "fp8_format", "te_fp8"):
        assert "precision.matmul" in meshwright("explain", word).out, word


SCRIPT = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 --swiglu "
    "--max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --tensor-model-parallel-size 4 --sequence-parallel "
    "--use-distributed-optimizer --micro-batch-size 1 --global-batch-size 256 --lr 3e-4 --min-lr 3e-5 "
    "--lr-decay-style cosine --lr-warmup-iters 100 --bf16 --train-iters 11050 --save /ckpt --save-interval 50 "
    "--eval-iters 0 --split 100,0,0 "
)
NULL = "--mock-data --tokenizer-type NullTokenizer --vocab-size 128256"


def test_checkpoints_of_megatron_jobs_are_retained_as_stated(meshwright: Any, tmp_path: Path) -> None:
    exported = ("export", *RECOMMEND[1:], "--to", "megatron-lm", "train.steps=11050", "checkpoint.save_every=50")
    kept = meshwright(*exported).out
    assert "--save-retain-interval 5550" in kept
    assert "checkpoint.keep=3: Megatron-LM keeps the latest checkpoint and one every 5,550 steps" in kept
    assert "milestone" not in kept
    one = meshwright(*exported, "checkpoint.keep=1").out
    assert "--save-retain-interval 11100" in one
    assert "checkpoint.keep" not in one
    assert "retain" not in meshwright(*exported, "checkpoint.keep=500").out
    launch = ("--to", "megatron-lm", "--scheduler", "slurm", "--no-requeue", "--write")
    ours = meshwright("launch", *RECOMMEND[1:], *launch, str(tmp_path / "ours"), *exported[-2:])
    assert "storage: 3 checkpoints of 104.7 GiB kept, 418.8 GiB" in ours.err
    (tmp_path / "run.sh").write_text(f"{SCRIPT}{NULL}\n")
    theirs = meshwright("launch", str(tmp_path / "run.sh"), *GPUS, *launch, str(tmp_path / "theirs"))
    assert "storage: 222 checkpoints of 104.7 GiB kept, 22.8 TiB" in theirs.err


AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 1, max_steps: 1000}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: MODEL
distributed: {strategy: fsdp2}
dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: train.jsonl
  seq_length: 8192
packed_sequence: {packed_sequence_size: 4096}
optimizer:
  _target_: torch.optim.AdamW
  lr: 1.0e-5
  weight_decays: 0.1
"""
AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
sequence_len: 4096
adapter: lora
lora_r: 16
micro_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 2e-4
"""


def test_small_mistakes_in_files_of_other_frameworks_are_found(meshwright: Any, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    for tokenizer, severity, fix in (
        ("HuggingFaceTokenizer", "error", "--tokenizer-model PATH"),
        ("GPT2BPETokenizer", "warning", "--vocab-file PATH --merge-file PATH"),
    ):
        script.write_text(f"{SCRIPT}--data-path d --tokenizer-type {tokenizer}\n")
        found = _rules(meshwright("check", str(script), *GPUS, "--json").json)["megatron-lm.tokenizer-files"]
        assert (found["severity"], found["fix"]) == (severity, [fix])
        script.write_text(f"{SCRIPT}--data-path d --tokenizer-type {tokenizer} {fix}\n")
        assert "megatron-lm.tokenizer-files" not in meshwright("check", str(script), *GPUS).out
    script.write_text(f"{SCRIPT.replace('--lr 3e-4', '--lr 3e-3')}{NULL}\n")
    found = _rules(meshwright("check", str(script), *GPUS, "--json").json)["learning_rate.too-high-for-size"]
    assert found["fix"][0] == "--lr 0.0003"
    path = tmp_path / "sft.yaml"
    path.write_text(AUTOMODEL.replace("MODEL", _own(tmp_path)))
    answer = meshwright("check", str(path), "--gpus", "8x8xH100", "--json").json
    assert answer["model"] == "my13b"  # the shape is in its folder
    assert _rules(answer)["automodel.optimizer-argument"]["fix"] == ["optimizer.weight_decay: 0.1"]
    assert _rules(answer)["automodel.longer-than-pack"]["fix"] == ["dataset.seq_length: 4096"]
    path.write_text(AXOLOTL)
    assert meshwright("check", str(path), "--json").json["framework"] == "axolotl"
    refused = meshwright("recommend", str(path)).err
    assert "is a config of Axolotl, which only check reads; read are configs of megatron-lm, " in refused
    command = refused.partition("fix:   meshwright ")[2].split()
    assert command[:4] == ["recommend", "meta-llama/Llama-3.1-8B", "--goal", "peft"]
    assert "peft: lora, rank 16 · 4,096 tokens" in meshwright(*command).out
