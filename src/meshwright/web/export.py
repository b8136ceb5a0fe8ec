"""Export the catalogue and plans as static files: pages, a JSON file for each, and llms.txt."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from starlette.types import Message

from meshwright import __version__, api
from meshwright.api.terms import meanings
from meshwright.errors import InputError, OutputError
from meshwright.stages import stage
from meshwright.web import plan_pages, preview_image
from meshwright.web.app import Settings, create_app
from meshwright.web.assets import assets
from meshwright.web.plan_selection import POPULAR, PlanKey, selected
from meshwright.web.static_page import as_file
from meshwright.web.templates import render

MARK = ".meshwright-export.json"
"""Marks an exported folder and lists its files."""
SECTIONS = {
    "recipes": ("Recipes", "the library: a contract and a layout for a cluster"),
    "throughput": ("Throughput recipes", "upper bounds on mock data; never a production setting"),
    "models": ("Models", "shapes and exact parameter counts"),
    "gpus": ("GPUs", "memory, peaks and links, with sources"),
    "rules": ("Rules", "all checks: symptom, cause and fix"),
}
SHOWN = ("title", "description")  # what link previews show of every page
GLOSSARY_TWIN = "twin:glossary"  # no verb returns all terms
Get = Callable[[str], Awaitable[bytes]]


@dataclass(frozen=True)
class Site:
    """What is exported besides the catalogue."""

    plans: Sequence[str] = ()  # popular, or MODEL:GPUS:GOAL
    url: str = ""  # where the site will be, for link previews
    docs: str = ""  # where the documentation is: a full address, or a file of the site


def export(folder: str, site: Site = Site(), log: Callable[[str], None] = lambda text: None) -> list[str]:  # noqa: B008  # immutable
    """Write the catalogue to a new, empty or previously exported folder; return the file names."""
    place = Path(folder)
    before = _written_before(place)
    if site.url and not urlsplit(site.url).netloc:
        fix = ("--url https://example.org/meshwright",)
        raise InputError("is not a full address", field="url", value=site.url, fix=fix)
    files = asyncio.run(_files(site, log))
    for name in sorted(set(before) - files.keys()):
        _below(place, name).unlink(missing_ok=True)
    for name, content in files.items():
        _write(_below(place, name), content)
    _write(place / MARK, json.dumps({"schema": api.SCHEMA, "version": __version__, "files": sorted(files)}).encode())
    return sorted(files)


def _written_before(place: Path) -> list[str]:
    """Return the files of an earlier export; raise InputError for a folder with other files."""
    if place.exists() and not place.is_dir():
        raise InputError("is not a folder", field="export", value=str(place), fix=("--export site",))
    mark = place / MARK
    if not place.is_dir() or not any(place.iterdir()):
        return []
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))["files"]
        return [str(name) for name in found if not PurePosixPath(name).is_absolute() and ".." not in name.split("/")]
    except (OSError, ValueError, KeyError, TypeError):
        reason = "contains other files; use a new or empty folder"
        raise InputError(reason, field="export", value=str(place), fix=(f"--export {place}/catalogue",)) from None


def _below(place: Path, name: str) -> Path:
    return place.joinpath(*PurePosixPath(name).parts)


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", field="export", value=str(path)) from error


async def _files(site: Site, log: Callable[[str], None]) -> dict[str, bytes]:
    """Return every file by name."""
    app = create_app(Settings(workers=0, cache_entries=20_000))

    async def get(address: str) -> bytes:
        return await _answer(app, address)

    contents: dict[str, bytes] = {f"static/{one.name}": one.content for one in assets().values()}
    catalogue = {name: json.loads(await get(f"/api/{name}")) for name in ("recipes", "models", "gpus", "rules")}
    catalogue["throughput"] = json.loads(await get("/api/recipes?benchmark=true"))
    keys = selected(site.plans, catalogue["models"]["models"])
    plans = plan_pages.computed(keys, POPULAR not in site.plans, log)
    pages = dict(_pages(catalogue))
    links = {address: name for name, (address, _) in pages.items()} | {"/": "index.html", "/llms.txt": "llms.txt"}
    links |= _plan_links(plans, catalogue) | ({site.docs: site.docs[1:]} if site.docs.startswith("/") else {})
    for number, (name, (address, twin)) in enumerate(pages.items()):
        html, data = (await get(address)).decode(), await get(twin)
        parts = {part: await _part(get, part) for part in _parts(html)}
        contents[name] = as_file(_without_served(html, site, links), name, links, parts.__getitem__).encode()
        if name.startswith("recipes/"):
            data = _merged(data, "estimate", await get(f"/api/estimate?target={PurePosixPath(name).stem}"))
        contents[str(PurePosixPath(name).with_suffix(".json"))] = _indented(data)
        stage(f"{number} of {len(pages)} catalogue pages")
    contents |= _plan_files(plans, catalogue, site, links)
    contents |= _front(plans, catalogue, site, links)
    contents |= _page_previews(contents, plan_pages.addresses(site.url)) if site.url else {}
    pages |= {name: ("", "") for name in contents if name.endswith(".html") and name not in (*pages, "404.html")}
    contents["index.json"] = _indented(json.dumps(_index(pages)).encode())
    contents["llms.txt"] = _llms(catalogue, plans).encode()
    if site.url:
        contents["sitemap.xml"] = plan_pages.sitemap(pages, plan_pages.addresses(site.url)).encode()
    return contents


def _plan_links(plans: Mapping[PlanKey, Any], catalogue: Mapping[str, Any]) -> dict[str, str]:
    """Return addresses of plans: their own, and the served form's query for the same plan."""
    links = {f"/{key.model}/": f"{key.model}/index.html" for key in plans}
    names = {one["hf_id"]: one["name"] for one in catalogue["models"]["models"]}
    for key in plans:
        file = f"{key.folder}/index.html"
        links[f"/{key.folder}/"] = file
        links[f"/?model={names.get(key.model)}&gpus={key.gpus}&goal={key.goal}"] = file
    return links


def _plan_files(
    plans: Mapping[PlanKey, Any], catalogue: Mapping[str, Any], site: Site, links: Mapping[str, str]
) -> dict[str, bytes]:
    """Return the files of plans: pages, JSON twins and preview pictures."""
    titles = _titles(plans, catalogue)
    address, previews = plan_pages.addresses(site.url), preview_image.available()
    files = {}
    for name, html in plan_pages.rendered(plans, titles, address, site.docs, previews):
        files[name] = as_file(_without_served(html, site, links), name, links).encode()
    for key, data in plans.items():
        plan = data["plan"]
        files[f"{key.folder}/index.json"] = _indented(json.dumps(plan).encode())
        if previews:
            title = plan_pages.short_name(key.model)
            about = f"{plan_pages.GOAL_TITLES[key.goal]} on {key.gpus}"
            words = plan_pages.model_row(key, plan)["words"]
            files[f"{key.folder}/preview.png"] = preview_image.preview(title, about, plan, words)
    for model in dict.fromkeys(key.model for key in plans):
        rows = [plan_pages.model_row(key, data["plan"]) for key, data in plans.items() if key.model == model]
        found = {"schema": api.SCHEMA, "version": __version__, "model": model, "name": titles[model], "plans": rows}
        files[f"{model}/index.json"] = _indented(json.dumps(found).encode())
    return files


def _titles(plans: Mapping[PlanKey, Any], catalogue: Mapping[str, Any]) -> dict[str, str]:
    """Return the catalogue's name of every model with plans."""
    names = {one["hf_id"]: one["name"] for one in catalogue["models"]["models"]}
    return {key.model: names.get(key.model, key.model) for key in plans}


def _front(
    plans: Mapping[PlanKey, Any], catalogue: Mapping[str, Any], site: Site, links: Mapping[str, str]
) -> dict[str, bytes]:
    """Return the first page, and the page for addresses that are none: both search the plans."""
    index = plan_pages.search_index(plans, _titles(plans, catalogue))
    address = plan_pages.addresses(site.url)
    lead = f"{len(plans)} plans for {len(index)} models: layout, memory, speed and commands for eight frameworks."
    shown = {
        "version": __version__, "path": "/", "sections": list(_sections(catalogue)), "docs": site.docs,
        "models": index, "index": index, "gpus": sorted({key.gpu for key in plans}), "goals": list(api.GOALS),
        "goal_titles": plan_pages.GOAL_TITLES,
    }  # fmt: skip
    heading = "How to train it on your GPUs" if plans else "Catalogue"
    lead = lead if plans else f"What Meshwright {__version__} knows. To plan for your own GPUs, run meshwright web."
    meta = plan_pages.page_meta("Training plans for open models" if plans else "Catalogue", lead, address(""))
    front = render("catalogue.html", heading=heading, lead=lead, meta=meta, root="", missing=False, **shown)
    files = {"index.html": as_file(_without_served(front, site, links), "index.html", links).encode()}
    if plans:
        root = urlsplit(site.url).path.rstrip("/") + "/"
        meta = plan_pages.page_meta("Page not found", lead, "")
        lead = "This address is not a page. The closest plans are below."
        html = render(
            "catalogue.html", heading="Page not found", lead=lead, meta=meta, root=root, missing=True, **shown
        )
        files["404.html"] = as_file(_without_served(html, site, links), "404.html", links, root=root).encode()
    return files


def _page_previews(contents: Mapping[str, bytes], address: Callable[[str], str]) -> dict[str, bytes]:
    """Return pages without a preview again, with one of their title and description, and its pictures."""
    found: dict[str, bytes] = {}
    pictures = preview_image.available()
    for name in (name for name in contents if name.endswith(".html") and name != "404.html"):
        html = contents[name].decode()
        if 'property="og:url"' in html:
            continue
        title, about = (unescape(html.partition(f'"og:{key}" content="')[2].partition('"')[0]) for key in SHOWN)
        title, image = title.removesuffix(" · Meshwright"), f"{name.removesuffix('.html')}-preview.png"
        if pictures:
            found[image] = preview_image.page_preview(title, about)
        meta = plan_pages.page_meta(
            title, about, address(name.removesuffix("index.html")), address(image) if pictures else "", title
        )
        found[name] = html.replace("</head>", f"{render('preview_tags.html', meta=meta)}</head>", 1).encode()
    return found


def _pages(catalogue: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield every page: its file, its URL, and the URL of its JSON."""
    for name in ("recipes", "models", "gpus", "rules"):
        yield f"{name}.html", (f"/{name}", f"/api/{name}")
    yield "throughput.html", ("/recipes?benchmark=1", "/api/recipes?benchmark=true")
    yield "accuracy.html", ("/accuracy", "/api/accuracy?points=true")
    yield "glossary.html", ("/glossary", GLOSSARY_TWIN)
    for one in (*catalogue["recipes"]["recipes"], *catalogue["throughput"]["recipes"]):
        yield f"recipes/{one['name']}.html", (f"/recipes/{one['name']}", f"/api/recipes/{one['name']}?format=toml")
    for one in catalogue["models"]["models"]:
        yield f"models/{one['name']}.html", (f"/models/{one['name']}", f"/api/models/{quote(one['name'])}")
    for one in catalogue["gpus"]["gpus"]:
        yield f"gpus/{one['name']}.html", (f"/gpus/{one['name']}", f"twin:gpus/gpus/name/{one['name']}")
    for one in catalogue["rules"]["rules"]:
        yield f"rules/{one['id']}.html", (f"/rules/{one['id']}", f"twin:rules/rules/id/{one['id']}")


async def _answer(app: Any, address: str) -> bytes:
    """Return the response to a URL; `twin:` URLs select one entry of a catalogue, or the glossary."""
    if address == GLOSSARY_TWIN:
        return json.dumps({"schema": api.SCHEMA, "terms": dict(sorted(meanings().items()))}).encode()
    if address.startswith("twin:"):
        catalogue, rows, key, value = address.removeprefix("twin:").split("/", 3)
        found = json.loads(await _answer(app, f"/api/{catalogue}"))
        return json.dumps({"schema": api.SCHEMA, **next(one for one in found[rows] if one[key] == value)}).encode()
    path, _, query = address.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
    }  # fmt: skip
    status, body = 0, b""
    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Future()  # stays connected

    async def send(message: Message) -> None:
        nonlocal status, body
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            body += message.get("body", b"")

    await app(scope, receive, send)
    if status != 200:
        raise OutputError(f"the page cannot be rendered: status {status}", field="export", value=address)
    return body


def _parts(html: str) -> set[str]:
    """Return the URLs of parts that a page loads later."""
    found = html.split('<div hx-get="')[1:]
    return {one.partition('"')[0] for one in found}


async def _part(get: Get, address: str) -> str:
    """Return a part that a served page loads later: a recipe as text, or the command that exports it."""
    path, _, query = address.partition("?")
    arguments = {name: values[0] for name, values in parse_qs(query).items()}
    if "format" in arguments:
        return (await get(address)).decode()
    name = path.split("/")[2]
    return f"<pre><code>meshwright export {escape(name)} --to {escape(arguments['to'])}</code></pre>"


def _without_served(html: str, site: Site, links: Mapping[str, str]) -> str:
    """Return a page without menu entries that need a server, and with one for the documentation."""
    entry = re.compile(r'\s*<li><a href="(/[a-z]*)"')
    lines = html.split("\n")
    kept = [line for line in lines if (found := entry.match(line)) is None or found[1] in links]
    docs = f'\n<li><a href="{escape(site.docs)}">Docs</a></li>' if site.docs else ""
    text = "\n".join(kept)
    for current in ("", ' aria-current="page"'):
        first = f'<li><a href="/"{current}>'
        text = text.replace(f"{first}Plan</a></li>", f"{first}{'Plans' if site.plans else 'Catalogue'}</a></li>")
    return text.replace("</ul>\n    </nav>", f"{docs}</ul>\n    </nav>", 1)


def _sections(catalogue: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for key, (title, about) in SECTIONS.items():
        rows = catalogue[key]["recipes" if key == "throughput" else key]
        yield "/recipes?benchmark=1" if key == "throughput" else f"/{key}", title, str(len(rows)), about
    yield "/accuracy", "Accuracy", "", "predicted against measured, by source"
    yield "/glossary", "Glossary", str(len(meanings())), "terms of reports and fields of a layout"


def _index(pages: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    files = [{"page": name, "data": str(PurePosixPath(name).with_suffix(".json"))} for name in pages]
    return {"schema": api.SCHEMA, "version": __version__, "pages": files}


def _merged(data: bytes, key: str, more: bytes) -> bytes:
    return json.dumps({**json.loads(data), key: json.loads(more)}).encode()


def _indented(data: bytes) -> bytes:
    return json.dumps(json.loads(data), indent=1).encode() + b"\n"


def _llms(catalogue: Mapping[str, Any], plans: Mapping[PlanKey, Any]) -> str:
    """Return an index for language models: what there is, and where its data is."""
    lines = [
        "# Meshwright",
        "",
        "> Training recipes for large models: layouts, memory, speed, and rules that check configs. "
        f"These are the plans and the catalogue of version {__version__}, written by `meshwright web --export`.",
        "",
        "Plans for another model, cluster or goal: run "
        "`meshwright recommend MODEL --gpus 8xH100 --goal sft --json`, or `meshwright mcp` for tools.",
        "",
        *_llms_plans(plans),
        "## Catalogue",
        "",
    ]
    for address, title, count, about in _sections(catalogue):
        lines.append(f"- [{title}]({_file_of(address)}.json): {f'{count}, ' if count else ''}{about}")
    for key, rows, label in (("models", "models", "name"), ("gpus", "gpus", "name")):
        lines += ["", f"## {'GPUs' if key == 'gpus' else key.title()}", ""]
        lines += [f"- [{one[label]}]({key}/{one[label]}.json)" for one in catalogue[key][rows]]
    lines += ["", "## Recipes", ""]
    for one in catalogue["recipes"]["recipes"]:
        about = f"{one['goal']} of {one['model']} on {one['gpus']}x{one['gpu']}, {one['seq_length']} tokens"
        lines.append(f"- [{one['name']}](recipes/{one['name']}.json): {about}")
    lines += ["", "## Optional", "", "- [Rules one by one](rules.json)", "- [All pages](index.json)", ""]
    return "\n".join(lines)


def _llms_plans(plans: Mapping[PlanKey, Any]) -> Iterator[str]:
    """Yield the lines on plans: one for each, with its verdict."""
    if plans:
        yield from ("## Plans", "", "MODEL/GPUS/GOAL/index.json is what `meshwright recommend … --json` prints.", "")
    for key, data in plans.items():
        row = plan_pages.model_row(key, data["plan"])
        about = f"{row['fit']}, {row['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU, {row['words']}"
        yield f"- [{key.goal} of {key.model} on {key.gpus}]({key.folder}/index.json): {about}"
    if plans:
        yield ""


def _file_of(address: str) -> str:
    return "throughput" if "benchmark" in address else address.strip("/")
