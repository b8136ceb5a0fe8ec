"""Export the catalogue as static files: pages, a JSON file for each, and llms.txt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.types import Message

from meshwright import __version__, api
from meshwright.errors import InputError, OutputError
from meshwright.web.app import Settings, create_app
from meshwright.web.assets import assets
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
Get = Callable[[str], Awaitable[bytes]]


def export(folder: str, log: Callable[[str], None] = lambda text: None) -> list[str]:
    """Write the catalogue to a new, empty or previously exported folder; return the file names."""
    place = Path(folder)
    before = _written_before(place)
    files = asyncio.run(_files(log))
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


async def _files(log: Callable[[str], None]) -> dict[str, bytes]:
    """Return every file by name."""
    app = create_app(Settings(workers=0, cache_entries=20_000))

    async def get(address: str) -> bytes:
        return await _answer(app, address)

    contents: dict[str, bytes] = {f"static/{one.name}": one.content for one in assets().values()}
    catalogue = {name: json.loads(await get(f"/api/{name}")) for name in ("recipes", "models", "gpus", "rules")}
    catalogue["throughput"] = json.loads(await get("/api/recipes?benchmark=true"))
    pages = dict(_pages(catalogue))
    links = {address: name for name, (address, _) in pages.items()} | {"/": "index.html", "/llms.txt": "llms.txt"}
    for number, (name, (address, twin)) in enumerate(pages.items()):
        html, data = (await get(address)).decode(), await get(twin)
        parts = {part: await _part(get, part) for part in _parts(html)}
        contents[name] = as_file(_without_served(html), name, links, parts.__getitem__).encode()
        if name.startswith("recipes/"):
            data = _merged(data, "estimate", await get(f"/api/estimate?target={PurePosixPath(name).stem}"))
        contents[str(PurePosixPath(name).with_suffix(".json"))] = _indented(data)
        if number % 100 == 0:
            log(f"{number} of {len(pages)} pages")
    front = render("catalogue.html", version=__version__, path="/", sections=list(_sections(catalogue)))
    contents["index.html"] = as_file(_without_served(front), "index.html", links, str).encode()
    contents["index.json"] = _indented(json.dumps(_index(pages)).encode())
    contents["llms.txt"] = _llms(catalogue).encode()
    return contents


def _pages(catalogue: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield every page: its file, its URL, and the URL of its JSON."""
    for name in ("recipes", "models", "gpus", "rules"):
        yield f"{name}.html", (f"/{name}", f"/api/{name}")
    yield "throughput.html", ("/recipes?benchmark=1", "/api/recipes?benchmark=true")
    yield "accuracy.html", ("/accuracy", "/api/accuracy?points=true")
    for one in (*catalogue["recipes"]["recipes"], *catalogue["throughput"]["recipes"]):
        yield f"recipes/{one['name']}.html", (f"/recipes/{one['name']}", f"/api/recipes/{one['name']}?format=toml")
    for one in catalogue["models"]["models"]:
        yield f"models/{one['name']}.html", (f"/models/{one['name']}", f"/api/models/{quote(one['name'])}")
    for one in catalogue["gpus"]["gpus"]:
        yield f"gpus/{one['name']}.html", (f"/gpus/{one['name']}", f"twin:gpus/gpus/name/{one['name']}")
    for one in catalogue["rules"]["rules"]:
        yield f"rules/{one['id']}.html", (f"/rules/{one['id']}", f"twin:rules/rules/id/{one['id']}")


async def _answer(app: Any, address: str) -> bytes:
    """Return the response to a URL; `twin:` URLs select one entry of a catalogue."""
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


def _without_served(html: str) -> str:
    """Return a page without menu entries that need a server."""
    lines = html.split("\n")
    served = ('<li><a href="/explore"', '<li><a href="/scale"', '<li><a href="/check"')
    kept = [line for line in lines if not line.lstrip().startswith(served)]
    return "\n".join(kept).replace('<li><a href="/">Plan</a></li>', '<li><a href="/">Catalogue</a></li>')


def _sections(catalogue: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for key, (title, about) in SECTIONS.items():
        rows = catalogue[key]["recipes" if key == "throughput" else key]
        yield "/recipes?benchmark=1" if key == "throughput" else f"/{key}", title, str(len(rows)), about
    yield "/accuracy", "Accuracy", "", "predicted against measured, by source"


def _index(pages: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    files = [{"page": name, "data": str(PurePosixPath(name).with_suffix(".json"))} for name in pages]
    return {"schema": api.SCHEMA, "version": __version__, "pages": files}


def _merged(data: bytes, key: str, more: bytes) -> bytes:
    return json.dumps({**json.loads(data), key: json.loads(more)}).encode()


def _indented(data: bytes) -> bytes:
    return json.dumps(json.loads(data), indent=1).encode() + b"\n"


def _llms(catalogue: Mapping[str, Any]) -> str:
    """Return an index for language models: what there is, and where its data is."""
    lines = [
        "# Meshwright",
        "",
        "> Training recipes for large models: layouts, memory, speed, and rules that check configs. "
        f"This is the catalogue of version {__version__}, written by `meshwright web --export`.",
        "",
        "Plans for a model, a cluster and a goal are not in these files: run "
        "`meshwright recommend MODEL --gpus 8xH100 --goal sft --json`, or `meshwright mcp` for tools.",
        "",
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


def _file_of(address: str) -> str:
    return "throughput" if "benchmark" in address else address.strip("/")
