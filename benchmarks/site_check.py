"""Check a built static site (links, anchors, JSON twins, previews, indexes, sizes); print problems and figures."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import jsonschema

from meshwright.api import schema

DOCS = "docs"  # the folder of the documentation, which another program builds
VERBS = {"recipes": "recipe", "models": "model"}  # folders of catalogue pages whose twins are a verb's response
LISTS = {"throughput": "recipes"}  # twins of lists that are named unlike their verb
PAGE_BYTES, SITE_BYTES = 300_000, 300_000_000  # most of one page of ours, and of the whole site
KINDS = {".html": "pages", ".json": "JSON files", ".png": "previews"}


class Page(HTMLParser):
    """Links, anchors and link previews of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.meta: dict[str, str] = {}
        self.tags: list[str] = []
        self.language = ""
        self.data: dict[str, str] = {}
        self._script = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one tag."""
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.links += [found[name] for name in ("href", "src") if name in found]
        self.ids += [found[name] for name in ("id",) if name in found]
        if tag == "meta":
            self.meta[found.get("property") or found.get("name", "")] = found.get("content", "")
        if tag == "html":
            self.language = found.get("lang", "")
        self._script = found.get("id", "") if tag == "script" and found.get("type") == "application/json" else ""

    def handle_data(self, data: str) -> None:
        """Note the data that a page carries."""
        if self._script:
            self.data[self._script] = self.data.get(self._script, "") + data


@dataclass
class Report:
    """Problems and figures of a site."""

    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def checked(site: Path) -> Report:
    """Return what is wrong with a site, and its figures."""
    report = Report()
    files = {path.relative_to(site).as_posix(): path for path in sorted(site.rglob("*")) if path.is_file()}
    pages = {name: Page(path.read_text(encoding="utf-8")) for name, path in files.items() if name.endswith(".html")}
    links = 0
    for name, page in pages.items():
        links += len(page.links)
        report.problems += _link_problems(name, page, pages, files)
        if not _of_docs(name):
            report.problems += _page_problems(name, page, files)
    report.problems += _index_problems(pages, files)
    report.figures = _figures(files, links)
    biggest = report.figures["largest page bytes"]
    if biggest > PAGE_BYTES:
        report.problems.append(f"{report.figures['largest page']}: {biggest:,} bytes; the limit is {PAGE_BYTES:,}")
    if report.figures["bytes"] > SITE_BYTES:
        report.problems.append(f"the site has {report.figures['bytes']:,} bytes; the limit is {SITE_BYTES:,}")
    return report


def _of_docs(name: str) -> bool:
    return name.startswith(f"{DOCS}/")


def _link_problems(name: str, page: Page, pages: Mapping[str, Page], files: Mapping[str, Path]) -> Iterator[str]:
    """Yield links to files and anchors that are not there."""
    for link in dict.fromkeys(page.links):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        if name.endswith("404.html"):  # shown at any address: its links start at the root of the host
            target = _from_root(parts.path, files)
        elif parts.path.startswith("/"):
            yield f"{name}: {link} starts at the root of the host, where the site may not be"
            continue
        else:
            target = _joined(name, unquote(parts.path)) if parts.path else name
        if target in files:
            found = unquote(parts.fragment)
            if found and target in pages and found not in pages[target].ids and not _of_docs(name):
                yield f"{name}: {link}: {target} has no anchor {found}"
        elif not (target is not None and f"{target}/index.html".lstrip("/") in files):
            yield f"{name}: {link} leads to no file"


def _from_root(path: str, files: Mapping[str, Path]) -> str | None:
    """Return the file that a path from the root of the host means, wherever the site is."""
    parts = unquote(path).strip("/").split("/")
    return next(
        (name for cut in range(len(parts) + 1) if (name := "/".join(parts[cut:]) or "index.html") in files), None
    )


def _joined(name: str, path: str) -> str:
    """Return the file that a relative link of a page leads to."""
    parts = list(PurePosixPath(name).parent.parts)
    for part in path.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def _page_problems(name: str, page: Page, files: Mapping[str, Path]) -> Iterator[str]:
    """Yield what one of our pages lacks: a language, a heading, unique ids, its preview and its JSON twin."""
    if page.language != "en":
        yield f"{name}: no language"
    if page.tags.count("h1") != 1:
        yield f"{name}: {page.tags.count('h1')} headings of the first level"
    for one in {one for one in page.ids if page.ids.count(one) > 1}:
        yield f"{name}: two elements have the id {one}"
    for key in ("description", "og:title", "og:description"):
        if not page.meta.get(key):
            yield f"{name}: no {key}"
    if "og:url" in page.meta and "og:image" not in page.meta:
        yield f"{name}: no og:image"
    if "og:image" in page.meta and _from_root(urlsplit(page.meta["og:image"]).path, files) is None:
        yield f"{name}: og:image {page.meta['og:image']} is not in the site"
    if name == "404.html":
        return
    twin = str(PurePosixPath(name).with_suffix(".json"))
    if twin not in files:
        yield f"{name}: no JSON twin {twin}"
        return
    try:
        found = json.loads(files[twin].read_text(encoding="utf-8"))
    except ValueError as error:
        yield f"{twin}: is not JSON: {error}"
        return
    if found.get("schema") != "meshwright/2":
        yield f"{twin}: no schema"
    verb = verb_of(twin)
    if verb is not None:
        for error in list(_validator(verb).iter_errors(_without_additions(twin, found)))[:1]:
            yield f"{twin}: not the response of {verb}: {error.json_path}: {error.message[:200]}"


def verb_of(twin: str) -> str | None:
    """Return the verb whose response a JSON file is; None for files that only the site has."""
    parts = PurePosixPath(twin).parts
    if len(parts) == 5:  # ORGANIZATION/MODEL/GPUS/GOAL/index.json
        return "recommend"
    if len(parts) == 2:
        return VERBS.get(parts[0])
    name = PurePosixPath(twin).stem
    return LISTS.get(name, name) if len(parts) == 1 and name not in ("index", "glossary") else None


def _without_additions(twin: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a twin without its recipe's estimate, which the verb has apart."""
    return {key: value for key, value in found.items() if not (twin.startswith("recipes/") and key == "estimate")}


@cache
def _validator(verb: str) -> Any:
    published = schema.published()[f"{verb}.json"]
    return jsonschema.validators.validator_for(published)(published)


def _index_problems(pages: Mapping[str, Page], files: Mapping[str, Path]) -> Iterator[str]:
    """Yield entries of llms.txt, index.json, the sitemap and the search that lead nowhere."""
    listed = re.findall(r"\]\(([^)]+)\)", files["llms.txt"].read_text(encoding="utf-8"))
    yield from (f"llms.txt: {one} is not in the site" for one in listed if unquote(one) not in files)
    rows = json.loads(files["index.json"].read_text(encoding="utf-8"))["pages"]
    for row in rows:
        yield from (f"index.json: {row[key]} is not in the site" for key in ("page", "data") if row[key] not in files)
    missing = {name for name in pages if not _of_docs(name) and name != "404.html"} - {row["page"] for row in rows}
    yield from (f"index.json: {name} is not listed" for name in sorted(missing))
    for model in json.loads(pages["index.html"].data.get("plans", "[]")):
        for gpus, goal, *_ in model["plans"]:
            if f"{model['id']}/{gpus}/{goal}/index.html" not in files:
                yield f"search: {model['id']}/{gpus}/{goal} is not in the site"
    if "sitemap.xml" in files:
        for one in re.findall("<loc>([^<]+)</loc>", files["sitemap.xml"].read_text(encoding="utf-8")):
            path = urlsplit(one).path
            if _from_root(f"{path}index.html" if path.endswith("/") else path, files) is None:
                yield f"sitemap.xml: {one} is not in the site"


def _figures(files: Mapping[str, Path], links: int) -> dict[str, Any]:
    sizes = {name: path.stat().st_size for name, path in files.items()}
    own = {name: size for name, size in sizes.items() if name.endswith(".html") and not _of_docs(name)}
    largest = max(own, key=lambda name: own[name])
    counts = {title: sum(name.endswith(end) and not _of_docs(name) for name in files) for end, title in KINDS.items()}
    return {
        "files": len(files), "bytes": sum(sizes.values()), **counts,
        "pages of documentation": sum(name.endswith(".html") and _of_docs(name) for name in files),
        "links": links, "largest page": largest, "largest page bytes": own[largest],
    }  # fmt: skip


def main() -> int:
    """Check the site of the command line; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    report = checked(parser.parse_args().site)
    for one in report.problems[:50]:
        print(one, file=sys.stderr)
    print(json.dumps({**report.figures, "problems": len(report.problems)}, indent=1))
    return min(len(report.problems), 1)


if __name__ == "__main__":
    sys.exit(main())
