"""Plans of the static site: computed by `recommend` in worker processes, and rendered as pages with a JSON twin."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from meshwright import __version__, api
from meshwright.api import requests
from meshwright.api.summary import layout_summary
from meshwright.errors import InputError
from meshwright.stages import stage
from meshwright.web import presenters
from meshwright.web.plan_selection import PlanKey, neighbours
from meshwright.web.templates import render

FEW = 4  # plans for which no processes are started
REASONS = ("reasons", "memory_by_stage_gib")  # of a response with explain
Data = dict[str, Any]
GOAL_TITLES = {"pretrain": "Pretrain", "sft": "Fine-tune", "peft": "LoRA fine-tune"}


def computed(
    keys: Sequence[PlanKey], strict: bool, log: Callable[[str], None] = lambda text: None
) -> dict[PlanKey, Data]:
    """Return the data of every page; without `strict`, combinations that no recipe trains are left out."""
    found: dict[PlanKey, Data] = {}
    for number, (key, data) in enumerate(zip(keys, _answers(keys), strict=True), start=1):
        if "error" not in data:
            found[key] = data
        elif strict:
            error = data["error"]
            raise InputError(error["message"], field="plans", value=":".join(key), fix=tuple(error["fix"]))
        else:
            log(f"left out {key.folder}: {data['error']['message']}")
        stage(f"{number} of {len(keys)} plans")
    return found


def _answers(keys: Sequence[PlanKey]) -> Iterator[Data]:
    """Yield the data of pages in order; many are computed on all cores."""
    if len(keys) <= FEW:
        yield from map(plan_data, keys)
        return
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(plan_data, keys, chunksize=4)


def plan_data(key: PlanKey) -> Data:
    """Return the response of `recommend`, its reasons, the plan in every framework, and what backs it."""
    try:
        request = requests.Recommend(model=key.model, gpus=key.gpus, goal=key.goal, explain=True)
        plan = api.recommend.handle(request)
        response = api.plan_response(plan, request)
    except InputError as error:
        return {"error": {"message": error.reason, "fix": list(error.fix)}}
    explained, replanned = _plain(response), dict[str, Any]()
    return {
        "plan": {name: value for name, value in explained.items() if name not in REASONS},
        "explained": explained,
        "written": {to: _written(plan, to, key, replanned) for to in presenters.FRAMEWORKS},
        "evidence": [_plain(one) for one in api.evidence_for(response)],
        "cli": presenters.command("recommend", requests.Recommend, {**key._asdict(), "overrides": ""}),
    }


def _written(plan: Any, to: str, key: PlanKey, replanned: dict[str, Any]) -> Data:
    """Return the plan as a framework's files, or why it has none there.

    A layout that the framework rejects is planned again for its engine; `replanned` has the plans by engine.
    """
    try:
        written = _plain(api.write_plan(plan, to, key.gpus))
        own = None if written["ok"] or to == api.ENGINES[0] else _for_engine(api.engine_of(to), key, replanned)
        found = None if own is None else _plain(api.write_plan(own, to, key.gpus))
    except InputError as error:
        subject = f"{error.field}={error.value} " if error.value else ""
        return {"written": None, "error": {"message": f"{subject}{error.reason}"}, "own": None}
    if to == api.ENGINES[0]:
        written["findings"] = []  # the page shows them
    if own is None or found is None or not found["ok"]:
        return {"written": written, "error": None, "own": None}
    return {"written": found, "error": None, "own": _plain(api.plan_response(own))}


def _for_engine(engine: str, key: PlanKey, replanned: dict[str, Any]) -> Any:
    """Return the plan for another engine; None if no recipe trains this there."""
    if engine not in replanned:
        try:
            request = requests.Recommend(key.model, gpus=key.gpus, goal=key.goal, engine=engine)
            replanned[engine] = api.recommend.handle(request)
        except InputError:
            replanned[engine] = None
    return replanned[engine]


def _plain(response: Any) -> Any:
    """Return a response as its JSON is read."""
    return json.loads(json.dumps(api.to_json(response), default=str))


def rendered(
    plans: Mapping[PlanKey, Data], titles: Mapping[str, str], address: Callable[[str], str], docs: str, previews: bool
) -> Iterator[tuple[str, str]]:
    """Yield every page of a plan and of a model: its file and its HTML. `titles` are models' catalogue names."""
    keys = list(plans)
    for key, data in plans.items():
        near = neighbours(key, keys)
        shown = _shown(data["explained"], key)
        folder = f"{key.folder}/"
        meta = page_meta(
            title=f"{GOAL_TITLES[key.goal]} {short_name(key.model)} on {key.gpus}",
            about=_about(data["plan"]),
            url=address(folder),
            image=address(f"{folder}preview.png") if previews else "",
            image_text=f"Memory and speed of {short_name(key.model)} on {key.gpus}",
        )
        html = render(
            "plan_page.html", version=__version__, path="/", key=key, data=data, near=near, meta=meta, docs=docs,
            date=build_date(), name=titles[key.model], frameworks=presenters.FRAMEWORKS, goal_titles=GOAL_TITLES,
            short=short_name(key.model), words_of=layout_summary, **shown,
        )  # fmt: skip
        yield f"{folder}index.html", html
    for model in dict.fromkeys(key.model for key in keys):
        rows = [model_row(key, plans[key]["plan"]) for key in keys if key.model == model]
        meta = page_meta(
            title=f"Training plans for {short_name(model)}",
            about=f"{len(rows)} plans to train {model}: layout, memory, speed and commands for each framework.",
            url=address(f"{model}/"),
        )
        yield (
            f"{model}/index.html",
            render(
                "plan_model.html",
                version=__version__,
                path="/",
                model=model,
                name=titles[model],
                rows=rows,
                meta=meta,
                docs=docs,
                date=build_date(),
                goal_titles=GOAL_TITLES,
                short=short_name(model),
            ),
        )


def model_row(key: PlanKey, plan: Data) -> Data:
    """Return a plan as a row of its model's page and of the index."""
    estimate = plan["estimate"]
    return {
        "gpus": key.gpus,
        "goal": key.goal,
        "path": f"{key.folder}/index.html",
        "fits": estimate["fits"],
        "fit": estimate["fit"],
        "gib": estimate["memory_gib"]["total"],
        "capacity": estimate["memory_gib"]["capacity"],
        "tokens_per_s_per_gpu": estimate["tokens_per_s_per_gpu"],
        "words": layout_summary(plan["layout"], plan["question"]["engine"]),
    }


def search_index(plans: Mapping[PlanKey, Data], titles: Mapping[str, str]) -> list[Data]:
    """Return what the search box and the picker look in: models with their plans."""
    models: dict[str, list[Any]] = {}
    for key, data in plans.items():
        row = model_row(key, data["plan"])
        models.setdefault(key.model, []).append([key.gpus, key.goal, row["fits"], round(row["tokens_per_s_per_gpu"])])
    return [{"id": model, "name": titles[model], "plans": rows} for model, rows in models.items()]


def _shown(plan: Data, key: PlanKey) -> Data:
    return {
        "plan": plan,
        "memory": presenters.memory(plan["estimate"], plan.get("memory_by_stage_gib")),
        "step": presenters.step(plan["estimate"]),
        "words": layout_summary(plan["layout"], plan["question"]["engine"]),
        "counts": presenters.counted(plan["findings"]),
    }


def _about(plan: Data) -> str:
    """Return a plan in one sentence, for link previews."""
    e = plan["estimate"]
    gib = e["memory_gib"]
    speed = f"about {e['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU" if e["fits"] else "needs more GPUs or offload"
    words = layout_summary(plan["layout"], plan["question"]["engine"])
    return f"{e['fit'].capitalize()}: {gib['total']:.0f} of {gib['capacity']:.0f} GiB, {speed}. {words}."


def page_meta(title: str, about: str, url: str, image: str = "", image_text: str = "") -> Data:
    """Return what link previews show of a page; `url` and `image` are full addresses or empty."""
    return {"title": title, "about": about, "url": url, "image": image, "image_text": image_text}


def addresses(url: str) -> Callable[[str], str]:
    """Return the function from a file to its full address; to nothing if the site's address is not known."""
    base = url.rstrip("/") + "/"
    return (lambda path: base + quote(path)) if url else (lambda path: "")


def short_name(model: str) -> str:
    """Return a model without its organization."""
    return model.rpartition("/")[2]


def build_date() -> str:
    """Return the day of the build; SOURCE_DATE_EPOCH makes a build repeatable."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    return (datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)).date().isoformat()


def sitemap(files: Iterable[str], address: Callable[[str], str]) -> str:
    """Return the pages for search engines."""
    pages = [
        address(name.removesuffix("index.html")) for name in files if name.endswith(".html") and name != "404.html"
    ]
    rows = "\n".join(f"<url><loc>{page}</loc></url>" for page in pages)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">'
    return f"{head}\n{rows}\n</urlset>\n"
