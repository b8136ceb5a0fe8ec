"""Words of bash: quotes, escapes, and what begins with a dollar sign."""

from __future__ import annotations

import re
from bisect import bisect_right

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.shell.values import NESTED, Unresolved, bad

# Explicit blanks: bash knows only these, Python's \s knows many more.
RUNS = {
    "plain": re.compile(r"[^ \t\n\\'\"$`;&|<>()]+"),
    "regex": re.compile(r"[^ \t\n\\'\"$`]+"),
    "double": re.compile(r'[^"\\$`\n]*\n|[^"\\$`\n]+'),
    "brace": re.compile(r"[^}'\"\\$`\n]*\n|[^}'\"\\$`\n]+"),
    "braced": re.compile(r'[^}"\\$`\n]*\n|[^}"\\$`\n]+'),  # a brace inside double quotes: ' is a letter
    "index": re.compile(r"[^\]'\"\\$`\n]+"),
    "arithmetic": re.compile(r"[^\"\\$`\n]*\n|[^\"\\$`\n]+"),
}
QUOTED = {"double", "braced", "arithmetic"}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SIMPLE_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
BRACED_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
OPERATOR = re.compile(r":-|:=|:\?|:\+|-|=|\?|\+|##|#|%%|%|//|/|\^\^|\^|,,|,|@|:")
INSIDE_PARENS = re.compile(r"[\\'\"`()#]|\$\{|\bcase\b|\besac\b")
INSIDE_DOUBLE = re.compile(r"[\\\"`]|\$\(|\$\{")
INSIDE_BRACE = re.compile(r"[\\'\"`}]|\$\(|\$\{")
CASE_IN = re.compile(r"case[ \t]+[^\n;]{1,200}?[ \t]in\b")
TICKS = re.compile(r"(?:[^`\\]|\\.)*`", re.DOTALL)
LINES = re.compile(r"[^\n]*\n|[^\n]+")
TRAILING = re.compile(r"\\[ \t]+(?=\n)")
ANSI = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|(.))", re.DOTALL)
ANSI_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
ANSI_LETTERS |= {letter: letter for letter in "\\'\"?"}


class Parameter(msgspec.Struct, frozen=True):
    """What stands between the braces of ${…}."""

    name: str
    index: tuple[Part, ...] | None = None
    length: bool = False
    indirect: bool = False
    operator: str = ""
    word: tuple[Part, ...] = ()


class Part(msgspec.Struct, frozen=True):
    """A part of a word: text, a parameter, arithmetic, or a command that would have to run."""

    kind: str  # text, parameter, arithmetic, command
    text: str  # as written, but for text without its quotes
    line: int
    file: str
    quoted: bool = False
    parameter: Parameter | None = None
    inner: tuple[Part, ...] = ()


Word = tuple[Part, ...]


class Source(msgspec.Struct, frozen=True):
    """A text, and for the start of every stretch of it the place where that was written."""

    text: str
    starts: list[int]
    places: list[tuple[int, str]]

    @classmethod
    def of_file(cls, text: str, file: str) -> Source:
        starts = [0, *(found.end() for found in re.finditer("\n", text))]
        return cls(text, starts, [(line, file) for line in range(1, len(starts) + 1)])


class WordReader:
    """Reads words from left to right; grammar.py puts them together to commands."""

    def __init__(self, source: Source) -> None:
        self.source, self.text = source, source.text
        self.pos, self.end, self.nesting = 0, len(source.text), 0
        self.suspicions: list[Unresolved] = []

    def place(self, pos: int | None = None) -> tuple[int, str]:
        return self.source.places[bisect_right(self.source.starts, self.pos if pos is None else pos) - 1]

    def bad(self, reason: str, pos: int | None = None) -> InputError:
        line, file = self.place(pos)
        return bad(file, line, reason)

    def suspect(self, what: str, reason: str, pos: int | None = None) -> None:
        self.suspicions.append(Unresolved(what, *self.place(pos), reason))

    def deeper(self) -> None:
        self.nesting += 1
        if self.nesting > NESTED:
            raise self.bad(f"more than {NESTED} quotes, brackets or blocks inside each other")

    def peek(self, ahead: int = 0) -> str:
        at = self.pos + ahead
        return self.text[at] if at < self.end else ""

    def parts(self, mode: str = "plain") -> Word:
        """The parts of the word that begins here, up to whatever ends it in this mode."""
        self.deeper()
        out: list[Part] = []
        run, quoted = RUNS[mode], mode in QUOTED
        while self.pos < self.end:
            found = run.match(self.text, self.pos, self.end)
            if found:
                out.append(Part("text", found[0], *self.place(), quoted))
                self.pos = found.end()
            elif not self._special(mode, quoted, out):
                break
        self.nesting -= 1
        return tuple(out)

    def _special(self, mode: str, quoted: bool, out: list[Part]) -> bool:
        """Read what is no ordinary letter; false where the word ends."""
        letter = self.peek()
        if letter == "\\":
            self._escape(mode, quoted, out)
        elif letter == "$":
            self._dollar(quoted, out)
        elif letter == "`":
            self._ticks(quoted, out)
        elif letter == '"' and mode == "arithmetic":
            self.pos += 1
        elif letter == '"' and mode != "double":
            self._double(out)
        elif letter == "'" and not quoted:
            self._single(out)
        elif letter == "(" and mode == "plain" and out and self.text[self.pos - 1] in "?*+@!":
            start, self.pos = self.pos, self.closing(self.pos)
            out.append(Part("text", self.text[start : self.pos], *self.place(start)))
        else:
            return False
        return True

    def _escape(self, mode: str, quoted: bool, out: list[Part]) -> None:
        following = self.peek(1)
        if following == "\n":
            self.pos += 2
            return
        if mode == "plain" and (found := TRAILING.match(self.text, self.pos, self.end)):
            reason = "a blank after the backslash ends the continued command; what follows is a new command"
            self.suspect(found[0], reason)
        keeps_backslash = not following or (
            quoted and following not in '$`"\\' and (following, mode) != ("}", "braced")
        )
        text = "\\" + following if keeps_backslash else following
        out.append(Part("text", text, *self.place(), True))
        self.pos += 1 + len(following)

    def _single(self, out: list[Part]) -> None:
        start = self.pos
        close = self.text.find("'", start + 1, self.end)
        if close < 0:
            raise self.bad("the quote ' opened here is never closed", start)
        self._literal(start + 1, close, out)
        self.pos = close + 1

    def _literal(self, start: int, end: int, out: list[Part]) -> None:
        """Text as it stands, one part per line; at least one part, because '' is a word too."""
        for found in LINES.finditer(self.text, start, end):
            out.append(Part("text", found[0], *self.place(found.start()), True))
        if start == end:
            out.append(Part("text", "", *self.place(start), True))

    def _double(self, out: list[Part]) -> None:
        start = self.pos
        self.pos += 1
        inner = self.parts("double")
        if self.peek() != '"':
            raise self.bad('the quote " opened here is never closed', start)
        self.pos += 1
        out.extend(inner or (Part("text", "", *self.place(start), True),))

    def _ticks(self, quoted: bool, out: list[Part]) -> None:
        start = self.pos
        found = TICKS.match(self.text, start + 1, self.end)
        if not found:
            raise self.bad("the quote ` opened here is never closed", start)
        self.pos = found.end()
        out.append(Part("command", self.text[start : self.pos], *self.place(start), quoted))

    def _dollar(self, quoted: bool, out: list[Part]) -> None:
        start, following = self.pos, self.peek(1)
        if following == "(":
            self._dollar_paren(quoted, out)
        elif following == "{":
            out.append(self._braced(quoted))
        elif following == "'" and not quoted:
            self._ansi(out)
        elif following == '"' and not quoted:
            self.pos += 1
            self._double(out)
        elif found := SIMPLE_PARAMETER.match(self.text, start + 1, self.end):
            self.pos = found.end()
            out.append(Part("parameter", "$" + found[0], *self.place(start), quoted, Parameter(found[0])))
        else:
            out.append(Part("text", "$", *self.place(start), quoted))
            self.pos += 1

    def _dollar_paren(self, quoted: bool, out: list[Part]) -> None:
        start = self.pos
        if self.peek(2) == "(":
            inner_end = self.closing(start + 2)
            if inner_end < self.end and self.text[inner_end] == ")":
                inner = self.arithmetic(start + 3, inner_end - 1)
                self.pos = inner_end + 1
                raw = self.text[start : self.pos]
                out.append(Part("arithmetic", raw, *self.place(start), quoted, None, inner))
                return
        self.pos = self.closing(start + 1)
        out.append(Part("command", self.text[start : self.pos], *self.place(start), quoted))

    def arithmetic(self, start: int, end: int) -> Word:
        """The parts of an arithmetic expression that stands between two places."""
        outer, self.pos, self.end = self.end, start, end
        inner = self.parts("arithmetic")
        self.end = outer
        return inner

    def _braced(self, quoted: bool) -> Part:
        start = self.pos
        self.pos += 2
        indirect = self.peek() == "!" and bool(NAME.match(self.peek(1)))
        length = self.peek() == "#" and bool(BRACED_PARAMETER.match(self.peek(1)))
        self.pos += indirect or length
        found = BRACED_PARAMETER.match(self.text, self.pos, self.end)
        if not found:
            raise self.bad("what follows ${ is no variable's name", start)
        self.pos = found.end()
        index = self._index() if self.peek() == "[" else None
        operation = OPERATOR.match(self.text, self.pos, self.end)
        self.pos = operation.end() if operation else self.pos
        word = self.parts("braced" if quoted else "brace")
        if self.peek() != "}":
            raise self.bad("the ${ opened here is never closed", start)
        self.pos += 1
        operator = operation[0] if operation else ("other" if word else "")
        parameter = Parameter(found[0], index, length, indirect, operator, word)
        return Part("parameter", self.text[start : self.pos], *self.place(start), quoted, parameter)

    def _index(self) -> Word:
        start = self.pos
        self.pos += 1
        index = self.parts("index")
        if self.peek() != "]":
            raise self.bad("the [ opened here is never closed", start)
        self.pos += 1
        return index

    def _ansi(self, out: list[Part]) -> None:
        start = self.pos
        found = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL).match(self.text, start + 2, self.end)
        if not found:
            raise self.bad("the quote $' opened here is never closed", start)
        self.pos = found.end()
        out.append(Part("text", ANSI.sub(_ansi_letter, found[0][:-1]), *self.place(start), True))

    def closing(self, opened: int) -> int:
        """Just behind the parenthesis that closes the one opened here; what is inside is not read further."""
        stack: list[list[int | str]] = [["(", 0]]  # what is open, and how many case … esac are in it
        at = opened + 1
        while stack:
            kind = stack[-1][0]
            wanted = INSIDE_PARENS if kind == "(" else INSIDE_DOUBLE if kind == '"' else INSIDE_BRACE
            found = wanted.search(self.text, at, self.end)
            if not found:
                raise self.bad("the parenthesis ( opened here is never closed", opened)
            at = self._step_inside(found, stack)
        return at

    def _step_inside(self, found: re.Match[str], stack: list[list[int | str]]) -> int:
        """Follow one sign inside parentheses; the place behind it."""
        sign, at, top = found[0], found.end(), stack[-1]
        if sign == "\\":
            return at + 1
        if sign == "'":
            return self._behind("'", at)
        if sign == "`":
            ticks = TICKS.match(self.text, at, self.end)
            return ticks.end() if ticks else self.end
        if sign == "#":
            comment = self.text[at - 2] in " \t\n;("
            return self._behind("\n", at) if comment else at
        if sign == "case" and CASE_IN.match(self.text, found.start(), self.end):
            top[1] = int(top[1]) + 1
        elif sign == "esac":
            top[1] = max(int(top[1]) - 1, 0)
        elif sign in ("(", "$("):
            stack.append(["(", 0])
        elif sign == "${":
            stack.append(["{", 0])
        elif sign == '"' and top[0] != '"':
            stack.append(['"', 0])
        elif sign in ('"', "}") or (sign == ")" and not top[1]):
            stack.pop()
        return at

    def _behind(self, letter: str, at: int) -> int:
        found = self.text.find(letter, at, self.end)
        return self.end if found < 0 else found + 1


def _ansi_letter(found: re.Match[str]) -> str:
    hexadecimal = found[1] or found[2] or found[3]
    if hexadecimal or found[4]:
        code = int(hexadecimal, 16) if hexadecimal else int(found[4], 8)
        return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else found[0]
    return ANSI_LETTERS.get(found[5], found[0])
