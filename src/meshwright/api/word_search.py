"""Free words: which fields, terms, findings and rules are about them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from meshwright import rules
from meshwright.api.terms import TERMS
from meshwright.recipes.key_maps import override_keys
from meshwright.recipes.types import recipe_fields
from meshwright.rules import messages
from meshwright.rules.messages.matching import STOP_WORDS

SHOWN = 8
ENOUGH = 0.6  # share of a long question's weight that an entry must contain
SHORT = 3  # words of a question that must all be found
LEAST_LETTERS = 3
ORDER = ("field", "term", "finding", "rule", "error")
QUESTION_WORDS = STOP_WORDS | {
    *(
        "how",
        "what",
        "why",
        "where",
        "who",
        "i",
        "my",
        "me",
        "so",
        "set",
        "use",
        "get",
        "run",
        "make",
        "explain",
        "mean",
        "much",
    )
}
_ENDING = re.compile(r"(?:ations?|ing|ed|es|s)$")


class Entry(msgspec.Struct, frozen=True):
    """Something that can be explained by name."""

    name: str
    kind: str
    meaning: str
    words: frozenset[str]
    title: frozenset[str]  # the words of its name


def search(text: str) -> tuple[list[Entry], list[str]]:
    """Return the entries that contain the words of a text, best first, and the words that no entry contains."""
    asked = [word for word in dict.fromkeys(_stems(text)) if word not in QUESTION_WORDS]
    entries = list(_entries())
    counts = Counter(word for entry in entries for word in entry.words)
    missing = [word for word in asked if word not in counts]
    if not asked or len(missing) > len(asked) / 2:
        return [], missing
    known = [word for word in asked if word in counts]
    weights = {word: math.log((len(entries) + 1) / (counts[word] + 0.5)) for word in known}
    needed = (1.0 if len(known) <= SHORT else ENOUGH) * sum(weights.values()) - 1e-9
    found = []
    for place, entry in enumerate(entries):
        covered = sum(weights[word] for word in known if word in entry.words)
        if covered >= needed:
            in_title = sum(weights[word] for word in known if word in entry.title)
            found.append((-round(in_title, 3), -round(covered, 3), ORDER.index(entry.kind), place, entry))
    return [entry for *_, entry in sorted(found, key=lambda row: row[:4])[:SHOWN]], missing


def _entries() -> Iterator[Entry]:
    others: dict[str, list[str]] = {}
    for key in override_keys().values():
        others.setdefault(key.field, []).append(key.key)
    for name, field in recipe_fields().items():
        yield _entry(name, "field", field.text, " ".join([name, *others.get(name, ())]))
    for name, meaning in TERMS.items():
        yield _entry(name, "term", meaning, name)
    from meshwright.doctor import meanings

    raised: dict[str, list[str]] = {}
    for message in messages.all_messages():
        for name in message.ids:
            raised.setdefault(name, []).append(message.text)
    for name, meaning in meanings().items():
        yield _entry(name, "finding", meaning, name, raised.get(name, ()))
    for name, rule in rules.all_rules().items():
        yield _entry(name, "rule", f"{rule.symptom}: {rule.cause}", name, raised.get(name, ()))
    for name, known in messages.KNOWN_ERRORS.items():
        yield _entry(name, "error", known.cause, name, (*raised.get(name, ()), *known.fix))


def _entry(name: str, kind: str, meaning: str, names: str, more: Iterable[str] = ()) -> Entry:
    title = frozenset(_stems(names))
    return Entry(name, kind, meaning, title | frozenset(_stems(" ".join([meaning, *more]))), title)


def _stems(text: str) -> list[str]:
    """Return the words of a text without their endings: stopping, stopped and stops are stop."""
    found = []
    for word in re.findall(r"[a-z]+[0-9]*|[0-9]+[a-z]+", text.lower()):
        stem = _ENDING.sub("", word) if len(word) > LEAST_LETTERS + 1 else word
        if len(stem) < LEAST_LETTERS:
            stem = word
        if stem != word and len(stem) > LEAST_LETTERS and stem[-1] == stem[-2] and stem[-1] not in "sl":
            stem = stem[:-1]
        found.append(stem)
    return found
