"""What a person does in a browser: every page clicked through, with the numbers of the command line."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.web.html import at

from meshwright.models import config_of

ASK = "/?model=llama3-70b&gpus=64xH100&goal=pretrain"
EXPLORE = "/explore?target=llama3-8b&gpus=16xH100&goal=pretrain"
SCALE = "/scale?model=llama3-8b&gpu=H100&goal=sft&tokens=1B&price=2.5"
PAGES = {
    "ask": "/",
    "answer": ASK,
    "error": "/?model=lama3-70b&gpus=64xH100&goal=pretrain",
    "explore": EXPLORE,
    "scale": SCALE,
    "check": "/check",
    "doctor": "/doctor",
    "compare": "/compare",
    "two plans": "/compare?model=llama3-8b&gpus=8xH100&goal=sft&gpus_b=8xH200",
    "not fitting": "/?model=llama3-405b&gpus=8xH100&goal=pretrain",
    "glossary": "/glossary",
    "recipes": "/recipes?query=llama3",
    "recipe": "/recipes/llama3_8b_sft_config",
    "models": "/models?query=qwen3",
    "model": "/models/llama3_8b",
    "gpus": "/gpus",
    "gpu": "/gpus/H100",
    "rules": "/rules?query=moe",
    "rule": "/rules/batch.divides",
    "missing": "/rules/nope.nope",
    "accuracy": "/accuracy",
}
ERRORS = ("error", "missing")  # the browser itself notes their status
OF_COLOURS = ["color-contrast", "link-in-text-block"]  # axe's rules that depend on the theme
DROP = """([selector, name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name, { type: "application/json" }));
  const place = document.querySelector(selector);
  for (const kind of ["dragover", "drop"]) {
    place.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
  }
}"""
SCRIPT = """#!/bin/bash
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
  --seq-length 4096 --max-position-embeddings 4096 --tensor-model-parallel-size 16 \\
  --micro-batch-size 1 --global-batch-size 7
"""


def _not_of_status(wrong: list[str]) -> list[str]:
    return [one for one in wrong if "status of 4" not in one]


def violations(page: Any, within: str) -> dict[str, list[tuple[str, list[str]]]]:
    """What axe-core, already loaded, objects to in each theme, with all details open: all in light, colours in dark."""
    ask = "async ([within, wanted]) => (await axe.run(within, {resultTypes: ['violations'], ...wanted})).violations"
    page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
    violations = {}
    for theme, wanted in {"light": {}, "dark": {"runOnly": {"type": "rule", "values": OF_COLOURS}}}.items():
        page.evaluate("(theme) => { document.documentElement.dataset.theme = theme; }", theme)
        found = page.evaluate(ask, [within, wanted])
        if found:
            violations[theme] = [(one["id"], [node["html"][:160] for node in one["nodes"][:4]]) for one in found]
    return violations


# The pages of recipes represent the other lists and their entries.
SLOW = ("models", "model", "gpus", "gpu", "rules", "rule")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in PAGES])
def test_no_violation_of_accessibility_and_no_sideways_scrolling(watched: Any, axe: str, name: str) -> None:
    page = watched.open(PAGES[name])
    page.evaluate(axe)
    assert violations(page, "html") == {}
    page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_timeout(60)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    if name in ERRORS:
        watched.wrong[:] = _not_of_status(watched.wrong)


def test_every_page_is_reached_by_clicking(watched: Any) -> None:
    page = watched.open("/")
    for name in (
        "Explore",
        "Scale",
        "Check",
        "Doctor",
        "Compare",
        "Recipes",
        "Models",
        "GPUs",
        "Rules",
        "Accuracy",
        "Plan",
    ):
        page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
        page.wait_for_load_state()
        assert page.locator("nav a[aria-current=page]").inner_text() == name
        watched.drawn()
    for path in ("/recipes", "/models", "/gpus", "/rules"):
        page = watched.open(path)
        first = page.locator("#results tbody th a").first
        named = first.inner_text()
        first.click()
        assert page.locator("h1").inner_text() == named


def test_asking_with_type_ahead_gives_the_numbers_of_the_command_line(watched: Any, meshwright: Any) -> None:
    page = watched.open("/")
    page.fill("#f-model", "")
    with page.expect_response(lambda reply: "/complete/models" in reply.url and "llama3_7" in reply.url):
        page.locator("#f-model").press_sequentially("llama3_7")
    page.wait_for_selector("#l-model option[value=llama3_70b]", state="attached")
    page.fill("#f-model", "llama3_70b")
    page.fill("#f-gpus", "64xH100")
    page.check("#goal-pretrain")
    page.click("button.main")
    page.wait_for_function("() => document.querySelector('#verdict').textContent.includes('8x8xH100 · pretrain')")
    answer = meshwright("recommend", "llama3_70b", "--gpus", "64xH100", "--goal", "pretrain", "--explain")
    numbers = watched.numbers("#answer")
    assert len(numbers) == 20 + 8 * answer["layout"]["pp"]  # 8 of every stage
    assert all(value == at(answer, path) for path, value in numbers.items())
    assert "model=llama3_70b&gpus=64xH100&goal=pretrain" in page.url  # a link to this answer
    needed = answer["estimate"]["memory_gib"]["total"]
    assert page.locator("#status").inner_text().startswith(f"Fits: {needed:.1f} of")
    page.reload()
    assert watched.numbers("#answer") == numbers


def test_chips_and_typing_update_the_answer_and_terms_are_explained(watched: Any) -> None:
    page = watched.open("/")
    verdict = "(text) => document.querySelector('#verdict').textContent.includes(text)"
    assert "llama3_8b on 8xH100" in page.locator("#verdict").inner_text()
    page.locator("#chips-model .chip", has_text="llama3-70b").click()
    page.wait_for_function(verdict, arg="llama3_70b on 8xH100")
    page.locator("#chips-count .chip", has_text="64").click()
    page.wait_for_function(verdict, arg="llama3_70b on 8x8xH100")
    assert page.input_value("#f-gpus") == "64xH100"
    assert "model=llama3-70b&gpus=64xH100" in page.url
    assert page.locator("#chips-count [aria-current]").inner_text() == "64"
    page.check("#goal-peft")
    page.wait_for_function(verdict, arg="peft")
    before = watched.numbers("#answer")
    page.fill("#f-model", "lla")  # half a name: the last answer stays
    page.wait_for_selector("#typing:not([hidden])")
    assert watched.numbers("#answer") == before
    page.fill("#f-model", "qwen3-8b")
    page.wait_for_function(verdict, arg="qwen3_8b on 8x8xH100")
    assert page.locator("#typing").is_hidden()
    page.locator(".tiles .term", has_text="MFU").hover()
    assert "utilization" in page.locator("#meaning").inner_text()
    page.locator("#meaning a").click()
    page.wait_for_url("**/glossary#mfu")


def test_a_command_is_copied(watched: Any, meshwright: Any) -> None:
    page = watched.open(ASK)
    answer = meshwright("recommend", "llama3-70b", "--gpus", "64xH100", "--goal", "pretrain")
    page.locator("#p-meshwright [data-copy]").first.click()
    page.wait_for_function("() => document.querySelector('#p-meshwright [data-copy]').textContent.startsWith('Copied')")
    assert page.evaluate("() => navigator.clipboard.readText()") == answer["commands"]["meshwright"]
    page.get_by_role("tab", name="Megatron-LM").click()
    page.wait_for_selector("#p-megatron-lm details")
    assert "pretrain_gpt.py" in page.locator("#p-megatron-lm pre").first.inner_text()
    page.locator("#same + p + .copyable [data-copy]").click()
    page.wait_for_timeout(50)
    assert page.evaluate("() => navigator.clipboard.readText()").startswith("meshwright recommend llama3-70b")


def test_a_dropped_config_is_asked_about(watched: Any, meshwright: Any, tmp_path: Any) -> None:
    config = json.dumps(config_of("qwen3_8b"), indent=2)
    (tmp_path / "config.json").write_text(config)
    page = watched.open("/")
    page.evaluate(DROP, ["#ask", "config.json", config])
    page.wait_for_function("() => document.getElementById('f-config').value.length > 100")
    page.fill("#f-gpus", "4xH100")
    page.check("#goal-sft")
    page.click("button.main")
    page.wait_for_function("() => document.querySelector('#verdict').textContent.includes('on 4xH100')")
    answer = meshwright("recommend", str(tmp_path / "config.json"), "--gpus", "4xH100", "--goal", "sft", "--explain")
    numbers = watched.numbers("#answer")
    assert len(numbers) > 20
    assert all(value == at(answer, path) for path, value in numbers.items())


def test_a_file_beside_the_form_or_too_large_is_reported_and_a_name_made_plain(watched: Any) -> None:
    page = watched.open("/check")
    example = page.input_value("#f-text")
    page.evaluate(DROP, ["footer", "run.sh", SCRIPT])
    assert page.input_value("#f-text") == example
    page.evaluate(DROP, ["#check", "my config (1).yaml", "x: 1"])
    page.wait_for_function("() => document.getElementById('f-text').value === 'x: 1'")
    assert page.input_value("#f-name") == "my config _1_.yaml"
    page.evaluate(DROP, ["#check", "large.sh", "x" * 1_600_000])
    assert "1,600,000 bytes" in page.wait_for_selector("[role=alert]").inner_text()
    assert page.input_value("#f-text") == "x: 1"


def test_going_back_shows_what_was_asked_before(watched: Any) -> None:
    page = watched.open(ASK)
    before = watched.numbers("#answer")
    page.fill("#f-gpus", "32xH100")
    page.click("button.main")
    page.wait_for_function("() => document.querySelector('#verdict').textContent.includes('4x8xH100')")
    page.go_back()
    page.wait_for_function("() => document.querySelector('#verdict').textContent.includes('8x8xH100')")
    assert (page.input_value("#f-gpus"), watched.numbers("#answer")) == ("64xH100", before)


def test_an_error_is_shown_in_place(watched: Any) -> None:
    page = watched.open("/")
    page.fill("#f-model", "lama3-70b")
    page.fill("#f-gpus", "64xH100")
    page.click("button.main")
    alert = page.wait_for_selector("[role=alert]")
    assert "did you mean" in alert.inner_text()


def test_layouts_are_filtered_and_compared(watched: Any, meshwright: Any, axe: str) -> None:
    page = watched.open(EXPLORE)
    before = int(page.locator("#shown").inner_text().split()[0].replace(",", ""))
    page.select_option("#only-pp", "2")
    page.wait_for_function(
        "(n) => parseInt(document.querySelector('#shown').textContent.replace(',', '')) < n", arg=before
    )
    assert all(" pp 2 " in text for text in page.locator("#layouts-table tbody th").all_inner_texts())
    for place in (0, 3):
        page.locator("#layouts-table tbody button").nth(place).click()
        page.wait_for_function("(n) => document.querySelectorAll('#compare .side').length === n", arg=1 + (place > 0))
    shown = watched.numbers("#compare")
    for slot, place in (("a", 0), ("b", 3)):
        chosen = dict(page.evaluate("() => [...new URL(location.href).searchParams]"))[slot]
        words = ("--gpus", "16xH100", "--goal", "pretrain", *chosen.split())
        answer = meshwright("estimate", "llama3-8b", *words)
        for path in ("step_s", "mfu", "memory_gib.total", "memory_gib.activations"):
            assert shown[f"{slot}.{path}"] == at(answer["estimate"], path)
        row = page.locator("#layouts-table tbody tr").nth(place).locator("data").nth(1)
        assert float(row.get_attribute("value")) == pytest.approx(answer["estimate"]["step_s"], rel=1e-12)
    assert page.locator("#compare .pipeline").count() == 2
    assert page.locator("#compare svg.passes .pass-F").count() > 10
    page.evaluate(axe)
    assert violations(page, "html") == {}
    page.reload()
    page.wait_for_selector("#compare .side >> nth=1")
    assert watched.numbers("#compare") == shown


def test_a_point_of_the_chart_is_chosen_by_a_click(watched: Any) -> None:
    page = watched.open(EXPLORE)
    page.locator("#layouts canvas").scroll_into_view_if_needed()
    box = page.locator("#layouts canvas").bounding_box()
    place = page.evaluate(
        "() => { const view = charts.views.get('layouts'); const row = view.data('layouts')[0];"
        " const [x, y] = view.origin(); const { left, top } = view.padding();"
        " return [left + x + view.scale('x')(row.total_gib), top + y + view.scale('y')(row.step_s)]; }"
    )
    page.mouse.move(box["x"] + place[0], box["y"] + place[1])
    tip = page.wait_for_selector("#vg-tooltip-element.visible").inner_text()
    page.mouse.click(box["x"] + place[0], box["y"] + place[1])
    page.wait_for_selector("#compare .side")
    row = page.evaluate("() => explore.rows.find((one) => one.ask === explore.chosen.a)")
    assert row["words"] in tip
    assert watched.numbers("#compare")["a.step_s"] == pytest.approx(row["step_s"], rel=1e-9)


def test_scale_draws_what_its_table_says(watched: Any, meshwright: Any) -> None:
    watched.open(SCALE)
    options = ("--goal", "sft", "--gpu", "H100", "--tokens", "1B", "--price", "2.5")
    answer = meshwright("size", "llama3-8b", *options)
    numbers = {path.removeprefix("H100."): value for path, value in watched.numbers("#answer").items()}
    assert len(numbers) > 50
    assert all(value == at(answer, path) for path, value in numbers.items())
    drawn = watched.page.evaluate("() => charts.views.get('scale-mfu').data('sizes').map((one) => one.mfu)")
    assert drawn == [one["mfu"] for one in answer["sizes"] if one["fits"]]
    assert watched.page.locator("canvas").count() == 4


def test_a_dropped_script_is_checked_line_by_line(watched: Any, meshwright: Any, tmp_path: Any) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    answer = meshwright("check", str(tmp_path / "run.sh"), "--gpus", "8xH100")
    page = watched.open("/check")
    page.evaluate(DROP, ["#check", "run.sh", SCRIPT])
    page.wait_for_function("() => document.getElementById('f-name').value === 'run.sh'")
    page.fill("#f-gpus", "8xH100")
    page.get_by_role("button", name="Check", exact=True).click()
    page.wait_for_function("() => !document.querySelector('#verdict').textContent.includes('example')")
    for finding in answer["findings"]:
        where = f"#line-{finding['line']} + .at" if finding["line"] else "#els ~ .finding"
        assert finding["message"] in "\n".join(page.locator(where).all_inner_texts())


def test_catalogues_are_searched_while_typing(watched: Any, meshwright: Any) -> None:
    page = watched.open("/recipes")
    page.locator("#f-query").press_sequentially("qwen3 moe")
    wanted = len(meshwright("recipes", "qwen3 moe")["recipes"])
    page.wait_for_function("(n) => Number(document.querySelector('[data-of=recipes]').value) === n", arg=wanted)
    assert page.url.endswith("/recipes?" + urlencode({"query": "qwen3 moe"})) or "qwen3" in page.url


def test_accuracy_is_filtered_by_source(watched: Any) -> None:
    page = watched.open("/accuracy")
    count = "() => scatter.plots.get('acc-step').shown.length"
    every = page.evaluate(count)
    page.select_option("#source", "llm_foundry")
    page.wait_for_function(f"(n) => ({count})() < n", arg=every)
    rows = page.locator("tr", has=page.locator("th", has_text="llm_foundry")).first.locator("td").first.inner_text()
    assert page.evaluate(count) == int(rows)


def test_dark_colours_are_kept(watched: Any) -> None:
    page = watched.open("/")
    colour = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.click("#theme")
    assert page.evaluate(colour) != light
    assert page.get_attribute("#theme", "aria-pressed") == "true"
    page.goto(watched.address + "/gpus")
    assert page.evaluate(colour) != light
    page.click("#theme")
    assert page.evaluate(colour) == light


def test_asking_by_keyboard_alone(watched: Any) -> None:
    page = watched.open("/")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.id") == "f-model"
    assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.type("llama3-8b")
    while page.evaluate("() => document.activeElement.id") != "f-gpus":
        page.keyboard.press("Tab")
    page.keyboard.type("4xH100")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#verdict').textContent.includes('on 4xH100')")
    page.locator("#t-meshwright").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.activeElement.id") == "t-megatron-lm"
    assert page.locator("#p-megatron-lm").is_visible()
    page.keyboard.press("End")
    assert page.locator("#p-accelerate").is_visible()
