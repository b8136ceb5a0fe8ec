"""The calls that are likely to follow an answer, ready to send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.api.inputs import Request, fields_of, texts_of
from meshwright.api.loose_arguments import written_override
from meshwright.api.responses import Part

Answer = dict[str, Any]


class NextCall(Part, frozen=True, kw_only=True):
    """A call that is likely to follow, ready to send."""

    tool: str
    arguments: Mapping[str, Any]
    why: str


def changes_of(plan: Answer) -> list[str]:
    """Return the overrides that give a plan on its recipe."""
    return [written_override(one["field"], one["to"]) for one in plan["changes"]]


def next_calls(name: str, full: Answer, request: Request) -> list[NextCall]:
    """Return the calls that are likely to follow; none that would need a text again."""
    found = _NEXT[name](full, request) if name in _NEXT else []
    return found[:2]


def _sent(request: Request) -> dict[str, Any] | None:
    """Return the arguments of a request; None if a file was sent as text."""
    given: dict[str, Any] = {}
    for field in fields_of(type(request)):
        value = getattr(request, field.name)
        if "mcp" in field.input.surfaces and value not in (None, (), field.python_default):
            given[field.name] = list(value) if field.repeated else value
    stand_ins = {file for text in texts_of(type(request)).values() for file in (text.file, text.json_file)}
    return None if {str(value) for value in given.values()} & (stand_ins | {given.get("name")}) else given


def _after_plan(full: Answer, request: Request) -> list[NextCall]:
    """Return the next calls after one plan: GPUs that suffice, a suggestion, other layouts."""
    given = _sent(request)
    if given is None:
        return []
    calls = []
    cluster = full.get("smallest_cluster")
    if cluster and not full["estimate"]["fits"] and "model" in given:
        calls.append(NextCall(tool="recommend", arguments={**given, "gpus": cluster}, why="the smallest that fits"))
    question = full["question"]
    base = {"target": given.get("model") or given.get("target"), "gpus": question["gpus"]}
    base |= {} if str(base["target"]).endswith("_config") else {"goal": question["goal"]}
    same: dict[str, Any] = {name: given[name] for name in ("seq", "engine") if name in given}
    for one in full.get("suggestions", ()):
        changes = list(dict.fromkeys([*changes_of(full), *one["overrides"]]))
        calls.append(
            NextCall(tool="estimate", arguments={**base, **same, "overrides": changes}, why=f"try to {one['title']}")
        )
    kept = {"overrides": given["overrides"]} if given.get("overrides") else {}
    calls.append(NextCall(tool="plan", arguments={**base, **same, **kept}, why="other layouts, ranked"))
    return calls


def _after_plans(full: Answer, request: Request) -> list[NextCall]:
    given = _sent(request)
    if given is None or not full["plans"]:
        return []
    kept: dict[str, Any] = {name: given[name] for name in ("target", "goal", "seq", "engine") if name in given}
    kept |= {"gpus": full["plans"][0]["question"]["gpus"]}
    return [
        NextCall(
            tool="estimate",
            arguments={**kept, "overrides": changes_of(full["plans"][0])},
            why="the first layout in full: memory and step time by part, changes with reasons",
        )
    ]


def _after_size(full: Answer, request: Request) -> list[NextCall]:
    given = _sent(request)
    if given is None:
        return []
    kept: dict[str, Any] = {
        name: given[name] for name in ("model", "goal", "seq", "engine", "tokens", "price") if name in given
    }
    calls = []
    for name, why in (("most_efficient", "the plan on the most efficient count"), ("smallest", "on the smallest")):
        one = full[name]
        if one:
            calls.append(
                NextCall(tool="recommend", arguments={**kept, "gpus": f"{one['nodes']}x{full['gpu']}"}, why=why)
            )
    return calls


def _explain_first(full: Answer, request: Request) -> list[NextCall]:
    rules = list(dict.fromkeys(one["rule"] for one in full["findings"]))[:1]
    return [NextCall(tool="explain", arguments={"about": rule}, why="cause and fix") for rule in rules]


def _after_compare(full: Answer, request: Request) -> list[NextCall]:
    given = _sent(request)
    best = next((one for one in full["sides"] if one["rank"] == 1 and one["ok"]), None)
    if given is None or best is None or given.get("more"):
        return []
    kept: dict[str, Any] = {name: given[name] for name in ("target", "goal", "seq") if name in given}
    arguments = {**kept, "gpus": best["gpus"], "engine": best["engine"]}
    return [NextCall(tool="plan", arguments=arguments, why=f"layouts for {best['engine']}")]


def _after_inspect(full: Answer, request: Request) -> list[NextCall]:
    given = _sent(request)
    if given is None:
        return []
    arguments = {"model": given["model"], "goal": "sft", "gpu": "H100"}
    return [NextCall(tool="size", arguments=arguments, why="how many GPUs it takes to train")]


def _after_models(full: Answer, request: Request) -> list[NextCall]:
    rows = full["models"][:1]
    return [NextCall(tool="inspect", arguments={"model": one["name"]}, why="layers, parameters, FLOPs") for one in rows]


def _after_gpus(full: Answer, request: Request) -> list[NextCall]:
    first = {"model": "llama3-8b", "goal": "sft"}
    return [
        NextCall(tool="size", arguments={**first, "gpu": one["name"]}, why="how many of them a training takes")
        for one in full["gpus"][:1]
    ]


def _after_recipes(full: Answer, request: Request) -> list[NextCall]:
    rows = full["recipes"][:1]
    return [NextCall(tool="estimate", arguments={"target": one["name"]}, why="memory and speed") for one in rows]


def _after_rules(full: Answer, request: Request) -> list[NextCall]:
    return [
        NextCall(tool="explain", arguments={"about": one["id"]}, why="symptom, cause and fix")
        for one in full["rules"][:1]
    ]


_NEXT: Mapping[str, Callable[[Answer, Request], list[NextCall]]] = {
    "recommend": _after_plan,
    "estimate": _after_plan,
    "plan": _after_plans,
    "size": _after_size,
    "check": _explain_first,
    "doctor": _explain_first,
    "compare": _after_compare,
    "inspect": _after_inspect,
    "models": _after_models,
    "gpus": _after_gpus,
    "recipes": _after_recipes,
    "rules": _after_rules,
}
