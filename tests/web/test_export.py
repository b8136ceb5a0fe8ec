"""The catalogue as files: every link leads to a file, every page has its data beside it, and nothing is overwritten."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from fastapi.testclient import TestClient

from meshwright.errors import InputError
from meshwright.web import export as exporting
from meshwright.web.static_page import as_file

FEW = 3  # entries of each kind


def _few(pages: Iterator[tuple[str, tuple[str, str]]]) -> Iterator[tuple[str, tuple[str, str]]]:
    seen: dict[str, int] = {}
    for name, addresses in pages:
        kind = name.partition("/")[0] if "/" in name else name
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= FEW and name != "accuracy.html":
            yield name, addresses


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small export."""
    every = exporting._pages
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exporting, "_pages", lambda catalogue: _few(every(catalogue)))
        place = tmp_path_factory.mktemp("exported") / "site"
        exporting.export(str(place))
        yield place


class Links(HTMLParser):
    """What a page points to, and what it would ask a server for."""

    def __init__(self) -> None:
        super().__init__()
        self.to: list[str] = []
        self.asks: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src"):
                self.to.append(value or "")
            if name.startswith("hx-") or (tag == "form" and name == "action"):
                self.asks.append(f"{tag} {name}={value}")


def links(page: Path) -> Links:
    found = Links()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def test_every_link_leads_to_a_file_and_nothing_asks_a_server(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        found = links(page)
        assert found.asks == [], page
        assert len(found.to) > 5
        for target in found.to:
            if target.startswith("#"):
                continue
            assert not re.match(r"[a-z]+:|/", target), (page, target)
            assert (page.parent / target.partition("?")[0]).resolve().is_file(), (page, target)


def test_every_page_has_its_data_beside_it(site: Path, client: TestClient) -> None:
    for page in site.rglob("*.html"):
        assert json.loads(page.with_suffix(".json").read_text())["schema"] == "meshwright/2", page
    name = json.loads((site / "recipes.json").read_text())["recipes"][0]["name"]
    twin = json.loads((site / "recipes" / f"{name}.json").read_text())
    assert twin["recipe"] == client.get(f"/api/recipes/{name}").json()["recipe"]
    assert twin["estimate"] == client.get(f"/api/estimate?target={name}").json()
    assert json.loads((site / "gpus.json").read_text()) == client.get("/api/gpus").json()


def test_a_recipe_is_there_in_every_format(site: Path) -> None:
    page = next((site / "recipes").glob("*.html"))
    text = page.read_text(encoding="utf-8")
    assert "Writing …" not in text
    for piece in ("from meshwright.recipes import", f"meshwright export {page.stem} --to torchtitan"):
        assert piece in text


def test_llms_txt_lists_existing_files(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# Meshwright\n\n> ")
    named = re.findall(r"\]\(([^)]+)\)", text)
    assert "recipes.json" in named
    there = {str(path.relative_to(site).as_posix()) for path in site.rglob("*.json")}
    exported = {PurePosixPath(name).parts[0] for name in there}
    assert {PurePosixPath(name).parts[0] for name in named} - {"accuracy.json"} <= exported


def test_an_export_is_written_again_and_what_is_gone_is_removed(site: Path) -> None:
    gone, own = site / "recipes" / "old_config.html", site / "notes.txt"
    mark = site / exporting.MARK
    shown = json.loads(mark.read_text())
    gone.write_text("old")
    own.write_text("mine")
    mark.write_text(json.dumps({**shown, "files": [*shown["files"], "recipes/old_config.html", "../outside.txt"]}))
    outside = site.parent / "outside.txt"
    outside.write_text("mine too")
    exporting.export(str(site))
    assert not gone.exists()
    assert (own.read_text(), outside.read_text()) == ("mine", "mine too")


def test_a_folder_with_other_files_is_refused(tmp_path: Path, cli: Callable[..., Mapping[str, Any]]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError) as refused:
        exporting.export(str(tmp_path))
    assert refused.value.fix == (f"--export {tmp_path}/catalogue",)
    assert [one.name for one in tmp_path.iterdir()] == ["thesis.txt"]
    assert cli("web", "--export", str(tmp_path / "thesis.txt"))["error"]["field"] == "export"


def test_a_page_keeps_its_text_and_drawings() -> None:
    drawing = '<svg viewBox="0 0 1 1"><rect x="0"/></svg>'
    page = f'<!doctype html>\n<p title="a &lt; b">x &amp; y &#8211;{drawing}<a href="/gone?x=1">z</a>'
    made = as_file(page + "<br>", "a/b.html", {}, str)
    assert made == page.replace('<a href="/gone?x=1">z</a>', "<span>z</span>") + "<br>"
