"""Every page keeps the budget of speed, size, stability and accessibility, at three widths in light and dark."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import web_budget


def _problems(browser: Any, address: str, axe: str) -> list[str]:
    return [
        f"{width} {theme}: {one}"
        for width in web_budget.SIZES
        for theme in web_budget.THEMES
        for one in web_budget.load(browser, address, width, theme, axe).problems
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", web_budget.SERVED)
def test_a_served_page_keeps_the_budget(browser: Any, address: str, axe: str, name: str) -> None:
    assert _problems(browser, address + web_budget.SERVED[name], axe) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", web_budget.STATIC)
def test_a_page_of_the_site_keeps_the_budget(browser: Any, site: str, axe: str, name: str) -> None:
    assert _problems(browser, site + web_budget.STATIC[name], axe) == []


def test_the_first_page_and_its_answer_come_at_once(browser: Any, address: str, axe: str) -> None:
    assert web_budget.load(browser, address, 1440, "light", axe).problems == []
    assert web_budget.answer_ms(browser, address) < web_budget.ANSWER_MS


def test_what_is_over_the_budget_is_a_problem(browser: Any, address: str, axe: str) -> None:
    found = web_budget.load(browser, address, 390, "light", axe)
    found.first_content_ms, found.layout_shift, found.moved = 1500.0, 0.2, ["chart"]
    assert found.problems == ["first content ms: 1500, budget 1,000", "layout shift: 0.2, budget 0.1", "moved: chart"]
