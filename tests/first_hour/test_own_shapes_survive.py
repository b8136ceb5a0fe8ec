"""A model of an own shape: nothing of it changes on the way to another file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

MEGATRON = (
    "torchrun --nproc-per-node 8 --nnodes 16 pretrain_gpt.py --num-layers {layers} --hidden-size 4096 "
    "--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 "
    "--swiglu --max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --tensor-model-parallel-size {tp} "
    "--use-distributed-optimizer --vocab-size 128256 --micro-batch-size 1 --global-batch-size 1024 --train-iters 5000 "
    "--lr 3e-4 --lr-warmup-iters 100 --bf16 --mock-data --attention-dropout 0 --hidden-dropout 0 {words}"
)
KEMPNERFORGE = """[model]
dim = 4096
n_layers = 36
n_heads = 32
n_kv_heads = 8
vocab_size = 128256
ffn_hidden_dim = 14336
max_seq_len = 4096
{words}
[train]
batch_size = 1
seq_len = 4096
grad_accum_steps = 4
max_steps = 5000
activation_checkpointing = "full"
[optimizer]
lr = 3e-4
"""
GPUS = ("--gpus", "16x8xH100")


def _script(folder: Path, words: str, layers: int = 36, tp: int = 2) -> str:
    (folder / "run.sh").write_text(f"#!/bin/bash\n{MEGATRON.format(words=words, layers=layers, tp=tp)}\n")
    return str(folder / "run.sh")


def _toml(folder: Path, words: str) -> str:
    (folder / "kf.toml").write_text(KEMPNERFORGE.format(words=words))
    return str(folder / "kf.toml")


def _file(answer: dict[str, Any]) -> str:
    return str(next(iter(answer["files"].values())))


def _flag(text: str, flag: str) -> float | None:
    words = text.split()
    return float(words[words.index(flag) + 1]) if flag in words else None


@pytest.mark.parametrize(
    ("layers", "words", "base", "eps", "std"),
    [
        (36, "--rotary-base 500000", 500000, 1e-5, None),
        (36, "--rotary-base 1234567 --norm-epsilon 1e-6 --init-method-std 0.008", 1234567, 1e-6, 0.008),
        (32, "", 10000, 1e-5, None),  # Megatron-LM's defaults, not those of the catalogue model
    ],
)
def test_a_file_keeps_its_numbers(
    meshwright: Any, tmp_path: Path, layers: int, words: str, base: float, eps: float, std: float | None
) -> None:
    path = _script(tmp_path, words, layers)
    answer = meshwright("export", path, "--to", "kempnerforge", *GPUS, "--json").json
    written = tomllib.loads(_file(answer))["model"]
    assert (written["rope_theta"], written["norm_eps"], written.get("init_std")) == (base, eps, std)
    assert not [one for one in answer["unmapped"] if "init_std" in one["field"] or "architecture" in one["field"]]
    text = _file(meshwright("export", path, "--to", "megatron-lm", *GPUS, "--json").json)
    for flag in ("--rotary-base", "--norm-epsilon", "--init-method-std"):
        assert _flag(text, flag) == _flag(words, flag)  # the file's own, or none
    own = tmp_path / "own.toml"
    meshwright("import", path, *GPUS, "--out", str(own))
    text = _file(meshwright("export", str(own), "--to", "megatron-lm", "--json").json)
    assert [_flag(text, flag) for flag in ("--rotary-base", "--norm-epsilon", "--init-method-std")] == [base, eps, std]


def test_a_job_keeps_the_rope_base(meshwright: Any, tmp_path: Path) -> None:
    path = _script(tmp_path, "--rotary-base 700000")
    job = ("--scheduler", "slurm", "--to", "megatron-lm", *GPUS, "--write", str(tmp_path / "jobs"))
    assert meshwright("launch", path, *job, "--json").code == 0
    assert _flag((tmp_path / "jobs" / "run.sbatch").read_text(), "--rotary-base") == 700000


@pytest.mark.parametrize(("words", "base"), [("rope_theta = 500000.0", 500000), ("", 10000)])
def test_a_kempnerforge_file_keeps_its_rope_base(meshwright: Any, tmp_path: Path, words: str, base: float) -> None:
    path = _toml(tmp_path, words)
    text = _file(meshwright("export", path, "--to", "megatron-lm", *GPUS, "--json").json)
    assert _flag(text, "--rotary-base") == base


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--rotary-base 500000 --rotary-percent 0.5", "--rotary-percent"),
        ("--rotary-base 500000 --squared-relu", "--squared-relu"),
        ("--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 3", "--rope-scaling-factor"),
    ],
)
def test_what_changes_the_model_and_cannot_be_kept_is_refused(
    meshwright: Any, tmp_path: Path, words: str, key: str
) -> None:
    path = _script(tmp_path, words)
    for command in (("import", path), ("export", path, "--to", "kempnerforge")):
        answer = meshwright(*command, *GPUS, "--json")
        assert answer.code == 2
        assert key in json.dumps(answer.json)
        assert "another model" in json.dumps(answer.json)


def test_scaled_rope_is_that_of_the_catalogue_model_with_it(meshwright: Any, tmp_path: Path) -> None:
    path = _script(tmp_path, "--rotary-base 500000 --use-rope-scaling", 32)
    assert meshwright("import", path, *GPUS, "--json").json["model"] == "llama31_8b"
    text = _file(meshwright("export", path, "--to", "megatron-lm", *GPUS, "--json").json)
    assert "--use-rope-scaling" in text
    assert "--use-rope-scaling" not in _file(
        meshwright("export", _script(tmp_path, "", 32), "--to", "megatron-lm", *GPUS, "--json").json
    )


def test_a_framework_without_a_key_for_a_stated_number_is_refused(meshwright: Any, tmp_path: Path) -> None:
    path = _script(tmp_path, "--rotary-base 777777", 32)
    answer = meshwright("export", path, "--to", "automodel", *GPUS, "--json")
    assert answer.code == 2
    assert "architecture.rope_theta" in json.dumps(answer.json)
    answer = meshwright("export", _script(tmp_path, "--rotary-base 500000", 32), "--to", "automodel", *GPUS, "--json")
    assert answer.code == 0


def test_the_engine_trains_with_the_numbers_of_the_recipe() -> None:
    from meshwright.engine.model.config import config_for
    from meshwright.recipes import index, overrides

    changes = ["architecture.rope_theta=700000", "architecture.norm_eps=1e-6", "architecture.layers=2"]
    config = config_for(overrides.apply(index.load("llama3_8b_pretrain_config"), changes))
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (700000, 1e-6)


def test_a_model_without_rotary_positions_has_no_base(meshwright: Any) -> None:
    answer = meshwright("check", "llama3_8b_pretrain_config", "model=gpt2", "architecture.rope_theta=1e6", "--json")
    assert answer.code == 2


def test_an_own_shape_is_called_own_and_its_command_keeps_it(meshwright: Any, tmp_path: Path) -> None:
    path = _script(tmp_path, "--rotary-base 900000", tp=1)
    assert "own shape like llama3_8b (8.90 B parameters)" in meshwright("estimate", path, *GPUS).out
    answer = meshwright("export", path, "--to", "kempnerforge", "--gpus", "1x8xH100", "--json").json
    note = next(one for one in answer["notes"] if "meshwright recommend" in one)
    words = note.partition("meshwright ")[2].partition(",")[0].split()
    assert path in words
    words[words.index("sized.toml")] = str(tmp_path / "sized.toml")
    meshwright(*words)
    shape = tomllib.loads((tmp_path / "sized.toml").read_text())["architecture"]
    assert shape == {"layers": 36, "rope_theta": 900000.0}


def test_automodel_gets_the_layers_of_an_own_shape(meshwright: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    meshwright("import", _script(tmp_path, "--rotary-base 500000"), *GPUS, "--out", str(own))
    answer = meshwright("export", str(own), "--to", "automodel", "--json")
    assert answer.code == 0  # the published model has 32 layers
    assert "num_hidden_layers: 36" in _file(answer.json)


def test_a_key_written_out_is_recognized(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "kf.toml"
    path.write_text(KEMPNERFORGE.format(words="").replace("grad_accum_steps", "grad_accumulation_steps"))
    finding = next(one for one in meshwright("check", str(path), *GPUS, "--json").json["findings"])
    assert finding["fix"] == ["train.grad_accum_steps = 4"]


SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 8192, "max_position_embeddings": 1024}  # fmt: skip


def _config(folder: Path, model_type: str, **values: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **values}))
    return str(folder)


@pytest.mark.parametrize("model_type", ["granite", "minicpm", "smollm3", "exaone4", "opt"])
def test_what_sizes_do_not_show_is_no_other_model_elsewhere(meshwright: Any, tmp_path: Path, model_type: str) -> None:
    words = {"opt": {"activation_function": "relu", "ffn_dim": 512, "word_embed_proj_dim": 256}}
    model = _config(tmp_path / "own", model_type, **words.get(model_type, {}))
    trainers = {one["name"]: one for one in meshwright("inspect", model, "--json").json["trainers"]}
    for name in ("megatron-lm", "kempnerforge"):
        assert not trainers[name]["trains"], trainers[name]
    assert trainers["accelerate"]["trains"]
    refused = meshwright("export", model, "--goal", "pretrain", "--to", "megatron-lm", "--gpus", "8xH100")
    assert (refused.code, "fix:   --to " in refused.err) == (2, True)


def test_a_parallel_residual_that_is_off_is_a_plain_model(meshwright: Any, tmp_path: Path) -> None:
    for off in (False, True):
        model = _config(tmp_path / "own", "gpt_neox", use_parallel_residual=not off)
        words = ("--goal", "pretrain", "--to", "megatron-lm", "--gpus", "8xH100")
        assert meshwright("export", model, *words).code == (0 if off else 2)


def test_models_without_a_hub_id_are_not_a_framework_recipe_without_one(meshwright: Any, tmp_path: Path) -> None:
    own = _config(tmp_path / "own", "olmo2")
    planned = meshwright("recommend", own, "--gpus", "4xH100", "--goal", "pretrain", "--json").json
    assert "megatron-bridge" not in planned["commands"]
    to_bridge = ("--to", "megatron-bridge", "--gpus", "64xH100")
    for model in (own, "gpt3_175b"):
        refused = meshwright("export", "vanilla_gpt_pretrain_config", "--model", model, *to_bridge)
        assert refused.code == 2, refused.out
        assert "Megatron-Bridge has no" in refused.err
    for published in ("olmo2_7b", "mixtral_8x7b", "phi4_14b"):  # as of an own config.json of the type
        refused = meshwright("export", published, "--goal", "pretrain", *to_bridge)
        assert (refused.code, "Megatron-Bridge has no bridge for " in refused.err) == (2, True)
    for name in ("vanilla_gpt_pretrain_config", "gpt3_175b_pretrain_config"):
        assert f"--recipe {name}" in meshwright("export", name, *to_bridge).out


@pytest.mark.parametrize("framework", ["accelerate", "deepspeed"])
def test_the_balancing_loss_that_a_trainer_does_not_add_is_listed(
    meshwright: Any, tmp_path: Path, framework: str
) -> None:
    experts = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 128}
    own = _config(tmp_path / "own", "qwen3_moe", **experts)
    words = ("--goal", "pretrain", "--to", framework, "--gpus", "4xH100", "--json")
    for weight, coefficient in (("0.001", "0.0005"), ("0.01", "0.005")):
        found = meshwright("export", own, *words, f"moe.aux_loss={weight}").json["unmapped"]
        (lost,) = (one for one in found if one["field"] == "moe.aux_loss")
        assert f"router_aux_loss_coef={coefficient}" in lost["reason"]
    plain = meshwright("export", own, *words, "moe.aux_loss=0").json["unmapped"]
    assert not [one for one in plain if "output_router_logits" in one["reason"]]


WINDOWED = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 128, "vocab_size": 50304, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": 1024,
}  # fmt: skip
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": True}
GEMMA = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config", "refusing"),
    [
        (QWEN | {"layer_types": [FULL, SLIDING] * 2}, {"torchtitan", "megatron-bridge", "kempnerforge"}),
        (QWEN | {"max_window_layers": 2}, {"torchtitan", "megatron-bridge", "kempnerforge"}),
        (QWEN | {"use_sliding_window": False}, set()),
        (GEMMA | {"layer_types": [SLIDING, FULL] * 2}, {"torchtitan", "kempnerforge"}),
        (GEMMA | {"layer_types": [FULL, SLIDING] * 2}, {"torchtitan", "megatron-bridge", "kempnerforge"}),
    ],
)
def test_sliding_windows_are_built_or_the_framework_is_refused(
    meshwright: Any, tmp_path: Path, config: dict[str, Any], refusing: set[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WINDOWED | config))
    trainers = meshwright("inspect", str(tmp_path / "config.json"), "--json").json["trainers"]
    refused = {one["name"] for one in trainers if not one["trains"]}
    assert refused & {"torchtitan", "megatron-bridge", "kempnerforge"} == refusing, trainers
    for name in sorted(refusing - {"kempnerforge"}):
        words = ("--goal", "pretrain", "--gpus", "4xA6000", "--to", name)
        assert meshwright("export", str(tmp_path / "config.json"), *words).code == 2
