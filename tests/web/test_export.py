"""The catalogue as files: every link leads to a file, every page has its data beside it, and nothing is overwritten."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from benchmarks import site_check
from fastapi.testclient import TestClient

from meshwright.errors import InputError
from meshwright.web import export as exporting
from meshwright.web import plan_pages, plan_selection
from meshwright.web.static_page import as_file

FEW = 3  # entries of each kind
PLANS = ("deepseek v3:8x8xH100:pretrain", "meta-llama/Meta-Llama-3.1-8B:8xH100:sft", "llama3.1-8b:8xH100:peft")
FOLDERS = (
    "deepseek-ai/DeepSeek-V3/64xH100/pretrain",
    "meta-llama/Meta-Llama-3.1-8B/8xH100/sft",
    "meta-llama/Meta-Llama-3.1-8B/8xH100/peft",
)
LINKED = ("models/deepseek_v3.html", "recipes/deepseek_v3_pretrain_config.html")
URL = "https://example.org/plans"
SITE = exporting.Site(PLANS, URL + "/", "https://example.org/docs/")


def _few(pages: Iterator[tuple[str, tuple[str, str]]]) -> Iterator[tuple[str, tuple[str, str]]]:
    seen: dict[str, int] = {}
    for name, addresses in pages:
        kind = name.partition("/")[0] if "/" in name else name
        seen[kind] = seen.get(kind, 0) + 1
        if (seen[kind] <= FEW and name != "accuracy.html") or name in LINKED:
            yield name, addresses


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small export."""
    every = exporting._pages
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exporting, "_pages", lambda catalogue: _few(every(catalogue)))
        patched.setattr(plan_pages, "plan_data", cache(plan_pages.plan_data))  # exported again below
        place = tmp_path_factory.mktemp("exported") / "site"
        exporting.export(str(place), SITE)
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


def test_nothing_asks_a_server(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        found = links(page)
        assert found.asks == [], page
        assert len(found.to) > 5


def test_the_check_of_a_built_site_finds_nothing(site: Path) -> None:
    # llms.txt lists the whole catalogue, of which this site has a part.
    report = site_check.checked(site)
    assert [one for one in report.problems if not one.startswith("llms.txt")] == []
    assert report.figures["links"] > 500


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("new.html", '<html lang="en"><h1>x</h1><a href="gone.html">', "gone.html leads to no file"),
        ("new.html", '<html lang="en"><h1>x</h1><a href="glossary.html#nope">', "glossary.html has no anchor nope"),
        ("new.html", '<html lang="en"><h1>x</h1><a href="/glossary.html">', "starts at the root of the host"),
        ("new.html", '<html lang="en"><p id="a"><p id="a">', "two elements have the id a"),
        ("new.html", '<html lang="en"><h1>x</h1>', "no JSON twin new.json"),
        ("models/a.json", '{"schema": "meshwright/2"}', "not the response of model"),
    ],
)
def test_the_check_of_a_built_site_finds_what_is_wrong(tmp_path: Path, name: str, text: str, problem: str) -> None:
    named = {"index.html": "<p>", "index.json": '{"pages": []}', "llms.txt": "", "glossary.html": '<p id="tp">'}
    for file, content in {**named, "models/a.html": "<p>", name: text}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    assert any(problem in one for one in site_check.checked(tmp_path).problems)


def test_terms_are_explained_and_led_to_the_glossary(site: Path) -> None:
    page = (site / FOLDERS[0] / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<a class="term" href="../../../../glossary.html#mfu" data-meaning="[^"]+">', page)
    terms = json.loads((site / "glossary.json").read_text())["terms"]
    assert "tensor parallelism" in terms["tp"]


def test_nothing_that_needs_a_server_is_offered_and_models_lead_to_their_plans(site: Path) -> None:
    model = (site / "models" / "deepseek_v3.html").read_text(encoding="utf-8")
    assert '<p><a href="../deepseek-ai/DeepSeek-V3/index.html">' in model
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for offered in ("JSON API", "Check your config", "Plan it for your cluster", "on how many?"):
            assert offered not in text, page


def test_every_page_has_its_data_beside_it(site: Path, client: TestClient) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
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
    exporting.export(str(site), SITE)
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


class Head(HTMLParser):
    """Headings, labels and previews of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.meta: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        if tag == "meta":
            self.meta[found.get("property") or found.get("name", "")] = found.get("content", "")


def head(page: Path) -> Head:
    found = Head()
    found.feed(page.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_plan_is_at_the_address_of_its_hub_id_with_the_json_of_the_command_line(
    site: Path, cli: Callable[..., Mapping[str, Any]], folder: str
) -> None:
    model, gpus, goal = folder.rsplit("/", 2)
    twin = json.loads((site / folder / "index.json").read_text())
    assert twin == cli("recommend", model, "--gpus", gpus, "--goal", goal)
    page = (site / folder / "index.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 100_000
    for shown in (f"meshwright recommend {model} --gpus {gpus} --goal {goal} --json", "What backs these figures"):
        assert shown in page
    assert "capacity" in page
    assert "interval of 80 %" in page
    for framework in ("Meshwright", "Megatron-LM", "torchtitan", "DeepSpeed"):
        assert f">{framework}</button>" in page


def test_a_plan_has_a_link_preview(site: Path) -> None:
    folder = FOLDERS[0]
    meta = head(site / folder / "index.html").meta
    assert meta["og:title"] == "Pretrain DeepSeek-V3 on 64xH100"
    assert "GiB" in meta["og:description"]
    assert meta["og:url"] == f"{URL}/{folder}/"
    assert meta["og:image"] == f"{URL}/{folder}/preview.png"
    assert meta["og:image:alt"]
    picture = (site / folder / "preview.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert (int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")) == (1200, 630)
    assert len(picture) < 50_000


def test_every_page_has_a_link_preview_with_a_picture(site: Path) -> None:
    pages = {str(one.relative_to(site)): head(one).meta for one in site.rglob("*.html") if one.name != "404.html"}
    for name, meta in pages.items():
        assert meta["og:image"].startswith(f"{URL}/"), name
        assert (site / meta["og:image"].removeprefix(f"{URL}/")).read_bytes().startswith(b"\x89PNG"), name
        assert meta["og:url"] == f"{URL}/{name.removesuffix('index.html')}"
        assert meta["twitter:card"] == "summary_large_image"


def test_the_first_paint_waits_for_no_other_file(site: Path) -> None:
    for page in site.rglob("*.html"):
        top = page.read_text(encoding="utf-8").partition("</head>")[0]
        assert '<link rel="stylesheet"' not in top
        assert all(" defer" in one for one in re.findall(r"<script src[^>]*>", top)), page


def test_plans_say_what_backs_them_and_link_their_neighbours(site: Path) -> None:
    sft = (site / FOLDERS[1] / "index.html").read_text(encoding="utf-8")
    assert '<a href="../../../../meta-llama/Meta-Llama-3.1-8B/8xH100/peft/index.html">' in sft
    deepseek = (site / FOLDERS[0] / "index.html").read_text(encoding="utf-8")
    for backing in ("estimated", "dry run of its recipe", "measured on other counts", "automodel_perf_summary"):
        assert backing in deepseek


def test_a_framework_that_rejects_the_layout_gets_a_plan_of_its_own(site: Path) -> None:
    page = (site / FOLDERS[0] / "index.html").read_text(encoding="utf-8")
    assert "Planned for Megatron-LM, which cannot run the layout above" in page
    command = "meshwright recommend deepseek-ai/DeepSeek-V3 --gpus 64xH100 --goal pretrain --engine megatron"
    assert command in page
    assert "The rules reject this layout there" not in page


def test_pages_of_plans_have_headings_labels_and_one_title(site: Path) -> None:
    pages = [site / "index.html", site / "404.html", *(site / folder / "index.html" for folder in FOLDERS)]
    pages.append(site / "meta-llama" / "Meta-Llama-3.1-8B" / "index.html")
    for page in pages:
        found = head(page)
        assert [tag for tag, _ in found.tags].count("h1") == 1, page
        assert found.meta["description"]
        ids = {one["id"] for _, one in found.tags if "id" in one}
        labelled = {one["for"] for tag, one in found.tags if tag == "label" and "for" in one}
        for tag, one in found.tags:
            if tag in ("input", "select"):
                assert one["id"] in labelled, (page, one)
            if tag == "svg":
                assert one.get("aria-hidden") or one.get("aria-label"), (page, one)
            for name in ("aria-labelledby", "aria-controls", "aria-describedby"):
                assert one.get(name, page.name) in (ids | {page.name}), (page, name, one)


def test_the_index_lists_every_plan_for_the_search_and_for_programs(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    carried = json.loads(page.split('id="plans">')[1].partition("</script>")[0])
    assert [one["id"] for one in carried] == ["deepseek-ai/DeepSeek-V3", "meta-llama/Meta-Llama-3.1-8B"]
    assert [plan[:3] for plan in carried[1]["plans"]] == [["8xH100", "sft", True], ["8xH100", "peft", True]]
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    for folder in FOLDERS:
        assert f"({folder}/index.json): fits" in listed
        assert f"<loc>{URL}/{folder}/</loc>" in (site / "sitemap.xml").read_text()


@pytest.mark.parametrize(
    ("words", "field", "fix"),
    [
        (("--plans", "llama3-8b:8xH100"), "plans", "--plans popular"),
        (("--plans", "llama3-8b:8xH100:train"), "plans", "--plans llama3-8b:8xH100:pretrain"),
        (("--plans", "qwen3.5-9b:8xH100:pretrain"), "plans", "--goal sft data.images=false"),
        (("--url", "example.org"), "url", "--url https://example.org/meshwright"),
    ],
)
def test_a_wrong_export_is_refused_with_a_fix(
    tmp_path: Path, cli: Callable[..., Mapping[str, Any]], words: tuple[str, ...], field: str, fix: str
) -> None:
    error = cli("web", "--export", str(tmp_path / "site"), *words)["error"]
    assert error["field"] == field
    assert fix in error["fix"]
    assert not (tmp_path / "site").exists()


def test_the_popular_plans_are_some_hundreds_of_catalogue_models(client: TestClient) -> None:
    keys = plan_selection.popular(client.get("/api/models").json()["models"])
    assert 300 < len(keys) < 500
    assert len(set(keys)) == len(keys)
    assert plan_selection.PlanKey("deepseek-ai/DeepSeek-V3", "64xH100", "pretrain") in keys
    assert all("/" in key.model for key in keys)


def test_a_plan_that_does_not_fit_says_so_and_has_no_command() -> None:
    key = plan_selection.PlanKey("meta-llama/Meta-Llama-3.1-70B", "1xRTX4090", "pretrain")
    plans = plan_pages.computed([key], strict=True)
    assert not plans[key]["plan"]["estimate"]["fits"]
    pages = dict(plan_pages.rendered(plans, {key.model: "llama31_70b"}, plan_pages.addresses(""), "", False))
    page = pages[f"{key.folder}/index.html"]
    assert '<span class="badge no">' in page
    assert "og:url" not in page
