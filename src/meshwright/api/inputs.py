"""Inputs of verbs: each is declared once, on a field of a request, and read from any surface.

A request is a frozen struct whose fields carry an `Input`. The options of the command line, the parameters of the HTTP
API and the schemas of the agent tools are derived from it, and all of them are validated by `read`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from meshwright import choices
from meshwright.api.choice_errors import refused_choice, unknown_choice
from meshwright.errors import InputError, MeshwrightError
from meshwright.notes import note
from meshwright.parsing import days_of
from meshwright.recipes.format_override import format_override

Surface = Literal["cli", "http", "mcp"]
ALL: tuple[Surface, ...] = get_args(Surface)
REMOTE: tuple[Surface, ...] = ("http", "mcp")
CLI: tuple[Surface, ...] = ("cli",)
CLI_MCP: tuple[Surface, ...] = ("cli", "mcp")

NAME_BYTES = 4096  # a name may be a path on the command line, and Linux paths have at most 4,096 bytes
TEXT_BYTES = 1_000_000  # the largest recipe file that is opened: a longer text would be refused by its reader anyway
BODY_BYTES = 2_500_000  # one request: two texts (a log and its baseline) with JSON escapes
MAX_OVERRIDES = 60
OVERRIDE_BYTES = 500
SHOWN_BYTES = 200  # of an unknown argument's name
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_TYPE_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "a boolean"}
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}

R = TypeVar("R", bound="Request")


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a file, sent over HTTP or MCP in place of its path."""

    name: str
    help: str
    file: str  # file name in the request
    json_file: str = ""  # the same when the text is JSON
    named_by: str = ""  # the argument that names the file
    examples: tuple[str, ...] = ()

    def file_name(self, arguments: Mapping[str, Any]) -> str:
        """Return the file name under which handlers open this text."""
        named = arguments.get(self.named_by) if self.named_by else None
        if named:
            return str(named)
        return self.json_file if self.json_file and str(arguments[self.name]).lstrip().startswith("{") else self.file


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a surface needs to know about one field of a request."""

    help: str
    flag: str = ""  # command-line option; --field-name if empty
    other_flags: tuple[str, ...] = ()  # other spellings of the option
    positional: bool = False
    needed: bool = False  # required, unless a recipe or file given as the target has it
    words: bool = False  # takes the further words of a command line that are no KEY=VALUE
    metavar: str = ""
    complete: str = ""  # kind of names that the shell completes
    prompt: str = ""  # question on a terminal if the value is missing
    choices: tuple[str, ...] = ()
    synonyms: str = ""  # kind of words in `choices.SYNONYMS` that are accepted too
    examples: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # exclusive minimum
    max_bytes: int = NAME_BYTES
    max_entries: int | None = None
    absent: Any = None  # value on a surface that sends none; the field's default is for Python callers
    objects: bool = False  # Python callers may give a list of objects
    any_text: bool = False  # line breaks and control characters allowed
    file_name: bool = False  # a plain file name
    in_days: bool = False  # a text with a unit of time, such as 6weeks, is understood too
    listed: bool = False  # several values, separated by commas
    override: str = ""  # key of the recipe field that it sets, as KEY=VALUE does
    surfaces: tuple[Surface, ...] = ALL
    texts: tuple[Text, ...] = ()  # what HTTP and MCP may send instead of a name or path
    also: tuple[Text, ...] = ()  # what HTTP and MCP may send besides


class Request(msgspec.Struct, frozen=True):
    """The inputs of one verb."""


class Field(msgspec.Struct, frozen=True):
    """One field of a request with its Python types and its default."""

    name: str
    types: tuple[type, ...]
    repeated: bool
    required: bool
    python_default: Any
    input: Input

    @property
    def default(self) -> Any:
        """Return the value on a surface that sends none."""
        return self.python_default if self.input.absent is None else self.input.absent

    @property
    def flag(self) -> str:
        """Return the command-line option of this field."""
        return self.input.flag or f"--{self.name.replace('_', '-')}"

    @property
    def label(self) -> str:
        """Return how the command line refers to this field."""
        return (self.input.metavar or self.name.upper()) if self.input.positional else self.flag.partition("/")[0]

    def fix(self, surface: Surface) -> tuple[str, ...]:
        """Return up to three valid values, formatted for a surface."""
        values = self.input.examples or self.input.choices or ((self.default,) if self.default is not None else ())
        if surface != "cli":
            return tuple(f"{self.name}: {json.dumps(value)}" for value in values[:3])
        return tuple(f"{value}" if self.input.positional else f"{self.flag} {value}" for value in values[:3])


@cache
def fields_of(request: type[Request]) -> tuple[Field, ...]:
    """Return the fields of a request type."""
    hints = get_type_hints(request, include_extras=True)
    return tuple(_field(one, hints[one.name]) for one in msgspec.structs.fields(request))


def flags_of(request: type[Request]) -> list[str]:
    """Return the options of a request's command."""
    own = [field for field in fields_of(request) if "cli" in field.input.surfaces and not field.input.positional]
    return [flag for field in own for name in (field.flag, *field.input.other_flags) for flag in name.split("/")]


def _field(info: msgspec.structs.FieldInfo, hint: Any) -> Field:
    parts = list(_parts(hint))
    types = tuple(one for one in (str, int, float, bool) if one in parts or (one is str and Literal in parts))
    default = None if info.required or info.default is msgspec.NODEFAULT else info.default
    declared = _input(parts)
    return Field(info.name, types, Sequence in parts, info.required or declared.needed, default, declared)


def _input(parts: Sequence[Any]) -> Input:
    """Return the declared input of a field, or that of an engine option, which msgspec's Meta describes."""
    declared = [one for one in parts if isinstance(one, Input | msgspec.Meta)]
    if not declared:
        return Input(help="Set by code.", surfaces=())
    if isinstance(meta := declared[-1], Input):
        return meta
    choices = tuple(one for one in parts if isinstance(one, str))  # of a Literal
    return Input(help=str(meta.description), choices=choices, minimum=meta.ge, surfaces=CLI, **(meta.extra or {}))


def _parts(hint: Any) -> Iterable[Any]:
    """Yield the types and the metadata that a type hint is made of."""
    if get_origin(hint) is Annotated:
        yield from _parts(hint.__origin__)
        yield from hint.__metadata__
    elif get_origin(hint) is not None:
        yield get_origin(hint)
        for one in get_args(hint):
            yield from _parts(one)
    else:
        yield hint


def texts_of(request: type[Request]) -> dict[str, Text]:
    """Return what HTTP and MCP may send as text for a request, by argument name."""
    return {text.name: text for field in fields_of(request) for text in (*field.input.texts, *field.input.also)}


def read(
    request: type[R],
    arguments: Mapping[str, Any],
    surface: Surface,
    *,
    texts: bool = True,
    strings: bool = False,
    files: bool = False,
) -> tuple[R, dict[str, str]]:
    """Return the validated request and the texts sent with it, by file name.

    `texts` allows texts in place of names; `strings` converts numbers and booleans that arrive as strings, as they do
    on the command line and in the query of a URL; `files` allows paths where a text can be sent.
    """
    known = texts_of(request) if texts and surface != "cli" else {}
    fields = fields_of(request)
    named = {one.name: one for one in fields if _is_on(one, surface, files) and one.name not in known}
    notes: Sequence[str] = ()
    if surface != "cli":
        from meshwright.api.loose_arguments import Arguments

        understood = Arguments(arguments, named, known, files)
        arguments, notes = understood.values, understood.notes
    others = {name[:SHOWN_BYTES]: arguments[name] for name in arguments if name not in named and name not in known}
    if others:
        from meshwright.api.argument_names import unknown_arguments

        flags = {one: named[one].flag.partition("/")[0] if one in named else "" for one in (*named, *known)}
        raise unknown_arguments(others, flags)
    sent = {name: _text(text, arguments[name]) for name, text in known.items() if arguments.get(name) is not None}
    sent_files = {known[name].file_name(arguments): text for name, text in sent.items()}
    values: dict[str, Any] = {}
    for field in fields:
        value = arguments.get(field.name) if field.name in named else None
        instead = [text for text in field.input.texts if text.name in sent]
        if value is not None and instead:
            which = " or ".join(_accepted(field, known, surface, files))
            raise InputError(f"give only one of {which}", field=field.name, fix=(f"only {field.name}",))
        if instead:
            values[field.name] = instead[0].file_name(arguments)
        elif value is not None:
            _refuse_contents(field, value, known)
            values[field.name] = _converted(field, value, surface, strings)
        elif field.name in named and field.input.absent is not None:
            values[field.name] = field.input.absent
    _require(fields, values, known, surface, files, tuple(sent))
    if notes and "notes" in request.__struct_fields__:
        values["notes"] = tuple(notes)
    return validated(request(**values), surface), sent_files


def _is_on(field: Field, surface: Surface, files: bool) -> bool:
    """Return whether a surface has a field; where paths are allowed, also that of a file that could be sent as text."""
    return surface in field.input.surfaces or (files and bool(field.input.texts))


def _require(
    fields: Sequence[Field],
    values: Mapping[str, Any],
    texts: Mapping[str, Text],
    surface: Surface,
    files: bool,
    given: Sequence[str] = (),
) -> None:
    """Raise an error about the required fields that are missing; `given` are the names of the texts that were sent."""
    missing = [field for field in fields if field.required and field.name not in values]
    if any(field.input.needed for field in missing) and _names_recipe(fields, values, "cli" if files else surface):
        missing = [field for field in missing if not field.input.needed]
    if not missing:
        return
    if all(field.name == "goal" for field in missing) and surface == "cli":
        _require_model(fields, values)
    first = missing[0]
    if surface == "cli":
        names = [field.label for field in missing]
    else:
        names = [" or ".join(_accepted(field, texts, surface, files)) for field in missing]
    fix = first.fix(surface)
    if surface != "cli":
        sent = next((text.name for text in first.input.texts if texts), "")
        forms = [one.fix(surface)[:1] for one in missing]
        whole = ", ".join(form for one in forms for form in one)
        fix = (
            (whole,)
            if len(missing) > 1 and whole
            else fix or ((f'{sent}: "the contents of the file"',) if sent else ())
        )
    else:
        fix = (*_misplaced(first, values), *fix)
    others = [one for one in given if one not in {text.name for text in first.input.texts}]
    wrong = f"; {others[0]} is for other contents: {texts[others[0]].help}" if others and first.input.texts else ""
    fix = (f'{first.input.texts[0].name}: "the contents of the file"', *fix) if wrong else fix
    raise InputError(f"{', '.join(names)} required{wrong.rstrip('.')}", field=first.name, fix=fix)


def _misplaced(missing: Field, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return --to with the value of --framework: that option names the framework of the file that is read."""
    named = values.get("framework") if missing.name == "to" else None
    return (f"{missing.flag} {named} in place of --framework {named}",) if named in choices.FRAMEWORKS else ()


def _names_recipe(fields: Sequence[Field], values: Mapping[str, Any], surface: Surface) -> bool:
    """Return whether the target is a recipe or a file, which have GPUs and a goal; remote files come as texts."""
    from meshwright.api.resolve import is_recipe
    from meshwright.recipes.index import is_known

    target = next((field for field in fields if field.input.texts and field.name in values), None)
    if target is None:
        return False
    value = str(values[target.name])
    if surface == "cli":
        return is_recipe(value)
    return is_known(value) or any(text.named_by and _is_sent(text, values, value) for text in target.input.texts)


def _require_model(fields: Sequence[Field], values: Mapping[str, Any]) -> None:
    """Raise for a model that is not known: no goal helps it, and its error says how to pass its config.json."""
    from meshwright.api.resolve import is_recipe
    from meshwright.models import find

    target = next((field for field in fields if field.input.texts and field.name in values), None)
    if target is not None and not is_recipe(str(values[target.name])):
        find(str(values[target.name]))


def _is_sent(text: Text, values: Mapping[str, Any], file: str) -> bool:
    return file in (text.file, text.json_file, values.get(text.named_by))


def _accepted(field: Field, texts: Mapping[str, Text], surface: Surface, files: bool) -> list[str]:
    """Return the arguments that may give a field's value on HTTP or MCP."""
    named = [field.name] if _is_on(field, surface, files) else []
    return [*named, *(text.name for text in field.input.texts if texts)]


def _text(text: Text, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError("must be a string", field=text.name, value=value)
    _check_length(text.name, value, TEXT_BYTES)
    return value


def _refuse_contents(field: Field, value: Any, texts: Mapping[str, Text]) -> None:
    """Raise for the contents of a file in a field that takes a name, if a request has another field for them."""
    text = next((one for one in field.input.texts if one.name in texts), None)
    is_json = isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{"))
    if text is None or not (is_json or (isinstance(value, str) and "\n" in value.strip())):
        return
    shown = value if isinstance(value, str) else str(value)
    reason = f"takes a name, not the contents of a file: send them as text in {text.name}"
    raise InputError(reason, field=field.name, value=shown, fix=(f'{text.name}: "the contents of the file"',))


def _converted(field: Field, value: Any, surface: Surface, strings: bool) -> Any:
    """Return a value as one of the field's types."""
    if field.repeated:
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise InputError("must be a list of strings", field=field.name, value=value, fix=field.fix(surface))
        return tuple(value)
    if isinstance(value, str):
        value = _in_days(field, value)
    if strings and isinstance(value, str):
        value = _from_string(field, value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = {
        str: isinstance(value, str),
        int: is_number and isinstance(value, int),
        float: is_number,
        bool: isinstance(value, bool),
    }
    if not any(fits[one] for one in field.types):
        kinds = " or ".join(_TYPE_NAMES[one] for one in field.types)
        days = " of days, or a time such as 45d, 6weeks or 36h" if field.input.in_days else ""
        raise InputError(f"must be {kinds}{days}", field=field.name, value=value, fix=field.fix(surface))
    return value


def _from_string(field: Field, value: str) -> Any:
    if str in field.types:
        return value
    if bool in field.types:
        return True if value.lower() in _TRUE else False if value.lower() in _FALSE else value
    try:
        return int(value) if float not in field.types else float(value)
    except ValueError:
        return value


def _are_overrides(value: object) -> bool:
    """Return whether a value lists fields of a recipe: peft.rank=16."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, str) and "=" in one for one in value)


def _in_days(field: Field, value: str) -> Any:
    """Return the days of a text with a unit of time, for a field in days; other texts as they are."""
    found = days_of(value) if field.input.in_days else None
    return value if found is None else found


COLLECTIONS = (list, tuple, set, frozenset, dict, bytes)


def _refuse_config(field: Field, value: object) -> None:
    """Raise InputError for the config of a model as Python has it: a dict, or an object of transformers."""
    named = value.get("model_type") if isinstance(value, Mapping) else getattr(value, "model_type", None)
    if named is None:
        return
    saved = hasattr(value, "save_pretrained")
    write = 'config.save_pretrained("my_model")' if saved else 'json.dump(config, open("config.json", "w"))'
    reason = "takes a name or a path, not the config itself: write it to a file and give its path"
    path = "my_model" if saved else "config.json"
    raise InputError(reason, field=field.name, value=str(named), fix=(write, f'{field.name}="{path}"'))


def validated(request: R, surface: Surface = "cli") -> R:
    """Return the request with its choices in lower case; raise InputError for a value outside its limits."""
    if isinstance(given := getattr(request, "overrides", ()), Mapping):  # {"layout.tp": 4}, as Python writes it
        written = tuple(format_override(key, value) for key, value in given.items())
        request = msgspec.structs.replace(request, overrides=written)
    single = [field.name for field in fields_of(type(request)) if field.repeated]
    single = [name for name in single if isinstance(getattr(request, name), str)]  # one entry, not one per character
    converted: dict[str, Any] = {name: (getattr(request, name),) for name in single}
    for field in fields_of(type(request)):
        if field.input.in_days and isinstance(given := getattr(request, field.name), str):
            converted[field.name] = _in_days(field, given)
    request = msgspec.structs.replace(request, **converted)
    changes: dict[str, Any] = {}
    for field in fields_of(type(request)):
        value = getattr(request, field.name)
        if value is None and field.required and not field.input.needed:
            raise InputError("must be given, not None", field=field.name, fix=field.fix(surface))
        if value is None:
            continue
        limits = field.input
        objects = limits.objects and isinstance(value, list)
        if not field.repeated:
            _refuse_config(field, value)
        if limits.positional and not field.repeated and isinstance(value, COLLECTIONS) and not objects:
            reason = f"takes one value, not a {type(value).__name__}"
            raise InputError(reason, field=field.name, value=str(value), fix=field.fix(surface))
        if not field.repeated and _are_overrides(value) and "overrides" in request.__struct_fields__:
            fix = (f"overrides={value!r}",)
            raise InputError(
                "is a list of overrides, which have a parameter", field=field.name, value=str(value), fix=fix
            )
        declared = bool(limits.surfaces) and bool(field.types)  # else set by code
        if declared and not field.repeated and not objects and not _has_type(field, value):
            kinds = " or ".join(_TYPE_NAMES[one] for one in field.types)
            reason = f"must be {kinds}, not {type(value).__name__} {value!r}"
            raise InputError(reason, field=field.name, value=str(value), fix=field.fix(surface))
        for one in value if field.repeated else (value,):
            if isinstance(one, str):
                _check_string(field, one)
            elif isinstance(one, int | float) and not isinstance(one, bool):
                _check_range(field, one, surface)
        if limits.max_entries is not None and len(value) > limits.max_entries:
            raise InputError(f"has {len(value)} entries; the limit is {limits.max_entries}", field=field.name)
        if limits.choices and isinstance(value, str):
            word = value.strip()
            found = _typed_choice(field, word, surface)
            changes[field.name] = found.value
            if found.meaning:
                typed = f"{field.label if surface == 'cli' else field.name} {word}"
                changes |= _with_synonym(request, changes, typed, found)
        if limits.override:
            meant = choices.Synonym("", "", (f"{limits.override}={value}",))
            changes["overrides"] = _with_overrides(request, changes, f"{field.label} {value}", meant)
    return msgspec.structs.replace(request, **changes) if changes else request


def _has_type(field: Field, value: Any) -> bool:
    """Return whether a value of a Python call is of a type that the field takes; results such as a Recipe are."""
    if isinstance(value, bool):
        return bool in field.types
    if isinstance(value, str):
        return str in field.types
    if isinstance(value, int | float):
        return float in field.types or (int in field.types and isinstance(value, int))
    return isinstance(value, msgspec.Struct)  # a Recipe, a Plan


def _typed_choice(field: Field, value: str, surface: Surface) -> choices.Synonym:
    """Return one of the field's choices; on the command line, a fix contains the option."""
    try:
        return choice(field, value)
    except InputError as error:
        if surface != "cli" or field.input.positional:
            raise
        fix = tuple(f"{field.label} {one}" for one in error.fix)
        raise InputError(error.reason, field=error.field, value=value, fix=fix) from None


def choice(field: Field, value: str) -> choices.Synonym:
    """Return one of the field's choices, written in any case and with _ or -, or what another word for it means."""
    known, kind = field.input.choices, field.input.synonyms
    for written in (value.lower(), value.lower().replace("_", "-")):
        if written in known:
            return choices.Synonym(written, "")
    plain = [one for one in known if choices.simplified(one) == choices.simplified(value)]
    if plain and kind:
        return choices.Synonym(plain[0], "")
    found = choices.synonym(kind, value)
    if found is not None and found.value in known:
        return found
    refused = choices.unsupported(kind, value)
    if refused is not None:
        raise refused_choice(field.name, value, *refused)
    raise unknown_choice(field.name, value, known, kind)


def _with_synonym(request: Request, changes: Mapping[str, Any], typed: str, found: choices.Synonym) -> dict[str, Any]:
    """Return overrides and notes with what a synonym means; an override that contradicts it is an error."""
    more: dict[str, Any] = {}
    names = request.__struct_fields__
    meaning = f"{typed} means {found.value}: {found.meaning}"
    if "notes" in names:
        before = changes.get("notes", request.notes)  # type: ignore[attr-defined]  # checked above
        more["notes"] = (*before, meaning)
    else:
        note(meaning)
    if "overrides" in names:
        more["overrides"] = _with_overrides(request, changes, typed, found)
    return more


def _with_overrides(
    request: Request, changes: Mapping[str, Any], typed: str, found: choices.Synonym
) -> tuple[str, ...]:
    """Return the overrides with those that an option means; one that contradicts it is an error."""
    overrides: Sequence[str] = changes.get("overrides", request.overrides)  # type: ignore[attr-defined]  # has them
    meant = [known for own in found.overrides if (known := _with_weights(own, request, overrides))]
    for own in meant:
        key = own.partition("=")[0]
        for given in overrides:
            kinds = (own, *found.kinds)
            if given.partition("=")[0].strip() == key and given.replace(" ", "") not in kinds:
                reason, fix = f"contradicts {typed}, which means {own}", f"leave out {given}"
                raise InputError(reason, field=key, value=given.partition("=")[2], fix=(fix,))
    typed_keys = {given.partition("=")[0].strip() for given in overrides}
    return (*(own for own in meant if own.partition("=")[0] not in typed_keys), *overrides)


def _with_weights(override: str, request: Request, overrides: Sequence[str]) -> str:
    """Return an override with the weights of the requested model, or the user's own; empty if it names no model."""
    key, _, value = override.partition("=")
    if value != "{weights}":
        return override
    from meshwright.api.resolve import weights_named

    given = next((one for one in overrides if one.partition("=")[0].strip() == key), None)
    if given is not None:
        return given.replace(" ", "")
    target = next(filter(None, (getattr(request, name, None) for name in ("model", "recipe", "target"))), None)
    weights = weights_named(target) if isinstance(target, str) else ""
    return f"{key}={weights}" if weights else ""


def _check_string(field: Field, value: str) -> None:
    _check_length(field.name, value, field.input.max_bytes)
    if not field.input.any_text and not value.isprintable():
        raise InputError("contains unprintable characters", field=field.name, value=value)
    if field.input.file_name and not _FILE_NAME.fullmatch(value):
        reason = "must be a plain file name: letters, digits, spaces and _ . -"
        raise InputError(reason, field=field.name, value=value, fix=field.fix("mcp"))


def _check_length(name: str, value: str, limit: int) -> None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InputError("is not valid Unicode", field=name) from None
    if size > limit:
        raise InputError(f"has {size:,} bytes; the limit is {limit:,}", field=name, value=value, fix=("send less",))


def _check_range(field: Field, value: float, surface: Surface) -> None:
    low, high, above = field.input.minimum, field.input.maximum, field.input.above
    if (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above):
        return
    raise InputError(f"must be {range_of(field.input)}", field=field.name, value=value, fix=field.fix(surface))


def range_of(limits: Input) -> str:
    """Describe the range of a number; empty if there is none."""
    low = f"at least {limits.minimum:g}" if limits.minimum is not None else ""
    low = f"above {limits.above:g}" if limits.above is not None else low
    if limits.maximum is None:
        return low
    return (
        f"{limits.minimum:g} to {limits.maximum:g}"
        if limits.minimum is not None
        else f"{low}, at most {limits.maximum:g}"
    )


def json_schema(request: type[Request], surface: Surface, *, texts: bool = True, files: bool = False) -> dict[str, Any]:
    """Return the JSON Schema of a verb's inputs on HTTP or MCP; `texts` and `files` are those of `read`."""
    known = texts_of(request) if texts else {}
    properties: dict[str, Any] = {}
    required = []
    for field in fields_of(request):
        if _is_on(field, surface, files) and field.name not in known:
            properties[field.name] = _property(field)
        if field.required and (not texts or not field.input.texts):
            required.append(field.name)
        elif field.required and not _is_on(field, surface, files):
            required.append(field.input.texts[0].name)
    for name, text in known.items():
        examples = {"examples": list(text.examples)} if text.examples else {}
        properties[name] = {"type": "string", "description": text.help, "maxLength": TEXT_BYTES, **examples}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _property(field: Field) -> dict[str, Any]:
    declared = field.input
    types = [_JSON_TYPES[one] for one in field.types]
    schema: dict[str, Any] = {"type": types[0] if len(types) == 1 else types, "description": declared.help}
    if field.repeated:
        schema["type"] = "array"
        schema |= {"items": {"type": "string", "maxLength": declared.max_bytes}, "maxItems": declared.max_entries}
    elif str in field.types:
        schema["maxLength"] = declared.max_bytes
    limits = {
        "minimum": declared.minimum,
        "maximum": declared.maximum,
        "exclusiveMinimum": declared.above,
        "default": None if field.repeated else field.default,
        "enum": [*declared.choices, *_other_words(declared)] or None,
        "examples": [list(one) if isinstance(one, tuple) else one for one in declared.examples] or None,
    }
    return schema | {name: value for name, value in limits.items() if value is not None}


def _other_words(declared: Input) -> list[str]:
    """Return the synonyms that say more than one of the choices; the others are accepted but not listed."""
    first: dict[choices.Synonym, str] = {}
    for word, one in choices.SYNONYMS.get(declared.synonyms, {}).items():
        if one.overrides:
            first.setdefault(one, word)
    return list(first.values())


def remote_fixes(error: MeshwrightError, request: type[Request], arguments: Mapping[str, Any]) -> list[str]:
    """Return an error's fixes with arguments in place of options; a field's examples if it has none."""
    flags = {field.flag: field.name for field in fields_of(request)}
    fixes = []
    for fix in error.fix:
        option, _, value = fix.partition(" ")
        is_value = error.field in flags.values() and re.fullmatch(r"[\w./+][\w./+-]*", fix)
        fix = f"{error.field}: {json.dumps(fix)}" if is_value else fix
        fixes.append(f"{flags[option]}: {json.dumps(value)}" if value and option in flags else fix)
    if fixes:
        return fixes
    own = [field for field in fields_of(request) if field.name == error.field]
    searched = [field for field in fields_of(request) if field.name == "query" and not own]
    if searched:
        return [fix for field in searched for fix in field.fix("mcp")]
    return [fix for field in own if str(arguments.get(field.name)) == str(error.value) for fix in field.fix("mcp")]


def command_words(request: type[Request], arguments: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments for the same request; texts become file names."""
    before: list[str] = []
    after: list[str] = []
    options: list[str] = []
    for field in fields_of(request):
        instead = [text for text in field.input.texts if arguments.get(text.name)]
        value = instead[0].file_name(arguments) if instead else arguments.get(field.name)
        if value in (None, "", (), [], False) or value == field.default or "cli" not in field.input.surfaces:
            continue
        if field.input.words:
            before.extend(value)
        elif field.input.positional:
            (after if field.repeated else before).extend(value if field.repeated else [str(value)])
        elif field.types == (bool,):
            options.append(field.flag)
        else:
            options += [field.flag, f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)]
    return [*before, *options, *after]
