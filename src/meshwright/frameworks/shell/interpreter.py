"""Interpret a script without running its programs; follow the branches whose condition is known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from meshwright.frameworks.shell.arithmetic import Undecided
from meshwright.frameworks.shell.assign import assign, assigned_by_arithmetic, assigned_value
from meshwright.frameworks.shell.conditions import Operand, Test, matches
from meshwright.frameworks.shell.expand import Expander
from meshwright.frameworks.shell.sbatch import slurm_variables
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
    Location,
    Loop,
    Pipeline,
    Simple,
    Statement,
)
from meshwright.frameworks.shell.unreached import (
    assigned_flags,
    may_exit,
    only_reports,
    only_sets,
    overwritten,
    statements_of,
    tested_for_empty,
)
from meshwright.frameworks.shell.values import (
    MAX_NESTING,
    Command,
    CutCommand,
    ExitStatus,
    Field,
    WrittenFile,
    script_error,
)
from meshwright.frameworks.shell.variables import ShellState, Value, text_value
from meshwright.frameworks.shell.words import Word
from meshwright.frameworks.shell.written_files import ShellFiles, record
from meshwright.frameworks.types import SourcedValue

ARGUMENT_TEST = re.compile(r'\[\[? *"?\$\{?[1-9](:-)?\}?"? *==? *["\']?[\w.-]+["\']? *\]')
RunCommand = Callable[["Interpreter", Simple, list[Field]], ExitStatus]
"""Runs one expanded simple command; builtins.py implements it."""


class Interpreter:
    """The state of interpreting one script."""

    def __init__(self, state: ShellState, sourced: Sourced, run_command: RunCommand) -> None:
        self.state, self.sourced, self.run_command = state, sourced, run_command
        self.expander = Expander(state)
        self.commands: list[Command] = []
        self.possible: list[Command] = []  # under conditions that are known only at run time, of all branches
        self.possible_flags: set[str] = set()  # in values that variables get under such conditions
        self.functions: dict[str, Statement] = {}
        self.call_stack: list[str] = []  # names of the functions being called
        self.local: list[dict[str, tuple[Value | None, bool]]] = []  # outer values shadowed by their local variables
        self.prefix: tuple[SourcedValue, ...] = ()  # words before bash -c, such as srun and its options
        self.cut: list[CutCommand] = []  # in the texts of bash -c and eval
        self.written: dict[str, WrittenFile] = {}  # config files that the script writes, by name
        self.called: list[str] = []  # scripts that it starts in a shell of their own
        self.follows_called = False  # they are interpreted too
        self.job: dict[str, SourcedValue] = {}  # options of the job that the script submits with sbatch
        self.flow = ""  # break, return or exit: the following commands are not reached
        self.eval_depth = 0  # nested eval and bash -c
        self.depth = 0

    def submit(self, options: Mapping[str, SourcedValue]) -> None:
        """Interpret what follows as a job with these sbatch options."""
        self.job = dict(options)
        self.state.slurm, self.state.in_job = slurm_variables(options), True

    def run_block(self, block: Block) -> ExitStatus:
        """Run commands in order; return the status of the last one."""
        self.depth += 1
        outcome = ExitStatus.SUCCESS
        for chain in block:
            if self.depth > MAX_NESTING:
                raise script_error(chain.location.file, chain.location.line, f"more than {MAX_NESTING} nested commands")
            if self.flow:
                break
            outcome = self._run_chain(chain)
        self.depth -= 1
        return outcome

    def _run_chain(self, chain: Chain) -> ExitStatus:
        outcome, before = ExitStatus.SUCCESS, None
        for sign, pipeline in chain.links:
            if self.flow:
                break
            if sign and not self._is_reached(sign, outcome, before, pipeline, chain):
                continue
            if sign and self._refuses(pipeline.statements, chain.text, chain.location):
                continue
            defaulted = self.state.defaulted
            outcome = self._run_pipeline(pipeline)
            before = pipeline
            if outcome in (ExitStatus.SUCCESS, ExitStatus.FAILURE) and self.state.defaulted > defaulted:
                outcome = self._unless_it_exits(outcome, chain)
        return outcome

    def _unless_it_exits(self, outcome: ExitStatus, chain: Chain) -> ExitStatus:
        """A test on a default value must not end the script: the environment may set the variable."""
        rest = (statement for _, pipeline in chain.links[1:] for statement in pipeline.statements)
        return ExitStatus.UNKNOWN if may_exit(rest) else outcome

    def _is_reached(
        self, sign: str, outcome: ExitStatus, before: Pipeline | None, pipeline: Pipeline, chain: Chain
    ) -> bool:
        """Return whether the command after && or || is reached."""
        if outcome is ExitStatus.UNKNOWN:
            if sign == "&&" and before and self._is_default(before, iter(pipeline.statements)):
                return True
            self._try(pipeline.statements)
            self._skip(chain.text, chain.location, iter(pipeline.statements))
            return False
        return (outcome is not ExitStatus.FAILURE) if sign == "&&" else outcome is ExitStatus.FAILURE

    def _run_pipeline(self, pipeline: Pipeline) -> ExitStatus:
        if len(pipeline.statements) == 1:
            outcome = self.run_statement(pipeline.statements[0])
        else:
            for statement in pipeline.statements:  # each runs in a subshell
                outcome = self._run_in_subshell(statement)
            outcome = ExitStatus.RAN if outcome in (ExitStatus.SUCCESS, ExitStatus.RAN) else outcome
        record(ShellFiles(self.expander, self.sourced, self.written), pipeline)
        return outcome.negated() if pipeline.negated else outcome

    def _run_in_subshell(self, statement: Statement) -> ExitStatus:
        location = getattr(statement, "place", Location(1, self.state.file))
        snapshot = self.state.snapshot(*location)
        outcome = self.run_statement(statement)
        self.state.restore(snapshot)
        self.flow = ""
        return outcome

    def run_statement(self, statement: Statement) -> ExitStatus:
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
            return ExitStatus.SUCCESS
        return self._run_group(statement)

    def _run_group(self, group: Group) -> ExitStatus:
        if not group.subshell:
            return self.run_block(group.body)
        snapshot = self.state.snapshot(1, self.state.file)
        outcome = self.run_block(group.body)
        self.state.restore(snapshot)
        self.flow = ""
        return outcome

    # Conditions.

    def _run_condition(self, condition: Condition) -> ExitStatus:
        tokens: list[str | Operand] = []
        for token in condition.tokens:
            if isinstance(token, str):
                tokens.append(token)
            else:
                tokens.append(Operand(self.expander.text(token), self._pattern(token)))
        return ExitStatus.of(Test(tokens, lambda name: self.state.look_up(name) is not None).evaluate())

    def _pattern(self, word: Word) -> str:
        """Return a word as a glob pattern; quoted characters are escaped."""
        out: list[str] = []
        for part in word:
            text = part.text if part.kind == "text" else "".join(p.text for p in self.expander.pieces((part,)))
            out.append("".join("\\" + char for char in text) if part.quoted else text)
        return "".join(out)

    def _run_arithmetic(self, statement: Arithmetic) -> ExitStatus:
        if self._mark_assigned(statement.text, statement.location):
            return ExitStatus.RAN
        try:
            return ExitStatus.of(self.expander.arithmetic(statement.inner) != 0)
        except Undecided:
            return ExitStatus.UNKNOWN

    def _mark_assigned(self, text: str, location: Location) -> bool:
        """Mark the variables that arithmetic assigns to as unknown."""
        names = assigned_by_arithmetic(text)
        for name in names:
            self.state.mark_unknown(name, f"arithmetic sets {name} at run time", *location)
        return bool(names)

    def _is_default(self, condition: Block | Pipeline, statements: Iterator[Statement]) -> bool:
        """Return whether this sets a default for an unset variable, like ${NAME:-value}."""
        name = tested_for_empty(condition)
        if not name or self.state.look_up(name) is not None or self.state.is_set_by_slurm(name):
            return False
        return only_sets(statements, name)

    def _refuses(self, statements: tuple[Statement, ...], what: str, location: Location) -> bool:
        """Return whether commands only report an error and exit; the script is read as if its input were filled in."""
        if not only_reports(statements):
            return False
        reason = "the script stops here as it is; what follows is read as if the condition did not hold"
        self.state.note(what, location.line, location.file, reason)
        return True

    def _try(self, body: Block | tuple[Statement, ...]) -> None:
        """Record the commands that a branch would run; nothing else of the script depends on them."""
        state, commands, local = self.state, self.commands, len(self.local)
        snapshot, kept = state.snapshot(1, state.file), (state.defaulted, dict(state.unresolved), state.loop_depth)
        shadowed = [dict(one) for one in self.local]
        self.commands = self.possible
        for one in body:
            if self.flow:
                break
            if isinstance(one, Chain):
                self._run_chain(one)
            else:
                self.run_statement(one)
        self.commands, self.flow = commands, ""
        self.local[:] = shadowed[:local]
        state.restore(snapshot)
        state.defaulted, state.unresolved, state.loop_depth = kept

    def _skip(self, what: str, location: Location, statements: Iterator[Statement]) -> None:
        """Skip commands whose condition is unknown; variables they would overwrite become unknown."""
        self.state.note(what, location.line, location.file, "the condition is known only at run time")
        skipped = list(statements)
        self.possible_flags.update(assigned_flags(iter(skipped)))
        for name in overwritten(iter(skipped)):
            reason = f"{name} is set under a condition on line {location.line} that is known only at run time"
            self.state.mark_unknown(name, reason, *location)

    def _run_if(self, statement: If) -> ExitStatus:
        for index, (condition, body) in enumerate(statement.branches):
            if condition is None:
                return self.run_block(body)
            defaulted = self.state.defaulted
            outcome = self.run_block(condition)
            if self.flow:
                return outcome
            if outcome is ExitStatus.SUCCESS and self.state.defaulted > defaulted and may_exit(statements_of(body)):
                outcome = ExitStatus.UNKNOWN
            if outcome is ExitStatus.SUCCESS and self._refuses(
                tuple(statements_of(body)), condition[0].text if condition else "if", statement.location
            ):
                outcome = ExitStatus.FAILURE
            if outcome is ExitStatus.UNKNOWN and self._asks_argument(statement, index):
                outcome = ExitStatus.FAILURE
            if outcome is ExitStatus.SUCCESS or (
                outcome is ExitStatus.UNKNOWN
                and len(statement.branches) == 1
                and self._is_default(condition, statements_of(body))
            ):
                return self.run_block(body)
            if outcome is not ExitStatus.FAILURE:
                first = condition[0] if condition else None
                location = first.location if first else statement.location
                rest = (each for _, block in statement.branches[index:] for each in statements_of(block))
                for _, block in statement.branches[index:]:
                    self._try(block)
                self._skip(first.text if first else "if", location, rest)
                return ExitStatus.RAN
        return ExitStatus.SUCCESS

    def _asks_argument(self, statement: If, index: int) -> bool:
        """Return whether a branch is for a word that the caller may pass, and another one is for none."""
        condition = statement.branches[index][0]
        text = condition[0].text if condition and len(condition) == 1 else ""
        if self.state.arguments is not None or statement.branches[-1][0] is not None or not ARGUMENT_TEST.match(text):
            return False
        self.state.note(text, *statement.location, "taken as not true: the script is read as it runs without arguments")
        return True

    def _run_case(self, case: Case) -> ExitStatus:
        subject = self.expander.text(case.word)
        if subject.unresolved:
            self._skip_case(case, subject)
            return ExitStatus.RAN
        runs = False
        for arm in case.arms:
            results = [True] if runs else [matches(subject.text, self._pattern(pattern)) for pattern in arm.patterns]
            if True in results:
                outcome = self.run_block(arm.body)
                runs = arm.falls_through
                if not runs or self.flow:
                    return outcome
            elif None in results:
                self._skip_case(case, subject)
                return ExitStatus.RAN
        return ExitStatus.SUCCESS

    def _skip_case(self, case: Case, subject: Field) -> None:
        arms = (statement for arm in case.arms for statement in statements_of(arm.body))
        for arm in case.arms:
            self._try(arm.body)
        self._skip(f"case {subject.text} in", case.location, arms)

    # Loops.

    def _run_loop(self, loop: Loop) -> ExitStatus:
        if loop.condition:
            outcome = self.run_block(loop.condition)
            ends = ExitStatus.FAILURE if loop.kind == "while" else ExitStatus.SUCCESS
            if outcome is ends or self.flow:
                return ExitStatus.SUCCESS
            if outcome is ExitStatus.UNKNOWN:
                first = loop.condition[0]
                self.state.note(first.text, *first.location, "the number of iterations is known only at run time")
        fields = [field for word in loop.words for field in self.expander.fields(word)] if loop.name else []
        if loop.words and not fields:
            return ExitStatus.SUCCESS  # for name in $EMPTY
        once = self._set_loop_variable(loop, fields)
        outer, self.state.set_in_loop = self.state.set_in_loop, set()
        self.state.loop_depth += not once
        self.run_block(loop.body)
        self.state.loop_depth -= not once
        self.state.set_in_loop = outer
        if self.flow == "break":
            self.flow = ""
        return ExitStatus.RAN

    def _set_loop_variable(self, loop: Loop, fields: list[Field]) -> bool:
        """Set the loop variable if the loop has exactly one known value; return whether it has."""
        if not loop.name:
            return False
        self.state.check_size(fields, *loop.location)
        if len(fields) == 1 and not fields[0].unresolved and not set("*?[{") & set(fields[0].text):
            self.state.store(loop.name, text_value(fields[0].pieces, *loop.location))
            return True
        values = ", ".join(field.text for field in fields[:4]) + (", …" if len(fields) > 4 else "")
        reason = f"the loop variable {loop.name} takes several values" + (f": {values}" if values else "")
        self.state.note(f"${loop.name}", *loop.location, reason)
        self.state.mark_unknown(loop.name, reason, *loop.location)
        return False

    # Simple commands.

    def _run_simple(self, simple: Simple) -> ExitStatus:
        location = simple.location
        self.state.spend(10, *location)
        fields = [field for word in simple.words for field in self.expander.fields(word)]
        self.state.check_size(fields, *location)
        if not fields:
            for assignment in simple.assignments:
                assign(self.expander, assignment)
            return ExitStatus.SUCCESS
        return self.run_command(self, simple, fields)

    def emit(self, simple: Simple, fields: list[Field]) -> Command:
        """Record a command that the script runs."""
        env = self.state.environment(*simple.location)
        if simple.assignments:
            self.state.spend(len(env), *simple.location)
            env = env | {
                one.name: assigned_value(self.expander, one).to_value()
                for one in simple.assignments
                if one.value is not None
            }
        words = self.prefix + tuple(field.to_value() for field in fields)
        command = Command(words, env, simple.location.line)
        self.commands.append(command)
        return command
