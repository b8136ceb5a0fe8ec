"""Answers at the size that an agent reads: figures with their bands, assumptions, commands and the calls to make next.

`plan`, `size`, `compare`, `models` and `gpus` have rows of their own here; the others are the response of the command
line. Numbers are rounded to four digits, and every answer has `next`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from meshwright.api.inputs import Request
from meshwright.api.responses import Part, Response
from meshwright.api.schema import response_schema, schema_of
from meshwright.api.summary import layout_summary
from meshwright.api.verbs import VERBS
from meshwright.mcp.next_calls import Answer, NextCall, changes_of, next_calls

DIGITS = 4  # of a number; the bands are wider than the rest
ROWS = 10
DROPPED = 3


class Figures(Part, frozen=True, kw_only=True):
    """Memory and speed of one layout; bands are [low, high]."""

    fit: str
    memory_gib: float
    memory_band_gib: Sequence[float]
    step_s: float | None  # speeds are null if the layout cannot be built
    step_band_s: Sequence[float] | None
    tokens_per_s_per_gpu: float | None
    mfu: float | None


class PlanRow(Figures, frozen=True, kw_only=True):
    """A layout, best first; `overrides` on the recipe give it."""

    layout: str
    overrides: Sequence[str]
    days: float | UnsetType = UNSET
    days_band: Sequence[float] | UnsetType = UNSET
    cost: float | UnsetType = UNSET


class DroppedRow(Part, frozen=True, kw_only=True):
    """Why layouts are not in the list."""

    count: int
    reason: str


class PlansAnswer(Response, frozen=True, kw_only=True):
    """Layouts by rank."""

    model: str | UnsetType = UNSET
    gpus: str | UnsetType = UNSET
    goal: str | UnsetType = UNSET
    seq_length: int | UnsetType = UNSET
    engine: str | UnsetType = UNSET
    recipe: str | UnsetType = UNSET
    global_batch_size: int | UnsetType = UNSET
    capacity_gib: float | UnsetType = UNSET
    mfu_convention: str | UnsetType = UNSET
    searched: int
    plans: Sequence[PlanRow]
    dropped: Sequence[DroppedRow]
    findings: Sequence[str] | UnsetType = UNSET
    assumed: Sequence[str] | UnsetType = UNSET
    suggestions: Sequence[str] | UnsetType = UNSET
    notes: Sequence[str] | UnsetType = UNSET


class SizeRow(Part, frozen=True, kw_only=True):
    """One GPU count; `levers` are overrides that make it fit."""

    gpus: int
    nodes: str
    layout: str
    fits: bool
    memory_gib: float
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    goodput: float
    days: float | UnsetType = UNSET
    days_band: Sequence[float] | UnsetType = UNSET
    cost: float | UnsetType = UNSET
    cost_band: Sequence[float] | UnsetType = UNSET
    levers: Sequence[str] | UnsetType = UNSET


class SizesAnswer(Response, frozen=True, kw_only=True):
    """GPU counts: the answers, and some of the counts tried."""

    gpu: str
    smallest: int | None
    most_efficient: int | None
    in_time: int | UnsetType | None = UNSET
    tokens: float | UnsetType = UNSET
    price: float | UnsetType = UNSET
    currency: str | UnsetType = UNSET
    sizes: Sequence[SizeRow]
    left_out: int
    assumed: Sequence[str] | UnsetType = UNSET
    notes: Sequence[str] | UnsetType = UNSET


class SideRow(Part, frozen=True, kw_only=True):
    """One engine or target."""

    name: str
    rank: int
    ok: bool
    gpus: str
    layout: str | UnsetType = UNSET
    figures: Figures | UnsetType = UNSET
    relative_speed: float | UnsetType = UNSET
    reasons: Sequence[str]
    findings: Sequence[str] | UnsetType = UNSET
    does_not_execute: Sequence[str] | UnsetType = UNSET
    config_loses: Sequence[str] | UnsetType = UNSET
    error: str | UnsetType = UNSET


class CompareAnswer(Response, frozen=True, kw_only=True):
    """Engines, targets or runs side by side."""

    of: str
    answer: str
    sides: Sequence[SideRow]
    runs: Any = UNSET
    differences: Any = UNSET
    assumed: Sequence[str] | UnsetType = UNSET
    notes: Sequence[str] | UnsetType = UNSET


class ModelRow(Part, frozen=True, kw_only=True):
    """A model of the catalogue; `recipes` are the goals with a recipe of its own."""

    name: str
    hf_id: str
    architecture: str
    total_params: int
    active_params: int
    max_seq_length: int
    recipes: Sequence[str]
    plan: Mapping[str, Any] | UnsetType = UNSET


class ModelsAnswer(Response, frozen=True, kw_only=True):
    """Models that match; `left_out` counts those beyond the limit."""

    models: Sequence[ModelRow]
    left_out: int


class GpuRow(Part, frozen=True, kw_only=True):
    """A GPU type: memory, dense peaks in TFLOP/s, and bandwidths in GB/s."""

    name: str
    memory_gib: float
    peak_tflops_dense: Mapping[str, float] | UnsetType = UNSET  # left out of long lists, as all below
    hbm_gb_s: float | UnsetType = UNSET
    nvlink_gb_s: float | UnsetType = UNSET
    network_gb_s: float | UnsetType = UNSET
    gpus_per_node: int | UnsetType = UNSET


class GpusAnswer(Response, frozen=True, kw_only=True):
    """GPU types that match."""

    gpus: Sequence[GpuRow]


class Compact(NamedTuple):
    """The type of a compact answer, and the function that makes it."""

    type: type[msgspec.Struct]
    make: Callable[[Answer, Request], msgspec.Struct]


def output_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a tool's answer."""
    found = schema_of(COMPACT[name].type) if name in COMPACT else response_schema(VERBS[name])
    calls = msgspec.json.schema(Sequence[NextCall])
    definitions = {**found.get("$defs", {}), **calls.pop("$defs")}
    return {**found, "properties": {**found["properties"], "next": calls}, "$defs": definitions}


def answer_of(name: str, full: Answer, request: Request) -> Answer:
    """Return what a tool answers for the response of its verb."""
    made: Answer = msgspec.to_builtins(COMPACT[name].make(full, request)) if name in COMPACT else full
    rounded: Answer = round_numbers(made)
    return {**rounded, "next": [msgspec.to_builtins(one) for one in next_calls(name, full, request)]}


def round_numbers(value: Any) -> Any:
    """Return a JSON value with numbers of a few significant digits; integers are exact."""
    if isinstance(value, float):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if abs(short) >= 10**DIGITS and short == short // 1 else short
    if isinstance(value, Mapping):
        return {key: round_numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(one) for one in value]
    return value


def _some(values: Sequence[Any]) -> Any:
    """Return values, or nothing at all if there are none."""
    return list(values) or UNSET


def _messages(assumed: Sequence[Answer]) -> Any:
    return _some([one["message"] for one in assumed])


def _found(findings: Sequence[Answer]) -> Any:
    return _some([f"{one['severity']}: {one['message']} ({one['rule']})" for one in findings[:DROPPED]])


def _figures(estimate: Answer) -> dict[str, Any]:
    band = estimate["band"]
    return {
        "fit": estimate["fit"],
        "memory_gib": estimate["memory_gib"]["total"],
        "memory_band_gib": [band["memory_low_gib"], band["memory_high_gib"]],
        "step_s": estimate["step_s"],
        "step_band_s": None if estimate["step_s"] is None else [band["step_low_s"], band["step_high_s"]],
        "tokens_per_s_per_gpu": estimate["tokens_per_s_per_gpu"],
        "mfu": estimate["mfu"],
    }


def _run_length(one: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return days and cost with their bands, as far as they are known."""
    if not one or one.get("days") is None:
        return {}
    known: dict[str, Any] = {"days": one["days"]}
    if one.get("days_band"):
        known["days_band"] = [*one["days_band"].values()]
    return known | ({} if one.get("cost") is None else {"cost": one["cost"]})


def _plans(full: Answer, request: Request) -> PlansAnswer:
    plans = full["plans"]
    rows = [
        PlanRow(
            layout=layout_summary(one["layout"], one["question"]["engine"]),
            overrides=changes_of(one),
            **_figures(one["estimate"]),
            **_run_length(one.get("budget")),
        )
        for one in plans
    ]
    dropped = [DroppedRow(count=one["count"], reason=one["reason"]) for one in full["dropped"]]
    common: dict[str, Any] = {}
    if plans:
        first = plans[0]
        common = {name: first["question"][name] for name in ("model", "gpus", "goal", "seq_length", "engine")}
        common |= {
            "recipe": first["recipe"]["name"],
            "global_batch_size": first["contract"]["global_batch_size"],
            "capacity_gib": first["estimate"]["memory_gib"]["capacity"],
            "mfu_convention": first["estimate"]["mfu_convention"],
            "findings": _found(first["findings"]),
            "assumed": _messages(first["question"]["assumed"]),
            "suggestions": _some(
                [f"{' '.join(one['overrides'])}: {one['why']}" for one in first.get("suggestions", ())]
            ),
        }
    notes = _some([*full.get("notes", ()), *(plans[0].get("notes", ()) if plans else ())])
    largest = sorted(dropped, key=lambda one: -one.count)[:DROPPED]  # the command is in the text
    return PlansAnswer(searched=full["searched"], plans=rows, dropped=largest, notes=notes, **common)


def _sizes(full: Answer, request: Request) -> SizesAnswer:
    chosen = {name: full[name] for name in ("smallest", "most_efficient", "in_time") if full.get(name)}
    wanted = {one["gpus"] for one in chosen.values()}
    others = [one["gpus"] for one in full["sizes"] if one["gpus"] not in wanted]
    powers = [count for count in others if count & (count - 1) == 0]
    places = [one.bit_length() for one in wanted]
    near = sorted(powers, key=lambda count: min((abs(count.bit_length() - one) for one in places), default=0))
    wanted |= set(near[: ROWS - len(wanted)])
    rows = [_size_row(one) for one in full["sizes"] if one["gpus"] in wanted]
    known = {name: full[name] for name in ("tokens", "price", "currency") if full[name]}
    if full["deadline_days"] is not None:
        known["in_time"] = full["in_time"]["gpus"] if full["in_time"] else None
    return SizesAnswer(
        gpu=full["gpu"],
        smallest=full["smallest"]["gpus"] if full["smallest"] else None,
        most_efficient=full["most_efficient"]["gpus"] if full["most_efficient"] else None,
        sizes=rows,
        left_out=len(full["sizes"]) - len(rows),
        assumed=_messages(full["assumed"]),
        notes=_some(full["notes"]),
        **known,
    )


def _size_row(one: Answer) -> SizeRow:
    more = _run_length(one)
    if "cost" in more and one.get("cost_band"):
        more["cost_band"] = [*one["cost_band"].values()]
    same = ("gpus", "nodes", "layout", "fits", "step_s", "tokens_per_s_per_gpu", "mfu")
    return SizeRow(
        **{name: one[name] for name in same},
        memory_gib=one["total_gib"],
        goodput=one["goodput"]["share"],
        levers=_some(one["levers"]),
        **more,
    )


def _comparison(full: Answer, request: Request) -> CompareAnswer:
    return CompareAnswer(
        of=full["of"],
        answer=full["answer"],
        sides=[_side(one) for one in full["sides"]],
        runs=full.get("runs", UNSET),
        differences=full.get("differences", UNSET),
        assumed=_messages(full["assumed"]),
        notes=_some(full.get("notes", ())),
    )


def _side(one: Answer) -> SideRow:
    estimate, speed = one["estimate"], one.get("relative_speed")
    lost = [f"{item['field']}: {item['reason']}" for item in one["lost"]]
    return SideRow(
        name=one["name"],
        rank=one["rank"],
        ok=one["ok"],
        gpus=one["gpus"],
        layout=layout_summary(one["layout"], one["engine"]) if one["layout"] else UNSET,
        figures=Figures(**_figures(estimate)) if estimate else UNSET,
        relative_speed=UNSET if speed is None else speed,
        reasons=one["reasons"],
        findings=_found(one["findings"]),
        does_not_execute=_some([f"{item['field']}={item['value']}: {item['effect']}" for item in one["cannot"]]),
        config_loses=_some(lost[:2] + ([f"and {len(lost) - 2} more"] if len(lost) > 2 else [])),
        error=one["error"] or UNSET,
    )


def _models(full: Answer, request: Request) -> ModelsAnswer:
    limit = getattr(request, "limit", None) or len(full["models"])
    same = ("name", "hf_id", "architecture", "max_seq_length", "recipes")
    rows = [
        ModelRow(
            **{name: one[name] for name in same},
            total_params=one["parameters"]["total"],
            active_params=one["parameters"]["active"],
            plan={name: value for name, value in one["plan"].items() if name != "command" and value is not None}
            if "plan" in one
            else UNSET,
        )
        for one in full["models"][:limit]
    ]
    return ModelsAnswer(models=rows, left_out=len(full["models"]) - len(rows))


def _gpus(full: Answer, request: Request) -> GpusAnswer:
    same = ("name", "memory_gib", "peak_tflops_dense", "hbm_gb_s", "network_gb_s", "gpus_per_node")
    if len(full["gpus"]) > ROWS:
        return GpusAnswer(gpus=[GpuRow(name=one["name"], memory_gib=one["memory_gib"]) for one in full["gpus"]])
    return GpusAnswer(
        gpus=[
            GpuRow(**{name: one[name] for name in same}, nvlink_gb_s=one["nvlink_gb_s_per_direction"])
            for one in full["gpus"]
        ]
    )


COMPACT: Mapping[str, Compact] = {
    "plan": Compact(PlansAnswer, _plans),
    "size": Compact(SizesAnswer, _sizes),
    "compare": Compact(CompareAnswer, _comparison),
    "models": Compact(ModelsAnswer, _models),
    "gpus": Compact(GpusAnswer, _gpus),
}
