"""Findings for an exported recipe: ours and those of the framework for the written file, with fixes that work."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress

import msgspec

from meshwright import clusters, frameworks, planner, rules
from meshwright.api.data_findings import DATA_ROWS
from meshwright.errors import InputError
from meshwright.frameworks import DroppedSetting, ExportedConfig, ImportedFile, RecipeCheckResult
from meshwright.models import ModelSpec
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Recipe, recipe_fields
from meshwright.rules import Finding as RuleFinding

WRITTEN = "--out FOLDER"  # fix of an export that converts data, which are written and not printed
ROWS_RULE = ".dataset-rows"  # how rules of frameworks on such data end
NO_OVERRIDE = "no override was found that resolves it"
DATA_SOURCES = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")  # of Megatron-LM


def framework_findings(
    theirs: frameworks.Framework, written: ExportedConfig, model: ModelSpec, on: clusters.Cluster, *, fixes: bool = True
) -> list[RuleFinding]:
    """Return the findings of the framework's own rules for the file, as `check` reports them, with fixes or without."""
    name, text = next(iter(written.files.items()))
    with suppress(InputError):  # a cluster of a file may have a GPU of its own
        content = frameworks.content_of(text, name, beside=written.files)
        result = frameworks.check(theirs, content, gpus=str(on), model=model, fixes=fixes)
        found = [one for one in result.findings if one.rule.startswith(f"{theirs.name}.")]
        return found if not fixes else [frameworks.in_our_keys(theirs, content, one, model, on) for one in found]
    return []


def all_findings(
    theirs: frameworks.Framework, written: ExportedConfig, checked: RecipeCheckResult, converting: str = WRITTEN
) -> tuple[RuleFinding, ...]:
    """Return our findings and the framework's; those that its rules report more precisely once, with a fix of both."""
    found = framework_findings(theirs, written, checked.model, checked.cluster)
    hidden = frameworks.superseded(theirs, found)
    ours = [_with_a_key(theirs, checked, one) for one in checked.findings if one.rule not in hidden]
    before = set[str]().union(*_error_rules(theirs, checked, checked.recipe, found)) if found else set()
    return (*ours, *(_with_working_fix(theirs, checked, one, converting, before) for one in found))


def _with_a_key(theirs: frameworks.Framework, checked: RecipeCheckResult, finding: RuleFinding) -> RuleFinding:
    """Return an error with a fix in settings that the framework has keys for, if there is one."""
    if finding.severity != "error" or not finding.fix or finding.rule not in rules.RULES:
        return finding
    with suppress(InputError):
        changed = override.apply_fix(checked.recipe, finding.fix)
        written = frameworks.export(theirs, changed, checked.model, checked.cluster)
        lost = {one.field for one in written.unmapped} & override.requested(checked.recipe, finding.fix).keys()
        if lost:
            case = planner.case_of(checked.recipe, checked.model, checked.cluster, checked.engine)
            names = {recipe_fields()[key].flat for key in lost}
            other = rules.one_fix(rules.RULES[finding.rule], case, typed=names)
            if other and not names & other.keys():
                return msgspec.structs.replace(finding, fix=planner.as_overrides(other))
    return finding


def unconverted_data(
    theirs: frameworks.Framework, recipe: Recipe, found: Sequence[RuleFinding], converting: str
) -> tuple[RuleFinding, ...]:
    """Return an error of rows that the written program cannot read, unless the framework's rules report them.

    An export into a folder converts them; one that is printed names the user's file.
    """
    if any(one.rule.endswith(ROWS_RULE) for one in found):
        return ()
    named = recipe
    converted: Mapping[str, str] = {}
    with suppress(InputError):  # rows that cannot be converted, which an export into a folder reports
        named, converted = theirs.readable_data(recipe)
    changed = [key for key in ("dataset", "validation") if getattr(named.data, key) in converted]
    if not changed:
        return ()
    names = " and ".join(getattr(recipe.data, key) for key in changed)
    reason = f"the exported job does not read all columns of {names}; {converting} writes the rows as messages"
    return (RuleFinding(DATA_ROWS, "error", f"data.{changed[0]}", reason, (converting,)),)


def in_users_file(finding: RuleFinding, read: ImportedFile | None, written: ExportedConfig) -> RuleFinding:
    """Return an error with its fix in the user's file: with an error, no file is written that it could be made in."""
    if finding.severity != "error" or read is None:
        return finding
    place = frameworks.in_export(next(iter(written.files)))
    return msgspec.structs.replace(finding, no_fix=finding.no_fix.replace(place, f"in {read.content.path}"))


def with_open_source(finding: RuleFinding, dropped: Sequence[DroppedSetting]) -> RuleFinding:
    """Return a finding on missing data with the setting of the file that names them, if that could not be read."""
    lost = next((one for one in dropped if one.key in DATA_SOURCES), None)
    if lost is None or not finding.rule.endswith(".no-data"):
        return finding
    flag = lost.key.replace("_", "-")
    message = f"{lost.file}:{lost.line} --{flag} {lost.value}: {lost.reason}, so the job would have no data: name them"
    return msgspec.structs.replace(finding, message=message)


def _with_working_fix(
    theirs: frameworks.Framework,
    checked: RecipeCheckResult,
    finding: RuleFinding,
    converting: str,
    before: Container[str],
) -> RuleFinding:
    """Return a finding with the first fix that removes it: our rule's, one override of its own, all, or the repair.

    A fix after which only rules of `before` report errors is preferred.
    """
    if finding.severity != "error" and len(finding.fix) < 2:
        return finding
    if any("meshwright export " in one for one in (*finding.fix, finding.no_fix)):  # of a file that is not written yet
        return msgspec.structs.replace(finding, fix=(converting,), no_fix="")
    same = frameworks.superseded(theirs, [finding])
    ours = [one.fix for one in checked.findings if one.rule in same and one.fix]
    works: list[tuple[str, ...]] = []
    together = (finding.fix,) if len(finding.fix) > 1 else ()
    repair = (checked.repair.overrides,) if checked.repair is not None else ()
    for fix in (*ours, *((one,) for one in finding.fix), *together, *repair):
        with suppress(InputError):
            changed = override.apply_fix(checked.recipe, fix)
            written = frameworks.export(theirs, changed, checked.model, checked.cluster)
            after = framework_findings(theirs, written, checked.model, checked.cluster, fixes=False)
            if finding.rule in {one.rule for one in after}:
                continue
            works.append(fix)
            errors = _error_rules(theirs, checked, changed, after)
            if all(any(name in before for name in names) for names in errors):
                return msgspec.structs.replace(finding, fix=fix, no_fix="")
    if works:  # each leads to another error, which has a fix of its own
        return msgspec.structs.replace(finding, fix=works[0], no_fix="")
    return msgspec.structs.replace(finding, fix=(), no_fix=finding.no_fix or NO_OVERRIDE)


def _error_rules(
    theirs: frameworks.Framework, checked: RecipeCheckResult, recipe: Recipe, found: Sequence[RuleFinding]
) -> list[set[str]]:
    """Return the rules of each error of a recipe: ours, or of `found` with those of ours that it supersedes."""
    case = planner.case_of(recipe, checked.model, checked.cluster, checked.engine)
    ours = [{rule.id} for rule in rules.applicable(case, ("error",)) if bool(rule.broken(case))]
    return [*ours, *({one.rule, *frameworks.superseded(theirs, [one])} for one in found if one.severity == "error")]


def is_open(finding: RuleFinding) -> bool:
    """Return whether the fix of a finding has a value that only the user knows, such as PATH."""
    return bool(finding.fix) and any(word.partition("=")[2].isupper() for word in finding.fix[0].split())


def is_about_weights(finding: RuleFinding) -> bool:
    """Return whether a finding is fixed by naming the initial weights, which no layout changes."""
    return bool(finding.fix) and all(text.startswith("checkpoint.") for text in finding.fix)


def is_about_tokenizer(finding: RuleFinding) -> bool:
    """Return whether a finding is fixed by naming the tokenizer."""
    return bool(finding.fix) and all(text.startswith("data.tokenizer=") for text in finding.fix)
