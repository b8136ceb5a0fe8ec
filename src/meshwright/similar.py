"""Names that a mistyped or shortened name may mean, for did-you-mean.

Two names with different numbers are different products: an RTX 3090 is never taken for an RTX 4090, nor a 7B model for
an 8B one. A word of its own is no typing error either: `q_proj` does not mean `proj`. A switch never means its
opposite: `check_nan` is not `no_check_nan`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

LONGEST = 200  # characters of a name that are compared
SHORT = 5  # characters up to which one wrong letter is all, and the first letter must be right
LEFT_OUT = 0.1  # distance per word or number that a short form leaves out
LONG, ENDING = 10, 3  # letters of a name that is known by its start, and of the end that it lacks
MARGIN = 0.35  # of distance between the best name and the last one shown
LEAST_SHARE = 0.3  # of a name that the words of its short form must cover
PREFIX_SHARE = 0.5  # of a name that its first letters must cover
LEAST_INITIALS = 3  # letters
NEGATIONS = frozenset(("no", "not", "dont", "disable", "disabled", "without", "skip"))
SOUNDS = {"ph": "f", "ck": "k", "qu": "kw", "tch": "ch"}
"""Letters that sound like others: lora_alfa is lora_alpha."""
_SOUNDS = re.compile("|".join(SOUNDS))
_PARTS = re.compile(r"[a-z]+|[0-9]+|[^\W_a-z0-9]+")
_CAPITALIZED = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|[0-9]+")
_WORDS = re.compile(r"[^\W_]+")
_LETTERS_FOR_DIGITS = str.maketrans("oil", "011")


class _Name(NamedTuple):
    """A name without case and separators, and what it consists of."""

    joined: str
    words: tuple[str, ...]  # between separators
    parts: tuple[str, ...]  # letters and numbers

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if part.isdigit())


@lru_cache(maxsize=4096)
def _name(text: str) -> _Name:
    lower = text.lower()[:LONGEST]
    # The letters O, I and l mean digits next to one: H10O is H100.
    lower = re.sub(r"(?<=[0-9])[oil]+(?![a-z])", lambda found: found[0].translate(_LETTERS_FOR_DIGITS), lower)
    words = tuple(_WORDS.findall(lower))
    return _Name("".join(words), words, tuple(_PARTS.findall(lower)))


NUMBER_WORDS = {
    "one": 1,
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
    "sixteen": 16,
    "twenty": 20,
    "hundred": 100,
    "thousand": 1000,
}
"""Numbers written as words, where digits are needed."""


def closest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return the known names that a name may be a typing error or a short form of, best first; empty if none."""
    typed = _name(name)
    scored = [(_distance(typed, _name(one)), one) for one in dict.fromkeys(known)] if typed.joined else []
    found = sorted(
        (
            (distance, -_shared_start(typed.joined, _name(one).joined), len(one), one)
            for distance, one in scored
            if distance is not None
        )
    )
    if not found:
        return []
    best = found[0][0]
    is_typo = best == int(best)  # and not a short form
    near = [one for distance, *_, one in found if distance <= best + (0 if is_typo else MARGIN)]
    # A wrong letter that fits more names than are shown does not tell which was meant.
    return [] if is_typo and len(near) > limit else near[:limit]


def abbreviated(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names of several capitalized words that a name shortens: HFTokenizer, HuggingFaceTokenizer."""
    typed = _name(name).joined
    return [one for one in known if len(typed) > 1 and _is_abbreviation(typed, _CAPITALIZED.findall(one[:LONGEST]))]


def _is_abbreviation(typed: str, words: Sequence[str]) -> bool:
    """Return whether words, each written out or as its first letter, begin with what is typed; two at least."""
    ends = {0}
    for count, word in enumerate(words, 1):
        lower = word.lower()
        ends = {end + len(part) for end in ends for part in (lower, lower[0]) if typed.startswith(part, end)}
        if len(typed) in ends:
            return count > 1
    return False


def misspelled(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a name is with a few wrong letters, best first; short forms do not count."""
    typed = _name(name)
    found = [(wrong, one) for one in known if (wrong := _typo(typed, _name(one))) is not None]
    return [one for _, one in sorted(found)]


def cut_short(name: str, known: Iterable[str]) -> str:
    """Return the only known name of which a long one has all but the last letters: gradient_checkpoint; else empty."""
    found = [one for one in known if one.startswith(name) and 0 < len(one) - len(name) <= ENDING]
    return found[0] if len(name) >= LONG and len(found) == 1 else ""


def is_slip(name: str, known: str) -> bool:
    """Return whether a name is a known one with a letter left out, added, or swapped with the next."""
    short, long = sorted((name, known), key=len)
    if len(long) == len(short) + 1:
        return any(long[:at] + long[at + 1 :] == short for at in range(len(long)))
    swapped = (name[:at] + name[at + 1] + name[at] + name[at + 2 :] for at in range(len(name) - 1))
    return len(long) == len(short) and known in swapped


def _distance(typed: _Name, known: _Name) -> float | None:
    """Return how far a name is from a known one, in wrong letters; None if it does not mean it."""
    if _is_negated(typed) != _is_negated(known):
        return None
    found = [one for one in (_typo(typed, known), _short_form(typed, known)) if one is not None]
    return min(found, default=None)


def opposites(name: str, known: Iterable[str]) -> list[str]:
    """Return the known switches that turn off what a name turns on, or on what it turns off."""
    typed = _name(name)
    plain = _without_negation(typed)
    others = ((one, _name(one)) for one in known)
    return [
        one for one, other in others if _is_negated(other) != _is_negated(typed) and _without_negation(other) == plain
    ]


def _is_negated(name: _Name) -> bool:
    return not NEGATIONS.isdisjoint(name.words)


def _without_negation(name: _Name) -> tuple[str, ...]:
    return tuple(word for word in name.words if word not in NEGATIONS and word not in ("enable", "enabled", "use"))


def _shared_start(one: str, other: str) -> int:
    """Return how many letters two names share at their start, where typing errors are rare."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _typo(typed: _Name, known: _Name) -> float | None:
    """Return the number of wrong letters, if they are few, the numbers agree and no word is added or missing."""
    allowed = _allowed(max(len(typed.joined), len(known.joined)))
    if abs(len(typed.joined) - len(known.joined)) > allowed or not _same_numbers(typed, known):
        return None
    wrong = _wrong_letters(typed.joined, known.joined)
    if wrong > allowed or (wrong and _other_words(typed.words, known.words)):
        return None
    if len(known.joined) <= SHORT and sorted(typed.joined[:2]) != sorted(known.joined[:2]):
        return wrong if typed.joined[:1] == known.joined[:1] or not wrong else None
    return wrong


def _short_form(typed: _Name, known: _Name) -> float | None:
    """Return the distance to a name that starts with the typed one, has all its words in order or its initials."""
    left_out = len(known.parts) - len(typed.parts)
    if _is_initials(typed, known):
        return LEFT_OUT
    share = len(typed.joined) / max(len(known.joined), 1)
    rest = known.joined[len(typed.joined) :]
    start = typed.joined if known.joined.startswith(typed.joined) else typed.joined.removesuffix("s")  # procs
    if rest and known.joined.startswith(start) and not rest[0].isdigit() and share >= PREFIX_SHARE:
        return LEFT_OUT * max(left_out, 1)
    if share < LEAST_SHARE or left_out <= 0:
        return None
    wrong = _in_order(typed.parts, known.parts)
    return None if wrong is None else wrong + LEFT_OUT * left_out


def _is_initials(typed: _Name, known: _Name) -> bool:
    """Return whether the last word has the first letters of the others: `mbs` of `micro_batch_size`."""
    last = typed.words[-1]
    if len(last) < LEAST_INITIALS or not last.isalpha():
        return False
    initials = "".join(word[0] for word in known.words[-len(last) :])
    section = known.words[: -len(last)]
    return initials == last and typed.words[:-1] in ((), section)


def _in_order(typed: Sequence[str], known: Sequence[str]) -> float | None:
    """Return the wrong letters of all typed parts, each found in the known ones in order; None if one is missing."""
    rest, total = list(known), 0
    for part in typed:
        found = [(at, wrong) for at, one in enumerate(rest) if (wrong := _wrong_part(part, one)) is not None]
        if not found:
            return None
        at, wrong = found[0]
        rest, total = rest[at + 1 :], total + wrong
    return float(total)


def _wrong_part(typed: str, known: str) -> int | None:
    if typed == known:
        return 0
    if typed.isdigit() or known.isdigit() or min(len(typed), len(known)) < 4:
        return None
    wrong = _wrong_letters(typed, known)
    return wrong if wrong <= 1 else None


def _allowed(length: int) -> int:
    """Return how many letters of a name may be wrong."""
    return 1 if length <= SHORT else min(max(2, length // 5), 4)


def _wrong_letters(one: str, other: str) -> int:
    """Return the letters to add, drop, replace or swap with their neighbour; a sound counts as one."""
    from rapidfuzz.distance import OSA

    wrong = int(OSA.distance(one, other))
    if wrong < 2:
        return wrong
    return min(wrong, 1 + int(OSA.distance(_SOUNDS.sub(_by_sound, one), _SOUNDS.sub(_by_sound, other))))


def _by_sound(found: re.Match[str]) -> str:
    return SOUNDS[found[0]]


def _same_numbers(typed: _Name, known: _Name) -> bool:
    """Return whether the digits agree, or differ only by a repeated or a swapped key."""
    one, other = "".join(typed.numbers), "".join(known.numbers)
    if one == other:
        return True
    if not one or not other:
        return False
    if re.sub(r"([0-9])\1+", r"\1", one) == re.sub(r"([0-9])\1+", r"\1", other):
        return True
    return sorted(one) == sorted(other) and _wrong_letters(one, other) == 1


def names_another_thing(typed: str, known: str) -> bool:
    """Return whether a key differs from a known one by a word, and not by wrong letters: local_rank is no lora_rank.

    A word may be shortened (sequence_len), and words may be missing at the end (gradient_accumulation).
    """
    words, others = (re.findall(r"[^\W_]+", one.lower()) for one in (typed, known))
    if len(words) == len(others):
        return any(
            not (one.startswith(other) or other.startswith(one))
            and _wrong_letters(one, other) > _allowed(max(len(one), len(other)))
            for one, other in zip(words, others, strict=True)
        )
    # The known key qualifies the typed one by a word in front: dpo_use_liger_kernel is no use_liger_kernel.
    return len(words) < len(others) and words == others[-len(words) :]


def _other_words(typed: Sequence[str], known: Sequence[str]) -> bool:
    """Return whether the names differ by a word, such as q_proj and proj, or train.lr and train_on."""
    if len(typed) == len(known):
        pairs = [(one, other) for one, other in zip(typed, known, strict=True) if one != other]
        return any(_wrong_letters(one, other) > _allowed(max(len(one), len(other))) for one, other in pairs)
    longer, shorter = (typed, known) if len(typed) > len(known) else (known, typed)
    rest = list(longer)
    for word in shorter:
        if word not in rest:
            return False
        rest.remove(word)
    return True
