"""The static site in a browser: found by any spelling, picked, and readable on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.web.e2e.conftest import Watched
from tests.web.e2e.test_browser import violations

PAGE = "/deepseek-ai/DeepSeek-V3/64xH100/pretrain/index.html"
FIRST_CONTENT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"


@pytest.fixture
def shown(browser: Any, site: str) -> Iterator[Watched]:
    """A fresh page of the site on which nothing may go wrong."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    made = Watched(context, site)
    yield made
    context.close()
    assert [one for one in made.wrong if "status of 404" not in one] == []


@pytest.mark.parametrize(
    "typed", ["DeepSeek V3 64 H100 pretraining", "deepseek-ai/deepseek-v3 64 x h100", "deepsek-v3"]
)
def test_any_spelling_finds_the_plan(shown: Watched, typed: str) -> None:
    page = shown.open("/")
    page.fill("#f-search", typed)
    found = page.locator("#found .chips a").first
    assert found.inner_text() == "pretrain on 64xH100"
    page.press("#f-search", "Enter")
    page.wait_for_url("**/deepseek-ai/DeepSeek-V3/64xH100/pretrain/index.html")
    assert page.locator("h1").inner_text() == "Pretrain DeepSeek-V3 on 64xH100"


def test_the_picker_opens_a_page_or_shows_the_command(shown: Watched) -> None:
    page = shown.open("/")
    assert page.locator("#picked a.open").inner_text() == "Open: pretrain on 64xH100"
    page.fill("#f-count", "48")
    command = "meshwright recommend deepseek-ai/DeepSeek-V3 --gpus 48xH100 --goal pretrain"
    assert page.locator("#picked code").inner_text() == command
    page.select_option("#f-model", "meta-llama/Meta-Llama-3.1-8B")
    page.locator("#picked a.open").click()
    page.wait_for_url("**/meta-llama/Meta-Llama-3.1-8B/8xH100/sft/index.html")


def test_a_wrong_address_offers_the_plan_that_it_means(shown: Watched) -> None:
    page = shown.open("/deepseek-ai/deepseek_v3/64xh100/pretrain")
    assert page.locator("h1").inner_text() == "Page not found"
    page.locator("#found .chips a").first.click()
    page.wait_for_url(f"**{PAGE}")


def test_plans_are_quick_readable_and_accessible(shown: Watched, axe: str) -> None:
    page = shown.open(PAGE)
    assert page.evaluate(FIRST_CONTENT) < 1000
    page.get_by_role("tab", name="Megatron-LM").click()
    assert "torchrun" in page.locator("#p-megatron-lm").inner_text()
    for path in (PAGE, "/index.html", "/deepseek-ai/DeepSeek-V3/index.html"):
        page = shown.open(path)
        page.evaluate(axe)
        assert violations(page, "html") == {}, path
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390, path
        page.set_viewport_size({"width": 1440, "height": 900})
