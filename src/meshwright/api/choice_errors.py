"""Errors of words that are none of an input's choices, with did-you-mean."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.choices import SYNONYMS, UNSUPPORTED
from meshwright.errors import InputError, unknown
from meshwright.similar import closest


def refused_choice(name: str, value: str, reason: str, instead: tuple[str, ...]) -> InputError:
    """Return the error for a known word that cannot be accepted, with the choices instead."""
    return InputError(f"{reason}; choose {' or '.join(instead)}", field=name, value=value, fix=instead)


def unknown_choice(name: str, value: str, known: Sequence[str], kind: str) -> InputError:
    """Return the error for a word that is no choice; the field's other words for the choices may be meant too.

    A word that is near to a refused one only is answered with the reason of that: dop is dpo.
    """
    accepted = (*known, *(word for word, one in SYNONYMS.get(kind, {}).items() if one.value in known))
    refused = UNSUPPORTED.get(kind, {})
    near = closest(value, (*accepted, *refused)) or closest(value, known)
    usable = [word for word in near if word in accepted]
    if near and not usable:
        reason, instead = refused[near[0]]
        return refused_choice(name, value, f"unknown {kind} {value}; did you mean {near[0]}? {reason}", instead)
    return unknown(name, value, usable or known, noun=kind)
