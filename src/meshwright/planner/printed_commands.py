"""Commands that an answer prints: typed, they ask about the same training, with every option that changes an answer."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from meshwright.planner.plan import Question
from meshwright.recipes import overrides as override
from meshwright.recipes.types import ENGINES

LENGTH = "data.seq_length="


def command_for_target(question: Question, verb: str, overrides: Sequence[str]) -> str:
    """Return the command of a verb for the recipe or file that the user named, with other overrides than its own."""
    own = [one for one in question.recipe_words[1:] if is_override(one)]
    named = [one for one in question.recipe_words if one not in own]
    return _command(question, (verb, *named), (), override.merged(own, overrides))


def command_for_model(question: Question, verb: str, model: str, goal: str, overrides: Sequence[str]) -> str:
    """Return the command of a verb for a model and a goal."""
    return _command(question, (verb, model), ("--goal", goal), overrides)


def _command(question: Question, named: Sequence[str], goal: Sequence[str], overrides: Sequence[str]) -> str:
    words = ["meshwright", *named, "--gpus", question.cluster_ref or question.cluster.argument, *goal]
    if question.seq_length is not None and not any(text.startswith(LENGTH) for text in overrides):
        words += ["--seq", str(question.seq_length)]
    own_engine = question.recipe_engine if question.recipe_words else ENGINES[0]
    if {question.engine, own_engine} != {ENGINES[0]}:
        words += ["--engine", question.engine]
    words += ["--benchmark"] * question.benchmark
    return shlex.join([*words, *question.options, *overrides])


def is_override(word: str) -> bool:
    """Return whether a word of a command line is KEY=VALUE."""
    return "=" in word and not word.startswith("-")
