"""Integer arithmetic with bash semantics."""

from __future__ import annotations

import re
from collections.abc import Callable

TOKEN = re.compile(
    r"[ \t\n]*(?:(0[xX][0-9a-fA-F]+|[0-9]+)(?![0-9A-Za-z_#])|([A-Za-z_][A-Za-z0-9_]*)|"
    r"(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&|^!~?:()]))"
)
NUMBER = re.compile(r"(?<![\w#$.])(?:[0-9]|\.[0-9])[\w.]*(?![\w.#])")  # 16#ff, of base 16, is not matched
INTEGER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]{1,16}|0[0-7]{0,22}|[1-9][0-9]{0,18})")
MAX_CHARS = 1000  # characters
MAX_DEPTH = 12
INT64_LIMIT = 2**63
# Operator precedence, lowest first, as in C.
BINARY = [{"||"}, {"&&"}, {"|"}, {"^"}, {"&"}, {"==", "!="}, {"<", "<=", ">", ">="}, {"<<", ">>"}]
BINARY += [{"+", "-"}, {"*", "/", "%"}]


class Undecided(Exception):  # noqa: N818  control flow, not a user error
    """An expression has no known value; the message says why."""


class NotAnInteger(Undecided):
    """Bash ends the script at this number, which may be the value of a variable."""

    def __init__(self, literal: str) -> None:
        super().__init__(f"{literal[:20]} is not an integer")
        self.literal, self.name = literal, ""


def divide(left: int, right: int) -> int:
    """Divide and truncate toward zero, as C does."""
    if right == 0:
        raise Undecided("it divides by zero")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def shift(left: int, right: int) -> int:
    if not -63 < right < 63:
        raise Undecided("the shift count is out of range")
    return left << right if right >= 0 else left >> -right


def power(left: int, right: int) -> int:
    if not 0 <= right < 64:
        raise Undecided("the exponent is out of range")
    return int(left**right)


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "||": lambda left, right: int(bool(left or right)),
    "&&": lambda left, right: int(bool(left and right)),
    "|": lambda left, right: left | right,
    "^": lambda left, right: left ^ right,
    "&": lambda left, right: left & right,
    "==": lambda left, right: int(left == right),
    "!=": lambda left, right: int(left != right),
    "<": lambda left, right: int(left < right),
    "<=": lambda left, right: int(left <= right),
    ">": lambda left, right: int(left > right),
    ">=": lambda left, right: int(left >= right),
    "<<": shift,
    ">>": lambda left, right: shift(left, -right),
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": divide,
    "%": lambda left, right: left - right * divide(left, right),
}
UNARY: dict[str, Callable[[int], int]] = {
    "-": lambda value: -value,
    "+": lambda value: value,
    "!": lambda value: int(not value),
    "~": lambda value: ~value,
}


class _Evaluator:
    def __init__(self, text: str, look_up: Callable[[str], int]) -> None:
        self.tokens, self.at, self.depth, self.look_up = _tokens(text), 0, 0, look_up

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def parse(self) -> int:
        value = self.ternary()
        if self.at < len(self.tokens):
            raise Undecided(f"{self.peek()} is unexpected")
        return value

    def ternary(self) -> int:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Undecided("it is nested too deeply")
        value = self.binary(0)
        if self.peek() == "?":
            self.take()
            yes = self.ternary()
            if self.take() != ":":
                raise Undecided("? has no :")
            no = self.ternary()
            value = yes if value else no
        self.depth -= 1
        return value

    def binary(self, level: int) -> int:
        """Precedence climbing: everything that binds at least as tightly as this level."""
        left = self.unary()
        while (precedence := _precedence(self.peek())) >= level:
            sign = self.take()
            left = _bounded(OPERATIONS[sign](left, self.binary(precedence + 1)))
        return left

    def unary(self) -> int:
        signs = []
        while self.peek() in UNARY:
            signs.append(self.take())
        value = self.primary()
        if self.peek() == "**":  # right-associative; 2**3**2 is rare enough to stay unresolved
            self.take()
            value = _bounded(power(value, self.primary()))
        for sign in reversed(signs):
            value = UNARY[sign](value)
        return value

    def primary(self) -> int:
        token = self.take()
        if token == "(":
            value = self.ternary()
            if self.take() != ")":
                raise Undecided("a parenthesis is not closed")
            return value
        if token[:1].isdigit():
            return _bounded(number(token))
        if token[:1].isalpha() or token[:1] == "_":
            return self.look_up(token)
        raise Undecided(f"{token or 'end of expression'} is unexpected")


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_CHARS:
        raise Undecided(f"it is longer than {MAX_CHARS} characters")
    tokens, at, end = [], 0, len(text.rstrip(" \t\n"))
    while at < end:
        found = TOKEN.match(text, at)
        if not found:
            if literal := next((one[0] for one in NUMBER.finditer(text) if not INTEGER.fullmatch(one[0])), ""):
                raise NotAnInteger(literal)
            raise Undecided(f"{text[at:].strip()[:20]} is unexpected")
        tokens.append(found[1] or found[2] or found[3])
        at = found.end()
    return tokens


def _precedence(sign: str) -> int:
    return next((level for level, signs in enumerate(BINARY) if sign in signs), -1)


def _bounded(value: int) -> int:
    if not -INT64_LIMIT <= value < INT64_LIMIT:
        raise Undecided("it does not fit in 64 bits")
    return value


def number(text: str) -> int:
    """Parse an integer as bash does: 12, 0x1f, or octal 017."""
    if not INTEGER.fullmatch(text):
        is_long = re.fullmatch(r"[-+]?[1-9][0-9]*", text)
        raise Undecided(f"{text[:20]} has too many digits") if is_long else NotAnInteger(text)
    digits = text.lstrip("+-")
    base = 16 if digits[:2].lower() == "0x" else 8 if len(digits) > 1 and digits[0] == "0" else 10
    return -int(digits, base) if text[0] == "-" else int(digits, base)


def evaluate(text: str, look_up: Callable[[str], int]) -> int:
    """Return the value of an arithmetic expression; raise Undecided if it is not known."""
    evaluator = _Evaluator(text, look_up)
    return evaluator.parse() if evaluator.tokens else 0
