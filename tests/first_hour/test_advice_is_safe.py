"""Advice is for a training that works: following it must not lead to a warning or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright import clusters
from meshwright.frameworks import check, content_of, framework_of
from meshwright.frameworks.tried_fixes import content_with_fix
from meshwright.planner import case_of
from meshwright.planner.findings import examine
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import model_of
from meshwright.rules.evaluate import UNCERTAIN

MISTRAL = """\
base_model: mistralai/Mistral-7B-Instruct-v0.2
model_type: MistralForCausalLM
tokenizer_type: LlamaTokenizer
datasets:
  - path: data/tickets_2025.jsonl
    type: chat_template
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
pad_to_sequence_len: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
flash_attention: true
debug:
"""


def alarms(findings: Any) -> set[str]:
    return {one.rule for one in findings if one.severity != "advice" or one.rule == UNCERTAIN}


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("qwen3_vl_8b_sft_config", "2xH100"),
        ("qwen25_vl_7b_sft_config", "2xH200"),
        ("qwen35_vl_800m_sft_config", "1xH200"),
        ("moonlight_16b_pretrain_config", "16xH100"),
        ("nemotronh_47b_peft_config", "4xH200"),
        ("qwen3_4b_peft_config", "1xRTX6000Ada"),
    ],
)
def test_following_advice_for_a_recipe_leads_to_no_warning(name: str, gpus: str) -> None:
    recipe, on = index.load(name), clusters.cluster(gpus)
    before = examine(case_of(recipe, model_of(recipe), on, recipe.engine)).findings
    for advice in (one for one in before if one.severity == "advice" and one.fix):
        changed = override.apply_fix(recipe, advice.fix)
        after = examine(case_of(changed, model_of(recipe), on, recipe.engine)).findings
        assert alarms(after) <= alarms(before), advice


@pytest.mark.parametrize(("gpus", "micro"), [("1xRTX6000Ada", 2), ("1xRTX6000Ada", 4), ("1x3090", 1), ("2xA100-40", 4)])
def test_following_advice_for_a_file_leads_to_no_warning(gpus: str, micro: int) -> None:
    content = content_of(MISTRAL.replace("micro_batch_size: 2", f"micro_batch_size: {micro}"), "a.yml", "yaml")
    theirs = framework_of(content, front_ends=True)
    assert theirs is not None
    before = check(theirs, content, gpus=gpus, advice=True).findings
    for advice in (one for one in before if one.severity == "advice" and one.fix):
        changed = content_with_fix(content, advice, advice.fix)
        assert changed is not None
        after = check(theirs, changed, gpus=gpus, advice=True).findings
        assert alarms(after) <= alarms(before), advice


def test_recompute_is_not_turned_off_where_the_memory_would_be_tight(meshwright: Any) -> None:
    Path("a.yml").write_text(MISTRAL)
    found = meshwright("check", "a.yml", "--gpus", "1xRTX6000Ada", "--advice", "--json").json["findings"]
    assert ["gradient_checkpointing: false"] not in [one["fix"] for one in found]
    assert "debug" not in [one["field"] for one in found]  # empty keys say nothing
