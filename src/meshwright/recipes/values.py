"""Parse typed values from text: integers, floats, booleans, names, lists and mappings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from meshwright.errors import InputError, closest
from meshwright.recipes.types import RecipeField
from meshwright.similar import NUMBER_WORDS

INTEGER = re.compile(r"[+-]?[0-9][0-9_]*")
NUMBER = re.compile(r"[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
LARGEST_INTEGER = 2**53  # exact in JSON readers and doubles
INTEGERS = f"an integer from -{LARGEST_INTEGER} to {LARGEST_INTEGER}"
MEANT = {
    **dict.fromkeys(("fp8", "float8"), "fp8_tensor"),  # a family of formats: the one that `--fp8` and plans name
    **dict.fromkeys(("loss_free", "loss-free", "aux_free", "aux_loss_free", "auxfree", "noaux_tc"), "bias"),
}
"""What other words for a value mean here."""
MEANT_BOOLEANS = dict.fromkeys(("yes", "on", "1"), "true") | dict.fromkeys(("no", "off", "0"), "false")
THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+")
BINARY = re.compile(r"seq|position|context|batch|hidden|vocab|length|_len|block_size")  # words of keys whose k is 1024
NUMBERS = "a finite number, at most 1.7e308 in magnitude"


def parse(info: RecipeField, text: str, key: str = "") -> Any:
    """Parse the text for a field; raise for a wrong type or range, with the allowed values."""
    key = key or info.key
    type_, optional = bare_type(info.type)
    if optional and text.strip().lower() in ("null", "none"):
        return None
    try:
        value = _parse(type_, text.strip(), key)
    except InputError as error:
        error.fix = tuple(one for one in error.fix if _is_in_range(info, one.partition("=")[2], key))
        raise
    try:
        msgspec.convert(value, info.type)
    except msgspec.ValidationError as error:
        wanted = str(error).replace("Expected ", "").split(" - at")[0].replace("`", "")
        wanted = wanted.replace("int ", "an integer ").replace("float ", "a number ")
        meant = [f"{key}={value / 100:g}"] if type_ is float and 1 < value <= 100 else []  # a share typed in percent
        fix = [one for one in meant if _is_in_range(info, one.partition("=")[2], key)]
        raise InputError(f"must be {wanted} ({info.text})", field=key, value=text, fix=fix) from error
    return value


def _is_in_range(info: RecipeField, text: str, key: str) -> bool:
    try:
        parse(info, text, key)
    except InputError:
        return False
    return True


def is_map(info: RecipeField) -> bool:
    """Return whether a field is a mapping, whose items may be set one by one."""
    return get_origin(bare_type(info.type)[0]) is dict


@lru_cache(maxsize=256)
def bare_type(hint: Any) -> tuple[Any, bool]:
    """Return the type of a field without metadata, and whether it is optional."""
    if get_origin(hint) is Annotated:
        return bare_type(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        inner = [part for part in get_args(hint) if part is not type(None)]
        return bare_type(inner[0])[0], len(inner) < len(get_args(hint))
    return hint, False


def _parse(type_: Any, text: str, key: str) -> Any:
    origin = get_origin(type_)
    if origin is Literal:
        return _choice(get_args(type_), _unquoted(text), key)
    if origin is tuple:
        return tuple(_parse(get_args(type_)[0], part, key) for part in _items(text))
    if origin is dict:
        return _weights(text, key) if get_args(type_)[1] is float else _names(text, key)
    if type_ is str:
        return _unquoted(text)
    return {bool: _boolean, int: as_int, float: _number}[type_](text, key)


def check_range(key: str, value: Any) -> None:
    """Raise for numbers that no field accepts: huge integers, infinities and NaN."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            check_range(key, item)
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise _expected(key, f"an integer of {len(hex(value)) * 6 // 5} digits", INTEGERS)
    elif isinstance(value, float) and not math.isfinite(value):
        raise _expected(key, str(value), NUMBERS)


def _expected(key: str, text: str, wanted: str, meant: str | None = None) -> InputError:
    return InputError(f"must be {wanted}", field=key, value=text, fix=[] if meant is None else [f"{key}={meant}"])


def meant_value(info: RecipeField, text: str, key: str) -> str | None:
    """Return how a value is written that a field refuses, but that has one meaning: 8192 for 8k; else None."""
    type_, _ = bare_type(info.type)
    found = meant_integer(text, key) if type_ is int else None
    found = MEANT_BOOLEANS.get(_unquoted(text.strip()).lower()) if type_ is bool else found
    try:
        return None if found is None else str(parse(info, found, key)).lower()
    except InputError:  # out of range
        return None


def meant_integer(text: str, key: str) -> str | None:
    """Return the digits of an integer in another notation: 8k, 8192.0, 8,192 or 1e6; None if it is none.

    The k of a length, a width or a batch is 1024, that of steps and samples 1000.
    """
    plain = _unquoted(text.strip()).strip()
    if plain.lower() in NUMBER_WORDS:
        return str(NUMBER_WORDS[plain.lower()])
    plain = plain.replace(",", "") if THOUSANDS.fullmatch(plain) else plain.replace(" ", "")
    found = re.fullmatch(rf"({NUMBER.pattern})([kmbgt]?)", plain, re.IGNORECASE)
    if found is None:
        return None
    base = 1024 if BINARY.search(key.lower()) else 1000
    number = float(found[1]) * base ** {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}[found[4].lower()]
    return str(int(number)) if number.is_integer() and abs(number) <= LARGEST_INTEGER else None


def meant_number(text: str, key: str) -> str | None:
    """Return the digits of a number in another notation: 5 %, or any notation of an integer; None if it is none."""
    share = re.fullmatch(rf"({NUMBER.pattern}) ?%", _unquoted(text.strip()).strip())
    return f"{float(share[1]) / 100:g}" if share else meant_integer(text, key)


def _boolean(text: str, key: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise _expected(key, text, "true or false", MEANT_BOOLEANS.get(text.lower()))
    return text.lower() == "true"


def as_int(text: str, key: str) -> int:
    """Parse an integer."""
    if not INTEGER.fullmatch(text):
        raise _expected(key, text, "an integer", meant_integer(text, key))
    digits = text.lstrip("+-").replace("_", "").lstrip("0")
    if len(digits) > len(str(LARGEST_INTEGER)) or int(digits or "0") > LARGEST_INTEGER:
        raise _expected(key, text, INTEGERS)
    return int(text)


def _number(text: str, key: str) -> float:
    if not NUMBER.fullmatch(text) and not NOT_FINITE.fullmatch(text):
        raise _expected(key, text, "a number", meant_number(text, key))
    number = float(text)
    if not math.isfinite(number):
        raise _expected(key, text, NUMBERS)
    return number


def _choice(allowed: tuple[Any, ...], text: str, key: str) -> str:
    if text in allowed:
        return text
    meant = MEANT.get(text.lower())
    near = [meant] if meant in allowed else closest(text, [str(value) for value in allowed], limit=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(
        f"{hint}allowed: {', '.join(map(str, allowed))}", field=key, value=text, fix=[f"{key}={n}" for n in near]
    )


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text


def _items(text: str) -> list[str]:
    """Split [a,b], a,b or ["a","b"] into items."""
    if text[:1] == "[" and text[-1:] == "]":
        text = text[1:-1]
    return [_unquoted(part.strip()) for part in text.split(",") if part.strip()]


def _weights(text: str, key: str) -> dict[str, float]:
    """Parse {"a": 0.7, "b": 0.3} or a:0.7,b:0.3; what means something else is the fix of the error."""
    wanted = 'sources with weights, like a:0.7,b:0.3 or {"a":0.7,"b":0.3}'
    try:
        return {name: _weight(weight, key, text, wanted) for name, weight in _pairs(text, key, wanted).items()}
    except InputError:
        meant = json.dumps(blend, separators=(",", ":")) if (blend := listed_weights(text.split())) else None
        raise _expected(key, text, wanted, meant) from None


def listed_weights(words: Sequence[str]) -> dict[str, float]:
    """Return the weights by source of a Megatron list, 0.7 a 0.3 b; empty if the words are no such list."""
    weights, names = words[::2], words[1::2]
    if len(words) < 2 or len(weights) != len(names) or not all(map(NUMBER.fullmatch, weights)):
        return {}
    return {name: float(weight) for name, weight in zip(names, weights, strict=True)}


def sources_in(text: str) -> dict[str, float]:
    """Return the sources and weights that a text lists in any way: a:0.7,b:0.3, 0.7 a 0.3 b, or a,b in equal parts."""
    return stated_weights(text) or dict.fromkeys(_items(text), 1.0)


def stated_weights(text: str) -> dict[str, float]:
    """Return the weights by source of a text that states them in any way; empty if it states none."""
    words = text.replace(",", " ").split()
    turned = [word for pair in zip(words[1::2], words[::2], strict=False) for word in pair]  # a 0.7 b 0.3
    for one in (words, turned if len(turned) == len(words) else []):
        if found := listed_weights(one):
            return found
    with suppress(InputError):
        return _weights(text, "data.blend")
    return {}


def _names(text: str, key: str) -> dict[str, str]:
    """Parse {"prompt": "question"} or prompt:question."""
    wanted = 'names, like prompt:question,response:answer or {"prompt":"question"}'
    return {name: _unquoted(str(other)) for name, other in _pairs(text, key, wanted).items()}


def _pairs(text: str, key: str, wanted: str) -> dict[str, Any]:
    try:
        pairs = json.loads(text) if text[:1] == "{" else None
    except (ValueError, RecursionError):  # not JSON, or a number too long to parse
        pairs = None
    if not isinstance(pairs, dict):
        inner = text[1:-1] if text[:1] == "{" and text[-1:] == "}" else text
        parts = [part.rpartition(":") for part in inner.split(",") if part.strip()]
        pairs = {_unquoted(name.strip()): value.strip() for name, colon, value in parts if name and colon}
        if len(pairs) != len(parts):
            raise _expected(key, text, wanted)
    return {str(name): value for name, value in pairs.items()}


def _weight(weight: Any, key: str, text: str, wanted: str) -> float:
    number = str(weight)
    if isinstance(weight, bool) or not NUMBER.fullmatch(number) or not 0 < float(number) < math.inf:
        raise _expected(key, text, wanted)
    return float(number)
