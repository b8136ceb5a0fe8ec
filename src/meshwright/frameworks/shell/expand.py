"""Word expansion. Text that only execution could produce stays as written and is recorded as unresolved."""

from __future__ import annotations

import re
from collections.abc import Callable

from meshwright.frameworks.shell.arithmetic import NotAnInteger, Undecided, evaluate, number
from meshwright.frameworks.shell.values import MAX_NESTING, Field, Piece, reasons, script_error
from meshwright.frameworks.shell.variables import ShellState, Value, array_value, text_value
from meshwright.frameworks.shell.words import Parameter, Part, Word

TOKEN_OR_BLANK = re.compile(r"[ \t\n]+|[^ \t\n]+")
BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
INTEGER = re.compile(r" *-?[0-9]{1,6}")
GLOB = set("*?[(\\")
BLANKS_ONLY = r"tr (?:-s )?['\"](?:\\n| )['\"](?: ['\"] ['\"])?|sed ['\"]s/ {1,2}\\?\+/ /g['\"]|xargs"
PRINTED = re.compile(rf"\$\(\s*echo \"?\$\{{?([A-Za-z_]\w*)\}}?\"?(?:\s*\|\s*(?:{BLANKS_ONLY}))*\s*\)")
"""Prints a variable; commands behind it change its blanks and line ends only."""

Bit = tuple[Piece, bool]  # and whether it is split into words at blanks
Segments = list[list[Bit]]  # one per word; several only from "${A[@]}" and "$@"


class Expander:
    """Expands variables in words."""

    def __init__(self, state: ShellState) -> None:
        self.state = state
        self.depth = 0

    # Words.

    def fields(self, word: Word) -> list[Field]:
        """Expand a word into fields."""
        if len(word) == 1 and word[0].kind == "text":  # fast path: most words
            part = word[0]
            reason = "" if part.quoted else self._braces(part)
            return [Field((Piece(part.text, part.line, part.file, reason),), part.line, part.file)]
        builder = _Builder()
        for part in word:
            if part.kind == "text":
                reason = "" if part.quoted else self._braces(part)
                builder.add(Piece(part.text, part.line, part.file, reason))
                continue
            segments = self.segments(part)
            for index, segment in enumerate(segments):
                if index:
                    builder.flush()
                if part.quoted:
                    builder.begin(part)
                for piece, splits in segment:
                    builder.add_split(piece) if splits and not piece.unresolved else builder.add(piece)
        builder.flush()
        if builder.done:
            self.state.check_size(builder.done, builder.done[0].line, builder.done[0].file)
        return builder.done

    def pieces(self, word: Word) -> tuple[Piece, ...]:
        """Expand a word without word splitting, as after NAME= and inside [[ ]]."""
        out: list[Piece] = []
        for part in word:
            if part.kind == "text":
                if part.text:
                    out.append(Piece(part.text, part.line, part.file))
            else:
                out.extend(piece for piece, _ in _flat(self.segments(part)))
        if len(out) > 1:
            self.state.check_size([Field(tuple(out), *out[0][1:3])], out[0].line, out[0].file)
        return tuple(out)

    def text(self, word: Word) -> Field:
        location = (word[0].line, word[0].file) if word else (0, "")
        return Field(self.pieces(word), *location)

    def _braces(self, part: Part) -> str:
        if "{" in part.text and BRACES.search(part.text):
            reason = "brace expansion is not supported"
            self.state.note(part.text, part.line, part.file, reason)
            return reason
        return ""

    # Parts.

    def segments(self, part: Part) -> Segments:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise script_error(part.file, part.line, f"more than {MAX_NESTING} nested expansions")
        if part.kind == "parameter":
            segments = self._parameter(part)
        elif part.kind == "arithmetic":
            segments = [self._arithmetic(part)]
        else:
            segments = self._printed(part) or [self._unknown(part, "command substitution is not executed")]
        self.depth -= 1
        return segments

    def _printed(self, part: Part) -> Segments | None:
        """Return what `$(echo "$NAME" | tr '\\n' ' ')` prints: a variable with its blanks changed; None for others."""
        found = PRINTED.fullmatch(part.text)
        if not found or self.state.look_up(found[1]) is None:
            return None
        named = Part("parameter", f"${found[1]}", part.line, part.file, part.quoted, Parameter(found[1]))
        return [
            [(piece._replace(text=piece.text.replace("\n", " ")), splits) for piece, splits in segment]
            for segment in self._parameter(named)
        ]

    def _unknown(self, part: Part, reason: str, rejected: tuple[str, str] = ("", "")) -> list[Bit]:
        reason = self.state.note(part.text, part.line, part.file, reason, rejected)
        return [(Piece(part.text, part.line, part.file, reason), False)]

    def _arithmetic(self, part: Part) -> list[Bit]:
        try:
            value = self.arithmetic(part.inner)
        except NotAnInteger as error:
            return self._unknown(part, f"arithmetic not evaluated: {error}", (error.name, error.literal))
        except Undecided as error:
            return self._unknown(part, f"arithmetic not evaluated: {error}")
        return [(Piece(str(value), part.line, part.file), False)]

    def arithmetic(self, inner: Word) -> int:
        """Evaluate (( … )); raise Undecided if the value is unknown."""
        pieces = self.pieces(inner)
        if reason := reasons(pieces):
            raise Undecided(reason)
        return self._evaluate("".join(piece.text for piece in pieces), 0)

    def _evaluate(self, text: str, depth: int) -> int:
        def look_up(name: str) -> int:
            value = self.state.look_up(name)
            if value is None:
                raise Undecided(f"{name} is not set in the script")
            field = value.fields.get("0")
            if field is None or field.unresolved:
                raise Undecided(field.unresolved if field else f"{name} is not a number")
            if depth >= 2:
                raise Undecided(f"{name} refers to too many other variables")
            self.state.spend(4 * len(field.text), field.line, field.file)
            try:
                is_number = re.fullmatch(r"[-+]?[0-9][0-9a-zA-Z]*", field.text)
                return number(field.text) if is_number else self._evaluate(field.text, depth + 1)
            except NotAnInteger as error:
                error.name = error.name or (name if error.literal == field.text else "")
                raise

        return evaluate(text, look_up)

    # Parameters.

    def _parameter(self, part: Part) -> Segments:
        parameter = part.parameter
        if parameter is None or parameter.name in "?$!-":
            return [self._unknown(part, "known only at run time")]
        if parameter.indirect:
            parameter = self._dereference(parameter)
            if parameter is None:
                return [self._unknown(part, "the variable it refers to is unknown")]
        if parameter.name == "#" or (parameter.name.isdigit() and parameter.name != "0") or parameter.name in "@*":
            value = self._argument(parameter.name, part)
        else:
            value = self.state.look_up(parameter.name)
        if parameter.length:
            return [self._length(part, parameter, value)]
        if value is not None and (parameter.index is not None or parameter.name in "@*"):
            value, is_all = self._indexed(part, parameter, value)
            if is_all and value is not None and (value.fields or not parameter.operator):
                return self._all_elements(part, parameter, value)
        return [self._apply_operator(part, parameter, value)]

    def _dereference(self, parameter: Parameter) -> Parameter | None:
        value = self.state.look_up(parameter.name)
        field = value.fields.get("0") if value else None
        if parameter.index is not None or field is None or field.unresolved:
            return None
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", field.text):
            return None
        return Parameter(field.text, None, False, False, parameter.operator, parameter.word)

    def _argument(self, name: str, part: Part) -> Value | None:
        arguments = self.state.arguments
        if arguments is None:
            return None
        if name == "#":
            return text_value((Piece(str(len(arguments)), part.line, part.file),), part.line, part.file)
        if name in "@*":
            return array_value(arguments, part.line, part.file)
        index = int(name[:6])
        return text_value(arguments[index - 1].pieces, part.line, part.file) if index <= len(arguments) else None

    def _indexed(self, part: Part, parameter: Parameter, value: Value) -> tuple[Value | None, bool]:
        """Return what an index selects, and whether that is every element."""
        if parameter.index is None:
            return value, True
        field = self.text(parameter.index)
        key = field.text
        if key in ("@", "*"):
            return value, True
        if field.unresolved:
            return text_value(
                (Piece(f"{parameter.name}[{key}]", field.line, field.file, field.unresolved),), *field[1:]
            ), False
        if value.kind != "map":
            try:
                index = self._evaluate(key, 0)
                key = str(index + len(value.fields) if index < 0 else index)
            except Undecided:
                return None, False
        found = value.fields.get(key)
        reason = "; ".join(dict.fromkeys(one.unresolved for one in value.fields.values() if one.unresolved))
        if found is None and reason:  # an unknown element may expand to several
            return text_value((Piece(part.text, part.line, part.file, reason),), part.line, part.file), False
        return (text_value(found.pieces, found.line, found.file) if found else None), False

    def _all_elements(self, part: Part, parameter: Parameter, value: Value) -> Segments:
        fields = list(value.fields.values())
        self.state.spend(len(fields), part.line, part.file)
        if parameter.operator in (":+", "+"):
            return [self._word_bits(parameter.word, part.quoted)] if fields else []
        if parameter.operator and parameter.operator not in (":-", "-", ":=", "=", ":?", "?"):
            return [self._unknown(part, "this array expansion is not supported")]
        segments: Segments = [[(piece, not part.quoted) for piece in field.pieces] for field in fields]
        star = parameter.name == "*" or (parameter.index and parameter.index[0].text == "*")
        return [[(piece, False) for piece, _ in _flat(segments)]] if part.quoted and star else segments

    def _length(self, part: Part, parameter: Parameter, value: Value | None) -> list[Bit]:
        if value is not None:
            is_all = True
            if parameter.index is not None:
                value, is_all = self._indexed(part, parameter, value)
            else:
                is_all = parameter.name in "@*"
        if value is None or any(field.unresolved for field in value.fields.values()):
            return self._unknown(part, f"{parameter.name} is unknown")
        count = len(value.fields) if is_all else len(value.fields["0"].text) if "0" in value.fields else 0
        return [(Piece(str(count), part.line, part.file), False)]

    def _apply_operator(self, part: Part, parameter: Parameter, value: Value | None) -> list[Bit]:
        operator = parameter.operator
        if value is None:
            return self._unset(part, parameter)
        pieces = value.fields["0"].pieces if "0" in value.fields else ()
        empty = not any(piece.text for piece in pieces)
        if operator in ("", "-", "=", "?") or (operator in (":-", ":=", ":?") and not empty):
            return [(piece, not part.quoted) for piece in pieces]
        if operator in (":-", ":="):
            return self._default(part, parameter)
        if operator in ("+", ":+"):
            return [] if empty and operator == ":+" else self._alternative(part, parameter, pieces)
        if operator == ":?":
            return self._unknown(part, f"{parameter.name} is empty: the script exits here")
        return self._transform(part, parameter, pieces)

    def _unset(self, part: Part, parameter: Parameter) -> list[Bit]:
        name = parameter.name
        if parameter.operator in (":-", "-", ":=", "=") and not self.state.is_set_by_slurm(name):
            self.state.defaulted += 1
            return self._default(part, parameter)
        if parameter.operator in (":+", "+") and not self.state.is_set_by_slurm(name):
            self.state.defaulted += 1
            return []
        if name.isdigit() or name in "@*#":
            reason = "the arguments of the script are unknown"
        elif name.startswith("SLURM_"):
            reason = f"SLURM sets {name} when the job runs"
        else:
            reason = f"{name} is not set in the script"
        return self._unknown(part, reason)

    def _default(self, part: Part, parameter: Parameter) -> list[Bit]:
        bits = self._word_bits(parameter.word, part.quoted)
        if parameter.operator in (":=", "=") and not parameter.name.isdigit():
            self.state.store(parameter.name, text_value(tuple(piece for piece, _ in bits), part.line, part.file))
        return bits

    def _alternative(self, part: Part, parameter: Parameter, pieces: tuple[Piece, ...]) -> list[Bit]:
        if pieces and all(piece.unresolved for piece in pieces) and parameter.operator == ":+":
            return self._unknown(part, reasons(pieces))
        return self._word_bits(parameter.word, part.quoted)

    def _word_bits(self, word: Word, quoted: bool) -> list[Bit]:
        """Expand the word after an operator such as :-; it inherits the outer quoting."""
        bits: list[Bit] = []
        for part in word:
            if part.kind == "text":
                if part.text:
                    bits.append((Piece(part.text, part.line, part.file), not quoted and not part.quoted))
            else:
                bits.extend((piece, splits and not quoted) for piece, splits in _flat(self.segments(part)))
        self.state.spend(len(bits), word[0].line if word else 0, word[0].file if word else self.state.file)
        return bits

    def _transform(self, part: Part, parameter: Parameter, pieces: tuple[Piece, ...]) -> list[Bit]:
        """Apply ${NAME%pattern} and similar operators, for simple patterns."""
        if reason := reasons(pieces):
            return [(Piece(part.text, part.line, part.file, reason), False)]
        word = self.pieces(parameter.word)
        transform = TRANSFORMS.get(parameter.operator)
        text, argument = "".join(p.text for p in pieces), "".join(p.text for p in word)
        changed = transform(text, argument) if transform and not reasons(word) else None
        if changed is None:
            return self._unknown(part, "this parameter expansion is not supported")
        location = pieces[0][1:3] if pieces else (part.line, part.file)
        return [(Piece(changed, *location), not part.quoted)] if changed else []


class _Builder:
    """Builds fields from pieces."""

    def __init__(self) -> None:
        self.done: list[Field] = []
        self.current: list[Piece] | None = None
        self.location = (0, "")

    def begin(self, part: Part) -> None:
        if self.current is None:
            self.current, self.location = [], (part.line, part.file)

    def add(self, piece: Piece) -> None:
        if self.current is None:
            self.current, self.location = [], (piece.line, piece.file)
        if piece.text:
            self.current.append(piece)

    def add_split(self, piece: Piece) -> None:
        for token in TOKEN_OR_BLANK.findall(piece.text):
            if token[0] in " \t\n":
                self.flush()
            else:
                self.add(Piece(token, piece.line, piece.file))

    def flush(self) -> None:
        if self.current is not None:
            self.done.append(Field(tuple(self.current), *self.location))
            self.current = None


def _flat(segments: Segments) -> list[Bit]:
    """Join segments with blanks."""
    if len(segments) <= 1:
        return segments[0] if segments else []
    out: list[Bit] = []
    for index, segment in enumerate(segments):
        if index and out:
            last = out[-1][0]
            out.append((Piece(" ", last.line, last.file), True))
        out.extend(segment)
    return out


def _is_literal(pattern: str) -> bool:
    return not GLOB.intersection(pattern)


def _without_prefix(text: str, pattern: str, longest: bool) -> str | None:
    if _is_literal(pattern):
        return text.removeprefix(pattern)
    if pattern[0] == "*" and len(pattern) > 1 and _is_literal(pattern[1:]):
        at = text.rfind(pattern[1:]) if longest else text.find(pattern[1:])
        return text if at < 0 else text[at + len(pattern) - 1 :]
    return None


def _without_suffix(text: str, pattern: str, longest: bool) -> str | None:
    if _is_literal(pattern):
        return text.removesuffix(pattern)
    if pattern[-1] == "*" and len(pattern) > 1 and _is_literal(pattern[:-1]):
        at = text.find(pattern[:-1]) if longest else text.rfind(pattern[:-1])
        return text if at < 0 else text[:at]
    return None


def _replace(text: str, argument: str, count: int) -> str | None:
    pattern, _, new = argument.partition("/")
    if not pattern or not _is_literal(pattern) or pattern[0] in "#%" or "&" in new:
        return None
    return text.replace(pattern, new, count) if len(text) * max(len(new), 1) < 1_000_000 else None


def _substring(text: str, argument: str) -> str | None:
    start, colon, length = argument.partition(":")
    if not INTEGER.fullmatch(start) or (colon and not INTEGER.fullmatch(length)):
        return None
    begin = int(start) + (len(text) if int(start) < 0 else 0)
    if begin < 0:
        return None
    end = len(text) if not colon else int(length) + (begin if int(length) >= 0 else len(text))
    return text[begin:end]


def _cased(change: Callable[[str], str], first: bool) -> Callable[[str, str], str | None]:
    def cased(text: str, pattern: str) -> str | None:
        if pattern:
            return None
        return change(text[:1]) + text[1:] if first else change(text)

    return cased


TRANSFORMS: dict[str, Callable[[str, str], str | None]] = {
    "#": lambda text, pattern: _without_prefix(text, pattern, longest=False),
    "##": lambda text, pattern: _without_prefix(text, pattern, longest=True),
    "%": lambda text, pattern: _without_suffix(text, pattern, longest=False),
    "%%": lambda text, pattern: _without_suffix(text, pattern, longest=True),
    "/": lambda text, argument: _replace(text, argument, 1),
    "//": lambda text, argument: _replace(text, argument, -1),
    ":": _substring,
    "^": _cased(str.upper, first=True),
    "^^": _cased(str.upper, first=False),
    ",": _cased(str.lower, first=True),
    ",,": _cased(str.lower, first=False),
}
