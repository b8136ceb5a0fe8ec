"""Check a framework's file with its own rules, our rules and the estimate; findings carry line and fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from meshwright import costs, models, rules
from meshwright.clusters import DEFAULT_GPU, Cluster, is_known
from meshwright.errors import InputError
from meshwright.frameworks.accumulation import accumulation_after, kept_accumulation
from meshwright.frameworks.argument_fixes import argument_changes, program_fields, replaced_keys, with_arguments_changed
from meshwright.frameworks.checkout import without_newer_names
from meshwright.frameworks.checkout_names import misspelled_names
from meshwright.frameworks.common import gpu_request_of
from meshwright.frameworks.framework import NOT_ESTIMATED, Content, Framework, RuleContext
from meshwright.frameworks.joint_repair import needs_repair, only_fix_fails, with_repair
from meshwright.frameworks.launch_checks import (
    imported_launch,
    keeps_arguments_in_strings,
    launch_findings,
    launch_notes,
    unquoted,
)
from meshwright.frameworks.mapping import relevant_fields, text_of, to_settings
from meshwright.frameworks.merged_fix import merged
from meshwright.frameworks.model_differences import model_findings
from meshwright.frameworks.model_free import any_model, gpu_findings, model_free_findings
from meshwright.frameworks.model_match import find_model
from meshwright.frameworks.native import batch_notes
from meshwright.frameworks.open_length import open_length
from meshwright.frameworks.other_versions import with_open_version
from meshwright.frameworks.result import CheckResult, UnresolvedValue, host_memory_notes
from meshwright.frameworks.saving import resume_findings, saving_findings
from meshwright.frameworks.schedule_units import file_units, in_file_units
from meshwright.frameworks.to_recipe import (
    ImportedRecipe,
    alternatives,
    asked_gpus,
    clusters_for,
    complete,
    import_recipe,
)
from meshwright.frameworks.trainer_saving import trainer_saving_findings
from meshwright.frameworks.tried_fixes import tried_fixes
from meshwright.frameworks.typed_settings import removed_keys, with_typed
from meshwright.frameworks.types import as_int
from meshwright.models import ModelSpec
from meshwright.notes import no_notes
from meshwright.planner import as_overrides, case_of, find_repair_of_file
from meshwright.planner.budget import Epochs
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.replacements import WarmupShare
from meshwright.recipes.types import Goal, Recipe, field_value, recipe_fields
from meshwright.rules import SEVERITIES, Finding
from meshwright.rules.rule import Severity

SHARES = (1, 8, 64)  # samples of a rank, in an unknown batch, in micro batches
JUDGEMENTS = (
    "dispatch.allgather-large",
    "kernels.compiled-experts",
    "moe.ep-too-low",
    "network.context-domain",
    "optimizer.no-clipping",
    "precision.bf16-reduction",
    "precision.fp16",
    "sequence.long-without-context-parallel",
    "strategy.fsdp-with-tensor-parallel",
)
"""Warnings about choices that published configs make for good reasons: advice in their files."""
FILE_WARNINGS = ("moe.forced-balance", "precision.bf16-gpu")
"""Errors of a plan that a file may state on purpose: the training runs, for a measurement, or slowly."""
BATCH, ACCUMULATION = "train_batch_size", "gradient_accumulation_steps"
MICRO_BATCH = "per_device_train_batch_size"
GLOBAL_BATCH = "train.global_batch_size"
CAPACITY = ("memory.state", "memory.peak", "memory.replicated-state")
"""Errors about the memory of a GPU."""
RECENTLY_OMEGACONF = {"llama-factory": "LLaMA-Factory refuses the file; releases up to 0.9.1 take the last value"}
OMEGACONF = ("llama-factory", "megatron-bridge")  # frameworks whose YAML loader refuses a key that is set twice
NO_LENGTH = ".no-length"  # ends the id of a framework's own rule
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
    count: Count = lambda _: None,
) -> CheckResult:
    """Return all findings for a file; if the GPUs are unknown, only those that hold on every candidate cluster.

    `batch_note` adds a note on a faster batch where the file's divides badly; `count` returns the samples of a
    recipe's epochs, where they can be counted.

    The fixes of a structured file are tried on its settings; one that leads to another error is not suggested.
    """
    if gpus is not None and is_known(gpus.strip()):
        gpus = asked_gpus(import_recipe(framework, content, model, list(overrides), goal), gpus.strip())
    result = _check(framework, content, gpus, model, overrides, advice, goal, count=count)
    tried: list[tuple[Content, bool, CheckResult]] = []

    def recheck(changed: Content, fixes: bool) -> CheckResult:
        for known, fixed, after in tried:  # single fixes, their combinations and the repair are often the same file
            if fixed == fixes and known == changed:
                return after
        with no_notes():
            after = _check(framework, changed, gpus, model, overrides, advice, goal, fixes=fixes, count=count)
        tried.append((changed, fixes, after))
        return after

    def findings_after(changed: Content) -> tuple[Finding, ...]:
        return recheck(changed, False).findings

    found = msgspec.structs.replace(result, findings=tried_fixes(content, result.findings, findings_after))

    def our_repair(changed: Content) -> tuple[str, ...]:
        return _our_repair(import_recipe(framework, changed, model, list(overrides), goal), gpus)

    if needs_repair(found.findings) or only_fix_fails(content, found.findings, recheck):
        found = with_repair(content, found, result.findings, recheck, our_repair)
    found = _with_fixes(found, merged)
    if keeps_arguments_in_strings(content):
        # Fixes are pasted into a string variable, where quotes would be characters.
        found = _with_fixes(found, lambda fix: tuple(map(unquoted, fix)))
    imported = import_recipe(framework, content, model, list(overrides), goal) if batch_note else None
    return found if imported is None else _with_batch_note(found, imported)


def findings_without_fixes(
    framework: Framework, content: Content, gpus: str | None = None, model: ModelSpec | None = None
) -> tuple[Finding, ...]:
    """Return the findings for a file, without trying fixes."""
    return _check(framework, content, gpus, model, (), False, None, fixes=False).findings


def _with_fixes(result: CheckResult, written: Callable[[Sequence[str]], tuple[str, ...]]) -> CheckResult:
    """Return the result with its fixes and its repair written in another way."""
    findings = [msgspec.structs.replace(one, fix=written(one.fix)) for one in result.findings]
    repair = result.repair and msgspec.structs.replace(result.repair, overrides=written(result.repair.overrides))
    return msgspec.structs.replace(result, findings=tuple(findings), repair=repair)


def _with_batch_note(result: CheckResult, imported: ImportedRecipe) -> CheckResult:
    """Return the result with a note on a faster batch, in the framework's keys, where the file's divides badly."""
    on, estimate = result.cluster, result.estimate
    if on is None or estimate is None or result.model is None or result.recipe.train.global_batch_size % on.world == 0:
        return result
    case = case_of(result.recipe, result.model, on, result.engine)

    def written(changes: Sequence[str]) -> str:
        return " ".join(their_fix(imported, result.recipe, changes))

    notes = batch_notes(case, result.findings, float(estimate.step_s), result.repair, written)
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
    count: Count = lambda _: None,
) -> CheckResult:
    imported = import_recipe(framework, content, model, list(overrides), goal)
    known, candidates = clusters_for(imported, gpus)
    cases = [_counted(one, count, imported.warmup_share) for one in _cases(imported, candidates)]
    recipe = complete(imported, candidates[0])
    ours = _our_findings(imported, cases, fixes, advice, known) if cases else []
    hidden = [one.rule for one in ours if one.rule in JUDGEMENTS and one.severity == "advice" and not advice]
    ours = [one for one in ours if advice or one.severity != "advice"]
    theirs = list(_framework_findings(imported, recipe, cases[0] if cases else None, candidates[0] if known else None))
    open_fields = _of_memory(imported, candidates[0]) if known and cases else ()
    estimate = costs.estimate(cases[0]) if known and cases and not open_fields else None
    buildable = not any(one.severity == "error" for one in ours)
    sized = _with_counted_steps(recipe, count)
    launch = imported_launch(content, imported.parsed)
    findings = [
        *imported.parsed.findings,
        *_repeated_keys(framework, content),
        *launch_findings(content, imported.parsed, candidates[0] if known else None, gpus),
        *saving_findings(imported, sized, estimate, buildable, cases[0] if cases else None, launch),
        *resume_findings(imported, sized, estimate, launch),
        *trainer_saving_findings(imported, sized, estimate, content, launch, cases[0] if cases else None),
        *model_findings(imported, model),
        *imported.mapped.findings,
        *theirs,
        *_without_duplicates(imported, ours, theirs),
        *(_without_model(imported, recipe, candidates[0], theirs, known) if imported.model is None else ()),
    ]
    findings += misspelled_names(framework, content, imported.parsed.settings, findings)
    findings, newer = without_newer_names(framework, content, imported.parsed.settings, findings)
    findings = with_open_version(framework, content, imported.parsed.settings, findings)
    notes = [*newer, *launch_notes(content, imported.parsed, candidates[0] if known else None, gpus)]
    notes += host_memory_notes(estimate, candidates[0] if known else None) if buildable else ()
    if hidden:
        notes.append(f"left out as matters of choice: {', '.join(dict.fromkeys(hidden))}; --advice prints them")
    left_open = _notes(imported, () if known else candidates, open_fields)
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
        cluster=candidates[0] if known else None,
        findings=tuple(sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.file, f.line))),
        unresolved=tuple(_unresolved(imported)),
        notes=(*imported.parsed.notes, *imported.mapped.notes, *left_open, *notes),
        estimate=estimate,
    )


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
    found = found if known else [_downgrade_host(one) for one in found]
    found = [one for one in found if not _is_of_unread_program(imported, one)]
    kept = [as_in_files(_downgrade_assumed(_downgrade_within_error(one, cases), assumed, cases)) for one in found]
    return [_in_framework_keys(imported, first.recipe, one) for one in kept]


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
    if known or imported.parsed.gpu_request.count is not None:
        yield from _without_duplicates(imported, tuple(model_free_findings(imported, recipe, on)), theirs)
    if not known:
        return
    replaced = msgspec.structs.replace(imported, model=any_model())
    ours = [_in_framework_keys(replaced, recipe, as_in_files(one)) for one in gpu_findings(imported, recipe, on)]
    yield from _without_duplicates(imported, ours, theirs)


def as_in_files(finding: Finding) -> Finding:
    """Return the finding with its severity in another framework's file."""
    if finding.severity == "error" and finding.rule in FILE_WARNINGS:
        return msgspec.structs.replace(finding, severity="warning")
    is_judgement = finding.severity == "warning" and finding.rule in JUDGEMENTS
    return msgspec.structs.replace(finding, severity="advice") if is_judgement else finding


def _downgrade_host(finding: Finding) -> Finding:
    """Return an error on the memory of the host as a warning: of unknown machines, it is assumed."""
    is_host = finding.rule == "memory.host" and finding.severity == "error"
    return msgspec.structs.replace(finding, severity="warning") if is_host else finding


def _downgrade_within_error(finding: Finding, cases: Sequence[Case]) -> Finding:
    """Downgrade a memory peak to a warning if a candidate case fits it within the error of the estimate.

    The candidates are clusters, and values of fields that only the program sets: of these the largest that may fit is
    named, since the peak in the message is that of the first.
    """
    if finding.rule != "memory.peak":
        return finding
    estimates = [costs.estimate(case) for case in cases]
    fitting = [
        (float(one.memory.total), case, one.band.memory_pct)
        for case, one in zip(cases, estimates, strict=True)
        if one.memory.total * (1 - one.band.memory_pct / 100) <= one.memory.capacity
    ]
    if not fitting:
        return finding
    first = cases[0]
    near = next((error for _, case, error in fitting if case is first or case.cluster is not first.cluster), None)
    if near is not None:
        case = next(case for _, case, _ in fitting if case is first or case.cluster is not first.cluster)
        where = "" if case is first else f" on {case.cluster.gpu.name}"
        message = f"{finding.message}, within the error of the estimate (±{near:.0f} %){where}"
        return msgspec.structs.replace(finding, severity="warning", message=message)
    total, case, error = max(fitting, key=lambda one: one[0])
    names = [name for name in recipe_fields() if field_value(case.recipe, name) != field_value(first.recipe, name)]
    assumed, lean = (
        " ".join(f"{name}={text_of(field_value(one.recipe, name))}" for name in names) for one in (first, case)
    )
    open_fields = " ".join(f"{name}=VALUE" for name in names)
    message = (
        f"{finding.message} with {assumed}, which is assumed; with {lean} it is {total:.1f} GiB (±{error:.0f} %) and "
        f"may fit: write {open_fields}"
    )
    return msgspec.structs.replace(finding, severity="warning", message=message)


def _downgrade_assumed(finding: Finding, assumed: Sequence[str], cases: Sequence[Case]) -> Finding:
    """Return a finding on memory with the values that the file does not have.

    An error becomes a warning, unless it holds with the leanest values too.
    """
    if finding.severity == "advice" or rules.RULES[finding.rule].subject != "memory" or not assumed:
        return finding
    case = cases[0]
    fields = [field for field in assumed if field in recipe_fields()]
    if finding.severity == "error" and len(fields) == len(assumed) and finding.rule in CAPACITY:
        least = [_least_gib(one, fields) for one in cases]
        if None not in least:
            message = f"{finding.message}; at least {min(filter(None, least)):.0f} GiB with any {' and '.join(fields)}"
            return msgspec.structs.replace(finding, message=message)
    values = ", ".join(f"{field}={text_of(field_value(case.recipe, field))}" for field in fields)
    values = values or f"{case.cluster.world} GPUs"
    state = " ".join(f"{field}=VALUE" for field in fields) or "--gpus"
    message = f"{finding.message}, with {values} assumed; write {state} if it differs"
    return msgspec.structs.replace(finding, severity="warning", message=message)


def _least_gib(case: Case, fields: Sequence[str]) -> float | None:
    """Return the memory with the leanest values of fields, less the error of its estimate; None if that fits."""
    recipe, least = case.recipe, costs.estimate(case)
    for field in fields:
        for value in alternatives(field):
            with suppress(InputError):
                changed, _ = override.change(recipe, {field: value})
                estimate = costs.estimate(case_of(changed, case.model, case.cluster, case.engine))
                if estimate.memory.total < least.memory.total:
                    recipe, least = changed, estimate
    total = float(least.memory.total) * (1 - least.band.memory_pct / 100)
    return total if total > least.memory.capacity else None


def _in_framework_keys(imported: ImportedRecipe, recipe: Recipe, finding: Finding) -> Finding:
    field = finding.field
    key = imported.mapped.source_keys.get(field, "") or _their_key(imported, recipe, field)
    if not key and field == "layout.micro_batch_size" and MICRO_BATCH in imported.parsed.program.fills:
        key = f"--{MICRO_BATCH}"
    unit = file_units(imported.framework.key_map, imported.parsed.settings, recipe).get(key)
    key = unit.key if unit and key not in imported.parsed.settings else key
    setting = imported.parsed.settings.get(key) or imported.parsed.program.given.get(key.removeprefix("--"))
    is_of_accelerate = imported.parsed.program.is_front_end and not key.startswith("--")  # a file without such keys
    return msgspec.structs.replace(
        finding,
        field=field if is_of_accelerate else key or field,
        fix=their_fix(imported, recipe, finding.fix),
        file=setting.file if setting else imported.parsed.files[0] if imported.parsed.files else "",
        line=setting.line if setting else 0,
    )


def _their_key(imported: ImportedRecipe, recipe: Recipe, field: str) -> str:
    settings, _ = to_settings(imported.framework, recipe, [field])
    return next(iter(settings), "")


def their_fix(imported: ImportedRecipe, recipe: Recipe, fix: Sequence[str]) -> tuple[str, ...]:
    """Translate overrides to the framework's settings; empty if one has no key and is not derived."""
    framework, model = imported.framework, imported.model
    if not fix or model is None:
        return ()
    changed = override.apply_fix(recipe, fix)
    of_program = program_fields(imported)
    fields = [one for one in relevant_fields(changed, model) if one not in of_program]
    before, _ = to_settings(framework, recipe, fields)
    after, unmapped = to_settings(framework, changed, fields)
    differing = {key: value for key, value in after.items() if before.get(key, ...) != value}
    touched = [key for key in {**before, **after} if before.get(key, ...) != after.get(key, ...)]
    differing |= dict.fromkeys(removed_keys(imported, touched, after)) | _kept_batch(imported, recipe, changed)
    instead = replaced_keys(imported) | _derived_keys(imported)
    differing = {key: value for key, value in differing.items() if key not in instead}
    differing = _without_stated_with(differing, imported.parsed.stated_with)
    stated = in_file_units(framework.key_map, differing, imported.parsed.settings, changed)
    try:
        formatted = list(_formatted(imported, stated | _batch_arguments(imported, recipe, changed), changed))
        formatted += argument_changes(imported, recipe, changed)
    except InputError:  # a front end has no key for it
        return ()
    lost = {one.field for one in unmapped} & {text.partition("=")[0] for text in fix} - {
        *imported.parsed.field_values,
        *framework.derived_fields,
    }
    return () if lost else tuple(formatted)


def _derived_keys(imported: ImportedRecipe) -> set[str]:
    """Return the keys that a file does not have, of fields that follow from its others; its version may have no key."""
    follows = imported.parsed.field_values.keys() & {*imported.framework.derived_fields}
    keys = config_keys(imported.framework.key_map).items()
    return {key for key, one in keys if one.field in follows and key not in imported.parsed.settings}


def _kept_batch(imported: ImportedRecipe, recipe: Recipe, changed: Recipe) -> dict[str, Any]:
    """Return the global batch of a file that does not set it, if a fix changes what it follows from."""
    theirs = imported.framework
    if theirs.accumulation_key:
        return kept_accumulation(theirs, imported.parsed.settings, recipe, changed) or {}
    follows = [one for one in theirs.batch_follows if field_value(recipe, one) != field_value(changed, one)]
    if not follows or GLOBAL_BATCH in imported.mapped.source_keys:
        return {}
    return to_settings(theirs, changed, [GLOBAL_BATCH])[0]


def _without_stated_with(differing: Mapping[str, Any], stated_with: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a fix that also removes the keys from which the changed ones follow."""
    found = {key: value for key, value in differing.items() if key not in stated_with or value is not None}
    for key in differing:
        if key in stated_with:
            found.setdefault(stated_with[key], None)
    return found


def _formatted(imported: ImportedRecipe, stated: Mapping[str, Any], changed: Recipe) -> Iterator[str]:
    """Yield settings where the file's value comes from: the config, an argument of the program, or both."""
    program = imported.parsed.program
    in_config = {key: value for key, value in stated.items() if key not in program.fills}
    for key, value in imported.framework.own_settings(imported.parsed, in_config, changed).items():
        yield _as_flag(key, value) if program.is_command else imported.framework.format_setting(key, value)
    for key, value in stated.items():
        if key == BATCH and ACCUMULATION in program.fills:  # the Trainer multiplies its own arguments
            continue
        if key in program.fills or key in program.repeats:
            yield from program.formatted(program.fills.get(key) or program.repeats[key], value)


def _as_flag(key: str, value: Any) -> str:
    return f"without --{key}" if value is None else f"--{key} {str(value).lower() if value in (True, False) else value}"


def _batch_arguments(imported: ImportedRecipe, recipe: Recipe, changed: Recipe) -> dict[str, Any]:
    """Return the Trainer's micro batch of a fix, and the accumulation steps that keep its batch if they are stated."""
    program, size = imported.parsed.program, changed.layout.micro_batch_size
    by_argument = MICRO_BATCH in program.fills
    found = {MICRO_BATCH: size} if by_argument and size != recipe.layout.micro_batch_size else {}
    stated = as_int(program.given.get(ACCUMULATION)) or as_int(imported.parsed.settings.get(ACCUMULATION))
    steps = stated or (1 if by_argument else 0)
    wanted = accumulation_after(steps, recipe, changed)
    return found | ({ACCUMULATION: int(wanted)} if wanted not in (steps, 0) and wanted.denominator == 1 else {})


def _framework_findings(
    imported: ImportedRecipe, recipe: Recipe, case: Case | None, on: Cluster | None
) -> Iterator[Finding]:
    """Yield the findings of the framework's own rules."""
    ctx = RuleContext(imported.framework, with_typed(imported), recipe, case, on)
    for rule in imported.framework.rules:
        yield from (with_arguments_changed(imported.parsed.program, one) for one in rule.findings(ctx))
    inner, count = imported.parsed.referenced, imported.parsed.gpu_request.count
    if inner is None:
        return
    # DeepSpeed divides its batch by the processes that Accelerate starts.
    same = on if on is None or count in (None, on.world) else None
    inner = msgspec.structs.replace(inner, gpu_request=imported.parsed.gpu_request)
    ctx = RuleContext(_referenced_framework(), inner, recipe, case, same)
    for rule in ctx.framework.rules:
        yield from (with_arguments_changed(inner.program, one) for one in rule.findings(ctx))


def _referenced_framework() -> Framework:
    """Return the framework of configs that configs of Accelerate name."""
    from meshwright.frameworks.deepspeed.definition import FRAMEWORK  # loaded on first use

    return FRAMEWORK


def _unresolved(imported: ImportedRecipe) -> Iterator[UnresolvedValue]:
    for key, setting in imported.parsed.settings.items():
        if setting.unresolved:
            yield UnresolvedValue(key, str(setting.value), setting.unresolved, setting.file, setting.line)


def _of_memory(imported: ImportedRecipe, on: Cluster) -> tuple[str, ...]:
    """Return the fields that are known only at run time and on which the memory depends."""
    if imported.model is None:
        return ()
    model, recipe, open_fields = imported.model, complete(imported, on), []
    for field in imported.mapped.unresolved:
        if field in imported.typed or field in imported.unknown_fields:
            continue
        changed = [override.change(recipe, {field: value})[0] for value in alternatives(field)]
        totals = {float(costs.estimate(case_of(one, model, on, imported.engine)).memory.total) for one in changed}
        open_fields += [field] if len(totals) > 1 else []
    return (*imported.unknown_fields, *open_fields)


def _unknown_gpus(imported: ImportedRecipe, candidates: Sequence[Cluster]) -> str:
    """Return what is not known of the GPUs, their number or their type, and how to say it."""
    request, types = imported.parsed.gpu_request, {one.gpu.name for one in candidates}
    gpu = next(iter(types)) if len(types) == 1 else ""
    if request.count is not None:
        what, tried = f"the type of the {request.count} GPUs is unknown", "type"
    elif gpu:
        what, tried = f"the number of {gpu} is unknown", "number"
    else:
        what, tried = "the GPUs are unknown", "count and type"
    gpus = request.text(gpu or DEFAULT_GPU) or f"8x{gpu or DEFAULT_GPU}"
    return f"{what}: only findings that hold for every common {tried} are reported (--gpus {gpus})"


def _notes(imported: ImportedRecipe, candidates: Sequence[Cluster], open_fields: Sequence[str]) -> Iterator[str]:
    """Yield what was not checked; `candidates` are the clusters tried in place of unknown GPUs."""

    def examples(fields: Sequence[str]) -> str:
        return " ".join(f"{field}={text_of(field_value(imported.recipe, field))}" for field in dict.fromkeys(fields))

    run_time = [field for field in open_fields if field not in imported.unknown_fields]
    named = imported.named_model
    if imported.model is not None and imported.recipe.goal == "peft" and imported.recipe.peft.method == "lora8bit":
        yield (
            "frozen weights of linear layers in 8 bits (LLM.int8): 1 byte each, embeddings and head in 16 bits; no "
            "step of it was measured, and it is mostly slower than in 16 bits"
        )
    if imported.model is None and named and find_model(named) is not None:
        if not any(NOT_ESTIMATED in note for note in imported.parsed.notes):
            yield f"{named}: architecture and memory were not checked"
    elif imported.model is None:
        what = f"{named} is not in the catalogue" if named else "the file does not name its model"
        yield f"{what}: architecture and memory were not checked (--model {'./config.json' if named else 'NAME'})"
    elif imported.unknown_fields:
        example = examples((*imported.unknown_fields, *run_time))
        yield f"the training program sets some fields: memory is checked if you pass them, e.g. {example}"
    elif run_time:
        yield f"some values are known only when it runs: memory is checked if you pass them, e.g. {examples(run_time)}"
    if imported.model is not None and candidates:
        yield _unknown_gpus(imported, candidates)
