"""Terms are explained where they stand, by one mechanism on every page."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

from meshwright.api.terms import IN_SENTENCES, meanings
from meshwright.web.explained_terms import explained, term_link

TERM = re.compile(r'<a class="term" href="/glossary#([^"]+)" data-meaning="([^"]+)">')


def terms_of(html: str) -> list[str]:
    return [found[1] for found in TERM.finditer(html)]


def test_terms_in_sentences_have_a_meaning() -> None:
    assert set(IN_SENTENCES) <= meanings().keys()


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("<p>With TP 8 and pp 2, tp stays in a node.</p>", ["tp", "pp"]),
        ("<p>layout.tp=8 --tp 8 <code>tp</code> tp=8 some_tp</p>", []),
        ("<p>one micro batch; gradient accumulation.</p>", ["micro_batch", "gradient_accumulation"]),
        ("<p>some other plan</p>", []),
        ("<dl><dt>other</dt><dd>2 s</dd></dl>", ["other"]),
        ("<table><tr><th scope=col>recompute</th></tr></table>", ["recompute"]),
        ("<section><p>MoE</p></section><section><p>MoE, MoE</p></section>", ["moe", "moe"]),
        ('<button type="button">LoRA</button><h1>LoRA</h1><svg><title>tp</title></svg><p>LoRA</p>', ["lora"]),
        (f"<p>{term_link('tp', 'tensor parallel')}, so tp is 2</p>", ["tp"]),
        ("<p>a &lt;tp&gt; b</p>", ["tp"]),
        ("<label><input type=radio> LoRA</label><p>LoRA</p>", ["lora"]),
        ("<dl><dt>strategy</dt><dd data-plain>fsdp2</dd></dl>", ["strategy"]),  # two links would be too close to tap
        ("<dl data-plain><dt>optimizer</dt></dl><dl><dt>optimizer</dt></dl>", ["optimizer"]),
    ],
)
def test_the_first_use_in_a_section_is_explained(body: str, wanted: list[str]) -> None:
    page = f"<title>tp</title><main id=main>{body}</main><footer>tp</footer>"
    found = explained(page)
    assert terms_of(found) == wanted
    assert re.sub(r'<a class="term"[^>]*>|</a>', "", found) == re.sub(r'<a class="term"[^>]*>|</a>', "", page)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/", {"tp", "micro_batch", "weights", "band"}),
        ("/explore?target=llama3-8b&gpus=16xH100&goal=pretrain", {"tp", "pp"}),
        ("/recipes/llama3_8b_sft_config", {"tp", "recompute"}),
        ("/rules", {"tp", "moe"}),
        ("/accuracy", set()),
    ],
)
def test_every_kind_of_page_explains_its_terms(client: Any, path: str, wanted: set[str]) -> None:
    html = client.get(path).text
    assert wanted <= set(terms_of(html))
    assert all(unescape(found[2]) == meanings()[found[1]] for found in TERM.finditer(html))
    for match in re.finditer(r"<(?:a|button)\b[^>]*>(?:(?!</(?:a|button)>).)*<a\b", html, re.DOTALL):
        pytest.fail(f"a link inside a link: {match[0][-200:]}")
