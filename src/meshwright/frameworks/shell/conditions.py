"""Evaluate tests such as [ "$A" = b ]: true, false or unknown."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import msgspec

from meshwright.frameworks.shell.arithmetic import Undecided, number
from meshwright.frameworks.shell.values import Field

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-lt": operator.lt,
    "-ge": operator.ge,
    "-le": operator.le,
}
EQUAL = {"=", "==", "!="}
UNSUPPORTED = {"=~", "<", ">", "-nt", "-ot", "-ef"}
BINARY = EQUAL | UNSUPPORTED | set(COMPARISONS)
FILE_TESTS = {"-" + letter for letter in "abcdefghkoprstuwxGLNOS"}
MAX_DEPTH = 20
MAX_MATCH_WORK = 1_000_000  # text length times pattern length


class Operand(msgspec.Struct, frozen=True):
    """An operand of a test."""

    field: Field
    pattern: str | None = ""  # quoted characters are backslash-escaped; None: unsupported pattern


class Malformed(Exception):  # noqa: N818  control flow, not a user error: the test stays unknown
    """The test cannot be parsed."""


def known_text(operand: Operand) -> str | None:
    return None if operand.field.unresolved else operand.field.text


def is_empty(field: Field) -> bool | None:
    """Return whether a text is empty; one known character is enough for False."""
    if any(piece.text and not piece.unresolved for piece in field.pieces):
        return False
    return None if field.unresolved else True


def matches(text: str, pattern: str) -> bool | None:
    """Return whether a text matches a glob of * and ?; O(len(text) × len(pattern))."""
    signs = _signs(pattern)
    if signs is None or len(text) * len(signs) > MAX_MATCH_WORK:
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
    """Split a glob into *, ? and backslash-escaped characters; None if it has other operators."""
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
    """Recursive-descent evaluator; precedence from low to high: ||, &&, !."""

    def __init__(self, tokens: Sequence[str | Operand], is_set: Callable[[str], bool]) -> None:
        self.tokens, self.at, self.depth, self.is_set = tokens, 0, 0, is_set

    def sign(self) -> str:
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        return token if isinstance(token, str) else ""

    def evaluate(self) -> bool | None:
        """Return True, False, or None if unknown."""
        if not self.tokens:
            return False
        try:
            result = self.or_expression()
        except Malformed:
            return None
        return result if self.at == len(self.tokens) else None

    def or_expression(self) -> bool | None:
        result = self.and_expression()
        while self.sign() == "||":
            self.at += 1
            result = three_valued_or(result, self.and_expression())
        return result

    def and_expression(self) -> bool | None:
        result = self.not_expression()
        while self.sign() == "&&":
            self.at += 1
            result = three_valued_and(result, self.not_expression())
        return result

    def not_expression(self) -> bool | None:
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
            if self.depth > MAX_DEPTH:
                raise Malformed
            result = self.or_expression()
            if self.sign() != ")":
                raise Malformed
            self.at += 1
            self.depth -= 1
            return result
        left = self.operand()
        if (sign := self.binary_sign()) is not None:
            self.at += 1
            return compare(left, sign, self.operand())
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
        """Return the next token if it is a binary operator followed by an operand."""
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


def three_valued_and(left: bool | None, right: bool | None) -> bool | None:
    """Three-valued and."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def three_valued_or(left: bool | None, right: bool | None) -> bool | None:
    """Three-valued or."""
    if left or right:
        return True
    return None if left is None or right is None else False


def compare(left: Operand, sign: str, right: Operand) -> bool | None:
    first, second = known_text(left), known_text(right)
    if first is None or second is None or sign in UNSUPPORTED:
        return None
    if sign in EQUAL:
        same = None if right.pattern is None else matches(first, right.pattern) if right.pattern else first == second
        return same if sign != "!=" or same is None else not same
    try:
        return COMPARISONS[sign](number(first.strip()), number(second.strip()))
    except Undecided:
        return None
