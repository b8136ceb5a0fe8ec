"""Parser for bash: builds lists, tests, branches, loops and functions from words."""

from __future__ import annotations

import re

from meshwright.frameworks.shell.syntax import (
    Arithmetic,
    Arm,
    Assignment,
    Block,
    Case,
    Chain,
    Condition,
    Element,
    Function,
    Group,
    HereDocument,
    If,
    Location,
    Loop,
    Pipeline,
    Simple,
    Statement,
)
from meshwright.frameworks.shell.values import MAX_COMMANDS, CutCommand
from meshwright.frameworks.shell.words import Part, Source, Word, WordReader

DECLARERS = {"export", "declare", "local", "readonly", "typeset"}
KEYWORD = re.compile(
    r"(?:if|then|elif|else|fi|for|select|while|until|do|done|case|esac|function|\[\[|[{}!])(?=[ \t\n;&|()<>]|\\\n|\Z)"
)
CLOSERS = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}
FUNCTION = re.compile(r"([A-Za-z_][A-Za-z0-9_.:-]*)[ \t]*\([ \t]*\)")
FUNCTION_NAME = re.compile(r"[^ \t\n;&|()<>'\"$`\\]+")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[|\+?=)")
FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
OUTPUTS = (">", "1>", ">|", ">>")  # redirections of the standard output to a file
PLACEHOLDER = re.compile(r"<[A-Za-z][^<>|;&()\n]*>[\w./-]*(?=\s|$)")
PLACEHOLDER_WORD = re.compile(r"<(?:[A-Z][A-Z_]+|[A-Za-z]\w* [\w ./-]*\w)>(?=\s|$)")  # no input and output of a command
REDIRECTION = re.compile(r"(?:[0-9]+|\{[A-Za-z_]+\})?(&>>|&>|<<<|<<-|<<|>>|>\||>&|<&|<>|>|<)")
REDIRECTING = frozenset("<>&{0123456789")
BLANKS = re.compile(r"[ \t]+")
COMMENT = re.compile(r"[^\n]*")
ARGUMENT_LIKE = re.compile(r"(?:[ \t]*#[^\n]*\n)*[ \t]*[-$\"']")
CASE_END = re.compile(r";;&|;;|;&")
CONDITION_SIGN = re.compile(r"&&|\|\||[()<>]|!(?=[ \t\n])")
SHOWN = 200  # characters of a command quoted in messages
IN_WORD = re.compile(r"in(?=[ \t\n;]|\\\n|\Z)")


class Parser(WordReader):
    """Parses a script into blocks."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.command_count = 0
        self.cut: list[CutCommand] = []
        self.last_line = 0  # of the last command that is not cut
        self.here_documents: list[tuple[str, bool, int, HereDocument]] = []
        self.outputs: list[tuple[Word, bool]] = []  # files that redirections write, and whether they append
        """Delimiter, whether tabs are stripped, position and text of those that start on the next line."""

    def script(self) -> Block:
        block = self.block()
        if self.pos < self.end:
            raise self.error(f"unexpected {self._token()!r}")
        return block

    def current_location(self) -> Location:
        return Location(*self.location())

    def _token(self) -> str:
        found = KEYWORD.match(self.text, self.pos, self.end) or CASE_END.match(self.text, self.pos, self.end)
        return found[0] if found else self.peek()

    # Blanks, comments and newlines.

    def skip_blanks(self, inside: bool = False) -> None:
        """Skip blanks and line continuations; inside a command, check for a comment that ends it by accident."""
        continued = False
        while self.pos < self.end:
            found = BLANKS.match(self.text, self.pos, self.end)
            if found:
                self.pos = found.end()
            elif self.peek() == "\\" and (self.peek(1) == "\n" or self.ends_script()):
                self.pos += 1 + len(self.peek(1))
                continued = True
            else:
                break
        if continued and inside and self.peek() == "#":
            self._check_comment()

    def _check_comment(self) -> None:
        found = COMMENT.match(self.text, self.pos, self.end)
        comment = found[0] if found else ""
        if comment.rstrip().endswith("\\") or ARGUMENT_LIKE.match(self.text, self.pos + len(comment) + 1, self.end):
            self.warn(comment, "the comment ends the command; the next line is a new command")

    def newline(self) -> None:
        """Advance to the next line, skipping here-documents that start there."""
        self.pos += 1
        for word, strips_tabs, opened, document in self.here_documents:
            self._read_here_document(word, strips_tabs, opened, document)
        self.here_documents.clear()

    def _read_here_document(self, word: str, strips_tabs: bool, opened: int, document: HereDocument) -> None:
        while self.pos < self.end:
            found = self.text.find("\n", self.pos, self.end)
            line = self.text[self.pos : self.end if found < 0 else found]
            line = line.lstrip("\t") if strips_tabs else line
            location = self.location()
            self.pos = self.end if found < 0 else found + 1
            if line == word:
                return
            document.lines.append((f"{line}\n", *location))
        self.warn(f"<<{word}", f"the here-document has no closing line {word}", opened)

    def skip_gap(self) -> None:
        """Skip blanks, comments and newlines."""
        while True:
            self.skip_blanks()
            if self.peek() == "\n":
                self.newline()
            elif self.peek() == "#":
                self._skip_comment()
            else:
                return

    def _skip_comment(self) -> None:
        found = self.text.find("\n", self.pos, self.end)
        self.pos = self.end if found < 0 else found

    def _separators(self) -> None:
        while True:
            self.skip_gap()
            if CASE_END.match(self.text, self.pos, self.end) or self.peek() not in (";", "&"):
                return
            if self.peek() == "&" and self.peek(1) in ("&", ">"):
                return
            self.pos += 1

    # Lists.

    def block(self, *enders: str) -> Block:
        """Parse commands up to one of these keywords, or to the end."""
        self.enter()
        chains: list[Chain] = []
        while True:
            self._separators()
            if self.pos >= self.end:
                break
            keyword = KEYWORD.match(self.text, self.pos, self.end)
            if (keyword and keyword[0] in enders) or (self.peek() == ")" and ")" in enders):
                break
            if ";;" in enders and CASE_END.match(self.text, self.pos, self.end):
                break
            if keyword and keyword[0] in CLOSERS:
                raise self.error(f"unexpected {keyword[0]!r}")
            chains.append(self.chain())
        self.nesting -= 1
        return tuple(chains)

    def chain(self) -> Chain:
        start, location = self.pos, self.current_location()
        links = [("", self._pipeline())]
        while True:
            self.skip_blanks()
            sign = self.text[self.pos : min(self.pos + 2, self.end)]
            if sign not in ("&&", "||"):
                text = self.text[start : min(self.pos, start + SHOWN)].strip()
                return Chain(tuple(links), location, text, (start, self.pos))
            self.pos += 2
            self.skip_gap()
            links.append((sign, self._pipeline()))

    def _pipeline(self) -> Pipeline:
        negated = False
        while (found := KEYWORD.match(self.text, self.pos, self.end)) and found[0] == "!":
            negated = not negated
            self.pos += 1
            self.skip_blanks()
        statements = [self.statement()]
        while True:
            self.skip_blanks()
            if self.peek() != "|" or self.peek(1) == "|":
                return Pipeline(tuple(statements), negated)
            self.pos += 2 if self.peek(1) == "&" else 1
            self.skip_gap()
            statements.append(self.statement())

    def statement(self) -> Statement:
        found = KEYWORD.match(self.text, self.pos, self.end)
        statement = self._compound(found[0]) if found else self._parenthesized()
        if statement is None:
            return self._simple()
        while self._redirection()[0]:
            pass
        return statement

    def _compound(self, keyword: str) -> Statement | None:
        if keyword in CLOSERS:
            raise self.error(f"unexpected {keyword!r}")
        opened, location = self.pos, self.current_location()
        self.pos += len(keyword)
        if keyword == "{":
            return Group(self._closed(opened, "{", "}"), subshell=False)
        if keyword == "if":
            return self._if(opened, location)
        if keyword in ("while", "until"):
            condition = self._closed(opened, keyword, "do")
            return Loop(keyword, self._closed(opened, keyword, "done"), location, condition=condition)
        if keyword in ("for", "select"):
            return self._for(opened, location, keyword)
        if keyword == "case":
            return self._case(opened, location)
        if keyword == "[[":
            return self._condition(opened, location)
        if keyword == "function":
            return self._function()
        self.pos = opened
        return None

    def _parenthesized(self) -> Statement | None:
        opened, location = self.pos, self.current_location()
        if self.peek() == "(":
            if self.peek(1) == "(" and (inner := self._double_parens()) is not None:
                return Arithmetic(inner, location, self.text[opened : min(self.pos, opened + SHOWN)])
            self.pos += 1
            return Group(self._closed(opened, "(", ")"), subshell=True)
        found = FUNCTION.match(self.text, self.pos, self.end)
        if not found:
            return None
        self.pos = found.end()
        return self._function_body(found[1])

    def _double_parens(self) -> Word | None:
        """Return the expression of (( … )), or None for two nested subshells."""
        opened = self.pos
        close = self.find_closing(opened + 1)
        if self.text[close : close + 1] != ")":
            return None
        inner = self.arithmetic(opened + 2, close - 1)
        self.pos = close + 1
        return inner

    def _closed(self, opened: int, what: str, closer: str) -> Block:
        block = self.block(closer)
        if self.pos >= self.end:
            raise self.error(f"the {what} opened here has no {closer}", opened)
        self.pos += len(closer)
        return block

    def _if(self, opened: int, location: Location) -> If:
        branches: list[tuple[Block | None, Block]] = []
        keyword = "if"
        while keyword != "fi":
            condition = self._closed(opened, "if", "then") if keyword != "else" else None
            body = self.block("elif", "else", "fi") if condition is not None else self.block("fi")
            if self.pos >= self.end:
                raise self.error("the if opened here has no fi", opened)
            branches.append((condition, body))
            keyword = self._token()
            self.pos += len(keyword)
        return If(tuple(branches), location)

    def _for(self, opened: int, location: Location, kind: str) -> Loop:
        self.skip_blanks()
        name, words = "", []
        if self.peek() == "(" and self.peek(1) == "(":
            self.pos = self.find_closing(self.pos)
        else:
            found = FUNCTION_NAME.match(self.text, self.pos, self.end)
            if not found:
                raise self.error(f"{kind} has no variable name", opened)
            name, self.pos = found[0], found.end()
            self.skip_gap()
            words = self._loop_words()
        self._separators()
        if self._token() not in ("do", "{"):
            raise self.error(f"the {kind} opened here has no do", opened)
        closer = "done" if self._token() == "do" else "}"
        self.pos += len(self._token())
        return Loop(kind, self._closed(opened, kind, closer), location, name, tuple(words))

    def _loop_words(self) -> list[Word]:
        words: list[Word] = []
        if not IN_WORD.match(self.text, self.pos, self.end):
            return words
        self.pos += 2
        while True:
            self.skip_blanks()
            if self.peek() in ("", "\n", ";", "#"):
                return words
            words.append(self.word())

    def _case(self, opened: int, location: Location) -> Case:
        self.skip_blanks()
        word = self.word()
        self.skip_gap()
        if not IN_WORD.match(self.text, self.pos, self.end):
            raise self.error("the case opened here has no in", opened)
        self.pos += 2
        arms: list[Arm] = []
        while True:
            self.skip_gap()
            if self.pos >= self.end:
                raise self.error("the case opened here has no esac", opened)
            if self._token() == "esac":
                self.pos += 4
                return Case(word, tuple(arms), location)
            arms.append(self._arm())

    def _arm(self) -> Arm:
        self.pos += self.peek() == "("
        patterns: list[Word] = []
        while True:
            self.skip_blanks()
            patterns.append(self.word())
            self.skip_blanks()
            sign = self.peek()
            self.pos += 1
            if sign == ")":
                break
            if sign != "|":
                raise self.error("a case pattern has no )", self.pos - 1)
        body = self.block(";;", "esac")
        ending = CASE_END.match(self.text, self.pos, self.end)
        self.pos = ending.end() if ending else self.pos
        return Arm(tuple(patterns), body, bool(ending) and self.text[self.pos - 1] == "&")

    def _condition(self, opened: int, location: Location) -> Condition:
        tokens: list[str | Word] = []
        matches = False  # after =~ parentheses belong to the regex
        while True:
            self.skip_gap()
            if self.pos >= self.end:
                raise self.error("the [[ opened here has no ]]", opened)
            if self.text.startswith("]]", self.pos) and self.peek(2) in ("", " ", "\t", "\n", ";", "&", "|", ")"):
                self.pos += 2
                return Condition(tuple(tokens), location, self.text[opened : min(self.pos, opened + SHOWN)])
            sign = None if matches else CONDITION_SIGN.match(self.text, self.pos, self.end)
            if sign:
                self.pos = sign.end()
                tokens.append(sign[0])
                continue
            word = self.word("regex" if matches else "plain")
            matches = len(word) == 1 and word[0].text == "=~" and not word[0].quoted
            tokens.append(word)

    def _function(self) -> Function:
        self.skip_blanks()
        found = FUNCTION_NAME.match(self.text, self.pos, self.end)
        if not found:
            raise self.error("function has no name")
        self.pos = found.end()
        self.skip_blanks()
        if self.peek() == "(":
            self.pos = self.find_closing(self.pos)
        return self._function_body(found[0])

    def _function_body(self, name: str) -> Function:
        self.skip_gap()
        self.enter()
        body = self.statement()
        self.nesting -= 1
        return Function(name, body)

    # Simple commands.

    def word(self, mode: str = "plain") -> Word:
        """Parse a word; raise if there is none."""
        start = self.pos
        word = self.parts(mode)
        if self.pos == start:
            raise self.error(f"unexpected {self._token()!r}" if self.pos < self.end else "unexpected end of script")
        return word

    def _simple(self) -> Simple:
        location, start = self.current_location(), self.pos
        self.command_count += 1
        if self.command_count > MAX_COMMANDS:
            raise self.error(f"more than {MAX_COMMANDS} commands in one file")
        assignments: list[Assignment] = []
        declared: list[Assignment] = []
        words: list[Word] = []
        documents, outputs = len(self.here_documents), len(self.outputs)
        while True:
            self.skip_blanks(inside=bool(words or assignments))
            if self.peek() == "#" and self.pos > start:
                self._skip_comment()
                break
            redirected, word = self._redirection()
            if redirected:
                continue
            declares = bool(words) and len(words[0]) == 1 and words[0][0].text in DECLARERS
            if not word and (not words or declares) and (assignment := self._assignment()):
                (declared if declares else assignments).append(assignment)
                continue
            word = word or self.parts()
            if not word and not self._at_boundary():
                continue
            if not word and words and self.peek() == "(":
                raise self.error("unexpected '('")
            if not word:
                break
            words.append(word)
        if self.pos == start:
            raise self.error(f"unexpected {self._token()!r}" if self.pos < self.end else "unexpected end of script")
        self._note_cut(words, location)
        document = self.here_documents[documents][3] if len(self.here_documents) > documents else None
        written, appends = self.outputs[-1] if len(self.outputs) > outputs else (None, False)
        return Simple(tuple(assignments), tuple(words), tuple(declared), location, document, written, appends)

    def _note_cut(self, words: list[Word], location: Location) -> None:
        """Record a command that starts with a flag: it is the rest of the one before."""
        starts = [word[0].text for word in words if word and word[0].kind == "text"]
        flags = [found[0] for text in starts if (found := FLAG.match(text))]
        if words and flags and words[0][0].kind == "text" and words[0][0].text.startswith(flags[0]):
            self.cut.append(CutCommand(location.line, location.file, tuple(flags), self.last_line))
        else:
            self.last_line = location.line

    def _at_boundary(self) -> bool:
        return self.peek() in ("", "\n", ";", "&", "|", "(", ")", "<", ">")

    def _redirection(self) -> tuple[bool, Word]:
        """Skip a redirection; return a process substitution as a word."""
        self.skip_blanks()
        if self.peek() == "<" and PLACEHOLDER_WORD.match(self.text, self.pos, self.end):
            return False, self._placeholder()
        # Checking one character first avoids the regex for most words.
        found = REDIRECTION.match(self.text, self.pos, self.end) if self.peek() in REDIRECTING else None
        if not found:
            return False, ()
        if found[0] in ("<", ">") and self.text[found.end() : found.end() + 1] == "(":
            return False, self._process()
        opened, self.pos = self.pos, found.end()
        self.skip_blanks()
        target = self._process() if self.peek() in ("<", ">") and self.peek(1) == "(" else self.word()
        if found[1] in ("<<", "<<-"):
            word, quoted = "".join(part.text for part in target), any(part.quoted for part in target)
            self.here_documents.append((word, found[1] == "<<-", opened, HereDocument(quoted)))
        elif found[0] in OUTPUTS:
            self.outputs.append((target, found[0] == ">>"))
        return True, ()

    def _process(self) -> Word:
        start, self.pos = self.pos, self.find_closing(self.pos + 1)
        return (Part("command", self.text[start : self.pos], *self.location(start), True),)

    def _assignment(self) -> Assignment | None:
        found = ASSIGNMENT.match(self.text, self.pos, self.end)
        if not found:
            return None
        opened, location, key, sign = self.pos, self.current_location(), None, found[2]
        self.pos = found.end()
        if sign == "[":
            self.pos -= 1
            if (keyed := self._key()) is None:
                self.pos = opened
                return None
            key, sign = keyed
        append = sign == "+="
        if self.peek() == "(" and key is None:
            return Assignment(found[1], location, append, None, None, self._elements(opened, found[1]))
        return Assignment(found[1], location, append, key, self._placeholder() or self.parts())

    def _placeholder(self) -> Word:
        """Return <path to the data>, which is to be filled in, as a word; empty if another value is there."""
        found = PLACEHOLDER.match(self.text, self.pos, self.end) if self.peek() == "<" else None
        if not found:
            return ()
        part = Part("text", found[0], *self.location(), True)
        self.warn(found[0], "a placeholder to fill in: bash takes < for a redirection and stops")
        self.pos = found.end()
        return (part,)

    def _key(self) -> tuple[Word, str] | None:
        """Return the key and operator of NAME[key]=, or None."""
        close = re.compile(r"\[[^\]\n]*\]\+?=").match(self.text, self.pos, self.end)
        if not close:
            return None
        key = self._index()
        sign = "+=" if self.peek() == "+" else "="
        self.pos += len(sign)
        return key, sign

    def _elements(self, opened: int, name: str) -> tuple[Element, ...]:
        self.pos += 1
        elements: list[Element] = []
        while True:
            self.skip_gap()
            if self.pos >= self.end:
                raise self.error(f"the array {name}=( opened here is never closed", opened)
            if self.peek() == ")":
                self.pos += 1
                return tuple(elements)
            keyed = self._key() if self.peek() == "[" else None
            if keyed:
                elements.append(Element(self.parts(), keyed[0]))
            elif self.peek() in ("<", ">") and self.peek(1) == "(":
                elements.append(Element(self._process()))
            else:
                elements.append(Element(self.word()))
