"""Exports of a cluster user's own files: what is written runs, and is what the file said."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml

from meshwright import frameworks, planner, recipes
from meshwright.api import export_findings
from meshwright.choices import FRAMEWORKS
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.frameworks.export_recipe import write
from meshwright.recipes import overrides
from meshwright.recipes.capabilities import FRAMEWORK_GOALS
from meshwright.recipes.case import model_of
from meshwright.recipes.types import recipe_fields
from meshwright.recipes.values import bare_type
from meshwright.rules import Finding

SWEEP = {  # one of each goal: dense, mixture of experts, latent attention
    "pretrain": ("qwen3_30b_a3b_pretrain_config", "deepseek_v2_lite_pretrain_config", "llama3_8b_pretrain_config"),
    "sft": ("qwen3_30b_a3b_sft_config",),
    "peft": ("qwen3_30b_a3b_peft_config",),
}
CHOICE_FIELDS = [
    name
    for name, field in recipe_fields().items()
    if bare_type(field.type)[0] is bool or any(isinstance(one, str) for one in get_args(bare_type(field.type)[0]))
]


def _parse(name: str, text: str) -> None:
    """Parse a written file as the program that reads it does."""
    if name.endswith(".py"):
        ast.parse(text)
    elif name.endswith(".toml"):
        tomllib.loads(text)
    elif name.endswith((".yaml", ".yml")):
        yaml.safe_load(text)
    elif name.endswith(".json"):
        json.loads(text)


@pytest.mark.slow
@pytest.mark.parametrize("to", FRAMEWORKS)
def test_every_written_file_parses(to: str) -> None:
    """Recipes of each goal, each field at each of its values: `torch.None` was a SyntaxError in override.py."""
    theirs = frameworks.framework(to)
    goals = FRAMEWORK_GOALS.get(to, tuple(SWEEP))
    broken: list[str] = []
    seen: set[str] = set()
    for name in (one for goal in goals for one in SWEEP[goal]):
        recipe = planner.with_engine_strategy(recipes.load(name), theirs.engine)
        recipe = overrides.apply(recipe, ["layout.ep=1", "layout.tp=1", "layout.pp=1", "layout.sp=false"])
        for change in (f"{field}={value}" for field in CHOICE_FIELDS for value in _values(field)):
            try:
                changed = overrides.apply(recipe, [change])
                written = write(theirs, changed, model_of(changed), cluster("8xH100"))
            except InputError:
                continue
            for file, text in written.files.items():
                if text in seen:
                    continue
                seen.add(text)
                try:
                    _parse(file, text)
                except (SyntaxError, ValueError, AssertionError, yaml.YAMLError) as error:
                    broken.append(f"{name} {change}: {file}: {error}")
    assert seen
    assert not broken, "\n".join(broken)


def _values(field: str) -> list[str]:
    kind = bare_type(recipe_fields()[field].type)[0]
    return ["true", "false"] if kind is bool else [str(value) for value in get_args(kind)]


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b_pretrain_config", "deepseek_v2_lite_pretrain_config"])
def test_a_bf16_router_is_none_in_python(meshwright: Any, tmp_path: Path, recipe: str) -> None:
    """Megatron's router is in the compute format unless a format is set; its formats are names, not torch's."""
    out = tmp_path / "mbq"
    found = meshwright("export", recipe, "--to", "megatron-bridge", "--gpus", "4x8xH200", "--out", str(out),
                       "moe.router_dtype=bf16")  # fmt: skip
    assert found.code == 0, found
    text = (out / "override.py").read_text()
    assert "cfg.model.moe_router_dtype = None" in text
    ast.parse(text)


SCRIPT = """#!/bin/bash
# Llama-like 3B on 16 nodes of 4 A100, without RoPE scaling
export CUDA_DEVICE_MAX_CONNECTIONS=1
GBS=512
TRAIN_SAMPLES=$(( 1000 * 1000 * 1000 * 1000 / 4096 ))
MODEL_ARGS=(
    --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000
    --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5
    --attention-dropout 0.0 --hidden-dropout 0.0 --attention-backend flash
)
TRAINING_ARGS=(
    --micro-batch-size 2 --global-batch-size $GBS
    --train-samples $TRAIN_SAMPLES --lr-decay-samples $TRAIN_SAMPLES --lr-warmup-samples $(( 2000 * GBS ))
    --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.02
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
DATA_ARGS=(
    --data-path 0.7 /project/data/fineweb_text_document 0.3 /project/data/stack_text_document
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.2-3B --split 99,1,0
)
LOG_ARGS=(--log-interval 10 --save-interval 500 --eval-interval 2000 --eval-iters 20
    --save /project/ckpt --load /project/ckpt --ckpt-format torch_dist)
torchrun --nproc_per_node 4 --nnodes 16 pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel \\
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain_3b.sh").write_text(SCRIPT)
    return tmp_path


def _out(folder: Path, name: str) -> str:
    return next((folder / name).glob("*.sh")).read_text()


@pytest.mark.parametrize("tokenizer", ["meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B", "/project/tok"])
def test_the_tokenizer_of_a_script_is_kept(meshwright: Any, folder: Path, tokenizer: str) -> None:
    """Without RoPE scaling the shape is that of a resized SmolLM2, whose tokenizer is another one."""
    (folder / "mine.sh").write_text(SCRIPT.replace("meta-llama/Llama-3.2-3B", tokenizer))
    found = meshwright("recommend", "mine.sh", "train.steps=476838", "--gpus", "16x4xA100-80", "--engine", "megatron",
                       "--save", "sized.toml")  # fmt: skip
    assert found.code == 0, found
    found = meshwright("export", "sized.toml", "--to", "megatron-lm", "--out", "sized_out")
    assert found.code == 0, found
    assert f"--tokenizer-model {tokenizer}\n" in _out(folder, "sized_out")
    assert "init_std" not in found.out, "0.02 is what the file says, and what is written"
    assert "--init-method-std 0.02" in _out(folder, "sized_out")


def test_steps_of_a_script_in_samples_are_written_in_samples(meshwright: Any, folder: Path) -> None:
    """Megatron-LM refuses a script with --train-samples and --train-iters."""
    found = meshwright("export", "pretrain_3b.sh", "--to", "megatron-lm", "--gpus", "16x4xA100-80", "--out", "tp1",
                       "train.steps=476838", "layout.tp=1", "layout.sp=false", "layout.recompute=none")  # fmt: skip
    assert found.code == 0, found
    text = _out(folder, "tp1")
    assert f"--train-samples {476838 * 512}\n" in text
    assert "--lr-warmup-samples 1024000\n" in text
    assert "--lr-decay-samples 244140625\n" in text, "unchanged lengths stay as the file states them"
    assert "-iters" not in text.replace("--eval-iters", "")
    found = meshwright("export", "pretrain_3b.sh", "--to", "megatron-lm", "--gpus", "16x4xA100-80", "--out", "short",
                       "train.steps=10000", "schedule.decay_steps=9000", "schedule.warmup_steps=100")  # fmt: skip
    assert found.code == 0, found
    for name, steps in {"train": 10000, "lr-decay": 9000, "lr-warmup": 100}.items():
        assert f"--{name}-samples {steps * 512}\n" in _out(folder, "short")
    found = meshwright("export", "pretrain_3b.sh", "--to", "megatron-lm", "--gpus", "16x4xA100-80", "--out", "batch",
                       "train.global_batch_size=1024")  # fmt: skip
    assert found.code == 0, found
    assert "--train-samples 244140625\n" in _out(folder, "batch"), "the same samples in fewer steps"


@pytest.mark.parametrize(
    ("written", "slip", "fix"),
    [
        ("--position-embedding-type rope", "--position-embedding-type ROPE", "--position-embedding-type rope"),
        ("--lr-decay-style cosine", "--lr-decay-style Cosine", "--lr-decay-style cosine"),
        ("--ckpt-format torch_dist", "--ckpt-format torchdist", "--ckpt-format torch_dist"),
        ("--normalization RMSNorm", "--normalization rmsnorm", "--normalization RMSNorm"),
        ("--swiglu", "--swiglu --transformer-impl te", "allowed: local, transformer_engine, inference_optimized"),
        ("--swiglu", "--swiglu --dataloader-type Single", "--dataloader-type single"),
        ("HuggingFaceTokenizer", "HFTokenizer", "fix: --tokenizer-type HuggingFaceTokenizer"),
        ("HuggingFaceTokenizer", "SPTokenizer", "fix: --tokenizer-type SentencePieceTokenizer"),
        ("--num-query-groups 8", "--num-key-value-heads 8", "--num-query-groups 8"),
        ("--num-layers 28", "--num-hidden-layers 28", "--num-layers 28"),
    ],
)
def test_megatron_choices_are_checked_as_argparse_does(
    meshwright: Any, folder: Path, written: str, slip: str, fix: str
) -> None:
    (folder / "slip.sh").write_text(SCRIPT.replace(written, slip, 1))
    found = meshwright("check", "slip.sh", "--gpus", "16x4xA100-80")
    assert found.code == 1, found
    assert fix in found.out
    assert "--tokenizer-type SFTTokenizer" not in found.out


def test_valid_choices_of_megatron_are_accepted(meshwright: Any, folder: Path) -> None:
    """Every value of the table, and lists of them, pass the check of the key itself."""
    from meshwright.frameworks.mapping import map_to_recipe
    from meshwright.frameworks.types import SourcedValue
    from meshwright.recipes.key_maps import config_keys

    theirs = frameworks.framework("megatron-lm")
    (folder / "plain.sh").write_text(SCRIPT)
    parsed = theirs.parse(frameworks.open_file(folder / "plain.sh"))
    assert not [one for one in map_to_recipe(theirs, parsed).findings if one.rule == "value.invalid"]
    for key, config_key in config_keys("megatron_lm").items():
        for value in config_key.choices:
            for given in (value, [value]) if key == "moe_router_load_balancing_type" else (value,):
                settings = {**parsed.settings, key: SourcedValue(given, 1, "plain.sh")}
                found = map_to_recipe(theirs, msgspec.structs.replace(parsed, settings=settings)).findings
                assert not [one for one in found if one.field == key and "allowed" in one.message], (key, given)


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[lr_scheduler]
warmup_steps = 100
decay_type = "cosine"
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
[parallelism]
pipeline_parallel_schedule = "1f1b"
[checkpoint]
enable = true
async_mode = "async"
"""


def test_torchtitan_choices_are_checked(meshwright: Any, folder: Path) -> None:
    (folder / "titan.toml").write_text(TITAN)
    found = meshwright("check", "titan.toml", "--gpus", "4x8xH200")
    assert "value.invalid" not in found.out, "torch reads names of schedules in any case"
    (folder / "titan.toml").write_text(TITAN.replace('"cosine"', '"Cosine"').replace('"async"', '"asynch"'))
    found = meshwright("check", "titan.toml", "--gpus", "4x8xH200")
    assert found.code == 1
    assert 'decay_type = "Cosine": allowed: linear, sqrt, cosine (value.invalid)' in found.out
    assert 'async_mode = "asynch": allowed: async, disabled, async_with_pinned_mem (value.invalid)' in found.out


def test_automodel_choices_are_checked(meshwright: Any, folder: Path) -> None:
    out = meshwright("export", "llama3_8b_pretrain_config", "--to", "automodel", "--gpus", "4x8xH200", "--out", "am")
    assert out.code == 0, out
    file = next((folder / "am").glob("*.yaml"))
    assert meshwright("check", str(file), "--gpus", "4x8xH200").code == 0
    file.write_text(file.read_text().replace("model_save_format: safetensors", "model_save_format: safetensor"))
    found = meshwright("check", str(file), "--gpus", "4x8xH200")
    assert found.code == 1
    assert "model_save_format: safetensor: allowed: safetensors, torch_save (value.invalid)" in found.out


def test_a_bridge_export_states_rope_scaling_where_the_base_recipe_has_another(meshwright: Any, folder: Path) -> None:
    """The base is Llama 3.2's recipe, whose RoPE is scaled; the sizes of the two scripts are the same."""
    scaled = SCRIPT.replace("--rotary-base 500000", "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32")
    (folder / "scaled.sh").write_text(scaled)
    for name, expected in {"pretrain_3b": True, "scaled": False}.items():
        found = meshwright("export", f"{name}.sh", "--to", "megatron-bridge", "--gpus", "16x4xA100-80", "--out", name)
        assert found.code == 0, found
        assert "llama32_3b_pretrain_config" in (folder / name / "override.py").read_text()
        assert ("cfg.model.rope_scaling = False" in (folder / name / "override.py").read_text()) is expected
        assert ("model.rope_scaling=false" in _out(folder, name)) is expected


def test_a_blend_is_exported_to_automodel_with_its_weights(meshwright: Any, folder: Path) -> None:
    found = meshwright("export", "pretrain_3b.sh", "--to", "automodel", "--gpus", "16x4xA100-80", "--out", "am",
                       "--model", "llama3.2-3b")  # fmt: skip
    assert found.code == 0, found
    written = yaml.safe_load(next((folder / "am").glob("*.yaml")).read_text())["dataset"]
    assert written["_target_"].endswith(".MegatronPretraining")
    assert written["paths"] == [
        "0.7",
        "/project/data/fineweb_text_document",
        "0.3",
        "/project/data/stack_text_document",
    ]
    assert written["seq_length"] == 4096
    assert "data.blend" not in found.out
    assert "data.dataset" not in found.out
    back = meshwright("import", str(next((folder / "am").glob("*.yaml"))), "--gpus", "16x4xA100-80")
    assert '"/project/data/fineweb_text_document" = 0.7' in back.out


def test_the_split_of_token_files_goes_to_and_from_automodel(meshwright: Any, folder: Path) -> None:
    """AutoModel's default trains on nine tenths; its pattern of file names is no prefix for Megatron."""
    found = meshwright("export", "pretrain_3b.sh", "--to", "automodel", "--gpus", "16x4xA100-80", "--out", "am",
                       "--model", "llama3.2-3b")  # fmt: skip
    assert "validation_part" not in found.out
    file = next((folder / "am").glob("*.yaml"))
    written = yaml.safe_load(file.read_text())
    assert written["dataset"]["split"] == "99,1,0"
    written["dataset"] |= {"split": "0.98, 0.02, 0.00", "paths": "/project/data/*_text_document*"}
    file.write_text(yaml.safe_dump(written))
    for to, key in {"megatron-bridge": 'dataset.split="98,2,0"', "megatron-lm": "--split 98,2,0"}.items():
        found = meshwright("export", str(file), "--to", to, "--gpus", "16x4xA100-80", "--out", to)
        assert found.code == 0, found
        assert key in _out(folder, to)
        assert "/project/data/*_text_document* is a pattern" in found.out


def test_a_minimum_rate_has_no_noise_of_floats(meshwright: Any, folder: Path) -> None:
    lines = '"cosine"\nmin_lr_factor = 0.1\n[optimizer]\nlr = 2e-5'
    (folder / "titan.toml").write_text(TITAN.replace('"cosine"', lines))
    found = meshwright("export", "titan.toml", "--to", "megatron-lm", "--gpus", "4x8xH200", "--out", "mlm")
    assert found.code == 0, found
    assert "--min-lr 2e-06\n" in _out(folder, "mlm")


def test_a_warning_of_an_export_keeps_no_fix_that_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fixes = ("layout.tp=1", "layout.cp=1")
    stays = Finding("automodel.some-warning", "warning", "layout.tp", "it stays", fixes)
    monkeypatch.setattr(export_findings, "framework_findings", lambda *_, **__: [stays])
    recipe, on = recipes.index.load("llama3_8b_pretrain_config"), cluster("8xH100")
    checked = frameworks.check_native(recipe, on, "automodel")
    theirs = frameworks.framework("automodel")
    written = frameworks.export(theirs, recipe, checked.model, on)
    found = export_findings.all_findings(theirs, written, checked)[-1]
    assert (found.rule, found.fix, found.no_fix) == (stays.rule, (), export_findings.NO_OVERRIDE)
