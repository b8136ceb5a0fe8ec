"""Overrides in a front end's own keys: read as if its file had them, and refused where its table has no such key."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.front_ends.commands import with_command_settings
from meshwright.frameworks.front_ends.describe import FrontEnd
from meshwright.frameworks.front_ends.keys import find_key
from meshwright.frameworks.front_ends.parse import table_of
from meshwright.frameworks.front_ends.synonyms import in_front_end
from meshwright.frameworks.key_table import KeyTable
from meshwright.recipes.key_maps import hugging_face
from meshwright.recipes.types import recipe_fields
from meshwright.rules.rule import Finding


def with_own_overrides(one: FrontEnd, content: Content, overrides: list[str]) -> tuple[Content, list[str]]:
    """Return the file with the overrides that are keys of its front end, and the other overrides.

    Raise InputError for an argument of the Trainer, TRL or peft that the front end does not read.
    """
    known = table_of(one, with_command_settings(one, content))
    rest: list[str] = []
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        plain = key.removeprefix("--").replace("-", "_")
        if key in recipe_fields() or not equals:
            rest.append(text)
        elif find_key(known, plain)[2] is not None:
            content = _with_setting(content, plain, value)
        elif any(row.key == plain for row in hugging_face.KEYS):
            raise _refusal(one, known, content, plain, value)
        else:
            rest.append(text)
    return content, rest


def _with_setting(content: Content, key: str, value: str) -> Content:
    from meshwright.frameworks.our_fixes import changed_content  # imports the readers, which import this package

    fix = f"{key}: {value}" if content.settings else f"--{key} {value}"
    changed = changed_content(content, Finding("", "advice", key, "", (fix,)))
    if changed is None:
        raise InputError("cannot be read as a value of the file", field=key, value=value)
    return changed


def _refusal(one: FrontEnd, known: KeyTable, content: Content, key: str, value: str) -> InputError:
    lines = [line.partition(": ") for line in in_front_end(one.name, {key: value}, known)]
    fix = [f"{name}={text.replace(', ', ',')}" for name, _, text in lines]
    own = f"; its key is {lines[-1][0]}" if lines else ""
    verb = "has no" if one.rejects else "ignores"
    return InputError(f"{one.title} {verb} {key}{own}", field=key, value=value, fix=[" ".join(fix)] if fix else [])
