"""Answers of the planner, kept in a file: a change of the search shows which answers it changes.

`python -m tests.planner.kept_answers` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import meshwright
from meshwright.errors import InputError

FILE = Path(__file__).with_name("answers.json")
QUESTIONS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("llama3-8b", "8xH100", "sft", {}),
    ("llama3-8b", "1xH100", "sft", {}),
    ("llama3-8b", "60xH100", "pretrain", {"tokens": "300B", "price": 2.5}),
    ("llama3-8b", "7xH100", "sft", {"overrides": ["layout.tp=3"]}),
    ("llama3-70b", "1xH100", "peft", {}),
    ("llama3-70b", "64xH100", "pretrain", {"tokens": "1T"}),
    ("llama31-405b", "64xH100", "sft", {}),
    ("qwen3-30b-a3b", "4xH100", "sft", {}),
    ("qwen3-14b", "12x8xH200", "pretrain", {"overrides": ["train.global_batch_size=384"]}),
    ("qwen3-235b-a22b", "256xH100", "pretrain", {}),
    ("deepseek-v3", "1024xH100", "pretrain", {"engine": "megatron"}),
    ("deepseek-v3", "256xB200", "sft", {"seq": "16k"}),
    ("mixtral-8x7b", "16xA100", "pretrain", {}),
    ("gemma3-27b", "8xA100-40", "peft", {}),
    ("qwen3-8b", "1xRTX4090", "qlora", {"overrides": ["train.epochs=3"]}),
    ("qwen2.5-7b", "2xL40S", "sft", {}),
    ("qwen3-vl-8b", "8xH100", "sft", {}),
    ("gpt-oss-20b", "8xH100", "peft", {}),
    ("llama2-13b", "4x8xA100", "pretrain", {"engine": "torchtitan"}),
    ("qwen25-7b", "16xH100", "sft", {"engine": "deepspeed"}),
)


def answer(model: str, gpus: str, goal: str, more: dict[str, Any]) -> dict[str, Any]:
    """Return what decides a recommendation, without its wording."""
    try:
        plan = meshwright.recommend(model, gpus, goal, **more)
    except InputError as error:
        return {"error": error.field}
    found = meshwright.to_dict(plan)
    return {
        "recipe": found["recipe"]["name"],
        "match": found["recipe"]["match"],
        "approach": plan.approach,
        "ok": plan.ok,
        "layout": found["layout"],
        "memory": f"{float(plan.estimate.memory.total):.4g} GiB",
        "step": f"{float(plan.estimate.step_s):.4g} s",
        "changes": sorted(change.field for change in plan.changes),
        "findings": sorted(f"{one.rule} {' '.join(one.fix)}" for one in plan.findings),
        "suggestions": [f"{one.title}: {' '.join(one.overrides)}" for one in plan.suggestions],
    }


def answers() -> dict[str, Any]:
    """Return the answer of every question."""
    return {" ".join(map(str, question)): answer(*question) for question in QUESTIONS}


if __name__ == "__main__":
    FILE.write_text(json.dumps(answers(), indent=1) + "\n")
