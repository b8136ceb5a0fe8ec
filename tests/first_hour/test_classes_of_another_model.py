"""A config copied for another model: the classes of the model and tokenizer that it still names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.frameworks import check, content_of, framework_of
from meshwright.frameworks.model_match import find_model
from meshwright.frameworks.start_checks import TABLES, broken_checks
from meshwright.frameworks.types import SourcedValue

FILE = """\
base_model: {model}
model_type: {classes[0]}
tokenizer_type: {classes[1]}
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
adapter: lora
sequence_len: 2048
lora_r: 16
lora_target_linear: true
gradient_accumulation_steps: 8
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_torch
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
attn_implementation: flash_attention_2
"""
KEYS = ("model_type", "type_of_model", "tokenizer_type")
CLASSES = TABLES["axolotl"][0]._replace(checks=tuple(one for one in TABLES["axolotl"][0].checks if one.key in KEYS))


def errors(model: str, model_type: str, tokenizer: str, **more: str) -> dict[str, tuple[str, ...]]:
    values = {"base_model": model, "model_type": model_type, "tokenizer_type": tokenizer, **more}
    settings = {key: SourcedValue(value, 1, "a.yml") for key, value in values.items()}
    return {one.field: one.fix for one in broken_checks([CLASSES], settings, "yaml", find_model(model))}


def test_classes_of_last_years_model_are_errors_with_a_fix_that_passes(tmp_path: Path, meshwright: Any) -> None:
    old = FILE.format(model="Qwen/Qwen3-4B-Instruct-2507", classes=("MistralForCausalLM", "LlamaTokenizer"))
    Path("a.yml").write_text(old)
    found = meshwright("check", "a.yml", "--gpus", "1xRTX6000Ada", "--json").json["findings"]
    fixes = [one["fix"] for one in found if one["severity"] == "error"]
    assert fixes == [["model_type: Qwen3ForCausalLM"], ["tokenizer_type: AutoTokenizer"]]
    new = old.replace("MistralForCausalLM", "Qwen3ForCausalLM").replace("LlamaTokenizer", "AutoTokenizer")
    content = content_of(new, "a.yml", "yaml")
    theirs = framework_of(content, front_ends=True)
    assert theirs is not None
    assert not [one for one in check(theirs, content, gpus="1xRTX6000Ada").findings if one.severity == "error"]


@pytest.mark.parametrize(
    ("model", "model_type", "tokenizer", "fixes"),
    [
        ("Qwen/Qwen3-8B", "LlamaForCausalLM", "AutoTokenizer", ["Qwen3ForCausalLM"]),
        ("Qwen/Qwen3-30B-A3B", "Qwen3ForCausalLM", "Qwen2Tokenizer", ["Qwen3MoeForCausalLM"]),
        ("meta-llama/Llama-3.1-8B", "AutoModelForCausalLM", "LlamaTokenizer", ["AutoTokenizer"]),
        ("mistralai/Mistral-7B-v0.1", "LlamaForCausalLM", "Qwen2Tokenizer", ["MistralForCausalLM", "AutoTokenizer"]),
        ("Qwen/Qwen3-8B", "LlamaForSequenceClassification", "", ["AutoModelForSequenceClassification"]),
        ("Qwen/Qwen3-8B", "Llama4ForConditionalGeneration", "", ["without model_type"]),
    ],
)
def test_a_class_of_another_type_is_named(model: str, model_type: str, tokenizer: str, fixes: list[str]) -> None:
    found = errors(model, model_type, tokenizer)
    assert [fix.split(": ")[-1] for (fix,) in found.values()] == fixes
    renamed = errors(model, "", "", type_of_model=model_type)
    assert ("type_of_model" in renamed) == ("model_type" in found)


@pytest.mark.parametrize(
    ("model", "model_type", "tokenizer"),
    [
        ("NousResearch/Llama-2-7b-hf", "LlamaForCausalLM", "LlamaTokenizer"),
        ("codellama/CodeLlama-7b-hf", "LlamaForCausalLM", "CodeLlamaTokenizer"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "MistralForCausalLM", "LlamaTokenizer"),
        ("mistralai/Mixtral-8x7B-v0.1", "AutoModelForCausalLM", "LlamaTokenizer"),
        ("01-ai/Yi-34B-Chat", "LlamaForCausalLM", "LlamaTokenizer"),
        ("TinyLlama/TinyLlama_v1.1", "LlamaForCausalLM", "LlamaTokenizerFast"),
        ("NousResearch/Meta-Llama-3-8B", "LlamaForCausalLM", "PreTrainedTokenizerFast"),
        ("Qwen/Qwen2.5-3B", "AutoModelForTokenClassification", "Qwen2TokenizerFast"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen2ForCausalLM", "LlamaTokenizer"),
        ("microsoft/phi-4", "Phi3ForCausalLM", "GPT2Tokenizer"),
        ("google/gemma-3-4b-it", "Gemma3ForCausalLM", "GemmaTokenizer"),
        ("Qwen/Qwen3-8B", "MyOwnForCausalLM", "MyTokenizer"),
        ("state-spaces/mamba-2.8b", "MambaLMHeadModel", "AutoTokenizer"),
    ],
)
def test_classes_of_the_model_itself_are_accepted(model: str, model_type: str, tokenizer: str) -> None:
    assert errors(model, model_type, tokenizer) == {}


def test_another_tokenizer_that_a_key_names_is_not_compared_with_the_model() -> None:
    assert errors("Qwen/Qwen3-8B", "", "LlamaTokenizer", tokenizer_config="./mine") == {}


def test_the_class_of_a_folder_on_this_machine_is_compared_with_its_config(meshwright: Any) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    Path("base").mkdir()
    Path("base/config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512, **sizes}))
    Path("a.yml").write_text(FILE.format(model="./base", classes=("MistralForCausalLM", "LlamaTokenizer")))
    found = meshwright("check", "a.yml", "--gpus", "1x4090", "--json").json["findings"]
    assert [one["fix"] for one in found if one["severity"] == "error"] == [["model_type: LlamaForCausalLM"]]
