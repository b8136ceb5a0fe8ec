"""Whether a test such as [ "$A" = b ] holds: yes, no, or not to be known."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import msgspec

from meshwright.frameworks.shell.arithmetic import Undecided, number
from meshwright.frameworks.shell.values import Field

COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-lt": operator.lt,
    "-ge": operator.ge,
    "-le": operator.le,
}
EQUAL = {"=", "==", "!="}
UNKNOWABLE = {"=~", "<", ">", "-nt", "-ot", "-ef"}
BINARY = EQUAL | UNKNOWABLE | set(COMPARED)
FILE_TESTS = {"-" + letter for letter in "abcdefghkoprstuwxGLNOS"}
DEEPEST = 20
LARGEST_MATCH = 1_000_000  # letters of the text times letters of the pattern


class Operand(msgspec.Struct, frozen=True):
    """An operand of a test."""

    field: Field
    pattern: str | None = ""  # with quoted signs escaped by a backslash; none: a kind of pattern that is not read


class Malformed(Exception):  # noqa: N818  not a user's error: the test stays undecided
    """The test is not one that is understood."""


def known_text(operand: Operand) -> str | None:
    return None if operand.field.why else operand.field.text


def is_empty(field: Field) -> bool | None:
    """Whether a text is empty; one known letter is enough to say no."""
    if any(piece.text and not piece.why for piece in field.pieces):
        return False
    return None if field.why else True


def matches(text: str, pattern: str) -> bool | None:
    """Whether a text matches a pattern of *, ? and letters; linear in the text times the pattern."""
    signs = _signs(pattern)
    if signs is None or len(text) * len(signs) > LARGEST_MATCH:
        return None
    at = sign = 0
    star, resume = -1, 0
    while at < len(text):
        if sign < len(signs) and signs[sign] == "*":
            star, resume = sign, at
            sign += 1
        elif sign < len(signs) and signs[sign] in ("?", "\\" + text[at]):
            at, sign = at + 1, sign + 1
        elif star >= 0:
            resume += 1
            at, sign = resume, star + 1
        else:
            return False
    return all(rest == "*" for rest in signs[sign:])


def _signs(pattern: str) -> list[str] | None:
    """A pattern as * and ? and letters behind a backslash; none where it has other signs."""
    signs: list[str] = []
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\" and at + 1 < len(pattern):
            at += 1
            signs.append("\\" + pattern[at])
        elif letter in "*?":
            signs.append(letter)
        elif letter in "[(":
            return None
        else:
            signs.append("\\" + letter)
        at += 1
    return signs


class Test:
    """Reads a test from left to right: || is looser than &&, which is looser than !."""

    def __init__(self, tokens: Sequence[str | Operand], is_set: Callable[[str], bool]) -> None:
        self.tokens, self.at, self.depth, self.is_set = tokens, 0, 0, is_set

    def sign(self) -> str:
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        return token if isinstance(token, str) else ""

    def verdict(self) -> bool | None:
        """Yes, no, or none."""
        if not self.tokens:
            return False
        try:
            result = self.either()
        except Malformed:
            return None
        return result if self.at == len(self.tokens) else None

    def either(self) -> bool | None:
        result = self.both()
        while self.sign() == "||":
            self.at += 1
            result = either(result, self.both())
        return result

    def both(self) -> bool | None:
        result = self.negated()
        while self.sign() == "&&":
            self.at += 1
            result = both(result, self.negated())
        return result

    def negated(self) -> bool | None:
        flips = 0
        while self.sign() == "!":
            self.at += 1
            flips += 1
        result = self.primary()
        return not result if flips % 2 and result is not None else result

    def primary(self) -> bool | None:
        if self.sign() == "(":
            self.at += 1
            self.depth += 1
            if self.depth > DEEPEST:
                raise Malformed
            result = self.either()
            if self.sign() != ")":
                raise Malformed
            self.at += 1
            self.depth -= 1
            return result
        left = self.operand()
        if (sign := self.binary_sign()) is not None:
            self.at += 1
            return compared(left, sign, self.operand())
        unary = known_text(left) or ""
        follows = self.at < len(self.tokens) and isinstance(self.tokens[self.at], Operand)
        if (follows and unary in ("-z", "-n", "-v")) or (unary in FILE_TESTS and follows):
            return self.unary(unary, self.operand())
        empty = is_empty(left.field)
        return None if empty is None else not empty

    def operand(self) -> Operand:
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        if isinstance(token, str):
            raise Malformed
        self.at += 1
        return token

    def binary_sign(self) -> str | None:
        """The comparison that follows, when an operand follows it in turn."""
        if self.at + 1 >= len(self.tokens) or not isinstance(self.tokens[self.at + 1], Operand):
            return None
        token = self.tokens[self.at]
        text = token if isinstance(token, str) else known_text(token)
        return text if text in BINARY else None

    def unary(self, sign: str, operand: Operand) -> bool | None:
        if sign == "-v":
            return True if self.is_set(operand.field.text) else None
        if sign in FILE_TESTS:
            return None
        empty = is_empty(operand.field)
        return empty if sign == "-z" or empty is None else not empty


def both(left: bool | None, right: bool | None) -> bool | None:
    """And, where a no is enough whatever the other is."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def either(left: bool | None, right: bool | None) -> bool | None:
    """Or, where a yes is enough whatever the other is."""
    if left or right:
        return True
    return None if left is None or right is None else False


def compared(left: Operand, sign: str, right: Operand) -> bool | None:
    first, second = known_text(left), known_text(right)
    if first is None or second is None or sign in UNKNOWABLE:
        return None
    if sign in EQUAL:
        same = None if right.pattern is None else matches(first, right.pattern) if right.pattern else first == second
        return same if sign != "!=" or same is None else not same
    try:
        return COMPARED[sign](number(first.strip()), number(second.strip()))
    except Undecided:
        return None
