"""The questions that are answered over HTTP, by name: each calls the front desk and gives the command line's JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from meshwright import api
from meshwright.errors import unknown

Answer = dict[str, Any]


def recommend(
    *,
    model: str,
    gpus: str,
    goal: str,
    seq: str | None = None,
    engine: str = "meshwright",
    benchmark: bool = False,
    explain: bool = False,
    overrides: Sequence[str] = (),
) -> Answer:
    """The plan for a model on a cluster."""
    plan = api.recommend(model, gpus, goal, seq=seq, engine=engine, benchmark=benchmark, overrides=overrides)
    return api.plan_to_dict(plan, explain=explain)


def plan(
    *,
    target: str,
    gpus: str,
    goal: str | None = None,
    seq: str | None = None,
    engine: str = "meshwright",
    top: int = 5,
    everything: bool = False,
    overrides: Sequence[str] = (),
) -> Answer:
    """The fastest plans, and with everything also all layouts that fit."""
    found = api.plan(target, gpus, goal, seq=seq, engine=engine, top=top, overrides=overrides, everything=everything)
    return api.ranking_to_dict(found)


def estimate(
    *,
    target: str,
    gpus: str | None = None,
    goal: str | None = None,
    seq: str | None = None,
    engine: str = "meshwright",
    overrides: Sequence[str] = (),
) -> Answer:
    """The estimate of exactly this layout."""
    found = api.estimate(target, gpus=gpus, goal=goal, seq=seq, engine=engine, overrides=overrides)
    return api.estimate_to_dict(found)


def size(
    *,
    model: str,
    goal: str,
    gpu: str,
    seq: str | None = None,
    engine: str = "meshwright",
    tokens: str | None = None,
    price: float | None = None,
    overrides: Sequence[str] = (),
) -> Answer:
    """GPU counts with speed, goodput, days and cost."""
    found = api.size(model, goal, gpu, seq=seq, engine=engine, tokens=tokens, price=price, overrides=overrides)
    return api.sizing_to_dict(found)


def side_by_side(answers: Mapping[str, Answer]) -> Answer:
    """The sizes of several GPU types, which are asked one by one."""
    series = [{"gpu": gpu, **{k: v for k, v in one.items() if k != "schema"}} for gpu, one in answers.items()]
    return {"schema": api.SCHEMA, "series": series}


def schedule(
    *,
    target: str,
    gpus: str | None = None,
    goal: str | None = None,
    seq: str | None = None,
    engine: str = "meshwright",
    first: int | None = None,
    overrides: Sequence[str] = (),
) -> Answer:
    """Start and end of every pass of a pipeline's step, or of the first so many micro batches."""
    found = api.estimate(target, gpus=gpus, goal=goal, seq=seq, engine=engine, overrides=overrides)
    answer = api.timeline_to_dict(api.timeline(found))
    if first is None:
        return answer
    return {**answer, "passes": [one for one in answer["passes"] if one["micro_batch"] < first]}


def check(
    *,
    target: str,
    gpus: str | None = None,
    engine: str | None = None,
    framework: str | None = None,
    model: str | None = None,
    advice: bool = False,
    overrides: Sequence[str] = (),
) -> Answer:
    """What is wrong with a recipe or a text."""
    found = api.check(
        target, gpus=gpus, engine=engine, framework=framework, model=model, advice=advice, overrides=overrides
    )
    return api.check_to_dict(found)


def export(*, target: str, to: str, gpus: str | None = None, overrides: Sequence[str] = ()) -> Answer:
    """A recipe in another framework's words."""
    return api.export_to_dict(*api.export(target, to, gpus=gpus, overrides=overrides))


def write(
    *,
    to: str,
    model: str,
    gpus: str,
    goal: str,
    seq: str | None = None,
    engine: str = "meshwright",
    benchmark: bool = False,
    overrides: Sequence[str] = (),
) -> Answer:
    """The plan for a model on a cluster, in a framework's words: files and the command that starts them."""
    plan = api.recommend(model, gpus, goal, seq=seq, engine=engine, benchmark=benchmark, overrides=overrides)
    if to != api.ENGINES[0]:
        return api.export_to_dict(*api.export(plan.recipe, to, gpus=gpus))
    answer = api.plan_to_dict(plan)
    return {
        "schema": api.SCHEMA,
        "framework": to,
        "ok": plan.ok,
        "gpus": answer["question"]["gpus"],
        "files": {f"{plan.recipe.name}.toml": api.recipe_text(plan.recipe)},
        "command": answer["commands"].get(to, ""),
        "env": {},
        "unmapped": [],
        "notes": [],
        "findings": answer["findings"],
    }


def recipes(
    *, query: str | None = None, goal: str | None = None, family: str | None = None, benchmark: bool | None = None
) -> Answer:
    """The index of recipes."""
    found = api.find_recipes(query, goal=goal, family=family, benchmark=benchmark)
    return {"schema": api.SCHEMA, "recipes": api.entries_to_dicts(found)}


def recipe(*, name: str, format: str | None = None, overrides: Sequence[str] = ()) -> Answer:
    """One recipe with every field, and as text where a format is asked for."""
    found = api.recipe(name, overrides)
    answer = {"schema": api.SCHEMA, "recipe": api.recipe_to_dict(found)}
    return answer if format is None else {**answer, "format": format, "text": api.recipe_text(found, format)}


def models(*, query: str | None = None) -> Answer:
    """The catalogue of models."""
    return {"schema": api.SCHEMA, "models": [api.model_to_dict(one) for one in api.model_catalogue(query)]}


def model(*, name: str) -> Answer:
    """One model's facts."""
    return {"schema": api.SCHEMA, "model": api.model_to_dict(api.find_model(name))}


def gpus() -> Answer:
    """The catalogue of GPUs."""
    return {"schema": api.SCHEMA, "gpus": [api.gpu_to_dict(one) for one in api.gpu_catalogue()]}


def rules(*, query: str | None = None, pitfalls: bool = False) -> Answer:
    """What is checked, with symptom, cause and fix."""
    found = api.rule_catalogue(query, pitfalls=pitfalls)
    return {"schema": api.SCHEMA, "rules": [api.rule_to_dict(one) for one in found]}


@cache
def _report() -> Any:
    return api.accuracy(api.shipped_measurements())


def accuracy(*, points: bool = False) -> Answer:
    """The cost model against the measurements that are shipped."""
    report = _report()
    answer = {"schema": api.SCHEMA, **api.accuracy_to_dict(report)}
    return {**answer, "points": api.accuracy_points(report)} if points else answer


def complete(*, kind: str, query: str = "", limit: int = 12) -> Answer:
    """Names that what was typed may become."""
    return {"schema": api.SCHEMA, "kind": kind, "names": api.complete(kind, query, limit)}


VERBS: dict[str, Callable[..., Answer]] = {
    verb.__name__: verb
    for verb in (
        recommend,
        plan,
        estimate,
        size,
        schedule,
        check,
        export,
        write,
        recipes,
        recipe,
        models,
        model,
        gpus,
        rules,
        accuracy,
        complete,
    )
}
HEAVY = frozenset(("plan", "size", "accuracy"))
"""Those that take a second: one worker stays free for the rest."""


def answer(verb: str, asked: dict[str, Any]) -> Answer:
    """The answer to a question by its name."""
    if verb not in VERBS:
        raise unknown("question", verb, VERBS)
    return VERBS[verb](**asked)
