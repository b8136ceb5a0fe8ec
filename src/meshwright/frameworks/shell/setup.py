"""Find the lines of a script that set up its environment, and the commands besides the training."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from meshwright.frameworks.shell.grammar import DECLARERS, Parser
from meshwright.frameworks.shell.launch_prefixes import unwrap
from meshwright.frameworks.shell.launcher import launch_command
from meshwright.frameworks.shell.syntax import Chain, Function, Simple, Statement
from meshwright.frameworks.shell.unreached import literal, simple_commands, statements_of
from meshwright.frameworks.shell.values import Command, Script
from meshwright.frameworks.shell.words import Source

SETUP = frozenset((
    "module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack", "pyenv", "nvm", "guix", "use", "alias",
    "shopt", "cd", "pushd", "popd", "ulimit", "umask", "unset", "eval", "mkdir", "huggingface-cli", "hf", "wandb",
))  # fmt: skip
"""Commands that prepare the shell, its folder or the user's accounts: they may run before every start."""
TESTS = frozenset((
    "[", "test", ":", "true", "false", "command", "which", "type", "exit", "return", "break", "continue",
))  # fmt: skip
PRINTS = frozenset((
    "echo", "printf", "date", "hostname", "pwd", "env", "printenv", "nvidia-smi", "nvcc", "sinfo", "squeue", "whoami",
    "uname", "df", "free",
))  # fmt: skip
SHELL_OPTIONS = "set"  # of interest only to other commands of the script
FINISH = frozenset(("wait", SHELL_OPTIONS))
SEARCH_PATHS = re.compile(r"(PYTHON|LD_LIBRARY_)?PATH")
"""Variables that a script extends: a job has them besides its own."""
USED = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
POSITIONAL = re.compile(r"\$[1-9@*#]|\$\{[@*#1-9]\}|\$\{#[@*]")
OWN_FILE = re.compile(r"\$\{BASH_SOURCE(?:\[0\])?(?::-\$0)?\}|\$BASH_SOURCE\b|\$0\b|\$\{0\}")
SOURCED_FILE = re.compile(r"(?m)((?:^|[;&|({]|then|do|else)\s*(?:source|\.)[ \t]+[\"']?)([\w.][\w./-]*)")
SHOWN = 100  # characters of a command in a message


class OtherCommand(msgspec.Struct, frozen=True):
    """A command of a script that is neither its training nor setup that a new job repeats."""

    line: int
    text: str
    after: bool = False  # it runs after the training


class SetupLines(msgspec.Struct, frozen=True):
    """The setup of a script before its training, in its order, and its other commands."""

    kept: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()  # of the commands in `kept`
    others: tuple[OtherCommand, ...] = ()


def setup_lines(
    script: Script,
    text: str,
    where: str,
    folder: Path | None,
    carried: Collection[str],
    is_replaced: Callable[[str], bool],
) -> SetupLines:
    """Return the setup of a script.

    A job exports the variables in `carried` by itself; it sets those that `is_replaced` to values of its own.
    """
    launch = launch_command(script)
    if launch is None:
        return SetupLines()
    text = text.replace("\r\n", "\n")
    return _Reader(text, where, folder, carried, is_replaced).read(script, launch)


class _Reader:
    """Sorts the top-level commands of a script."""

    def __init__(
        self, text: str, where: str, folder: Path | None, carried: Collection[str], is_replaced: Callable[[str], bool]
    ) -> None:
        self.text, self.where, self.folder = text, where, folder
        self.carried, self.is_replaced = carried, is_replaced
        self.block = Parser(Source.of_file(text, where)).script()
        self.functions: dict[str, list[Statement]] = {}

    def read(self, script: Script, launch: Command) -> SetupLines:
        at, starters = None, set[str]()
        for number, chain in enumerate(self.block):
            functions = [one for one in _statements(chain) if isinstance(one, Function)]
            self.functions |= {one.name: [one.body] for one in functions}
            first, last = self._lines(chain)
            if functions and first <= launch.line <= last:
                starters |= {one.name for one in functions}
            elif first <= launch.line <= last or any(_name(one) in starters for one in self._commands(chain)):
                at = number
                break
        if at is None:  # a sourced file starts the training: the whole script may set it up
            return SetupLines()
        before, after = self.block[:at], self.block[at + 1 :]
        kept = {number for number, chain in enumerate(before) if self._is_setup(chain)}
        inner = tuple(self._inside(self.block[at], script, launch))
        kept |= self._definitions(before, kept, inner)
        if kept or inner:
            kept |= {number for number, one in enumerate(before) if self._names(one) == {SHELL_OPTIONS}}
        others = [self._other(one) for number, one in enumerate(before) if number not in kept and self._acts(one)]
        others += [self._other(one, after=True) for one in after if self._acts(one)]
        ordered = sorted(kept)
        return SetupLines(
            (*(self._written(before[number]) for number in ordered), *(text for _, text in inner)),
            (*(before[number].location.line for number in ordered), *(line for line, _ in inner)),
            tuple(others),
        )

    def _lines(self, chain: Chain) -> tuple[int, int]:
        """Return the first and last line of a command, here-documents included."""
        last = chain.location.line + self.text[chain.span[0] : chain.span[1]].rstrip().count("\n")
        documents = [one.here_document for one in simple_commands(_statements(chain)) if one.here_document]
        return chain.location.line, max([last, *(line for one in documents for _, line, _ in one.lines)])

    def _source(self, chain: Chain) -> str:
        return self.text[slice(*chain.span)].strip()

    def _commands(self, chain: Chain) -> Iterator[Simple]:
        """Yield the simple commands of a chain, and those of the functions that it calls."""
        called = set[str]()
        pending = list(simple_commands(_statements(chain)))
        while pending:
            one = pending.pop()
            yield one
            name = _name(one)
            if name in self.functions and name not in called:
                called.add(name)
                pending += simple_commands(iter(self.functions[name]))

    def _names(self, chain: Chain) -> set[str]:
        """Return the names of the commands that a chain runs; empty if it only assigns or defines."""
        return {_name(one) for one in self._commands(chain) if one.words}

    def _is_setup(self, chain: Chain) -> bool:
        commands = [one for one in self._commands(chain) if one.words]
        allowed = {*SETUP, *TESTS, *PRINTS, *DECLARERS, SHELL_OPTIONS, *self.functions}
        if any(_name(one) not in allowed or one.here_document for one in commands) or _is_function(chain):
            return False
        if POSITIONAL.search(self._source(chain)):
            return False
        return any(_name(one) in SETUP or self._exports(one) for one in commands)

    def _exports(self, simple: Simple) -> bool:
        """Return whether a command exports a variable that the job would not have otherwise."""
        if _name(simple) != "export":
            return False
        return any(
            one not in self.carried and (bool(SEARCH_PATHS.fullmatch(one)) or not self.is_replaced(one))
            for one in _exported(simple)
        )

    def _definitions(
        self, before: tuple[Chain, ...], kept: Collection[int], inner: Collection[tuple[int, str]]
    ) -> set[int]:
        """Return the commands that define the variables and functions of the setup, and those that these need."""
        found: set[int] = set()
        while True:
            texts = [self._source(before[number]) for number in {*kept, *found}] + [text for _, text in inner]
            used = {name for text in texts for name in USED.findall(text)}
            called = {name for number in {*kept, *found} for name in self._names(before[number])}
            more = {
                number
                for number, chain in enumerate(before)
                if number not in kept and number not in found and self._defines(chain, used, called)
            }
            if not more:
                return found
            found |= more

    def _defines(self, chain: Chain, used: Collection[str], called: Collection[str]) -> bool:
        if _is_function(chain):
            return any(isinstance(one, Function) and one.name in called for one in _statements(chain))
        commands = list(simple_commands(_statements(chain)))
        harmless = {*TESTS, *PRINTS, *DECLARERS}
        if any(one.words and _name(one) not in harmless for one in commands):
            return False
        sets = {each.name for one in commands for each in (*(() if one.words else one.assignments), *one.declared)}
        return bool(sets & set(used))

    def _inside(self, chain: Chain, script: Script, launch: Command) -> Iterator[tuple[int, str]]:
        """Yield the setup inside the command that starts the training, such as srun bash -c 'source …; torchrun …'."""
        first, last = self._lines(chain)
        for command in (*script.commands, *script.possible):
            if command is launch:
                return
            words = command.words[unwrap(command.words).start :]
            inside = first <= command.line <= last and all(word.file == self.where for word in words)
            if words and inside and str(words[0].value) in SETUP:
                yield command.line, " ".join(_quoted(str(word.value), bool(word.unresolved)) for word in words)

    def _acts(self, chain: Chain) -> bool:
        """Return whether a command does more than print, test, assign or wait."""
        if _is_function(chain):
            return False
        passive = {*TESTS, *PRINTS, *DECLARERS, *FINISH}
        return any(_name(one) not in passive or self._exports(one) for one in self._commands(chain) if one.words)

    def _other(self, chain: Chain, after: bool = False) -> OtherCommand:
        text = re.sub(r"\s*\\\n\s*", " ", self._source(chain))
        first, *more = text.splitlines()
        first = f"{first[:SHOWN]} …" if more or len(first) > SHOWN else first
        return OtherCommand(chain.location.line, first, after)

    def _written(self, chain: Chain) -> str:
        """Return a command as a script in another folder has it: files beside its own script by their full path."""
        text = self._source(chain)
        if self.folder is None:
            return text
        folder = self.folder.resolve()
        text = OWN_FILE.sub(lambda _: str(folder / Path(self.where).name), text)

        def full(found: re.Match[str]) -> str:
            return f"{found[1]}{folder / found[2] if (folder / found[2]).is_file() else found[2]}"

        return SOURCED_FILE.sub(full, text)


def _statements(chain: Chain) -> Iterator[Statement]:
    return statements_of((chain,))


def _is_function(chain: Chain) -> bool:
    return all(isinstance(one, Function) for one in _statements(chain))


def _name(simple: Simple) -> str:
    return literal(simple.words[0]) if simple.words else ""


def _exported(simple: Simple) -> list[str]:
    """Return the variables of export NAME=value OTHER."""
    bare = [literal(word) for word in simple.words[1:]]
    return [*(one.name for one in simple.declared), *(name for name in bare if re.fullmatch(r"[A-Za-z_]\w*", name))]


def _quoted(word: str, expands: bool) -> str:
    """Return an expanded word for a shell: a home directory and what is known only in the job stay as written."""
    if re.fullmatch(r"[\w./:=@%+,~-]+", word):
        return word
    escaped = re.sub(r'(["\\])' if expands else r'(["\\$`])', r"\\\1", word)
    return f'"{escaped}"'
