"""The generated pages say what the code says."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@cache
def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def maker() -> ModuleType:
    return _module("make")


@pytest.mark.parametrize("page", sorted(maker().PAGES))
def test_page_is_up_to_date(page: str) -> None:
    made = maker()
    assert (DOCS / page).read_text(encoding="utf-8") == made.written(page), "stale: run `make docs`"


def test_the_readmes_example_is_todays_answer() -> None:
    made = maker()
    assert made.README.read_text(encoding="utf-8") == made.readme_page(), "stale: run `make docs`"
    rehearsed = made.rehearsed_rows
    assert rehearsed.PAGE.read_text(encoding="utf-8") == rehearsed.page(), "stale: run `make docs`"


def test_pictures_of_the_site_have_a_size_and_a_small_version() -> None:
    html = '<p><img alt="Plan" src="../screens/ask.png" /></p><td><img alt="Scale" src="../screens/scale.png"></td>'
    sizes = {"screens/ask.png": (1200, 1500), "screens/scale.png": (1200, 1400)}
    found = _module("site_html").with_sizes(html, "skill", sizes)
    assert '<a href="../screens/ask.png"><img alt="Plan" src="../screens/ask-small.webp"' in found
    assert 'width="1200" height="1500" fetchpriority="high"' in found
    assert 'width="1200" height="1400" loading="lazy"' in found


def test_a_small_picture_is_under_60_kb() -> None:
    assert len(_module("site_html").small(DOCS / "screens" / "ask.png")) < 60_000


def test_the_theme_s_search_dialog_has_a_name() -> None:
    named = _module("site_html").on_post_page('<div data-md-component="search" role="dialog">', None, None)
    assert 'role="dialog" aria-label="Search"' in named


def test_the_site_loads_nothing_from_other_hosts() -> None:
    text = "![tests](https://img.shields.io/badge/tests) [a](https://example.org)"
    assert _module("site_hooks").site_links(text) == " [a](https://example.org)"
