"""Finds the known messages that a text contains: a line, a traceback with prefixes of ranks, or part of a message.

Words are compared in order and weighted by how rare they are among all messages. Numbers, paths and quoted values
carry no weight, because every run has its own.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec

from meshwright.rules.messages import codes
from meshwright.rules.messages.message import Message
from meshwright.rules.messages.table import all_messages
from meshwright.rules.rule import all_rules

SURE = 0.86  # share of a message's weight that a text must contain
NEAR = 0.55  # share from which a message is named as a candidate
LEAST = 8.8  # weight of the shortest message that a longer text may contain
LEAST_PART, LEAST_PART_WORDS = 8.0, 4  # weight and words of the shortest part of a message that identifies it
MAX_WORDS = 400  # words of one passage
MAX_PASSAGES = 400
HINTS = ("rror", "xception", "ssert", "CUDA", "NCCL", "nccl", "must ", "not supported", "cannot", "divisible")
BLOCK = 8  # lines of a message that a terminal has wrapped

_WORD = re.compile(r"[a-z][a-z0-9]*|[0-9]+[a-z]+[0-9a-z]*")
_VALUE = re.compile(r"\{[^{}]*\}|(?:[a-z]:)?(?:[\w.~-]*/){2,}[\w.~-]*|0x[0-9a-f]+|https?://\S+", re.IGNORECASE)
_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(
    r"^\s*(?:[│|❱]\s*|\[\d+\]\s+(?=\[rank)|\[(?:rank|default|gpu)?\s?\d+(?:/\d+)?\]:?\s|\d+:\s"
    r"|\(\w+ pid=\d+[^)]*\)\s?|\S+\.\w+\.\w+:\s(?=\[rank)"
    r"|[\[(]?\d{4}-\d\d-\d\d[T ][\d:.,+Z-]+[\])]?\s*(?:-\s*)?"
    r"|(?:\[?(?:ERROR|CRITICAL|WARNING|INFO)\]?\s*[:-]\s*))+"
)
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Warning)?:\s+")
_NAMED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception):")
NEGATIONS = frozenset(("not", "no", "cannot", "never", "without", "t"))  # t: doesn't
OPPOSITE = 0.8
STOP_WORDS = frozenset((
    "a", "an", "the", "is", "are", "be", "been", "was", "were", "to", "of", "in", "on", "for", "with", "and", "or",
    "not", "no", "this", "that", "it", "its", "by", "from", "at", "as", "but", "if", "when", "while", "you", "your",
    "we", "can", "cannot", "must", "should", "may", "might", "please", "has", "have", "had", "do", "does", "did",
    "only", "which", "than", "there", "here", "error", "exception", "runtime", "value", "assertion", "assert",
    "failed",
))  # fmt: skip
"""Words that every message may contain."""


class Match(msgspec.Struct, frozen=True):
    """A known message that a text contains, or is close to."""

    message: Message
    score: float  # 0 to 1
    sure: bool
    passage: str  # the part of the text
    agreement: float = 1.0  # how much message and passage have in common, of both


def words_of(text: str) -> list[str]:
    """Return the words of a text without numbers, paths and values; names are split at underscores and dashes."""
    return _WORD.findall(_VALUE.sub(" ", text).lower())[:MAX_WORDS]


class Index:
    """Messages with the weights of their words."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self.messages = tuple(messages)
        self.words = [words_of(one.text) for one in self.messages]
        counts = Counter(word for words in self.words for word in set(words))
        self._weights = {word: _weight(word, count, len(self.messages)) for word, count in counts.items()}
        self._new = _weight("", 0, len(self.messages))
        self._by_word: dict[str, list[int]] = {}
        for at, words in enumerate(self.words):
            for word in dict.fromkeys(words):
                self._by_word.setdefault(word, []).append(at)

    def weight(self, words: Iterable[str]) -> float:
        """Return how much some words tell about a message."""
        return sum(self._weights.get(word, STOP_WEIGHT if word in STOP_WORDS else self._new) for word in words)

    def search(self, text: str) -> list[Match]:
        """Return the messages that a text contains or is close to, best first; one per distinct meaning."""
        best: dict[int, Match] = {}
        for passage in passages(text):
            for at, found in self._scores(passage):
                if at not in best or _rank(found) > _rank(best[at]):
                    best[at] = found
        order = sorted(best, key=lambda at: _rank(best[at]))
        distinct: dict[tuple[str, ...], Match] = {}
        for at in reversed(order):
            distinct.setdefault(best[at].message.ids, best[at])
        return list(distinct.values())

    def _scores(self, passage: str) -> Iterator[tuple[int, Match]]:
        words = words_of(passage)
        typed = self.weight(words)
        known = set(words)
        long_enough = sum(word.lower() not in STOP_WORDS for word in passage.split()) >= LEAST_PART_WORDS
        for at in self._candidates(known):
            template = self.words[at]
            total = self.weight(template)
            if self.weight(word for word in template if word in known) < NEAR * min(total, typed):
                continue
            if total < LEAST:  # it is part of many sentences: only the whole message counts
                if _is_all(self.messages[at].text, passage):
                    yield at, Match(self.messages[at], 1.0, True, passage.strip())
                continue
            shared = self.weight(_common(template, words))
            covered = shared / total * (OPPOSITE if _is_opposite(template, known) else 1)
            is_part = shared >= LEAST_PART and long_enough
            score = max(covered, shared / typed if is_part else 0.0)
            if score >= NEAR:
                agreement = 2 * shared / (total + typed)
                yield at, Match(self.messages[at], round(score, 3), score >= SURE, passage.strip(), agreement)

    def _candidates(self, known: set[str]) -> list[int]:
        found = {at for word in known if word not in STOP_WORDS for at in self._by_word.get(word, ())}
        return sorted(found)


STOP_WEIGHT = 0.15


def _rank(match: Match) -> tuple[bool, float, float]:
    return match.sure, round(match.score, 2), match.agreement


def _weight(word: str, count: int, total: int) -> float:
    return STOP_WEIGHT if word in STOP_WORDS else math.log((total + 1) / (count + 0.5))


def _is_opposite(template: Sequence[str], known: set[str]) -> bool:
    """Return whether only the message denies something: not initialized, and already initialized."""
    return not NEGATIONS.isdisjoint(template) and NEGATIONS.isdisjoint(known)


def _is_all(template: str, passage: str) -> bool:
    """Return whether a passage is nothing but a message with values, besides the exception's name."""
    pattern = r"\s+".join(re.escape(part).replace(r"\{\}", r"[\w.,-]+") for part in template.split())
    return re.fullmatch(pattern + r"[.!]?", _EXCEPTION.sub("", passage.strip()), re.IGNORECASE) is not None


def _common(template: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the longest run of the template's words that a text has in the same order (patience over positions)."""
    places: dict[str, list[int]] = {}
    for at, word in enumerate(words):
        places.setdefault(word, []).append(at)
    ends: list[int] = []
    chains: list[list[str]] = []
    for word in template:
        for at in reversed(places.get(word, ())):
            length = bisect_left(ends, at)
            chain = [*(chains[length - 1] if length else ()), word]
            if length == len(ends):
                ends.append(at)
                chains.append(chain)
            else:
                ends[length], chains[length] = at, chain
    return chains[-1] if chains else []


def passages(text: str) -> list[str]:
    """Return the parts of a text that may be a message: every line, and exceptions with the lines that follow them."""
    lines = [clean(line) for line in text.splitlines()]
    lines = [line for line in lines if line.strip()]
    places: Sequence[int] = range(len(lines))
    if len(lines) > MAX_PASSAGES:  # a log: its errors, the last ones if there are many
        places = [at for at in places if any(hint in lines[at] for hint in HINTS)][-MAX_PASSAGES:]
    found = dict.fromkeys(lines[at] for at in places)
    for at in places:
        if _EXCEPTION.match(lines[at]) or (at == 0 and len(lines) <= BLOCK):
            found.setdefault(" ".join(_continued(lines[at : at + BLOCK])))
    return list(found)


def is_error(text: str) -> bool:
    """Return whether a text has a line that names an exception, such as ValueError: …"""
    return any(_NAMED.match(clean(line)) for line in text.splitlines())


def _continued(lines: Sequence[str]) -> Iterator[str]:
    """Yield an exception's line and those after it that belong to its message."""
    yield lines[0]
    for line in lines[1:]:
        if _EXCEPTION.match(line) or line.lstrip().startswith(("Traceback", "File ", "---", "===")):
            return
        yield line


def clean(line: str) -> str:
    """Return a line without colors, box drawing, and the prefixes of ranks, actors and log levels."""
    return _PREFIX.sub("", _COLOR.sub("", line)).rstrip(" │\r")


def _symptoms() -> Iterator[Message]:
    """Yield the symptoms and findings of rules as messages in our terms."""
    for id, rule in all_rules().items():
        yield Message(rule.message, "", (id,))
        for part in re.split(r"; or |; ", rule.symptom):
            yield Message(part, "", (id,))


@cache
def _index(own_words: bool) -> Index:
    return Index(_symptoms() if own_words else all_messages())


def search(text: str) -> list[Match]:
    """Return the known messages that a text contains or is close to, best first."""
    found = _index(False).search(text)
    sure = [one for one in found if one.sure]
    named = [*_coded(text, codes.SPECIFIC), *sure, *_coded(text, codes.GENERAL)]
    return list({one.message.ids: one for one in reversed([*named, *(one for one in found if not one.sure)])}.values())[
        ::-1
    ]


def has_code(text: str) -> bool:
    """Return whether a text names a known error by its code, such as Xid 79 or ncclSystemError."""
    return next(_coded(text, (*codes.SPECIFIC, *codes.GENERAL)), None) is not None


def _coded(text: str, patterns: Any) -> Iterator[Match]:
    for line in text.splitlines():
        for message in codes.coded(clean(line), patterns):
            yield Match(message, 1.0, True, clean(line).strip())


def search_symptoms(text: str) -> list[Match]:
    """Return the rules' symptoms that a text describes or is close to, best first."""
    return _index(True).search(text)
