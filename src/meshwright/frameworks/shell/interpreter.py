"""Follows the commands of a script in order and takes the branches that can be decided."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.shell.arithmetic import Undecided
from meshwright.frameworks.shell.assign import assign, assigned, changed_by_arithmetic
from meshwright.frameworks.shell.builtins import BUILTINS, call, ran
from meshwright.frameworks.shell.conditions import Operand, Test, matches
from meshwright.frameworks.shell.expand import Expander
from meshwright.frameworks.shell.sourced import Sourced
from meshwright.frameworks.shell.syntax import (
    Arithmetic,
    Block,
    Case,
    Chain,
    Condition,
    Function,
    Group,
    If,
    Loop,
    Pipeline,
    Place,
    Simple,
    Statement,
)
from meshwright.frameworks.shell.unreached import leaves, only_sets, replaced, statements_of, tested_for_empty
from meshwright.frameworks.shell.values import NESTED, Command, Field, Outcome, Piece, bad
from meshwright.frameworks.shell.variables import Memory, Value, text_value
from meshwright.frameworks.shell.words import Word
from meshwright.frameworks.types import SourcedValue


class Walker:
    """The state of following one script."""

    def __init__(self, memory: Memory, sourced: Sourced) -> None:
        self.memory, self.sourced = memory, sourced
        self.expander = Expander(memory)
        self.commands: list[Command] = []
        self.functions: dict[str, Statement] = {}
        self.running: list[str] = []  # functions that are being called
        self.local: list[dict[str, tuple[Value | None, bool]]] = []  # what their own variables were outside them
        self.around: tuple[
            SourcedValue, ...
        ] = ()  # what starts the commands of a bash -c, such as srun and its options
        self.flow = ""  # break, return or exit: what follows is not reached
        self.loops = 0  # loops around, whose bodies are followed once
        self.exports_all = False
        self.texts = 0  # eval and bash -c inside each other
        self.depth = 0

    def run_block(self, block: Block) -> Outcome:
        """Follow commands in order; how the last one ends."""
        self.depth += 1
        outcome = Outcome.YES
        for chain in block:
            if self.depth > NESTED:
                raise bad(chain.place.file, chain.place.line, f"more than {NESTED} commands inside each other")
            if self.flow:
                break
            outcome = self._run_chain(chain)
        self.depth -= 1
        return outcome

    def _run_chain(self, chain: Chain) -> Outcome:
        outcome, before = Outcome.YES, None
        for sign, pipeline in chain.links:
            if self.flow:
                break
            if sign and not self._goes_on(sign, outcome, before, pipeline, chain):
                continue
            defaulted = self.memory.defaulted
            outcome = self._run_pipeline(pipeline)
            before = pipeline
            if outcome in (Outcome.YES, Outcome.NO) and self.memory.defaulted > defaulted:
                outcome = self._unless_it_leaves(outcome, chain)
        return outcome

    def _unless_it_leaves(self, outcome: Outcome, chain: Chain) -> Outcome:
        """A test on a default says nothing about a run that sets the variable, so it may not end the script."""
        rest = (statement for _, pipeline in chain.links[1:] for statement in pipeline.statements)
        return Outcome.UNKNOWN if leaves(rest) else outcome

    def _goes_on(self, sign: str, outcome: Outcome, before: Pipeline | None, pipeline: Pipeline, chain: Chain) -> bool:
        """Whether the command behind && or || is reached."""
        if outcome is Outcome.UNKNOWN:
            if sign == "&&" and before and self._is_default(before, iter(pipeline.statements)):
                return True
            self._skip(chain.text, chain.place, iter(pipeline.statements))
            return False
        return (outcome is not Outcome.NO) if sign == "&&" else outcome is Outcome.NO

    def _run_pipeline(self, pipeline: Pipeline) -> Outcome:
        if len(pipeline.statements) == 1:
            outcome = self.run_statement(pipeline.statements[0])
        else:
            for statement in pipeline.statements:  # each runs in a shell of its own
                outcome = self._run_apart(statement)
            outcome = Outcome.RAN if outcome in (Outcome.YES, Outcome.RAN) else outcome
        return outcome.negated() if pipeline.negated else outcome

    def _run_apart(self, statement: Statement) -> Outcome:
        place = getattr(statement, "place", Place(1, self.memory.file))
        saved = self.memory.saved(*place)
        outcome = self.run_statement(statement)
        self.memory.restore(saved)
        self.flow = ""
        return outcome

    def run_statement(self, statement: Statement) -> Outcome:
        if isinstance(statement, Simple):
            return self._run_simple(statement)
        if isinstance(statement, Condition):
            return self._run_condition(statement)
        if isinstance(statement, If):
            return self._run_if(statement)
        if isinstance(statement, Loop):
            return self._run_loop(statement)
        if isinstance(statement, Case):
            return self._run_case(statement)
        if isinstance(statement, Arithmetic):
            return self._run_arithmetic(statement)
        if isinstance(statement, Function):
            self.functions[statement.name] = statement.body
            return Outcome.YES
        return self._run_group(statement)

    def _run_group(self, group: Group) -> Outcome:
        if not group.subshell:
            return self.run_block(group.body)
        saved = self.memory.saved(1, self.memory.file)
        outcome = self.run_block(group.body)
        self.memory.restore(saved)
        self.flow = ""
        return outcome

    # Conditions.

    def _run_condition(self, condition: Condition) -> Outcome:
        tokens: list[str | Operand] = []
        for token in condition.tokens:
            if isinstance(token, str):
                tokens.append(token)
            else:
                tokens.append(Operand(self.expander.text(token), self._pattern(token)))
        return Outcome.of(Test(tokens, lambda name: self.memory.look_up(name) is not None).verdict())

    def _pattern(self, word: Word) -> str:
        """A word as a pattern, in which quoted signs stand for themselves."""
        out: list[str] = []
        for part in word:
            text = part.text if part.kind == "text" else "".join(p.text for p in self.expander.pieces((part,)))
            out.append("".join("\\" + letter for letter in text) if part.quoted else text)
        return "".join(out)

    def _run_arithmetic(self, statement: Arithmetic) -> Outcome:
        if self._changed(statement.text, statement.place):
            return Outcome.RAN
        try:
            return Outcome.of(self.expander.arithmetic(statement.inner) != 0)
        except Undecided:
            return Outcome.UNKNOWN

    def _changed(self, text: str, place: Place) -> bool:
        """Make the variables unknown that arithmetic assigns to."""
        names = changed_by_arithmetic(text)
        for name in names:
            self.memory.hide(name, f"arithmetic sets {name} when the script runs", *place)
        return bool(names)

    def _is_default(self, condition: Block | Pipeline, statements: Iterator[Statement]) -> bool:
        """Whether this gives an unset variable a value, so that it means the same as ${NAME:-value}."""
        name = tested_for_empty(condition)
        if not name or self.memory.look_up(name) is not None or self.memory.is_set_by_slurm(name):
            return False
        return only_sets(statements, name)

    def _skip(self, what: str, place: Place, statements: Iterator[Statement]) -> None:
        """Pass over commands whose condition is unknown; what they would set anew is unknown from here on."""
        self.memory.note(what, place.line, place.file, "it cannot be decided without running the script")
        for name in replaced(statements):
            reason = f"{name} is set under a condition on line {place.line} that cannot be decided"
            self.memory.hide(name, reason, *place)

    def _run_if(self, statement: If) -> Outcome:
        for index, (condition, body) in enumerate(statement.branches):
            if condition is None:
                return self.run_block(body)
            defaulted = self.memory.defaulted
            outcome = self.run_block(condition)
            if self.flow:
                return outcome
            if outcome is Outcome.YES and self.memory.defaulted > defaulted and leaves(statements_of(body)):
                outcome = Outcome.UNKNOWN
            if outcome is Outcome.YES or (
                outcome is Outcome.UNKNOWN
                and len(statement.branches) == 1
                and self._is_default(condition, statements_of(body))
            ):
                return self.run_block(body)
            if outcome is not Outcome.NO:
                first = condition[0] if condition else None
                place = first.place if first else statement.place
                rest = (each for _, block in statement.branches[index:] for each in statements_of(block))
                self._skip(first.text if first else "if", place, rest)
                return Outcome.RAN
        return Outcome.YES

    def _run_case(self, case: Case) -> Outcome:
        subject = self.expander.text(case.word)
        if subject.why:
            self._skip_case(case, subject)
            return Outcome.RAN
        runs = False
        for arm in case.arms:
            verdicts = [True] if runs else [matches(subject.text, self._pattern(pattern)) for pattern in arm.patterns]
            if True in verdicts:
                outcome = self.run_block(arm.body)
                runs = arm.falls_through
                if not runs or self.flow:
                    return outcome
            elif None in verdicts:
                self._skip_case(case, subject)
                return Outcome.RAN
        return Outcome.YES

    def _skip_case(self, case: Case, subject: Field) -> None:
        arms = (statement for arm in case.arms for statement in statements_of(arm.body))
        self._skip(f"case {subject.text} in", case.place, arms)

    # Loops.

    def _run_loop(self, loop: Loop) -> Outcome:
        if loop.condition:
            outcome = self.run_block(loop.condition)
            ends = Outcome.NO if loop.kind == "while" else Outcome.YES
            if outcome is ends or self.flow:
                return Outcome.YES
            if outcome is Outcome.UNKNOWN:
                first = loop.condition[0]
                self.memory.note(first.text, *first.place, "how often the loop runs cannot be decided")
        once = self._set_loop_variable(loop)
        self.loops += not once
        self.run_block(loop.body)
        self.loops -= not once
        if self.flow == "break":
            self.flow = ""
        return Outcome.RAN

    def _set_loop_variable(self, loop: Loop) -> bool:
        """Give the loop variable its one value; false when there are more, or nobody knows."""
        if not loop.name:
            return False
        fields = [field for word in loop.words for field in self.expander.fields(word)]
        self.memory.check_size(fields, *loop.place)
        if len(fields) == 1 and not fields[0].why and not set("*?[{") & set(fields[0].text):
            self.memory.store(loop.name, text_value(fields[0].pieces, *loop.place))
            return True
        values = ", ".join(field.text for field in fields[:4]) + (", …" if len(fields) > 4 else "")
        reason = f"the loop variable {loop.name} takes several values" + (f": {values}" if values else "")
        self.memory.note(f"${loop.name}", *loop.place, reason)
        self.memory.hide(loop.name, reason, *loop.place)
        return False

    # Simple commands.

    def _run_simple(self, simple: Simple) -> Outcome:
        place = simple.place
        self.memory.spend(10, *place)
        fields = [field for word in simple.words for field in self.expander.fields(word)]
        self.memory.check_size(fields, *place)
        if not fields:
            for assignment in simple.assignments:
                assign(self, assignment)
            return Outcome.YES
        name = "" if fields[0].why else fields[0].text
        builtin = BUILTINS.get(name)
        if builtin:
            return builtin(self, simple, fields)
        if name in self.functions:
            return call(self, name, simple, fields)
        return ran(self, simple, fields)

    def emit(self, simple: Simple, fields: list[Field]) -> Command:
        """Add a command to what the script runs."""
        env = self.memory.environment(*simple.place)
        if simple.assignments:
            self.memory.spend(len(env), *simple.place)
            own = {one.name: assigned(self, one).said() for one in simple.assignments if one.value is not None}
            env = env | own
        words = self.around + tuple(field.to_value() for field in fields)
        command = Command(words, env, simple.place.line)
        self.commands.append(command)
        return command

    def unknown(self, name: str, reason: str, place: Place) -> None:
        """Note a variable whose value only a run can tell."""
        self.memory.store(name, text_value((Piece(f"${name}", *place, reason),), *place))
