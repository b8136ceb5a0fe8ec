"""Answers of the planner, kept in a file: a change of the search shows which answers it changes.

`python -m tests.planner.kept_answers` writes them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import kept

import meshwright
from meshwright.errors import InputError

FILE = Path(__file__).with_name("answers.json")
Question = tuple[str, tuple[Any, ...], dict[str, Any]]
WHY = {"explain": True}
QUESTIONS: tuple[Question, ...] = (
    ("recommend", ("llama3-8b", "8xH100", "sft"), {}),
    ("recommend", ("llama3-8b", "1xH100", "sft"), WHY),
    ("recommend", ("llama3-8b", "60xH100", "pretrain"), {"tokens": "300B", "price": 2.5, **WHY}),
    ("recommend", ("llama3-8b", "7xH100", "sft"), {"overrides": ["layout.tp=3"]}),
    ("recommend", ("llama3-70b", "1xH100", "peft"), {}),
    ("recommend", ("llama3-70b", "64xH100", "pretrain"), {"tokens": "1T"}),
    ("recommend", ("llama31-405b", "64xH100", "sft"), {}),
    ("recommend", ("qwen3-30b-a3b", "4xH100", "sft"), WHY),
    ("recommend", ("qwen3-14b", "12x8xH200", "pretrain"), {"overrides": ["train.global_batch_size=384"]}),
    ("recommend", ("qwen3-235b-a22b", "256xH100", "pretrain"), {}),
    ("recommend", ("deepseek-v3", "1024xH100", "pretrain"), {"engine": "megatron"}),
    ("recommend", ("deepseek-v3", "256xB200", "sft"), {"seq": "16k"}),
    ("recommend", ("mixtral-8x7b", "16xA100", "pretrain"), {"tokens": "1M"}),
    ("recommend", ("gemma3-27b", "8xA100-40", "peft"), {}),
    ("recommend", ("qwen3-8b", "1xRTX4090", "qlora"), {"overrides": ["train.epochs=3"], "tokens": "1B"}),
    ("recommend", ("qwen2.5-7b", "2xL40S", "sft"), {}),
    ("recommend", ("qwen3-vl-8b", "8xH100", "sft"), {}),
    ("recommend", ("gpt-oss-20b", "8xH100", "peft"), {}),
    ("recommend", ("llama2-13b", "4x8xA100", "pretrain"), {"engine": "torchtitan"}),
    ("recommend", ("qwen25-7b", "16xH100", "sft"), {"engine": "deepspeed"}),
    ("recommend", ("llama3-8b", "8xH100", "sft"), {"overrides": ["layout.tp=3", "layout.cp=3", "layout.pp=7"]}),
    ("recommend", ("llama3-8b", "11xH100", "sft"), {"overrides": ["train.global_batch_size=13", "layout.pp=3"]}),
    ("recommend", ("llama3-8b", "8xH100", "pretrain"), {"benchmark": True}),
    ("recommend", ("llama3-70b", "128xB200", "pretrain"), {"benchmark": True, **WHY}),
    ("recommend", ("wan-14b", "8xH100", "sft"), {}),
    ("recommend", ("nemotronh-8b", "13xH100", "pretrain"), {"tokens": "20T", **WHY}),
    ("recommend", ("llama3-70b", "2xRTX4090", "sft"), {}),
    ("recommend", ("qwen3-14b", "2xRTX4090", "peft"), {}),
    ("recommend", ("gpt3-175b", "96xH100", "pretrain"), {"overrides": ["layout.strategy=ddp"]}),
    ("recommend", ("qwen3-0.6b", "2xT4", "sft"), {}),
    ("plan", ("llama3-8b", "8xH100", "sft"), {"top": 3}),
    ("plan", ("qwen3-30b-a3b", "4xH100", "sft"), {"top": 2}),
    ("plan", ("qwen3-0.6b", "3xRTX4090", "peft"), {"everything": True, "top": 2}),
    ("plan", ("llama3-8b", "7xH100", "sft"), {"overrides": ["layout.tp=3"]}),
    ("plan", ("llama3_8b_pretrain_config", "8xA100"), {"overrides": ["layout.vp=2", "layout.pp=2"], "top": 2}),
    ("estimate", ("llama3-70b", "64xH100", "pretrain"), {"overrides": ["layout.tp=8", "layout.micro_batch_size=auto"]}),
    ("estimate", ("llama3-70b", "8xH100", "pretrain"), {"overrides": ["layout.tp=8"], "tokens": "1T", "price": 3}),
    ("check", ("llama3_8b_pretrain_config",), {"gpus": "8xH100", "overrides": ["layout.tp=3", "layout.pp=5"]}),
    ("check", ("llama3_8b_pretrain_config",), {"gpus": "1xA100-40"}),
    ("check", ("qwen3_30b_a3b_pretrain_config",), {"gpus": "24xH100", "overrides": ["layout.ep=7"]}),
    ("check", ("deepseek_v3_pretrain_config",), {"gpus": "8xH100"}),
    ("check", ("llama3_8b_pretrain_config",), {"gpus": "16xH100", "engine": "torchtitan"}),
)


def answer(verb: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, str]:
    """Return what decides an answer, without its wording."""
    try:
        found = meshwright.to_dict(getattr(meshwright, verb)(*arguments, **options))
    except InputError as error:
        found = {"error": {"field": error.field, "reason": error.reason, "fix": error.fix}}
    return kept.lines({name: part for name, part in found.items() if name not in ("schema", "commands")})


def label(question: Question) -> str:
    return " ".join(map(str, (question[0], *question[1], *(f"{k}={v}" for k, v in question[2].items()))))


def answers() -> Iterator[tuple[str, Any]]:
    """Yield the answer of every question."""
    for question in QUESTIONS:
        yield label(question), answer(*question)


if __name__ == "__main__":
    kept.write(FILE, answers)
