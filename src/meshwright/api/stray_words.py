"""Words of a command line that are neither options nor overrides, and where they belong."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from meshwright.api.inputs import Field
from meshwright.errors import InputError, closest
from meshwright.recipes.format_override import format_override
from meshwright.recipes.overrides import native_key
from meshwright.recipes.types import recipe_fields

_CLUSTER = re.compile(r"[0-9]+(x[0-9]+)?x[A-Za-z]|auto$", re.IGNORECASE)


def stray_word(word: str, command: str, fields: Sequence[Field], given: Collection[str]) -> InputError:
    """Return the error for a word that is neither an option nor key=value, with the option or key it belongs to."""
    free = [field for field in fields if not field.input.positional and field.name not in given]
    fixes = [f"{field.flag} {word}" for field in free if word.lower() in field.input.choices]
    if not fixes and _CLUSTER.match(word):
        fixes = [f"{field.flag} {word}" for field in free if field.input.complete == "clusters"]
    own = native_key(word)
    if not fixes and own is not None:
        fixes = [format_override(own, recipe_fields()[own].default)]
    near = closest(word, [field.flag.partition("/")[0] for field in fields if not field.input.positional])
    hint = fixes or near or [f"meshwright {command} --help"]
    reason = "neither an option nor key=value"
    return InputError(f"{reason}; did you mean {hint[0]}?" if fixes or near else reason, "argument", word, hint)
