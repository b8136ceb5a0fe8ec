"""Names of instruct releases, embedding models, logs, and recipes by version."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshwright import models
from meshwright.recipes import index


@pytest.mark.parametrize(
    ("typed", "weights"),
    [
        ("Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("qwen3_4b_thinking_2507", "Qwen/Qwen3-4B-Thinking-2507"),
        ("qwen/qwen3-4b-instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("someone/Qwen3-4B-Instruct-2507", "someone/Qwen3-4B-Instruct-2507"),
        ("llama3-8b-instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("llama2-7b-chat", "meta-llama/Llama-2-7b-chat-hf"),
        ("llama3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("gemma-2-2b-it", "google/gemma-2-2b-it"),
        ("Qwen2.5-Coder-7B", "Qwen/Qwen2.5-Coder-7B"),
        ("qwen3-8b-base", "Qwen/Qwen3-8B-Base"),
        ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen3-4b", "Qwen/Qwen3-4B"),
        ("llama3.1-8b", "meta-llama/Meta-Llama-3.1-8B"),
    ],
)
def test_a_known_release_has_its_own_weights_with_and_without_organization(typed: str, weights: str) -> None:
    found, reference = models.find(typed), models.reference(typed)
    assert found.hf_id == weights
    assert reference == (weights if models.has_other_weights(found) else found.name)


def test_every_known_release_has_one_name() -> None:
    for name in models.names():
        for hub_id in models.releases(name):
            found = models.find(hub_id.rpartition("/")[2])
            assert found.name == name
            assert found.hf_id == hub_id or not models.dropped_words(hub_id.rpartition("/")[2])


def test_commands_and_exports_load_the_release_that_was_typed(meshwright: Any) -> None:
    typed, weights = "Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"
    asked = meshwright("recommend", typed, "--gpus", "1xRTX4090", "--goal", "lora")
    assert f"--model {weights} --dataset" in asked.out
    assert "Qwen/Qwen3-4B " not in asked.out + asked.err
    for framework in ("megatron-bridge", "deepspeed", "automodel"):
        written = meshwright("export", typed, "--goal", "sft", "--gpus", "8xH100", "--to", framework).out
        assert weights in written
        assert "Qwen3-4B\n" not in written.replace('"', "\n")


def test_an_unknown_release_is_answered_with_the_known_ones(meshwright: Any) -> None:
    said = meshwright("recommend", "qwen3-4b-instruct", "--gpus", "1xRTX4090", "--goal", "lora").err
    assert "its weights are Qwen/Qwen3-4B; known others of its shape:" in said
    assert "Qwen/Qwen3-4B-Instruct-2507" in said


QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
    "vocab_size": 151669,
    "tie_word_embeddings": True,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


def folder(config: dict[str, Any], *files: str) -> str:
    Path("emb").mkdir()
    Path("emb/config.json").write_text(json.dumps(config))
    for name in files:
        Path("emb", name).write_text("[]")
    return "emb"


@pytest.mark.parametrize(
    ("config", "files", "reason"),
    [
        ({**QWEN3, "architectures": ["Qwen3ForCausalLM"]}, ("modules.json",), "sentence-transformers model"),
        ({**QWEN3, "architectures": ["Qwen3Model"]}, ("1_Pooling",), "sentence-transformers model"),
        ({**QWEN3, "architectures": ["Qwen3ForSequenceClassification"]}, (), "head for another task"),
        ({**QWEN3, "architectures": ["Qwen3RewardModel"]}, (), "head for another task"),
        (
            {**QWEN3, "architectures": ["Qwen3Model"], "tie_word_embeddings": False},
            ("model.safetensors",),
            "start with a random head",
        ),
        ({**BERT, "architectures": ["BertModel"]}, (), "encoders are not trained"),
        ({**BERT, "architectures": ["BertForMaskedLM"]}, (), "head for another task"),
    ],
)
@pytest.mark.parametrize("verb", ["recommend", "estimate", "train", "dryrun"])
def test_a_model_without_lm_head_is_refused_at_once(
    meshwright: Any, verb: str, config: dict[str, Any], files: tuple[str, ...], reason: str
) -> None:
    gpus = () if verb == "train" else ("--gpus", "1xRTX4090")
    answer = meshwright(verb, folder(config, *files), "--goal", "lora", *gpus)
    assert answer.code == 2
    assert reason in answer.err
    assert "fix:   name a language model" in answer.err
    assert ("Qwen/Qwen3-0.6B" in answer.err) == (config["model_type"] == "qwen3")


def test_a_decoder_without_its_own_head_says_what_is_trained(meshwright: Any) -> None:
    typed = folder({**QWEN3, "architectures": ["Qwen3Model"]}, "model.safetensors")
    answer = meshwright("recommend", typed, "--goal", "lora", "--gpus", "1xRTX4090")
    assert answer.code == 0
    assert "Qwen3Model is a decoder without an LM head of its own; trained is the language model" in answer.err
    assert "the input embedding (tied)" in answer.err


def test_an_embedding_model_is_still_inspected(meshwright: Any) -> None:
    assert meshwright("inspect", folder({**QWEN3, "architectures": ["Qwen3Model"]}, "modules.json")).code == 0


@pytest.mark.parametrize(("query", "goal"), [("llama3.2", "sft"), ("llama 3.2 lora", "peft"), ("llama3.2-3b", "sft")])
def test_recipes_of_a_version_without_one_say_how_to_derive_it(meshwright: Any, query: str, goal: str) -> None:
    answer = meshwright("recipes", query)
    assert "llama3_8b_128k" not in answer.out
    assert "no shipped recipe for llama32_" in answer.err
    assert f"meshwright recommend llama32_3b --goal {goal} --gpus 8xH100" in answer.err


@pytest.mark.parametrize(
    ("query", "names"),
    [("qwen2.5", "qwen25_"), ("Qwen 2.5 lora", "qwen25_"), ("llama3.1", "llama31_"), ("qwen3-1.7b", "qwen3_1p7b_"),
     ("llama3 8b", "llama3_8b_"), ("128k", "")],
)  # fmt: skip
def test_a_version_is_one_word_of_a_query(query: str, names: str) -> None:
    found = [one.name for one in index.search(query, benchmark=False)]
    assert found
    assert all(name.startswith(names) for name in found)


@pytest.mark.parametrize(
    ("most", "text"),
    [
        ("1", "1 count tried: 1\n"),
        ("2", "2 counts tried: 1 to 2\n"),
        ("16", "1 to 8, then nodes of 8: every number up to 16 GPUs"),
    ],
)
def test_counts_tried_are_those_below_the_limit(meshwright: Any, most: str, text: str) -> None:
    shown = meshwright("size", "llama3.2-3b", "--goal", "qlora", "--gpu", "A100-80", "--max-gpus", most).out
    assert text in shown
    assert "a GPU fails every 60,000 hours" in shown


SCRIPT = """from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B-Instruct-2507")
ds = load_dataset("json", data_files="clauses.jsonl", split="train")
args = SFTConfig(output_dir="out", num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=4,
    gradient_checkpointing=True, learning_rate=2e-4, lr_scheduler_type="cosine", warmup_ratio=0.03, bf16=True,
    max_length=4096, packing=PACKING)
trainer = SFTTrainer(model=model, args=args, train_dataset=ds, peft_config=LoraConfig(r=16, lora_alpha=32))
trainer.train()
"""
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 23.52 GiB "
    "of which 5.10 GiB is free. Including non-PyTorch memory, this process has 18.40 GiB memory in use. Of the "
    "allocated memory 16.90 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated."
)


def script(packing: bool = True) -> str:
    Path("train_sft.py").write_text(SCRIPT.replace("PACKING", str(packing)))
    row = {"messages": [{"role": "user", "content": "q " * 200}, {"role": "assistant", "content": "a " * 200}]}
    Path("clauses.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4000)))
    return "train_sft.py"


def test_remedies_of_a_trainer_log_with_its_script_are_arguments_of_the_script(meshwright: Any) -> None:
    lines = [str({"loss": 2.0 - i / 50, "grad_norm": 0.4, "learning_rate": 2e-4, "epoch": i / 100}) for i in range(20)]
    Path("console.log").write_text("\n".join([*lines, OUT_OF_MEMORY]) + "\n")
    shown = meshwright("doctor", "console.log", "--recipe", script(), "--gpus", "1xRTX4090").out
    assert ". per_device_train_batch_size=1 gradient_accumulation_steps=16" in shown
    assert ". use_liger_kernel=True" in shown


@pytest.mark.parametrize("packing", [True, False])
def test_a_share_of_warmup_steps_is_counted_in_the_data(meshwright: Any, packing: bool) -> None:
    shown = meshwright("recommend", script(packing), "--gpus", "1xA100-80", "--json").json
    steps, warmup = shown["budget"]["steps"], shown["contract"]["warmup_steps"]
    assert warmup == math.ceil(0.03 * steps)


@pytest.mark.parametrize(("typed", "more"), [("H100", "8xH100 for a node"), ("rtx4090", "2xRTX4090 for two")])
def test_a_gpu_without_a_count_is_one_and_said(meshwright: Any, typed: str, more: str) -> None:
    answer = meshwright("recommend", "llama3.2-3b", "--gpus", typed, "--goal", "lora")
    assert answer.code == 0
    assert f"1 GPU, because no count was written; write {more}" in " ".join((answer.out + answer.err).split())
    sized = meshwright("size", "llama3.2-3b", "--gpu", typed, "--goal", "lora", "--max-gpus", "2")
    assert "no count was written" not in sized.out + sized.err


def test_engines_that_have_the_adapters_are_suggested(meshwright: Any) -> None:
    typed = ("Qwen3-4B-Instruct-2507", "--gpus", "1xRTX4090", "--goal", "qlora", "--engine", "kempnerforge")
    found = meshwright("recommend", *typed, "--json").json["findings"]
    text = next(one["no_fix"] for one in found if one["rule"] == "peft.engine")
    assert "other engines can: --engine meshwright or automodel" in text
    assert "torchtitan" not in text
    assert "megatron" not in text


def test_an_out_of_memory_message_with_large_fragments_is_explained_with_its_numbers(meshwright: Any) -> None:
    shown = " ".join(meshwright("explain", OUT_OF_MEMORY.replace("9.27", "2.00").replace("1.02", "8.02")).out.split())
    assert "8.02 GiB of 23.52 GiB are reserved by PyTorch but unallocated, and 2 GiB were requested" in shown
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in shown
    assert "expandable_segments" not in meshwright("explain", OUT_OF_MEMORY).out


def test_standard_input_is_refused_with_a_fix(meshwright: Any) -> None:
    answer = meshwright("check", "-")
    assert answer.code == 2
    assert "standard input is not read" in answer.err
    assert "cat > train.yaml && meshwright check train.yaml" in answer.err


@pytest.mark.parametrize(
    ("right", "wrong", "fix"),
    [
        ('lr_scheduler_type="cosine"', 'lr_scheduler_type="cosin"', 'lr_scheduler_type="cosine"'),
        ("bf16=True", 'bf16=True, optim="paged_adamw_8bits"', 'optim="paged_adamw_8bit"'),
        ("bf16=True", 'bf16=True, optim="shampoo"', ""),
    ],
)
def test_an_optimizer_or_schedule_that_transformers_lacks_is_an_error(
    meshwright: Any, right: str, wrong: str, fix: str
) -> None:
    path = Path(script())
    path.write_text(path.read_text().replace(right, wrong))
    found = meshwright("check", str(path), "--gpus", "1xA100-80", "--json").json["findings"]
    refused = [one for one in found if one["rule"] == "accelerate.argument-refused"]
    assert [one["fix"] for one in refused] == [[fix] if fix else []]
    assert refused[0]["message"].startswith("transformers has no ")


@pytest.mark.parametrize("name", ["adamw_hf", "adamw_torch_fused", "OptimizerNames.ADAMW_TORCH"])
def test_an_optimizer_that_transformers_has_or_had_is_no_error(meshwright: Any, name: str) -> None:
    path = Path(script())
    path.write_text(path.read_text().replace("bf16=True", f"bf16=True, optim={name if '.' in name else repr(name)}"))
    found = meshwright("check", str(path), "--gpus", "1xA100-80", "--json").json["findings"]
    refused = [one for one in found if one["rule"] == "accelerate.argument-refused"]
    assert [one["severity"] for one in refused] == ["warning"] * (name == "adamw_hf")  # until version 4.50
