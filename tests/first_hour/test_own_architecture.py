"""A user's own architecture: run, evaluate, convert, resume, and mistakes in its keys."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import meshwright as package
from meshwright import json_text, notes
from meshwright.api.inputs import validated
from meshwright.api.verbs import VERBS
from meshwright.engine.checkpoint.contract import changed_fields, check_before_start, contract_of
from meshwright.engine.checkpoint.folder import STATE
from meshwright.engine.checkpoint.metadata import State, read_state
from meshwright.engine.evaluation import ValidationState
from meshwright.engine.metrics.record import ValidationRecord
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "tie_word_embeddings": True,
}
SPARSE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 12,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two models without weights and a text."""
    for name, config in (("dense", DENSE), ("sparse", SPARSE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "corpus.txt").write_text("A sentence of a corpus that is long enough to fill samples.\n\n" * 60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    notes.print_once.cache_clear()
    return tmp_path


TRAIN = ("--dataset", "corpus.txt", "--out", "run", "data.tokenizer=bytes", "train.steps=2")
SMALL = ("data.seq_length=32", "train.global_batch_size=2", "layout.micro_batch_size=2", "train.eval_every=0")


def test_a_run_is_evaluated_converted_and_resumed(here: Path, meshwright: Any) -> None:
    done = meshwright("train", "dense", "--json", *TRAIN, *SMALL)
    assert done.code == 0, done.err
    assert "dense has no weights: training starts from random weights" in done.err
    notes.print_once.cache_clear()

    of_run = meshwright("evaluate", "run", "--dataset", "corpus.txt", "--samples", "1", "--json")
    assert (of_run.json["seq_length"], of_run.json["tokens"]) == (32, 32)
    converted = meshwright("convert", "run", "exported", "--json")
    assert converted.code == 0, converted.err
    assert "random weights" not in of_run.err + converted.err

    exported = ("evaluate", "exported", "--dataset", "corpus.txt", "--samples", "1", "data.tokenizer=bytes")
    capped = meshwright(*exported, "--json")
    assert (capped.json["seq_length"], capped.json["tokens"]) == (96, 96)
    shown = meshwright(*exported, "data.seq_length=128")
    assert "samples of at most 128 tokens (data.seq_length)" in shown.out
    assert "data.seq_length=128 exceeds the 96 positions of the model" in shown.err

    start = time.process_time()
    refused = meshwright("train", "dense", "--json", *TRAIN[:-1], *SMALL, "train.steps=3")
    assert time.process_time() - start < 1
    assert refused.code == 2
    assert "train.steps was 2 and is 3" in refused.json["error"]["message"]
    assert "train.steps=2" in refused.json["error"]["fix"]


BAMBA = {
    "model_type": "bamba",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}


def test_a_run_of_a_config_with_an_infinity_is_evaluated(here: Path, meshwright: Any) -> None:
    (here / "own.json").write_text(json.dumps(BAMBA))  # time_step_limit is (0.0, Infinity) by default
    done = meshwright("train", "own.json", "--json", *TRAIN, *SMALL)
    assert done.code == 0, done.err
    of_run = meshwright("evaluate", "run", "--dataset", "corpus.txt", "--samples", "1")
    assert of_run.code == 0, of_run.err


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan, 1.5])
def test_every_float_survives_a_checkpoint(loss: float, tmp_path: Path) -> None:
    record = ValidationRecord(step=1, loss=loss, perplexity=None, tokens=1, samples=1, seconds=1.0, best=False)
    contract = {"config.time_step_limit": [0.0, loss]}
    state = State(1, 1, 1, {}, contract, None, {}, None, 0, {}, validation=ValidationState(records=[record]))
    (tmp_path / STATE).write_bytes(json_text.encode(state))
    assert b"null]" not in (tmp_path / STATE).read_bytes()
    read = read_state(tmp_path)
    assert repr(read) == repr(state)
    assert not changed_fields(read.contract, contract)


def test_samples_longer_than_the_positions_are_noted_and_exported(here: Path, meshwright: Any) -> None:
    one = ("train.global_batch_size=1", "layout.micro_batch_size=1", "train.eval_every=0")
    longer = meshwright("train", "dense", *TRAIN, *one, "data.seq_length=100")
    assert "data.seq_length=100 is more than the 96 positions of dense: it has to learn the others" in longer.err
    assert json.loads(Path("run/model/config.json").read_text())["max_position_embeddings"] == 100
    (here / "other").mkdir()
    (here / "other" / "config.json").write_text(json.dumps({**DENSE, "hidden_size": 64}))
    words = ("--goal", "pretrain", *TRAIN[:2], *TRAIN[4:], *one, "data.seq_length=32", "--out", "next")
    mistaken = meshwright("train", "other", *words, "checkpoint.pretrained=run/model")
    assert "fix:   run/model in place of " in mistaken.err
    assert meshwright("train", "run/model", *words, "checkpoint.pretrained=run/model").code == 0
    assert json.loads(Path("next/model/config.json").read_text())["max_position_embeddings"] == 100


def test_the_model_of_a_model_is_another_target(here: Path, meshwright: Any) -> None:
    refused = meshwright("train", "dense", "--model", "llama3-8b", *TRAIN)
    assert "remove --model | llama3-8b in place of dense" in refused.err
    planned = ("recommend", "dense", "--goal", "pretrain", "--gpus", "1xH100", "--framework", "torchtitan")
    assert "--engine torchtitan | remove --framework" in meshwright(*planned).err
    (here / "dense").rename("olmo")
    assert "fix:   ./olmo" in meshwright("train", "olmo", *TRAIN).err
    assert "/olmo (" in meshwright("recommend", "./olmo", "--goal", "pretrain", "--gpus", "1xH100").out


def test_the_check_before_the_start_imports_no_torch() -> None:
    loaded = "import sys, meshwright.engine.checkpoint.contract; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def _saved(folder: Path, recipe: Recipe, **changed: Any) -> Path:
    step = folder / "checkpoints" / "step-00000004"
    step.mkdir(parents=True)
    contract = contract_of(recipe, {"hidden_size": 32}) | {key.replace("__", "."): v for key, v in changed.items()}
    (step / "state.json").write_text(json.dumps({"contract": contract}))
    return folder


RECIPE = Recipe(name="one", model="llama3_8b", goal="pretrain", cluster="1xH100")


def test_the_check_before_the_start_compares_what_is_final(tmp_path: Path) -> None:
    check_before_start(RECIPE, tmp_path / "none", None)
    check_before_start(RECIPE, _saved(tmp_path / "equal", RECIPE), None)
    check_before_start(RECIPE, _saved(tmp_path / "moved", RECIPE, data__dataset="elsewhere"), None)
    changed = _saved(tmp_path / "changed", RECIPE, optimizer__lr=0.5)
    with pytest.raises(InputError, match=r"optimizer\.lr was 0\.5"):
        check_before_start(RECIPE, changed, None)
    check_before_start(RECIPE, changed, {"train.steps"})  # --tiny scales the learning rate
    (tmp_path / "damaged" / "checkpoints" / "step-00000001").mkdir(parents=True)
    check_before_start(RECIPE, tmp_path / "damaged", None)


@pytest.mark.parametrize(
    ("typed", "reason", "fix"),
    [
        ("train.loss=focal", "did you mean kernels.loss? kernels.loss=focal: allowed: vocab_parallel", "kernels.loss="),
        ("train.loss=chunked", "did you mean kernels.loss?", "kernels.loss=chunked"),
        ("optimizer.schedule=wsd", "did you mean schedule.name?", "schedule.name=wsd"),
        ("optimizer.scheduler=wsd", "did you mean schedule.name?", "schedule.name=wsd"),
        ("train.lr_scheduler=cosine", "did you mean schedule.name?", "schedule.name=cosine"),
        ("train.optimizer=adamw", "did you mean optimizer.name?", "optimizer.name=adamw"),
        ("train.learning_rate=1e-4", "did you mean optimizer.lr?", "optimizer.lr=1e-4"),
        ("optimizer.warmup=8", "did you mean schedule.warmup_steps?", "schedule.warmup_steps=8"),
        ("model.frobnicate=8", "meshwright explain KEY", ""),
    ],
)
def test_a_key_in_the_wrong_section(typed: str, reason: str, fix: str, meshwright: Any) -> None:
    error = meshwright("estimate", "llama3-8b", "--goal", "sft", "--gpus", "8xH100", typed, "--json").json["error"]
    assert reason in error["message"]
    assert any(one.startswith(fix) for one in error["fix"]) if fix else not error["fix"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("estimate llama3-8b --seq-len 8192", "--seq 8192"),
        ("recommend llama3-8b --context-length=8192", "--seq 8192"),
        ("train llama3_8b_sft_config --context-length 8192", "data.seq_length=8192"),
        ("estimate llama3-8b --num-gpus 8", "--gpus 8"),
        ("estimate llama3-8b --nodes 2", "--gpus 2x8xH100"),
        ("train llama3_8b_sft_config --gpus 2x4xH100", "--nproc 8"),
        ("train llama3_8b_sft_config --gpus 8xH100", "--nproc 8"),
        ("estimate llama3-8b -o plan.json", "--json > plan.json"),
        ("train llama3_8b_sft_config -o runs/a", "--out runs/a"),
        ("estimate llama3-8b --bf16", "precision.compute=bf16"),
        ("convert run out --bf16", "--dtype bf16"),
        ("estimate llama3-8b --precision fp8", "precision.matmul=fp8_tensor"),
        ("train llama3-8b --lora", "--goal lora"),
        ("export llama3_8b_sft_config --format hf", "meshwright convert RUN OUT"),
        ("export llama3_8b_sft_config --format torchtitan", "--to torchtitan"),
    ],
)
def test_options_of_other_tools(words: str, fix: str, meshwright: Any) -> None:
    answer = meshwright(*words.split(), "--json")
    assert answer.code == 2
    assert answer.json["error"]["fix"] == [fix]
    assert fix in answer.json["error"]["message"]


def test_size_takes_gpus_and_says_how_to_get_the_cost(meshwright: Any) -> None:
    question = ("llama3-8b", "--goal", "sft", "layout.pp=1", "layout.cp=1", "layout.tp=1")
    with_tokens = meshwright("size", *question, "--gpus", "H100", "--tokens", "1B").out
    assert "days" in with_tokens
    assert "--price 2.50 (of one GPU for one hour) adds the cost" in with_tokens
    assert "  cost" not in with_tokens
    priced = meshwright("size", *question, "--gpu", "H100", "--tokens", "1B", "--price", "2").out
    assert "  cost" in priced
    assert "adds the cost" not in priced


def test_python_takes_overrides_as_a_mapping_and_shows_the_fix() -> None:
    request = VERBS["estimate"].request
    read = validated(request(target="llama3-8b", overrides={"layout.tp": 4, "layout.sp": True, "data.blend": {"a": 1}}))
    assert read.overrides == ("layout.tp=4", "layout.sp=true", "data.blend=a:1")
    with pytest.raises(package.InputError, match=r"(?s)unknown key layout.tpp.*\nfix: layout\.tp=5"):
        package.estimate("llama3-8b", "8xH100", "sft", overrides={"layout.tpp": 5})
    assert str(InputError("is wrong", "a", 1)) == "a=1: is wrong"


@pytest.mark.parametrize("words", [(), ("layout.tp=2",)])
def test_an_own_moe_model_is_estimated_in_a_layout_that_exists(
    words: tuple[str, ...], here: Path, meshwright: Any
) -> None:
    answer = meshwright("estimate", "sparse", "--gpus", "2xA100", "--json", *words)
    assert answer.code == 0, answer.err
    assert answer.json["layout"]["ep"] <= 2
    assert answer.json["layout"]["tp"] == (2 if words else answer.json["layout"]["tp"])
    checked = meshwright("check", "sparse", "--gpus", "2xA100", "--json", *words)
    assert checked.json["estimate"]["memory_gib"]["total"] == answer.json["estimate"]["memory_gib"]["total"]
