"""Checking a file of another framework: its own rules, ours, and the estimate, each finding with its line and fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from meshwright import costs, rules
from meshwright.clusters import Cluster
from meshwright.frameworks.framework import Content, Framework, FrameworkRule, Problem, RuleContext
from meshwright.frameworks.mapping import relevant_fields, text_of, to_settings, value_of
from meshwright.frameworks.result import CheckResult, UnresolvedValue
from meshwright.frameworks.to_recipe import ImportedRecipe, alternatives, clusters_for, complete, import_recipe
from meshwright.models import ModelSpec
from meshwright.planner import case_of
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe
from meshwright.rules import SEVERITIES, Finding

OPINIONS = (
    "batch.too-few-tokens",
    "dispatch.allgather-large",
    "kernels.compiled-experts",
    "memory.tight",
    "moe.ep-too-low",
    "network.context-domain",
    "optimizer.no-clipping",
    "precision.bf16-reduction",
    "precision.fp16",
    "precision.fp8-tokens",
    "precision.mxfp8-untested",
    "schedule.idle-stages",
    "schedule.no-interleaving",
    "sequence.long-without-context-parallel",
    "strategy.fsdp-with-tensor-parallel",
)
"""Warnings about speed, room and taste that published configs meet for good reasons: advice in others' files."""


def check(
    framework: Framework,
    content: Content,
    *,
    gpus: str | None = None,
    model: ModelSpec | None = None,
    overrides: Sequence[str] = (),
    advice: bool = False,
) -> CheckResult:
    """Everything that is wrong with a file; where it leaves the GPUs open, only what is wrong on all of them."""
    reading = import_recipe(framework, content, model, list(overrides))
    known, candidates = clusters_for(reading, gpus)
    cases = list(_cases(reading, candidates))
    recipe = complete(reading, candidates[0])
    ours = _ours(reading, cases, advice) if cases else []
    theirs = list(_theirs(reading, recipe, cases[0] if cases else None, candidates[0] if known else None))
    findings = [*reading.parsed.findings, *reading.mapped.findings, *theirs, *_untold(reading, ours, theirs)]
    whole = known and cases and not reading.mapped.unresolved and not reading.unknown_fields
    return CheckResult(
        framework=framework.name,
        version=framework.version,
        engine=reading.engine,
        file=content.path,
        recipe=recipe,
        model=reading.model,
        cluster=candidates[0] if known else None,
        findings=tuple(sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.file, f.line))),
        unresolved=tuple(_unresolved(reading)),
        notes=(*reading.parsed.notes, *reading.mapped.notes, *_notes(reading, known)),
        estimate=costs.estimate(cases[0]) if whole else None,
    )


def _untold(reading: ImportedRecipe, ours: Sequence[Finding], theirs: Sequence[Finding]) -> list[Finding]:
    """What our rules find and theirs do not: where both speak of a key, theirs say it in their own words."""
    speaking = {finding.rule for finding in theirs}
    told = {rule for each in reading.framework.rules if each.id in speaking for rule in each.supersedes}
    told.update(reading.parsed.suppressed_rules)
    refused = {finding.field for finding in theirs if finding.severity == "error"}

    def says_more(finding: Finding) -> bool:
        if finding.rule in told:
            return False
        about_memory = rules.RULES[finding.rule].subject == "memory"
        return about_memory or finding.severity != "error" or finding.field not in refused

    return [finding for finding in ours if says_more(finding)]


def _cases(reading: ImportedRecipe, candidates: Sequence[Cluster]) -> Iterator[Case]:
    """The training on every cluster that may be meant, and with every value that the file leaves open."""
    if reading.model is None:
        return
    for on in candidates:
        yield case_of(complete(reading, on), reading.model, on, reading.engine)
    first = complete(reading, candidates[0])
    for own in (*reading.mapped.unresolved, *reading.unknown_fields):
        for value in alternatives(own):
            changed, _ = override.change(first, {own: value})
            yield case_of(changed, reading.model, candidates[0], reading.engine)


def _ours(reading: ImportedRecipe, cases: Sequence[Case], advice: bool) -> list[Finding]:
    """What our own rules find in every case, told in their words."""
    first, *others = cases
    found = rules.check(first, SEVERITIES if advice else SEVERITIES[:2], others)
    told = [_as_sure_as_it_is(one, first) for one in found if advice or one.rule not in OPINIONS]
    return [_in_their_words(reading, first.recipe, one) for one in told]


def _as_sure_as_it_is(finding: Finding, case: Case) -> Finding:
    """A peak over the capacity by less than the estimate's own error may fit: somebody may have run it."""
    if finding.rule != "memory.peak":
        return finding
    made = costs.estimate(case)
    error = made.band.memory_pct
    if made.memory.total * (1 - error / 100) > made.memory.capacity:
        return finding
    message = f"{finding.message}: more by less than the estimate's own error (±{error:.0f} %)"
    return msgspec.structs.replace(finding, severity="warning", message=message)


def _in_their_words(reading: ImportedRecipe, recipe: Recipe, finding: Finding) -> Finding:
    own = finding.field
    key = reading.mapped.source_keys.get(own, "")
    said = reading.parsed.settings.get(key)
    return msgspec.structs.replace(
        finding,
        field=key or _their_key(reading, recipe, own) or own,
        fix=_their_fix(reading, recipe, finding.fix),
        file=said.file if said else reading.parsed.files[0] if reading.parsed.files else "",
        line=said.line if said else 0,
    )


def _their_key(reading: ImportedRecipe, recipe: Recipe, own: str) -> str:
    settings, _ = to_settings(reading.framework, recipe, [own])
    return next(iter(settings), "")


def _their_fix(reading: ImportedRecipe, recipe: Recipe, fix: Sequence[str]) -> tuple[str, ...]:
    """Overrides of ours as settings of theirs; none when part of them cannot be said there and does not follow."""
    framework, model = reading.framework, reading.model
    if not fix or model is None:
        return ()
    changed = override.apply(recipe, fix)
    fields = relevant_fields(changed, model)
    before, _ = to_settings(framework, recipe, fields)
    after, unsaid = to_settings(framework, changed, fields)
    spelled = [framework.format_setting(key, value) for key, value in after.items() if before.get(key, ...) != value]
    spelled += [framework.format_setting(key, None) for key in before if key not in after]
    lost = {one.field for one in unsaid} & {text.partition("=")[0] for text in fix} - {
        *reading.parsed.field_values,
        *framework.derived_fields,
    }
    return () if lost else tuple(spelled)


def _theirs(reading: ImportedRecipe, recipe: Recipe, case: Case | None, on: Cluster | None) -> Iterator[Finding]:
    """What the framework's own rules find."""
    ctx = RuleContext(reading.framework, reading.parsed, recipe, case, on)
    for rule in reading.framework.rules:
        for problem in _problems(rule, ctx):
            key = problem.key or next((key for key in rule.keys if ctx.is_set(key)), rule.keys[0] if rule.keys else "")
            said = reading.parsed.settings.get(key) or reading.parsed.env.get(key)
            files = reading.parsed.files
            yield Finding(
                rule.id,
                problem.severity or rule.severity,
                key,
                problem.message,
                problem.fix,
                file=said.file if said else files[0] if files else "",
                line=said.line if said else 0,
            )


def _problems(rule: FrameworkRule, ctx: RuleContext) -> Iterable[Problem]:
    found = rule.check(ctx)
    if found is None:
        return ()
    return (found,) if isinstance(found, Problem) else found


def _unresolved(reading: ImportedRecipe) -> Iterator[UnresolvedValue]:
    for key, said in reading.parsed.settings.items():
        if said.unresolved:
            yield UnresolvedValue(key, str(said.value), said.unresolved, said.file, said.line)


def _notes(reading: ImportedRecipe, known: bool) -> Iterator[str]:
    if reading.model is None:
        yield "the file does not say which model it trains: its shape and memory were not judged (--model NAME)"
    elif reading.unknown_fields:
        said = " ".join(f"{own}={text_of(value_of(reading.recipe, own))}" for own in reading.unknown_fields)
        yield f"the program that reads the file decides the rest: memory is judged when it is said, e.g. {said}"
    if reading.model is not None and not known:
        count = reading.parsed.gpu_request.count
        what = "nobody said the GPUs" if count is None else f"nobody said the type of the {count} GPUs"
        tried = "count and type" if count is None else "type"
        yield f"{what}: only what is wrong on every usual {tried} is told (--gpus {count or 8}xH100)"
