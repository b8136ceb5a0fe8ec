"""Explain a rule, a recipe field, a section, a framework's key, a finding, a term, an error message or free words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import rules
from meshwright.api import requests, their_keys, word_search
from meshwright.api.argument_names import recipe_key
from meshwright.api.common_words import FIELDS as COMMON_FIELDS
from meshwright.api.inputs import fields_of
from meshwright.api.labels import LABELS
from meshwright.api.responses import Part, Response, Severity, copied
from meshwright.api.terms import TERMS
from meshwright.api.verb_function import verb
from meshwright.choices import ENGINES, SYNONYMS, simplified, synonym, unsupported
from meshwright.display import Readable, Row, titled
from meshwright.errors import InputError, closest, unknown
from meshwright.frameworks import rule_catalog
from meshwright.recipes.capabilities import Executed, describe, engines_with, executed_by, executed_values
from meshwright.recipes.key_maps import override_keys
from meshwright.recipes.types import RecipeField, recipe_fields
from meshwright.rules import Rule, messages

SHOWN = 80  # characters of an unknown name that the error repeats
MOST_FIXES = 5  # of a message that several rules explain
LONGEST = 400  # characters of a message that the answer repeats
LONGEST_QUESTION = 12  # words
MOST_WORDS = 3  # of a field with its value: layout.tp = 4
NEAREST = 4  # messages that are named
_RULE = re.compile(r"[a-z0-9_]+\.[a-z0-9_.-]*[a-z0-9]", re.IGNORECASE)


AXES = {"pp_schedule": "pp", "cp_comm": "cp", "dispatcher": "ep"}  # fields that mean something on a mesh axis only

Kind = Literal[
    "rule", "field", "finding", "term", "value", "section", "key", "error", "message", "words", "option", "capabilities"
]


class Found(msgspec.Struct, frozen=True):
    """One answer of several: what a message means, or an entry that free words describe."""

    name: str
    kind: str  # of the entry: rule, field, finding, term or error
    meaning: str
    fix: tuple[str, ...] = ()
    message: str = ""  # the framework's message; {} marks a value
    source: str = ""  # repository and file that raises it
    score: float | None = None  # share of the message that the text contains


class Explained(Readable, msgspec.Struct, frozen=True):
    """One rule, a field and the rules about it, several fields, a finding, a term, or what a message means."""

    about: str
    kind: Kind
    field: RecipeField | None = None
    rules: tuple[Rule, ...] = ()
    meaning: str = ""  # of a finding, a term, a key or an error
    fields: tuple[RecipeField, ...] = ()  # of a section or of another framework's key
    matches: tuple[Found, ...] = ()  # best first
    fix: tuple[str, ...] = ()  # of an error
    capabilities: tuple[Executed, ...] = ()  # of an engine

    def summary(self) -> list[Row]:
        """Return what it is and means, then fields, rules, matches and fixes, a line each."""
        field = [] if self.field is None else [f"{self.field.key}: {self.field.text}  default {self.field.default}"]
        return [
            ("About", f"{self.about} ({self.kind})"),
            *titled("Meaning", self.meaning.splitlines()),
            *titled("Field", field),
            *titled("Fields", [f"{one.key}: {one.text}  default {one.default}" for one in self.fields]),
            *titled("Rules", [f"{one.severity}: {one.symptom} ({one.id})" for one in self.rules]),
            *titled("Executes", [f"{one.field}: {one.executes}" for one in self.capabilities]),
            *titled("Matches", [f"{one.name} ({one.kind}): {one.meaning}" for one in self.matches]),
            *titled("Fix", self.fix),
        ]


@verb(requests.Explain)
def explain(request: requests.Explain) -> Explained:
    """Return what a rule, field, section, framework key, finding, term, value, error message or free words mean."""
    text = request.about.strip()
    for look in LOOKUPS:
        found = look(text)
        if found is not None:
            return found
    raise _unknown(text)


def _unknown(text: str) -> InputError:
    """Return the error for a text that nothing explains, with the nearest messages or names."""
    near = [one for one in messages.search(text) if not one.sure][:NEAREST]
    if near:
        shown = "; ".join(f"{one.message.ids[0]} ({one.message.text})" for one in near)
        fix = tuple(dict.fromkeys(f"meshwright explain {one.message.ids[0]}" for one in near))
        reason = f"no known error message, field, rule or term matches; the nearest messages are {shown}"
        return InputError(reason, field="about", value=text[:SHOWN], fix=fix)
    if " " in text:
        reason = "no known error message, field, rule or term matches, and none is near"
        return InputError(reason, field="about", value=text[:SHOWN], fix=("meshwright rules",))
    from meshwright.doctor import meanings

    known = (rules.all_rules(), recipe_fields(), meanings(), TERMS)
    names = [one for some in known for one in closest(text[:SHOWN], some, 2)]
    error = unknown("rule, field, finding or term", text[:SHOWN], names or [one for some in known for one in some])
    return InputError(error.reason, field="about", value=text, fix=error.fix)


def _as_rule(text: str) -> Explained | None:
    rule = _rule(text)
    return None if rule is None else Explained(rule.id, "rule", _field_of(rule), (rule,))


def _as_section(text: str) -> Explained | None:
    """Return the fields of a section of recipes, such as train or layout."""
    name = text.strip("[]. ").lower()
    fields = tuple(info for key, info in recipe_fields().items() if key.partition(".")[0] == name)
    return Explained(name, "section", meaning=TERMS.get(name, ""), fields=fields) if fields else None


def _as_term_or_field(text: str) -> Explained | None:
    is_sentence = len(text.split()) > MOST_WORDS  # train.steps=1000 with 8 samples each …
    term, key = _term(text), None if is_sentence else recipe_key(text)
    if term is not None and (key is None or key.partition(".")[2] != term):
        if term in COMMON_FIELDS:
            return _field(COMMON_FIELDS[term], _meaning(term))
        field = _field_of_value(term)
        name = term if term in TERMS else text.strip(" :")
        return Explained(name, "term", field, (), ". ".join(filter(None, (_meaning(term), _runs_it(field, term)))))
    return None if key is None else _field(key, _meaning(term) if term else "")


def _meaning(term: str) -> str:
    return TERMS.get(term) or LABELS[term]


def _runs_it(field: RecipeField | None, value: str) -> str:
    """Return which engines execute a value, unless all do."""
    if field is None:
        return ""
    axis = AXES.get(field.flat)
    running = [one for one in engines_with(field.flat, value) if not axis or executed_values(axis, one) is None]
    return "" if len(running) == len(ENGINES) else f"Executed by {', '.join(running) or 'no engine'}."


def _field(key: str, meaning: str = "") -> Explained:
    field = recipe_fields()[key]
    about = tuple(r for r in rules.all_rules().values() if r.field == field.flat)
    engines = "; ".join(f"{engine}: {what}" for engine, what in describe(field.flat).items())
    executed = f"Executed by {engines}" if engines else ""
    return Explained(key, "field", field, about, ". ".join(text.rstrip(".") for text in (meaning, executed) if text))


def _as_their_key(text: str) -> Explained | None:
    found = their_keys.find(text)
    if not found:
        removed = their_keys.removed(text)
        return Explained(text, "key", meaning=removed) if removed else None
    best = found[0]
    if not best.fields and text.isalpha():
        return None  # a plain word, such as warmup, is more likely to be about a field
    if len(best.fields) == 1:
        return _field(best.fields[0], best.meaning)
    fields = tuple(recipe_fields()[key] for key in best.fields)
    return Explained(best.key.key, "key", meaning=best.meaning, fields=fields)


def _as_value(text: str) -> Explained | None:
    """Return the field that takes a word as one of its values."""
    field = _field_of_value(text.lower())
    if field is None:
        return None
    meaning = f"value of {field.key}: {field.text}. {_runs_it(field, text.lower())}".strip()
    return Explained(text.lower(), "value", field, meaning=meaning)


def _field_of_value(word: str) -> RecipeField | None:
    return next((info for info in recipe_fields().values() if word in _choices(info.type)), None) if word else None


def _as_named(text: str) -> Explained | None:
    """Return the rule, finding or known error whose id a text contains, such as a printed finding."""
    from meshwright.doctor import meanings

    findings = meanings()
    for word in _RULE.findall(text) if text.count(" ") else (text,):
        name = word.lower()
        if (rule := _as_rule(word.removesuffix("."))) is not None:
            return rule
        if name in findings:
            return Explained(name, "finding", meaning=_with_needs(name, findings[name]), fix=_steps(name))
        if name in messages.KNOWN_ERRORS:
            known = messages.KNOWN_ERRORS[name]
            return Explained(name, "error", meaning=known.cause, fix=known.fix)
    return None


def _as_message(text: str) -> Explained | None:
    """Return what an error message means: those of the frameworks first, then symptoms in our terms."""
    if " " not in text and not messages.has_code(text):
        return _as_end(text)
    matches = [one for one in messages.search(text) if one.sure] or [
        one for one in messages.search_symptoms(text) if one.sure
    ]
    found: dict[str, Found] = {}
    for fragments in _fragments(text, matches[0]) if matches else ():
        found[fragments.name] = fragments
    for match in matches[:NEAREST]:
        for name in match.message.ids:
            found.setdefault(name, _found(name, match))
    if not found:
        return _as_end(text)
    named = tuple(rule for name in found if (rule := rules.all_rules().get(name)))
    return Explained(matches[0].passage[:LONGEST], "message", None, named, matches=tuple(found.values()))


def _fragments(text: str, match: messages.Match) -> Iterable[Found]:
    """Yield the cause that an out-of-memory message states in numbers: free memory in fragments."""
    from meshwright.doctor.faults import out_of_memory
    from meshwright.doctor.memory import SEGMENTS, is_fragmented

    oom = out_of_memory(text)
    if not is_fragmented(oom):
        return
    cause = (
        f"fragmentation: {oom.unused:g} GiB of {oom.capacity:g} GiB are reserved by PyTorch but unallocated, and "
        f"{oom.wanted or 0:g} GiB were requested: enough is free, but not in one piece"
    )
    fix = tuple(f"export {one}: {SEGMENTS.why}" for one in SEGMENTS.try_)
    yield Found("memory.out-of-memory", "finding", cause, fix, match.message.text, match.message.source, match.score)


def _as_network(text: str) -> Explained | None:
    """Return the finding for a line in which NCCL reports that it uses TCP sockets."""
    from meshwright.doctor import meanings
    from meshwright.doctor.nccl_network import names_sockets, socket_remedies

    if not names_sockets(text):
        return None
    name = "speed.tcp-sockets"
    fix = tuple(f"{' '.join(one.try_)}: {one.why}" for one in socket_remedies())
    meaning = f"{meanings()[name]} On one node sockets do not matter: its GPUs use NVLink"
    return Explained(name, "finding", meaning=meaning, fix=fix)


def _as_variable(text: str) -> Explained | None:
    """Return what an environment variable does, with or without a value: NCCL_IB_DISABLE, NCCL_IB_DISABLE=1."""
    from meshwright.api import variable_words
    from meshwright.frameworks.launch_variables import VARIABLES

    name = text.removeprefix("export ").partition("=")[0].strip().upper()
    found = next((one for one in VARIABLES if one.name == name), None)
    if found is None:
        other = variable_words.purpose(name)
        return None if other is None else Explained(name, "term", meaning=other)
    where = "on several nodes, " if found.several_nodes else ""
    meaning = f"environment variable that {found.purpose}. {where}{name}={found.bad_value}: {found.effect_on()}"
    return Explained(name, "term", meaning=meaning, fix=(found.fix(found.bad_value),))


def _as_end(text: str) -> Explained | None:
    """Return the finding for a line with which a scheduler or the host ends a run, such as those of SLURM."""
    from meshwright.doctor import meanings
    from meshwright.doctor.faults import ends_run

    name = ends_run(text)
    return None if name is None else Explained(name, "finding", meaning=meanings()[name], fix=_steps(name))


def _found(name: str, match: messages.Match) -> Found:
    """Return an entry that a message may mean, with its cause and fix."""
    from meshwright.doctor import meanings

    rule, known = rules.all_rules().get(name), messages.KNOWN_ERRORS.get(name)
    kind = "rule" if rule else "error" if known else "finding"
    meaning = rule.cause if rule else known.cause if known else meanings()[name]
    fix = _first_fixes(rules.fix_texts(rule)) if rule else known.fix if known else _steps(name)
    return Found(name, kind, meaning, fix, match.message.text, match.message.source, match.score)


def _first_fixes(fix: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first fixes that name their values; the doctor knows which of all others fit a run."""
    named = tuple(one for one in fix if "another " not in one) or fix
    if len(fix) <= MOST_FIXES:
        return fix
    return (*named[:MOST_FIXES], "meshwright doctor LOG --model MODEL --gpus GPUS tries all others on the run")


def _with_needs(finding: str, meaning: str) -> str:
    """Return what a finding means, and what a log must contain for it."""
    from meshwright.doctor.examine import needed_input

    needed = needed_input(finding)
    return f"{meaning} Needs {needed}." if needed else meaning


def _steps(finding: str) -> tuple[str, ...]:
    """Return the steps for a failure; for other findings, the command that tries changes on the run."""
    from meshwright.doctor.faults import fix_of

    tried = "meshwright doctor LOG --recipe FILE --gpus GPUS  lists causes to check and changes, tried on the run"
    return fix_of(finding) or (tried,)


def _as_words(text: str) -> Explained | None:
    if not text.isalpha() and " " not in text:
        return None  # a misspelled name
    if len(text.split()) > LONGEST_QUESTION or messages.is_error(text):
        return None  # an error message that is not known
    entries, missing = word_search.search(text)
    known = messages.KNOWN_ERRORS
    found = tuple(Found(e.name, e.kind, e.meaning, known[e.name].fix if e.name in known else ()) for e in entries)
    meaning = f"no entry contains: {', '.join(missing)}" if missing else ""
    return Explained(text[:LONGEST], "words", meaning=meaning, matches=found) if found else None


_VERSUS = re.compile(r"\s+(?:vs\.?|versus)\s+", re.IGNORECASE)


def _as_comparison(text: str) -> Explained | None:
    """Return what each of the things means that a question compares: LoRA vs QLoRA."""
    names = _VERSUS.split(text.strip(" ?"))
    found = [_as_term_or_field(name) for name in names] if len(names) > 1 else []
    if not found or None in found:
        return None
    matches = tuple(Found(one.about, one.kind, one.meaning) for one in found if one is not None)
    return Explained(text, "words", matches=matches)


def _as_code(text: str) -> Explained | None:
    """Return the error that a short text names by its code, such as Xid 79."""
    return _as_message(text) if messages.has_code(text) else None


def _as_capabilities(text: str) -> Explained | None:
    """Return what an engine executes: capabilities, capabilities megatron, what torchtitan supports."""
    words = re.findall(r"[a-z0-9_-]+", text.lower())
    if not any(word.startswith("capabilit") for word in words) or len(words) > LONGEST_QUESTION:
        return None
    names = [one.value if (one := synonym("engine", word)) else word for word in words]
    engine = next((name for name in names if name in ENGINES), ENGINES[0])
    meaning = f"what the {engine} engine executes; `explain capabilities ENGINE` prints another: {', '.join(ENGINES)}"
    return Explained(f"capabilities of {engine}", "capabilities", meaning=meaning, capabilities=executed_by(engine))


def _as_option(text: str, named: bool = False) -> Explained | None:
    """Return what an option of our commands does, and which commands have it."""
    from meshwright.api.verbs import verbs_on

    flag = text.partition("=")[0].strip()
    if not flag.startswith("-"):
        if not named or " " in flag:
            return None
        flag = f"--{flag.replace('_', '-')}"
    found: dict[str, list[str]] = {}
    for one in verbs_on("cli"):
        for field in fields_of(one.request):
            flags = (*field.flag.split("/"), *field.input.other_flags)
            if flag in flags and "cli" in field.input.surfaces and not field.input.positional:
                found.setdefault(field.input.help, []).append(one.name)
    if not found:
        return None
    meaning = " ".join(f"{', '.join(commands)}: {help}" for help, commands in found.items())
    return Explained(flag, "option", meaning=meaning)


def _as_option_name(text: str) -> Explained | None:
    """Return what an option does whose dashes were left out."""
    return _as_option(text, named=True)


def _as_unsupported(text: str) -> Explained | None:
    """Return what is supported in place of a goal of other tools, such as dpo."""
    found = unsupported("goal", text)
    if found is None:
        return None
    return Explained(text, "term", meaning=f"not supported: {found[0]}; choose {' or '.join(found[1])}")


def _as_goal(text: str) -> Explained | None:
    """Return what another word for a goal means, with the rules that are named after it."""
    found = synonym("goal", text)
    if found is None:
        return None
    same = {simplified(name) for name, one in SYNONYMS["goal"].items() if one is found}
    named = tuple(one for id, one in rules.all_rules().items() if simplified(id.partition(".")[2]) in same)
    sets = " ".join(found.overrides).replace("{weights}", "the model's weights")
    meaning = f"--goal {text} means {found.value}: {found.meaning}" + (f"; it sets {sets}" if sets else "")
    return Explained(text, "term", None, named, meaning)


LOOKUPS = (
    _as_unsupported, _as_comparison, _as_rule, _as_capabilities, _as_section, _as_code, _as_option, _as_variable,
    _as_term_or_field, _as_their_key, _as_value, _as_network, _as_named, _as_message, _as_option_name, _as_goal,
    _as_words,
)  # fmt: skip
"""What a text may be, in this order."""


class FieldPart(Part, frozen=True, kw_only=True):
    """A recipe field; `also_understood` lists other frameworks' keys for it."""

    key: str
    kind: str
    meaning: str
    default: Any
    choices: Sequence[Any]
    also_understood: Sequence[str]


class MessagePart(Part, frozen=True, kw_only=True):
    """An error message of a framework that a rule explains; {} marks a value."""

    text: str
    source: str


class ExplainedRule(Part, frozen=True, kw_only=True):
    """A rule; each entry of `fix` lists recipe keys to change together."""

    id: str
    subject: str
    severity: Severity
    engines: Sequence[str]
    symptom: str
    cause: str
    pitfall: str
    field: str
    fix: Sequence[Sequence[str]]
    messages: Sequence[MessagePart]


class FoundPart(Part, frozen=True, kw_only=True):
    """One answer of several; `message` is the framework's text and `source` the file that raises it."""

    name: str
    kind: str
    meaning: str
    fix: Sequence[str]
    message: str | None
    source: str | None
    score: float | None


class ExplainResponse(Response, frozen=True, kw_only=True):
    """What a rule, a field, a section, a key, a finding, a term, an error message or free words mean."""

    about: str
    kind: Kind
    meaning: str | None
    field: FieldPart | None
    fields: Sequence[FieldPart]
    rules: Sequence[ExplainedRule]
    matches: Sequence[FoundPart]
    fix: Sequence[str]
    capabilities: Sequence[Executed] | UnsetType = UNSET


def explain_response(found: Explained, request: requests.Explain | None = None) -> ExplainResponse:
    """Return the response of explain."""
    return ExplainResponse(
        about=found.about,
        kind=found.kind,
        meaning=found.meaning or None,
        field=None if found.field is None else _field_part(found.field),
        fields=[_field_part(field) for field in found.fields],
        rules=[_rule_part(rule) for rule in found.rules],
        matches=[_found_part(one) for one in found.matches],
        fix=found.fix,
        capabilities=found.capabilities or UNSET,
    )


def _found_part(one: Found) -> FoundPart:
    values = msgspec.structs.asdict(one)
    return FoundPart(**values | {"message": one.message or None, "source": one.source or None})


def _field_part(field: RecipeField) -> FieldPart:
    return FieldPart(
        key=field.key,
        kind=field.kind,
        meaning=field.text,
        default=msgspec.to_builtins(field.default),
        choices=list(_choices(field.type)),
        also_understood=sorted({key.key for key in override_keys().values() if key.field == field.key}),
    )


def _rule_part(rule: Rule) -> ExplainedRule:
    keys = {info.flat: key for key, info in recipe_fields().items()}
    fixes = [sorted(keys[flat] for flat in fix) for fix in rule.fixes]
    distinct = [fix for place, fix in enumerate(fixes) if fix not in fixes[:place]]
    raised = [MessagePart(text=one.text, source=one.source) for one in messages.messages_of(rule.id)]
    return copied(ExplainedRule, rule, field=keys.get(rule.field, ""), fix=distinct, messages=raised)


def _choices(hint: Any) -> Iterable[Any]:
    """Return the values of the literals in a type hint."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = (_choices(part) for part in get_args(hint) if isinstance(part, type) or get_origin(part) is not None)
    return [choice for part in parts for choice in part]


def _term(text: str) -> str | None:
    word = text.strip().lower().replace(" ", "_").replace("-", "_")
    plain = re.sub(r"_?\((?:layout|contract)\)$", "", word.rstrip(":"))  # a leaner step (layout)
    variants = (word, word.replace("_stage", ""), plain)  # ZeRO stage 3
    return next((one for one in variants if one in TERMS or one in LABELS), None)


def _rule(text: str) -> Rule | None:
    found = rules.all_rules().get(text.lower())
    return found or next((r for r in rule_catalog.find_rules(text) if r.id == text.lower()), None) if text else None


def _field_of(rule: Rule) -> RecipeField | None:
    return next((info for info in recipe_fields().values() if info.flat == rule.field), None)
