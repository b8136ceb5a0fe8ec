"""Lexer for bash words: quotes, escapes and $ expansions."""

from __future__ import annotations

import re
from bisect import bisect_right

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.shell.values import MAX_NESTING, Unresolved, script_error

# Blanks are explicit: bash splits at these only, Python's \s matches many more.
RUNS = {
    "plain": re.compile(r"[^ \t\n\\'\"$`;&|<>()]+"),
    "regex": re.compile(r"[^ \t\n\\'\"$`]+"),
    "double": re.compile(r'[^"\\$`\n]*\n|[^"\\$`\n]+'),
    "brace": re.compile(r"[^}'\"\\$`\n]*\n|[^}'\"\\$`\n]+"),
    "braced": re.compile(r'[^}"\\$`\n]*\n|[^}"\\$`\n]+'),  # inside double quotes, ' is an ordinary character
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
BACKTICKS = re.compile(r"(?:[^`\\]|\\.)*`", re.DOTALL)
LINES = re.compile(r"[^\n]*\n|[^\n]+")
TRAILING = re.compile(r"\\[ \t]+(?=\n)")
ANSI = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|(.))", re.DOTALL)
ANSI_CHARS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
ANSI_CHARS |= {char: char for char in "\\'\"?"}


class Parameter(msgspec.Struct, frozen=True):
    """The contents of ${…}."""

    name: str
    index: tuple[Part, ...] | None = None
    length: bool = False
    indirect: bool = False
    operator: str = ""
    word: tuple[Part, ...] = ()


class Part(msgspec.Struct, frozen=True):
    """A part of a word: text, parameter, arithmetic, or command substitution."""

    kind: str  # text, parameter, arithmetic, command
    text: str  # as written; for text, without quotes
    line: int
    file: str
    quoted: bool = False
    parameter: Parameter | None = None
    inner: tuple[Part, ...] = ()


Word = tuple[Part, ...]


class Source(msgspec.Struct, frozen=True):
    """A text with the source location of each of its segments."""

    text: str
    starts: list[int]
    locations: list[tuple[int, str]]

    @classmethod
    def of_file(cls, text: str, file: str) -> Source:
        starts = [0, *(found.end() for found in re.finditer("\n", text))]
        return cls(text, starts, [(line, file) for line in range(1, len(starts) + 1)])


class WordReader:
    """Reads words from left to right; grammar.py builds commands from them."""

    def __init__(self, source: Source) -> None:
        self.source, self.text = source, source.text
        self.pos, self.end, self.nesting = 0, len(source.text), 0
        self.warnings: list[Unresolved] = []

    def location(self, pos: int | None = None) -> tuple[int, str]:
        return self.source.locations[bisect_right(self.source.starts, self.pos if pos is None else pos) - 1]

    def error(self, reason: str, pos: int | None = None) -> InputError:
        line, file = self.location(pos)
        return script_error(file, line, reason)

    def warn(self, what: str, reason: str, pos: int | None = None) -> None:
        self.warnings.append(Unresolved(what, *self.location(pos), reason))

    def enter(self) -> None:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise self.error(f"more than {MAX_NESTING} nested quotes, brackets or blocks")

    def peek(self, ahead: int = 0) -> str:
        at = self.pos + ahead
        return self.text[at] if at < self.end else ""

    def parts(self, mode: str = "plain") -> Word:
        """Return the parts of the word at the current position; `mode` decides where it ends."""
        self.enter()
        out: list[Part] = []
        run, quoted = RUNS[mode], mode in QUOTED
        while self.pos < self.end:
            found = run.match(self.text, self.pos, self.end)
            if found:
                out.append(Part("text", found[0], *self.location(), quoted))
                self.pos = found.end()
            elif not self._special(mode, quoted, out):
                break
        self.nesting -= 1
        return tuple(out)

    def _special(self, mode: str, quoted: bool, out: list[Part]) -> bool:
        """Read a special character; return False at the end of the word."""
        char = self.peek()
        if char == "\\":
            self._escape(mode, quoted, out)
        elif char == "$":
            self._dollar(quoted, out)
        elif char == "`":
            self._backticks(quoted, out)
        elif char == '"' and mode == "arithmetic":
            self.pos += 1
        elif char == '"' and mode != "double":
            self._double(out)
        elif char == "'" and not quoted:
            self._single(out)
        elif char == "(" and mode == "plain" and out and self.text[self.pos - 1] in "?*+@!":
            start, self.pos = self.pos, self.find_closing(self.pos)
            out.append(Part("text", self.text[start : self.pos], *self.location(start)))
        else:
            return False
        return True

    def ends_script(self) -> bool:
        """Return whether the character here is the last of the script: bash drops a backslash there."""
        return self.pos + 1 == len(self.text)

    def _escape(self, mode: str, quoted: bool, out: list[Part]) -> None:
        following = self.peek(1)
        if following == "\n" or self.ends_script():
            self.pos += 1 + len(following)
            return
        if mode == "plain" and (found := TRAILING.match(self.text, self.pos, self.end)):
            reason = "whitespace after the backslash ends the command; the next line is a new command"
            self.warn(found[0], reason)
        keeps_backslash = not following or (
            quoted and following not in '$`"\\' and (following, mode) != ("}", "braced")
        )
        text = "\\" + following if keeps_backslash else following
        out.append(Part("text", text, *self.location(), True))
        self.pos += 1 + len(following)

    def _single(self, out: list[Part]) -> None:
        start = self.pos
        close = self.text.find("'", start + 1, self.end)
        if close < 0:
            raise self.error("the quote ' opened here is never closed", start)
        self._literal(start + 1, close, out)
        self.pos = close + 1

    def _literal(self, start: int, end: int, out: list[Part]) -> None:
        """Append literal text, one part per line; at least one part, because '' is a word too."""
        for found in LINES.finditer(self.text, start, end):
            out.append(Part("text", found[0], *self.location(found.start()), True))
        if start == end:
            out.append(Part("text", "", *self.location(start), True))

    def _double(self, out: list[Part]) -> None:
        start = self.pos
        self.pos += 1
        inner = self.parts("double")
        if self.peek() != '"':
            raise self.error('the quote " opened here is never closed', start)
        self.pos += 1
        out.extend(inner or (Part("text", "", *self.location(start), True),))

    def _backticks(self, quoted: bool, out: list[Part]) -> None:
        start = self.pos
        found = BACKTICKS.match(self.text, start + 1, self.end)
        if not found:
            raise self.error("the quote ` opened here is never closed", start)
        self.pos = found.end()
        out.append(Part("command", self.text[start : self.pos], *self.location(start), quoted))

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
            out.append(Part("parameter", "$" + found[0], *self.location(start), quoted, Parameter(found[0])))
        else:
            out.append(Part("text", "$", *self.location(start), quoted))
            self.pos += 1

    def _dollar_paren(self, quoted: bool, out: list[Part]) -> None:
        start = self.pos
        if self.peek(2) == "(":
            inner_end = self.find_closing(start + 2)
            if inner_end < self.end and self.text[inner_end] == ")":
                inner = self.arithmetic(start + 3, inner_end - 1)
                self.pos = inner_end + 1
                raw = self.text[start : self.pos]
                out.append(Part("arithmetic", raw, *self.location(start), quoted, None, inner))
                return
        self.pos = self.find_closing(start + 1)
        out.append(Part("command", self.text[start : self.pos], *self.location(start), quoted))

    def arithmetic(self, start: int, end: int) -> Word:
        """Return the parts of the arithmetic expression between two positions."""
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
            raise self.error("${ is not followed by a variable name", start)
        self.pos = found.end()
        index = self._index() if self.peek() == "[" else None
        operation = OPERATOR.match(self.text, self.pos, self.end)
        self.pos = operation.end() if operation else self.pos
        word = self.parts("braced" if quoted else "brace")
        if self.peek() != "}":
            raise self.error("the ${ opened here is never closed", start)
        self.pos += 1
        operator = operation[0] if operation else ("other" if word else "")
        parameter = Parameter(found[0], index, length, indirect, operator, word)
        return Part("parameter", self.text[start : self.pos], *self.location(start), quoted, parameter)

    def _index(self) -> Word:
        start = self.pos
        self.pos += 1
        index = self.parts("index")
        if self.peek() != "]":
            raise self.error("the [ opened here is never closed", start)
        self.pos += 1
        return index

    def _ansi(self, out: list[Part]) -> None:
        start = self.pos
        found = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL).match(self.text, start + 2, self.end)
        if not found:
            raise self.error("the quote $' opened here is never closed", start)
        self.pos = found.end()
        out.append(Part("text", ANSI.sub(_ansi_char, found[0][:-1]), *self.location(start), True))

    def find_closing(self, opened: int) -> int:
        """Return the position after the parenthesis that closes the one at `opened`."""
        stack: list[list[int | str]] = [["(", 0]]  # open bracket, and the number of open case … esac in it
        at = opened + 1
        while stack:
            bracket = stack[-1][0]
            pattern = INSIDE_PARENS if bracket == "(" else INSIDE_DOUBLE if bracket == '"' else INSIDE_BRACE
            found = pattern.search(self.text, at, self.end)
            if not found:
                raise self.error("the parenthesis ( opened here is never closed", opened)
            at = self._step(found, stack)
        return at

    def _step(self, found: re.Match[str], stack: list[list[int | str]]) -> int:
        """Process one special character inside parentheses; return the position after it."""
        sign, at, top = found[0], found.end(), stack[-1]
        if sign == "\\":
            return at + 1
        if sign == "'":
            return self._after("'", at)
        if sign == "`":
            ticks = BACKTICKS.match(self.text, at, self.end)
            return ticks.end() if ticks else self.end
        if sign == "#":
            comment = self.text[at - 2] in " \t\n;("
            return self._after("\n", at) if comment else at
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

    def _after(self, char: str, at: int) -> int:
        found = self.text.find(char, at, self.end)
        return self.end if found < 0 else found + 1


def _ansi_char(found: re.Match[str]) -> str:
    hexadecimal = found[1] or found[2] or found[3]
    if hexadecimal or found[4]:
        code = int(hexadecimal, 16) if hexadecimal else int(found[4], 8)
        return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else found[0]
    return ANSI_CHARS.get(found[5], found[0])
