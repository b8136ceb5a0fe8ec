"""Check a framework's file with its own rules, our rules and the estimate; findings carry line and fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from meshwright import costs, models, rules
from meshwright.clusters import Cluster, is_known
from meshwright.frameworks.argument_fixes import with_arguments_changed
from meshwright.frameworks.assumed_values import (
    JUDGEMENTS,
    as_in_files,
    downgrade_assumed,
    downgrade_host,
    downgrade_within_error,
)
from meshwright.frameworks.checkout import without_newer_names
from meshwright.frameworks.checkout_names import misspelled_names
from meshwright.frameworks.common import gpu_request_of
from meshwright.frameworks.framework import Content, Framework, GpuRequest, ParsedConfig, RuleContext
from meshwright.frameworks.joint_repair import needs_repair, only_fix_fails, with_repair
from meshwright.frameworks.launch_checks import (
    imported_launch,
    keeps_arguments_in_strings,
    launch_findings,
    launch_notes,
    unquoted,
)
from meshwright.frameworks.merged_fix import merged
from meshwright.frameworks.model_differences import model_findings
from meshwright.frameworks.model_free import any_model, gpu_findings, model_free_findings
from meshwright.frameworks.native import batch_notes
from meshwright.frameworks.open_length import open_length
from meshwright.frameworks.other_versions import with_open_version
from meshwright.frameworks.repeated_options import repeated_options
from meshwright.frameworks.result import CheckResult, host_memory_notes
from meshwright.frameworks.run_tokenizer import file_findings as tokenizer_findings
from meshwright.frameworks.saving import resume_findings, saving_findings
from meshwright.frameworks.to_recipe import (
    ImportedRecipe,
    alternatives,
    asked_gpus,
    clusters_for,
    complete,
    gpu_variant,
    import_recipe,
)
from meshwright.frameworks.trainer_saving import trainer_saving_findings
from meshwright.frameworks.translated_fixes import GLOBAL_BATCH, in_framework_keys, their_fix
from meshwright.frameworks.tried_fixes import tried_fixes
from meshwright.frameworks.typed_settings import with_typed
from meshwright.frameworks.types import Settings
from meshwright.frameworks.unchecked import notes_on_unchecked, open_memory_fields, unresolved_values
from meshwright.frameworks.ways_to_fit import with_ways
from meshwright.models import ModelSpec
from meshwright.notes import no_notes
from meshwright.planner import FOR_MEMORY, as_overrides, case_of, find_repair_of_file, with_cost
from meshwright.planner.budget import Epochs
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.replacements import WarmupShare
from meshwright.recipes.types import Goal, Recipe
from meshwright.rules import SEVERITIES, Finding
from meshwright.rules.rule import Severity

SHARES = (1, 8, 64)  # samples of a rank, in an unknown batch, in micro batches
RECENTLY_OMEGACONF = {"llama-factory": "LLaMA-Factory refuses the file; releases up to 0.9.1 take the last value"}
OMEGACONF = ("llama-factory", "megatron-bridge")  # frameworks whose YAML loader refuses a key that is set twice
OF_A_TYPE = re.compile(r": expected (an? \w+|true or false)$")
NO_LENGTH = ".no-length"  # ends the id of a framework's own rule
FIRST = ("accelerate.machines", "accelerate.processes")  # rules about the ranks, by which a batch is divided
Count = Callable[[Recipe], Epochs | None]


def check(
    framework: Framework,
    content: Content,
    *,
    gpus: str | None = None,
    model: ModelSpec | None = None,
    overrides: Sequence[str] = (),
    advice: bool = False,
    goal: Goal | None = None,
    batch_note: bool = False,
    own_count: bool = False,
    count: Count = lambda _: None,
    fixes: bool = True,
    options: Sequence[str] = (),
) -> CheckResult:
    """Return all findings for a file; if the GPUs are unknown, only those that hold on every candidate cluster.

    `own_count`: the number of GPUs is the file's own, and only their type was typed. `batch_note` adds a note on a
    faster batch where the file's divides badly; `count` returns the samples of a recipe's epochs, where they can be
    counted. Printed commands repeat the user's `options`.

    The fixes of a structured file are tried on its settings; one that leads to another error is not suggested. Without
    `fixes` there is no repair, and findings have only what needs no trial.
    """
    if gpus is not None and is_known(gpus.strip()):
        gpus = asked_gpus(import_recipe(framework, content, model, list(overrides), goal), gpus.strip())
    result = _check(framework, content, gpus, model, overrides, advice, goal, fixes, own_count, count)
    if not fixes:
        return result
    tried: list[tuple[Content, bool, CheckResult]] = []

    def recheck(changed: Content, fixes: bool) -> CheckResult:
        for known, fixed, after in tried:  # single fixes, their combinations and the repair are often the same file
            if fixed == fixes and known == changed:
                return after
        with no_notes():
            after = _check(framework, changed, gpus, model, overrides, advice, goal, fixes, own_count, count)
        tried.append((changed, fixes, after))
        return after

    def findings_after(changed: Content) -> tuple[Finding, ...]:
        return recheck(changed, False).findings

    found = msgspec.structs.replace(result, findings=tried_fixes(content, result.findings, findings_after))

    def our_repair(changed: Content) -> tuple[str, ...]:
        return _our_repair(import_recipe(framework, changed, model, list(overrides), goal), gpus)

    if needs_repair(found.findings) or only_fix_fails(content, found.findings, recheck):
        found = with_repair(content, found, result.findings, recheck, our_repair)
    found = _with_ways(_with_fixes(found, merged), options)
    if keeps_arguments_in_strings(content):
        # Fixes are pasted into a string variable, where quotes would be characters.
        found = _with_fixes(found, lambda fix: tuple(map(unquoted, fix)))
    imported = import_recipe(framework, content, model, list(overrides), goal) if batch_note else None
    if imported is None:
        return found
    return _with_batch_note(found, imported, (content.path, *overrides) if model is None and goal is None else ())


def _with_ways(result: CheckResult, options: Sequence[str]) -> CheckResult:
    """Return the result; errors of memory that no setting resolves say what does."""
    model, on = result.model, result.cluster
    case = None if model is None or on is None else case_of(result.recipe, model, on, result.engine)
    return msgspec.structs.replace(result, findings=with_ways(result.findings, case, options))


def findings_without_fixes(
    framework: Framework,
    content: Content,
    gpus: str | None = None,
    model: ModelSpec | None = None,
    overrides: Sequence[str] = (),
    goal: Goal | None = None,
) -> tuple[Finding, ...]:
    """Return the findings for a file, without trying fixes."""
    return _check(framework, content, gpus, model, overrides, False, goal, fixes=False).findings


def _with_fixes(result: CheckResult, written: Callable[[Sequence[str]], tuple[str, ...]]) -> CheckResult:
    """Return the result with its fixes and its repair written in another way."""
    findings = [msgspec.structs.replace(one, fix=written(one.fix)) for one in result.findings]
    repair = result.repair and msgspec.structs.replace(result.repair, overrides=written(result.repair.overrides))
    return msgspec.structs.replace(result, findings=tuple(findings), repair=repair)


def _with_batch_note(result: CheckResult, imported: ImportedRecipe, target: Sequence[str]) -> CheckResult:
    """Return the result with a note on a faster batch, in the framework's keys, where the file's divides badly.

    `target` are the words that name the file in a command, with the user's overrides.
    """
    on, estimate = result.cluster, result.estimate
    if on is None or estimate is None or result.model is None or result.recipe.train.global_batch_size % on.world == 0:
        return result
    case = case_of(result.recipe, result.model, on, result.engine)

    def written(changes: Sequence[str]) -> str:
        return " ".join(their_fix(imported, result.recipe, changes))

    notes = batch_notes(case, result.findings, float(estimate.step_s), result.repair, written, target)
    return msgspec.structs.replace(result, notes=(*result.notes, *notes)) if notes else result


def stated_gpus(framework: Framework, content: Content, gpus: str | None) -> str | None:
    """Return the GPUs as typed; a type alone gets the count that the file states, in its settings or its launch."""
    if gpus is None or not is_known(gpus.strip()):
        return gpus
    request = framework.parse(content).gpu_request
    if request.count is None and len(content.launches) == 1:
        request = gpu_request_of(content.launches[0])
    return request.text(gpus.strip()) or gpus


def _our_repair(imported: ImportedRecipe, gpus: str | None) -> tuple[str, ...]:
    """Return the smallest change that leaves no error of our rules, in the framework's keys; empty if none is found."""
    _, candidates = clusters_for(imported, gpus)
    case = next(_cases(imported, candidates), None)
    stated = GLOBAL_BATCH in imported.typed or GLOBAL_BATCH in imported.mapped.source_keys
    change = {} if case is None else find_repair_of_file(case, follows_ranks=not stated)
    return their_fix(imported, case.recipe, as_overrides(change)) if case is not None and change else ()


def _check(
    framework: Framework,
    content: Content,
    gpus: str | None,
    model: ModelSpec | None,
    overrides: Sequence[str],
    advice: bool,
    goal: Goal | None,
    fixes: bool = True,
    own_count: bool = False,
    count: Count = lambda _: None,
) -> CheckResult:
    imported = import_recipe(framework, content, model, list(overrides), goal)
    known, candidates = clusters_for(imported, gpus)
    cases = [_counted(one, count, imported.warmup_share) for one in _cases(imported, candidates)]
    case, on = cases[0] if cases else None, candidates[0] if known else None
    recipe = complete(imported, candidates[0])
    ours = _our_findings(imported, cases, fixes, advice, known) if cases else []
    hidden = [one.rule for one in ours if one.rule in JUDGEMENTS and one.severity == "advice" and not advice]
    ours = [one for one in ours if advice or one.severity != "advice"]
    theirs = list(_framework_findings(imported, recipe, case, on))
    open_fields = open_memory_fields(imported, candidates[0]) if known and cases else ()
    estimate = costs.estimate(cases[0]) if known and cases and not open_fields else None
    buildable = not any(one.severity == "error" for one in ours)
    sized = _with_counted_steps(recipe, count)
    findings = [
        *imported.parsed.findings,
        *_repeated_keys(framework, content),
        *launch_findings(content, imported.parsed, on, gpus, own_count),
        *_checkpoint_findings(content, imported, sized, estimate, buildable, case),
        *model_findings(imported, model),
        *tokenizer_findings(imported),
        *imported.mapped.findings,
        *theirs,
        *_without_duplicates(imported, ours, theirs),
        *(_without_model(imported, recipe, candidates[0], theirs, known) if imported.model is None else ()),
    ]
    findings, newer = _with_names(framework, content, imported.parsed.settings, _once_per_value(findings))
    notes = [*newer, *_notes(content, imported, findings, on, gpus)]
    notes += host_memory_notes(estimate, on) if buildable else ()
    if hidden:
        notes.append(f"left out as matters of choice: {', '.join(dict.fromkeys(hidden))}; --advice prints them")
    left_open = notes_on_unchecked(content, imported, () if known else candidates, open_fields)
    length = open_length(content.path, imported, recipe)
    if length and not any(one.rule.endswith(NO_LENGTH) for one in findings):
        notes.append(length)
    return CheckResult(
        framework=framework.name,
        version=framework.version,
        engine=imported.engine,
        file=content.path,
        recipe=recipe,
        model=imported.model,
        cluster=on,
        findings=tuple(sorted(findings, key=_rank)),
        unresolved=tuple(unresolved_values(imported)),
        notes=(*imported.parsed.notes, *imported.mapped.notes, *left_open, *notes),
        estimate=estimate,
    )


def _with_names(
    framework: Framework, content: Content, settings: Settings, findings: list[Finding]
) -> tuple[list[Finding], list[str]]:
    """Return the findings with those on misspelled names, and notes on names that only the checkout has."""
    findings = [*findings, *misspelled_names(framework, content, settings, findings)]
    findings, newer = without_newer_names(framework, content, settings, findings)
    return with_open_version(framework, content, settings, findings), newer


def _notes(
    content: Content, imported: ImportedRecipe, findings: Sequence[Finding], on: Cluster | None, gpus: str | None
) -> Iterator[str]:
    """Yield notes on what was typed: options given twice, the launch line, and the card that a name was taken for."""
    yield from repeated_options(content, imported.parsed, findings)
    yield from launch_notes(content, imported.parsed, on, gpus)
    yield from (one.message for one in gpu_variant(imported, gpus))


def _rank(finding: Finding) -> tuple[int, bool, str, int]:
    """Return the place of a finding: the most severe first, and what others are derived from before them."""
    is_derived = finding.rule not in FIRST
    return SEVERITIES.index(finding.severity), is_derived, finding.file, finding.line


def _checkpoint_findings(
    content: Content,
    imported: ImportedRecipe,
    recipe: Recipe,
    estimate: costs.Estimate | None,
    buildable: bool,
    case: Case | None,
) -> Iterator[Finding]:
    """Yield what is wrong with the checkpoints that a file saves and resumes from."""
    launch = imported_launch(content, imported.parsed)
    yield from saving_findings(imported, recipe, estimate, buildable, case, launch)
    yield from resume_findings(imported, recipe, estimate, launch)
    paced = estimate if buildable else None
    yield from trainer_saving_findings(imported, recipe, paced, content, launch, case)


def _repeated_keys(framework: Framework, content: Content) -> Iterator[Finding]:
    """Yield the keys that a YAML file sets twice: PyYAML uses the last value, OmegaConf refuses the file."""
    for one in content.repeated:
        same = _line(content, one.first) == _line(content, one.last)
        strict = framework.name in OMEGACONF and not (same and framework.name in RECENTLY_OMEGACONF)
        severity: Severity = "error" if strict else "warning"
        effect = f"{framework.title} refuses the file" if strict else "the first value is lost"
        effect = RECENTLY_OMEGACONF.get(framework.name, effect) if same else effect
        message = f"{one.key} is set twice, in lines {one.first} and {one.last}: {effect}"
        fix = (f"remove one of lines {one.first} and {one.last}",)
        yield Finding("key.repeated", severity, one.key, message, fix, content.path, one.last)


def _line(content: Content, number: int) -> str:
    return content.text.splitlines()[number - 1].partition(" #")[0].strip()


def _with_counted_steps(recipe: Recipe, count: Count) -> Recipe:
    """Return the recipe with the steps of its epochs, where they can be counted."""
    epochs = count(recipe)
    if epochs is None:
        return recipe
    steps = max(1, -(-epochs.samples // recipe.train.global_batch_size))
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, steps=steps, epochs=0.0))


def _counted(case: Case, count: Count, warmup: WarmupShare) -> Case:
    """Return the case with the samples of its epochs and its warmup, where they can be counted."""
    found = count(case.recipe)
    if found is None:
        return case
    counted = found.counted(case)
    return counted.replace(warmup_steps=warmup.of(int(counted.steps))) if warmup else counted


def _without_duplicates(imported: ImportedRecipe, ours: Sequence[Finding], theirs: Sequence[Finding]) -> list[Finding]:
    """Drop our findings that the framework's own rules report more precisely."""
    reported = {finding.rule for finding in theirs}
    own = (*imported.framework.rules, *(_referenced_framework().rules if imported.parsed.referenced else ()))
    superseded = {rule for each in own if each.id in reported for rule in each.supersedes}
    superseded.update(imported.parsed.suppressed_rules)
    error_keys = {finding.field for finding in theirs if finding.severity == "error"}

    def is_new(finding: Finding) -> bool:
        if finding.rule in superseded:
            return False
        about_memory = rules.RULES[finding.rule].subject == "memory"
        return about_memory or finding.severity != "error" or finding.field not in error_keys

    return [finding for finding in ours if is_new(finding)]


def _cases(imported: ImportedRecipe, candidates: Sequence[Cluster]) -> Iterator[Case]:
    """Yield the training on every candidate cluster, with every value of each unresolved field, and as it runs with
    the vocabulary of a placeholder tokenizer."""
    model, vocabulary = imported.model, imported.parsed.vocabulary
    if model is None:
        return
    for on in candidates:
        yield case_of(complete(imported, on), model, on, imported.engine)
    first = complete(imported, candidates[0])
    if vocabulary is not None and vocabulary != model.vocab:
        yield case_of(first, models.reshape(model, vocab=vocabulary), candidates[0], imported.engine)
    for field in (*imported.mapped.unresolved, *imported.unknown_fields):
        for value in () if field in imported.typed else _possible(field, first, candidates[0]):
            changed, _ = override.change(first, {field: value})
            yield case_of(changed, model, candidates[0], imported.engine)


def _possible(field: str, recipe: Recipe, on: Cluster) -> Sequence[Any]:
    """Return the usual values of a field that is known only at run time; batches also in shares of the ranks."""
    usual = alternatives(field)
    if field != GLOBAL_BATCH:
        return usual
    layout = recipe.layout
    share = layout.micro_batch_size * max(1, on.world // (layout.tp * layout.pp * layout.cp))
    return (*usual, *(share * count for count in SHARES))


def _our_findings(
    imported: ImportedRecipe, cases: Sequence[Case], fixes: bool, advice: bool, known: bool
) -> list[Finding]:
    """Return the findings of our rules that hold in every case, in the framework's keys.

    Without `advice`, no rule of that severity is tried; warnings that are advice in files are returned nevertheless.
    """
    first, *others = cases
    found = rules.check(first, SEVERITIES if advice else SEVERITIES[:2], others, fixes=fixes)
    assumed = [field for field in imported.parsed.assumed if field not in imported.typed]
    request = imported.parsed.gpu_request
    assumed += [] if known or (request.count and not request.is_example) else ["GPUs"]
    found = found if known else [downgrade_host(one) for one in found]
    found = [one for one in found if not _is_of_unread_program(imported, one)]
    kept = [as_in_files(downgrade_assumed(downgrade_within_error(one, cases), assumed, cases)) for one in found]
    return [_with_cheap_fix(imported, first, one, known) for one in kept]


def _with_cheap_fix(imported: ImportedRecipe, case: Case, finding: Finding, known: bool) -> Finding:
    """Return a finding in the framework's keys; advice on memory with the cheapest fix that its file can say."""
    found = in_framework_keys(imported, case.recipe, finding)
    if not known or finding.rule not in FOR_MEMORY or finding.severity != "advice" or not found.fix:
        return found
    cheaper = in_framework_keys(imported, case.recipe, with_cost(finding, case, frozenset()))
    if cheaper.fix:
        return cheaper
    return in_framework_keys(imported, case.recipe, with_cost(finding, case, frozenset(), others=False))


def _is_of_unread_program(imported: ImportedRecipe, finding: Finding) -> bool:
    """Return whether a warning rests on a value of ours for what only the program sets, which is not in the file."""
    field, mapped = finding.field, imported.mapped
    if finding.severity == "error" or not imported.parsed.leaves_to_program(field):
        return False
    stated = {*mapped.source_keys, *imported.parsed.field_values} - {*mapped.unresolved}
    return field not in stated | {*imported.typed} and rules.RULES[finding.rule].subject != "memory"


def _without_model(
    imported: ImportedRecipe, recipe: Recipe, on: Cluster, theirs: Sequence[Finding], known: bool
) -> Iterator[Finding]:
    """Yield the findings of our rules that hold for every model, in the framework's keys.

    Without `known`, the type of the GPUs is not known, or also their number.
    """
    replaced, ours = msgspec.structs.replace(imported, model=any_model()), list[Finding]()
    if known or imported.parsed.gpu_request.count is not None:
        ours += model_free_findings(imported, recipe, on)
    if known:
        ours += [as_in_files(one) for one in gpu_findings(imported, recipe, on)]
    yield from _without_duplicates(imported, [in_framework_keys(replaced, recipe, one) for one in ours], theirs)


def _once_per_value(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings without those on the type of a value that was refused when it was read."""
    refused = {(one.field, one.line) for one in findings if one.rule == "value.invalid"}
    return [
        one
        for one in findings
        if one.rule == "value.invalid" or (one.field, one.line) not in refused or not OF_A_TYPE.search(one.message)
    ]


def _framework_findings(
    imported: ImportedRecipe, recipe: Recipe, case: Case | None, on: Cluster | None
) -> Iterator[Finding]:
    """Yield the findings of the framework's own rules."""
    ctx = RuleContext(imported.framework, with_typed(imported), recipe, case, on)
    for rule in imported.framework.rules:
        yield from (with_arguments_changed(imported.parsed.program, one) for one in rule.findings(ctx))
    inner = imported.parsed.referenced
    if inner is None:
        return
    request, same = _ranks_of_batch(ctx, inner, on)
    inner = msgspec.structs.replace(inner, gpu_request=request)
    ctx = RuleContext(_referenced_framework(), inner, recipe, case, same)
    for rule in ctx.framework.rules:
        yield from (with_arguments_changed(inner.program, one) for one in rule.findings(ctx))


def _ranks_of_batch(ctx: RuleContext, inner: ParsedConfig, on: Cluster | None) -> tuple[GpuRequest, Cluster | None]:
    """Return the GPUs by whose number DeepSpeed divides its batch, as requested and as a cluster.

    It divides by the processes that Accelerate starts. If that does not come out, their number may be what is wrong:
    the batch is that of the GPUs which the training has.
    """
    from meshwright.frameworks.deepspeed.rules.batch import fits_ranks

    own, job = ctx.parsed.gpu_request, ctx.parsed.job_gpus
    count = own.count
    if count is None or (on is not None and count == on.world and job.count is None):
        return own, on
    if fits_ranks(ctx.recipe, inner, count):
        return own, None
    return (own, on) if on is not None and on.world != count else (job if job.count else own, None)


def _referenced_framework() -> Framework:
    """Return the framework of configs that configs of Accelerate name."""
    from meshwright.frameworks.deepspeed.definition import FRAMEWORK  # loaded on first use

    return FRAMEWORK
