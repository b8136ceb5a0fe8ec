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
