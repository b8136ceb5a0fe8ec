"""Every rule fires on its broken case, is silent on its sound case, and its fix works."""

from __future__ import annotations

from string import Formatter

from tests.each import each

from meshwright.recipes.case import Case
from meshwright.rules import RULES, check, message, try_fixes

from .cases import CASES, WITHOUT_FIX, broken_case, sound_case
from .helpers import parse

ALL = sorted(RULES)


def broken_errors(c: Case) -> set[str]:
    return {r.id for r in RULES.values() if r.severity == "error" and c.engine in r.engines and bool(r.broken(c))}


def test_every_rule_has_a_broken_and_a_sound_case() -> None:
    assert sorted(CASES) == ALL


@each("rule_id", ALL)
def test_fires_and_is_reported_with_a_complete_message(rule_id: str) -> None:
    c, rule = broken_case(rule_id), RULES[rule_id]
    assert c.engine in rule.engines
    assert bool(rule.broken(c))
    assert rule_id in {f.rule for f in check(c)}
    text = message(rule, c)
    assert text
    assert "{" not in text
    named = [name for _, name, _, _ in Formatter().parse(rule.message) if name]
    for name in named:
        if name not in rule.values and isinstance(getattr(c, name), int | str):
            assert str(getattr(c, name)) in text
    assert rule.id.startswith(f"{rule.subject}.")
    assert rule.symptom
    assert rule.cause


@each("rule_id", ALL)
def test_is_silent(rule_id: str) -> None:
    c = sound_case(rule_id)
    assert c.engine not in RULES[rule_id].engines or not bool(RULES[rule_id].broken(c))


@each("rule_id", ALL)
def test_fix_resolves_the_finding_and_adds_no_error(rule_id: str) -> None:
    c, rule = broken_case(rule_id), RULES[rule_id]
    fix = try_fixes(rule, c)
    if rule_id in WITHOUT_FIX:
        assert fix == ()
        return
    assert fix, "no fix was found"
    repaired = c.replace(**dict(parse(override) for override in fix))
    assert not bool(rule.broken(repaired))
    assert broken_errors(repaired) <= broken_errors(c)


PITFALLS = {
    "TP > num_kv_heads",
    "PP without VP",
    "EP too low for large MoE",
    "CUDA graphs + packed sequences",
    "CUDA graphs + full recompute",
    "use_te_rng_tracker not set",
    "FSDP + TP > 1 on H100",
    "Long context without CP",
    "MoE overlap_grad_reduce on H100",
    "VLM SFT missing image data",
    "Qwen35-VL MoE FSDP",
}


def test_every_pitfall_has_a_rule() -> None:
    assert {r.pitfall for r in RULES.values() if r.pitfall} == PITFALLS
