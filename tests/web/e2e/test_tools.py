"""What a person does on the pages of layouts, checks and logs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.web import rehearsals
from tests.web.e2e.conftest import PATIENCE_MS
from tests.web.e2e.test_browser import DROP, EXPLORE, violations

from meshwright.web import example_files


def test_filters_of_layouts_are_in_the_link(watched: Any) -> None:
    page = watched.open(EXPLORE)
    assert page.locator("#layouts-table .tag", has_text="recommended").count() == 1
    page.select_option("#only-pp", "2")
    page.wait_for_function("() => new URL(location.href).searchParams.get('only') === 'pp:2'")
    shown = page.locator("#shown").inner_text()
    page.reload()
    watched.drawn()
    assert page.locator("#shown").inner_text() == shown
    page.check("#frontier-only")
    tags = page.locator("#layouts-table tbody tr").count()
    assert page.locator("#layouts-table tbody .tag").count() == tags
    page.click("#clear")
    page.wait_for_function("() => !new URL(location.href).searchParams.get('only')")
    assert page.evaluate("() => charts.views.get('layouts').data('frontier').length") > 1


def test_fixes_are_applied_by_a_click(watched: Any) -> None:
    page = watched.open("/check")
    page.get_by_role("button", name="Apply fixes").click()
    page.wait_for_selector("#fxd")
    assert "--tensor-model-parallel-size 4" in page.input_value("#f-text")
    assert page.locator("#verdict .badge.yes").count() == 1


def test_a_dropped_log_is_drawn_and_shared(watched: Any) -> None:
    page = watched.open("/doctor")
    log = example_files.log()
    page.evaluate(
        DROP, ["#doctor", "train.log", "one line of another program\n" * 60_000 + log]
    )  # too long: its middle is left out
    page.wait_for_function("() => document.getElementById('f-log').value.includes('loss')")
    assert len(page.input_value("#f-log")) < 1_000_000
    page.fill("#f-model", "llama3-8b")
    page.fill("#f-gpus", "8xH100")
    page.click("button.main")
    page.wait_for_function("() => !document.querySelector('#verdict').textContent.includes('example')")
    watched.drawn()
    assert page.evaluate("() => charts.views.get('curve-0').data('findings').length") == 1
    page.locator("#shr ~ .copyable [data-copy=url]").click()
    page.wait_for_timeout(60)
    page.goto(page.evaluate("() => navigator.clipboard.readText()"))
    assert "loss.spikes" in page.locator("#answer").inner_text()


def test_a_dropped_rehearsal_is_drawn_as_a_pipeline(watched: Any, axe: str) -> None:
    page = watched.open(EXPLORE)
    passes = 2 * rehearsals.RANKS * rehearsals.MICRO_BATCHES
    page.evaluate(DROP, ["#rehearsal", "rehearsal.json", rehearsals.response_text()])
    page.wait_for_selector("#timeline svg.passes")
    assert page.locator("#timeline svg.passes g").count() == passes
    assert "pipeline bubble" in page.locator("#timeline").inner_text()
    box = page.locator("#timeline svg.passes rect.pass-F").first.bounding_box()
    assert box["width"] > 5
    page.evaluate(DROP, ["#rehearsal", "step.json", rehearsals.trace_text()])
    page.wait_for_selector("#timeline [aria-label='Collectives over time']")
    assert page.locator("#timeline svg.passes g").count() == passes + 10
    page.evaluate(axe)
    assert violations(page, "#timeline") == {}
    page.fill("#f-rehearsal", "{}")
    page.locator("#f-rehearsal").dispatch_event("change")
    page.wait_for_selector("#timeline [role=alert]")
    assert "meshwright rehearse" in page.locator("#timeline").inner_text()


def test_a_search_of_seconds_shows_how_far_it_is(watched: Any) -> None:
    page = watched.open("/scale")
    page.fill("#f-model", "deepseek-v3")
    page.fill("#f-gpu", "H100")
    page.click("button.main")
    bar = "document.querySelector('.progress progress')"
    page.wait_for_function(f"() => {bar} && {bar}.max > 10 && {bar}.value > 0")
    page.wait_for_function("() => document.querySelector('.progress').innerText.includes('counts done')")
    # Each GPU type's counts are folded. Five seconds of CPU time were over a minute on two cores with a load of 15.
    page.wait_for_selector("#answer table", state="attached", timeout=3 * PATIENCE_MS)
    assert page.locator(".progress").count() == 0


@pytest.mark.parametrize(
    ("path", "table"),
    [
        ("/?model=llama3-70b&gpus=64xH100&goal=pretrain", "[aria-label=Changes]"),
        (EXPLORE, "[aria-label='Table of what was left out']"),
        (EXPLORE, ".scroll:has(> #layouts-table)"),
        ("/compare?model=llama3-8b&gpus=8xH100&goal=sft", "[aria-label='Table of engines']"),
        ("/rules?query=moe", "[aria-label=Rules]"),
    ],
)
def test_on_a_phone_no_column_of_sentences_or_buttons_is_cut(watched: Any, path: str, table: str) -> None:
    page = watched.page
    page.set_viewport_size({"width": 390, "height": 844})
    watched.open(path)
    wide, seen = page.locator(table).evaluate("(one) => [one.scrollWidth, one.clientWidth]")
    assert wide <= seen
