"""Failures whose message is known: the rule or error behind it, and its fixes tried on the run's case."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

import msgspec

from meshwright import rules
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.remedies import Change, advice, change_kind, evaluate_change
from meshwright.doctor.run import Fault
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.their_keys import to_framework_settings
from meshwright.errors import InputError
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.key_maps import override_keys
from meshwright.rules import Rule, messages

MAX_SHOWN = 300  # characters of a message
NEAREST = 2
MOST_FIXES = 4
SIZES = (
    *(
        f"layout.{name}"
        for name in ("tp", "pp", "vp", "cp", "ep", "etp", "dp_shard", "dp_replicate", "micro_batch_size")
    ),
    *("train.global_batch_size", "data.seq_length"),
)
_NUMBER = re.compile(r"((?:[A-Za-z_.-]+ ){0,4}[A-Za-z_.-]+) ?[=(] ?(\d+)\b")
SLOWER = 1.1  # step time ratio above which a new experiment is the better fix


def known_failure(stats: RunStats, fatal: Sequence[Fault]) -> Finding | None:
    """Return the finding of the first failure with a known message that a rule or a known error explains."""
    for fault in fatal:
        for match in messages.search(fault.context or fault.text):
            explained = [id for id in match.message.ids if id in rules.all_rules() or id in messages.KNOWN_ERRORS]
            if match.sure and explained:
                stats = _with_stated_values(stats, match.passage, explained)
                return _finding(stats, fault, match, _most_likely(stats, explained))
    return None


def _with_stated_values(stats: RunStats, passage: str, ids: Sequence[str]) -> RunStats:
    """Return the run with the values that its message states, if its case breaks one of the rules only with them."""
    case = stats.case
    named = [rule for id in ids if (rule := rules.all_rules().get(id))]
    if case is None or any(_is_broken(rule, stats) for rule in named):
        return stats
    try:
        changed, _ = override.change(case.recipe, stated_values(passage))
        other = RunStats(stats.run, case.rebuild(changed), stats.baseline, stats.stated)
        return other if any(_is_broken(rule, other) for rule in named) else stats
    except (InputError, ValueError, ZeroDivisionError):  # the values do not make a case
        return stats


def stated_values(message: str) -> dict[str, int]:
    """Return the recipe fields that a message names with a number: tensor_model_parallel_size (3), tp(4)."""
    found: dict[str, int] = {}
    for name, number in _NUMBER.findall(message):
        words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
        keys = ("_".join(words[start:]) for start in range(len(words)))
        field = next((_fields_by_name()[key] for key in keys if key in _fields_by_name()), None)
        if field is not None:
            found.setdefault(field, int(number))
    return found


@cache
def _fields_by_name() -> dict[str, str]:
    """Return the fields with a size or a degree, by the last part of every framework's key for them."""
    names = {key.key.rpartition(".")[2].lower(): key.field for key in override_keys().values() if key.field in SIZES}
    return {**names, **{field.partition(".")[2]: field for field in SIZES}}


def nearest(fault: Fault) -> tuple[Remedy, ...]:
    """Return where to look for a message that is not known: the messages that are close to it."""
    found = [one for one in messages.search(fault.context or fault.text) if not one.sure][:NEAREST]
    return tuple(
        advice(f"meshwright explain {one.message.ids[0]}", why=f"the message is not known; near: {one.message.text}")
        for one in found
    )


def _most_likely(stats: RunStats, ids: Sequence[str]) -> str:
    """Return the rule that the case breaks, if one does; else the first."""
    return next((id for id in ids if (rule := rules.all_rules().get(id)) and _is_broken(rule, stats)), ids[0])


def _is_broken(rule: Rule, stats: RunStats) -> bool:
    return stats.case is not None and stats.case.engine in rule.engines and bool(rule.broken(stats.case))


def _finding(stats: RunStats, fault: Fault, match: messages.Match, id: str) -> Finding:
    rule, known, case = rules.all_rules().get(id), messages.KNOWN_ERRORS.get(id), stats.case
    cause = rule.cause if rule else known.cause if known else ""
    remedies = tuple(_rule_remedies(rule, stats)) if rule else tuple(map(_remedy, known.fix if known else ()))
    when = f" after step {fault.step}" if fault.step else " before the first step"
    return Finding(
        id=f"run.failed-{known.fault.replace('_', '-')}" if known and known.fault else id,
        severity="error",
        message=f"the run ended{when}: {match.passage[:MAX_SHOWN].rstrip('. ')}. Cause: {cause}"
        + ("" if rule is None or case is None or _is_broken(rule, stats) else f". {_not_in_recipe(case)}"),
        steps=None if fault.step is None else (fault.step, fault.step),
        lines=(fault.located,),
        evidence=(
            Evidence("known message", match.message.text, "", match.message.source, ""),
            *_also_broken(stats, id),
        ),
        remedies=remedies,
    )


def _also_broken(stats: RunStats, id: str) -> Iterator[Evidence]:
    """Yield the other rules that the run's settings break, which would end it next."""
    if stats.case is not None and not stats.run.steps:
        broken = [one.id for one in rules.applicable(stats.case, ("error",)) if bool(one.broken(stats.case))]
        others = [one for one in broken if one != id]
        if others:
            yield Evidence("the settings also break", ", ".join(others))


def _not_in_recipe(case: Case) -> str:
    return f"{case.recipe.name} on {case.cluster} does not break this rule: pass the run's settings as overrides"


def _rule_remedies(rule: Rule, stats: RunStats) -> Iterator[Remedy]:
    """Yield the fixes of a rule: tried on the case if it breaks the rule, else all of them as they are."""
    case = stats.case
    if case is None or not _is_broken(rule, stats):
        yield from (_remedy(text) for text in rules.fix_texts(rule))
        return
    alternatives = [msgspec.structs.replace(rule, fixes=(fix,)) for fix in rule.fixes]
    fixes = dict.fromkeys(fix for one in alternatives if (fix := rules.try_fixes(one, case)))
    tried = [(_new_warnings(case, fix), _tried(stats, case, fix, rule.cause)) for fix in fixes]
    yield from (remedy for _, remedy in sorted(tried, key=lambda pair: (pair[0], *_cost(pair[1])))[:MOST_FIXES])


def _tried(stats: RunStats, case: Case, fix: tuple[str, ...], why: str) -> Remedy:
    """Return a fix with its estimated effect, if the layout has one."""
    values = override.requested(case.recipe, fix)
    there = to_framework_settings(stats.run, case, override.change(case.recipe, values)[0])
    plain = Remedy(try_=fix, what=change_kind(values), why=why, there=there)
    return evaluate_change(stats, Change(values, why)) or plain


def _new_warnings(case: Case, fix: tuple[str, ...]) -> int:
    """Return how many warnings a fix causes."""
    changed = case.rebuild(override.change(case.recipe, override.requested(case.recipe, fix))[0])
    warnings = rules.applicable(case, ("warning",))
    return sum(bool(one.broken(changed)) and not bool(one.broken(case)) for one in warnings)


def _cost(remedy: Remedy) -> tuple[bool, bool, float]:
    """Return the sort key of a fix: those that do not fit or slow the step down last, then new experiments."""
    ratio = remedy.step_ratio or 1.0
    return remedy.fits is False or ratio > SLOWER, remedy.what == "contract", ratio


def _remedy(text: str) -> Remedy:
    """Return a fix as overrides if it consists of overrides of recipe fields, else as a sentence."""
    words = tuple(text.split())
    try:
        keys = [override.native_key(word.partition("=")[0]) for word in words if "=" in word]
    except InputError:
        keys = []
    if len(keys) == len(words) and all(keys):
        return Remedy(try_=words, what=change_kind(key for key in keys if key), why="")
    return advice(text)
