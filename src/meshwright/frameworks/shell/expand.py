"""Words with their variables filled in; what would have to run stays as written and is said."""

from __future__ import annotations

import re
from collections.abc import Callable

from meshwright.frameworks.shell.arithmetic import Undecided, evaluate, number
from meshwright.frameworks.shell.values import NESTED, Field, Piece, bad, reasons
from meshwright.frameworks.shell.variables import Memory, Value, array_value, text_value
from meshwright.frameworks.shell.words import Parameter, Part, Word

TOKEN_OR_BLANK = re.compile(r"[ \t\n]+|[^ \t\n]+")
BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
WHOLE_NUMBER = re.compile(r" *-?[0-9]{1,6}")
GLOB = set("*?[(\\")

Bit = tuple[Piece, bool]  # and whether blanks in it part words
Segments = list[list[Bit]]  # one per word; several only from "${A[@]}" and "$@"


class Expander:
    """Fills variables into words."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.depth = 0

    # Words.

    def fields(self, word: Word) -> list[Field]:
        """The words that one written word becomes."""
        if len(word) == 1 and word[0].kind == "text":  # most words
            part = word[0]
            why = "" if part.quoted else self._braces(part)
            return [Field((Piece(part.text, part.line, part.file, why),), part.line, part.file)]
        builder = _Builder()
        for part in word:
            if part.kind == "text":
                why = "" if part.quoted else self._braces(part)
                builder.add(Piece(part.text, part.line, part.file, why))
                continue
            segments = self.segments(part)
            for index, segment in enumerate(segments):
                if index:
                    builder.flush()
                if part.quoted:
                    builder.begin(part)
                for piece, splits in segment:
                    builder.add_split(piece) if splits and not piece.why else builder.add(piece)
        builder.flush()
        if builder.done:
            self.memory.check_size(builder.done, builder.done[0].line, builder.done[0].file)
        return builder.done

    def pieces(self, word: Word) -> tuple[Piece, ...]:
        """The text of a word that is not parted at blanks, as behind NAME= and inside [[ ]]."""
        out: list[Piece] = []
        for part in word:
            if part.kind == "text":
                if part.text:
                    out.append(Piece(part.text, part.line, part.file))
            else:
                out.extend(piece for piece, _ in _flat(self.segments(part)))
        if len(out) > 1:
            self.memory.check_size([Field(tuple(out), *out[0][1:3])], out[0].line, out[0].file)
        return tuple(out)

    def text(self, word: Word) -> Field:
        place = (word[0].line, word[0].file) if word else (0, "")
        return Field(self.pieces(word), *place)

    def _braces(self, part: Part) -> str:
        if "{" in part.text and BRACES.search(part.text):
            reason = "braces that stand for several words are not expanded"
            self.memory.note(part.text, part.line, part.file, reason)
            return reason
        return ""

    # Parts.

    def segments(self, part: Part) -> Segments:
        self.depth += 1
        if self.depth > NESTED:
            raise bad(part.file, part.line, f"more than {NESTED} expansions inside each other")
        if part.kind == "parameter":
            segments = self._parameter(part)
        elif part.kind == "arithmetic":
            segments = [self._arithmetic(part)]
        else:
            segments = [self._unknown(part, "a command would have to run to know it")]
        self.depth -= 1
        return segments

    def _unknown(self, part: Part, reason: str) -> list[Bit]:
        self.memory.note(part.text, part.line, part.file, reason)
        return [(Piece(part.text, part.line, part.file, reason), False)]

    def _arithmetic(self, part: Part) -> list[Bit]:
        try:
            value = self.arithmetic(part.inner)
        except Undecided as error:
            return self._unknown(part, f"the arithmetic has no known value: {error}")
        return [(Piece(str(value), part.line, part.file), False)]

    def arithmetic(self, inner: Word) -> int:
        """The value of what stands inside (( )); raises Undecided."""
        pieces = self.pieces(inner)
        if why := reasons(pieces):
            raise Undecided(why)
        return self._evaluate("".join(piece.text for piece in pieces), 0)

    def _evaluate(self, text: str, depth: int) -> int:
        def look_up(name: str) -> int:
            value = self.memory.look_up(name)
            if value is None:
                raise Undecided(f"{name} is not set in the script")
            field = value.fields.get("0")
            if field is None or field.why:
                raise Undecided(field.why if field else f"{name} is no number")
            if re.fullmatch(r"[-+]?[0-9][0-9a-zA-Z]*", field.text):
                return number(field.text)
            if depth >= 2:
                raise Undecided(f"{name} leads to other variables too often")
            self.memory.spend(4 * len(field.text), field.line, field.file)
            return self._evaluate(field.text, depth + 1)

        return evaluate(text, look_up)

    # Parameters.

    def _parameter(self, part: Part) -> Segments:
        parameter = part.parameter
        if parameter is None or parameter.name in "?$!-":
            return [self._unknown(part, "it is known only when the script runs")]
        if parameter.indirect:
            parameter = self._pointed(parameter)
            if parameter is None:
                return [self._unknown(part, "the name it leads to is not known")]
        if parameter.name == "#" or (parameter.name.isdigit() and parameter.name != "0") or parameter.name in "@*":
            value = self._argument(parameter.name, part)
        else:
            value = self.memory.look_up(parameter.name)
        if parameter.length:
            return [self._length(part, parameter, value)]
        if value is not None and (parameter.index is not None or parameter.name in "@*"):
            value, all_of_it = self._indexed(part, parameter, value)
            if all_of_it and value is not None and (value.fields or not parameter.operator):
                return self._every(part, parameter, value)
        return [self._operated(part, parameter, value)]

    def _pointed(self, parameter: Parameter) -> Parameter | None:
        value = self.memory.look_up(parameter.name)
        field = value.fields.get("0") if value else None
        if parameter.index is not None or field is None or field.why:
            return None
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", field.text):
            return None
        return Parameter(field.text, None, False, False, parameter.operator, parameter.word)

    def _argument(self, name: str, part: Part) -> Value | None:
        arguments = self.memory.arguments
        if arguments is None:
            return None
        if name == "#":
            return text_value((Piece(str(len(arguments)), part.line, part.file),), part.line, part.file)
        if name in "@*":
            return array_value(arguments, part.line, part.file)
        index = int(name[:6])
        return text_value(arguments[index - 1].pieces, part.line, part.file) if index <= len(arguments) else None

    def _indexed(self, part: Part, parameter: Parameter, value: Value) -> tuple[Value | None, bool]:
        """What an index picks, and whether that is every entry."""
        if parameter.index is None:
            return value, True
        field = self.text(parameter.index)
        key = field.text
        if key in ("@", "*"):
            return value, True
        if field.why:
            return text_value(
                (Piece(f"{parameter.name}[{key}]", field.line, field.file, field.why),), *field[1:]
            ), False
        if value.kind != "map":
            try:
                index = self._evaluate(key, 0)
                key = str(index + len(value.fields) if index < 0 else index)
            except Undecided:
                return None, False
        found = value.fields.get(key)
        why = "; ".join(dict.fromkeys(one.why for one in value.fields.values() if one.why))
        if found is None and why:  # an unknown entry may stand for several
            return text_value((Piece(part.text, part.line, part.file, why),), part.line, part.file), False
        return (text_value(found.pieces, found.line, found.file) if found else None), False

    def _every(self, part: Part, parameter: Parameter, value: Value) -> Segments:
        fields = list(value.fields.values())
        self.memory.spend(len(fields), part.line, part.file)
        if parameter.operator in (":+", "+"):
            return [self._word_bits(parameter.word, part.quoted)] if fields else []
        if parameter.operator and parameter.operator not in (":-", "-", ":=", "=", ":?", "?"):
            return [self._unknown(part, "this change of a whole array is not read")]
        segments: Segments = [[(piece, not part.quoted) for piece in field.pieces] for field in fields]
        star = parameter.name == "*" or (parameter.index and parameter.index[0].text == "*")
        return [[(piece, False) for piece, _ in _flat(segments)]] if part.quoted and star else segments

    def _length(self, part: Part, parameter: Parameter, value: Value | None) -> list[Bit]:
        if value is not None:
            all_of_it = True
            if parameter.index is not None:
                value, all_of_it = self._indexed(part, parameter, value)
            else:
                all_of_it = parameter.name in "@*"
        if value is None or any(field.why for field in value.fields.values()):
            return self._unknown(part, f"{parameter.name} is not known")
        count = len(value.fields) if all_of_it else len(value.fields["0"].text) if "0" in value.fields else 0
        return [(Piece(str(count), part.line, part.file), False)]

    def _operated(self, part: Part, parameter: Parameter, value: Value | None) -> list[Bit]:
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
            return self._unknown(part, f"{parameter.name} is empty, and the script stops there")
        return self._changed(part, parameter, pieces)

    def _unset(self, part: Part, parameter: Parameter) -> list[Bit]:
        name = parameter.name
        if parameter.operator in (":-", "-", ":=", "=") and not self.memory.is_set_by_slurm(name):
            self.memory.defaulted += 1
            return self._default(part, parameter)
        if parameter.operator in (":+", "+") and not self.memory.is_set_by_slurm(name):
            self.memory.defaulted += 1
            return []
        if name.isdigit() or name in "@*#":
            reason = "the arguments the script is started with are not known"
        elif name.startswith("SLURM_"):
            reason = f"SLURM sets {name} when the job runs"
        else:
            reason = f"{name} is not set in the script"
        return self._unknown(part, reason)

    def _default(self, part: Part, parameter: Parameter) -> list[Bit]:
        bits = self._word_bits(parameter.word, part.quoted)
        if parameter.operator in (":=", "=") and not parameter.name.isdigit():
            self.memory.store(parameter.name, text_value(tuple(piece for piece, _ in bits), part.line, part.file))
        return bits

    def _alternative(self, part: Part, parameter: Parameter, pieces: tuple[Piece, ...]) -> list[Bit]:
        if pieces and all(piece.why for piece in pieces) and parameter.operator == ":+":
            return self._unknown(part, reasons(pieces))
        return self._word_bits(parameter.word, part.quoted)

    def _word_bits(self, word: Word, quoted: bool) -> list[Bit]:
        """The word behind an operator such as :-, which is quoted where its outside is."""
        bits: list[Bit] = []
        for part in word:
            if part.kind == "text":
                if part.text:
                    bits.append((Piece(part.text, part.line, part.file), not quoted and not part.quoted))
            else:
                bits.extend((piece, splits and not quoted) for piece, splits in _flat(self.segments(part)))
        self.memory.spend(len(bits), word[0].line if word else 0, word[0].file if word else self.memory.file)
        return bits

    def _changed(self, part: Part, parameter: Parameter, pieces: tuple[Piece, ...]) -> list[Bit]:
        """${NAME%pattern} and its kin, as far as they are simple."""
        if why := reasons(pieces):
            return [(Piece(part.text, part.line, part.file, why), False)]
        word = self.pieces(parameter.word)
        change = CHANGES.get(parameter.operator)
        text, argument = "".join(p.text for p in pieces), "".join(p.text for p in word)
        changed = change(text, argument) if change and not reasons(word) else None
        if changed is None:
            return self._unknown(part, "this change of a variable is not read")
        place = pieces[0][1:3] if pieces else (part.line, part.file)
        return [(Piece(changed, *place), not part.quoted)] if changed else []


class _Builder:
    """Puts pieces together to words."""

    def __init__(self) -> None:
        self.done: list[Field] = []
        self.current: list[Piece] | None = None
        self.place = (0, "")

    def begin(self, part: Part) -> None:
        if self.current is None:
            self.current, self.place = [], (part.line, part.file)

    def add(self, piece: Piece) -> None:
        if self.current is None:
            self.current, self.place = [], (piece.line, piece.file)
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
            self.done.append(Field(tuple(self.current), *self.place))
            self.current = None


def _flat(segments: Segments) -> list[Bit]:
    """Several words as one text, with a blank between them."""
    if len(segments) <= 1:
        return segments[0] if segments else []
    out: list[Bit] = []
    for index, segment in enumerate(segments):
        if index and out:
            last = out[-1][0]
            out.append((Piece(" ", last.line, last.file), True))
        out.extend(segment)
    return out


def _literal(pattern: str) -> bool:
    return not GLOB.intersection(pattern)


def _without_prefix(text: str, pattern: str, longest: bool) -> str | None:
    if _literal(pattern):
        return text.removeprefix(pattern)
    if pattern[0] == "*" and len(pattern) > 1 and _literal(pattern[1:]):
        at = text.rfind(pattern[1:]) if longest else text.find(pattern[1:])
        return text if at < 0 else text[at + len(pattern) - 1 :]
    return None


def _without_suffix(text: str, pattern: str, longest: bool) -> str | None:
    if _literal(pattern):
        return text.removesuffix(pattern)
    if pattern[-1] == "*" and len(pattern) > 1 and _literal(pattern[:-1]):
        at = text.find(pattern[:-1]) if longest else text.rfind(pattern[:-1])
        return text if at < 0 else text[:at]
    return None


def _replaced(text: str, argument: str, count: int) -> str | None:
    pattern, _, new = argument.partition("/")
    if not pattern or not _literal(pattern) or pattern[0] in "#%" or "&" in new:
        return None
    return text.replace(pattern, new, count) if len(text) * max(len(new), 1) < 1_000_000 else None


def _cut(text: str, argument: str) -> str | None:
    start, colon, length = argument.partition(":")
    if not WHOLE_NUMBER.fullmatch(start) or (colon and not WHOLE_NUMBER.fullmatch(length)):
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


CHANGES: dict[str, Callable[[str, str], str | None]] = {
    "#": lambda text, pattern: _without_prefix(text, pattern, longest=False),
    "##": lambda text, pattern: _without_prefix(text, pattern, longest=True),
    "%": lambda text, pattern: _without_suffix(text, pattern, longest=False),
    "%%": lambda text, pattern: _without_suffix(text, pattern, longest=True),
    "/": lambda text, argument: _replaced(text, argument, 1),
    "//": lambda text, argument: _replaced(text, argument, -1),
    ":": _cut,
    "^": _cased(str.upper, first=True),
    "^^": _cased(str.upper, first=False),
    ",": _cased(str.lower, first=True),
    ",,": _cased(str.lower, first=False),
}
