"""One-click changes of a request: chips for model, GPU, count and goal, and the fixes of an error as links."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from typing import Any

from meshwright.choices import GOALS
from meshwright.web import presenters

DEFAULT = {"model": "llama3-8b", "gpus": "8xH100", "goal": "sft"}
"""The question that the landing page answers before the user has asked one."""
MODELS = ("llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-30b-a3b", "gemma3-27b", "gpt-oss-20b", "deepseek-v3")
GPUS = ("H100", "H200", "B200", "GB200", "A100-80", "MI300X", "L40S", "RTX4090")
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GOAL_LABELS = dict(zip(GOALS, ("pretrain", "fine-tune (sft)", "LoRA (peft)"), strict=True))
_CLUSTER = re.compile(r"\s*((?:\d{1,6}\s*[x×*]?\s*){0,2}?)(?<!\d)([A-Za-z][\w-]*)\s*", re.IGNORECASE)
_ARGUMENT = re.compile(r"(\w+): (\"(?:[^\"\\]|\\.)*\"|\d+)")
_ARGUMENTS = re.compile(rf"{_ARGUMENT.pattern}(?:, {_ARGUMENT.pattern})*")
_OVERRIDE = re.compile(r"\w+\.[\w.]+=\S.*")
Chip = dict[str, Any]


def split_cluster(text: str) -> tuple[int, str]:
    """Return the number of GPUs and their type of `8xH100`, `4x8xH100` or `8 H100`; the default's where it is open."""
    found = _CLUSTER.fullmatch(text)
    if found is None:
        counts, gpu = re.findall(r"\d+", text) if re.fullmatch(r"[\d\sx×*]+", text) else [], "H100"
    else:
        counts, gpu = re.findall(r"\d+", found[1]), found[2]
    return (prod(map(int, counts)) if counts else 8), gpu


def chips(form: Mapping[str, str], question: Mapping[str, Any] | None) -> dict[str, list[Chip]]:
    """Return the chips of every group: label, field and value that it sets, its link, and whether it is the current."""
    count, gpu = split_cluster(str(question["gpus"]) if question else form["gpus"])
    typed, named = form["model"], str(question["model"]) if question else ""
    goal = question["goal"] if question else form["goal"]
    return {
        "model": [
            _chip(form, name, "model", name, not form["config"] and _plain(name) in (_plain(typed), _plain(named)))
            for name in MODELS
        ],
        "gpu": [_chip(form, name, "gpus", f"{count}x{name}", name.lower() == gpu.lower()) for name in GPUS],
        "count": [_chip(form, f"{n:,}", "gpus", f"{n}x{gpu}", n == count) for n in COUNTS],
        "goal": [{"label": label, "value": name, "on": name == goal} for name, label in GOAL_LABELS.items()],
    }


def _chip(form: Mapping[str, str], label: str, field: str, value: str, on: bool) -> Chip:
    changed = {**form, field: value, **({"config": ""} if field == "model" else {})}
    linked = presenters.linkable(changed)
    return {
        "label": label,
        "field": field,
        "value": value,
        "on": on,
        "query": presenters.query(changed) if linked else "",
    }


def _plain(name: str) -> str:
    return re.sub(r"[\s\-_.]+", "", name.lower())


def applied_fixes(error: Mapping[str, Any], form: Mapping[str, str]) -> list[dict[str, str]]:
    """Return an error's fixes: text, and the query that applies it; empty if no field of the form can hold it."""
    if not presenters.linkable(form):
        return [{"text": fix, "query": ""} for fix in error["fix"]]
    return [{"text": fix, "query": _applied(fix, error["field"], form)} for fix in error["fix"]]


def _applied(fix: str, field: str, form: Mapping[str, str]) -> str:
    arguments = _ARGUMENT.findall(fix) if _ARGUMENTS.fullmatch(fix) else []
    if arguments and all(name in form for name, _ in arguments):
        return presenters.query({**form, **{name: str(json.loads(value)) for name, value in arguments}})
    if field in form and not re.search(r"\s[a-z]+ [a-z]|^--|=|: ", fix):
        return presenters.query({**form, field: fix})
    if field == "overrides":  # what was typed cannot be read
        return presenters.query({**form, field: fix})
    if "overrides" in form and _OVERRIDE.fullmatch(fix):
        return presenters.with_override(form, [fix])
    return ""


def would_fit(plan: Mapping[str, Any], form: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the clusters that would fit a plan which does not fit, or only with host memory: text and query."""
    smallest, plain = plan.get("smallest_cluster"), plan.get("smallest_without_offload")
    offload = " with offload to host memory" if plain != smallest else ""
    rows = {} if plan["estimate"]["fits"] else {smallest: offload}
    rows |= {plain: " without offload" if offload else ""}
    linked = presenters.linkable(form)
    return [
        {"text": f"{name}{how}", "query": presenters.query({**form, "gpus": name}) if linked else ""}
        for name, how in rows.items()
        if name
    ]
