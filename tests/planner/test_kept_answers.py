"""The planner's answers to a list of questions are the kept ones."""

from __future__ import annotations

import pytest
from tests import kept

from . import kept_answers, kept_parts

KEPT = kept.load(kept_answers.FILE)


@pytest.mark.parametrize("question", kept_answers.QUESTIONS, ids=kept_answers.label)
def test_answer(question: kept_answers.Question) -> None:
    changed = kept.difference(KEPT[kept_answers.label(question)], kept_answers.answer(*question))
    assert not changed, "python -m tests.kept writes the new answers"


def test_parts() -> None:
    changed = kept.first_difference(kept_parts.FILE, kept_parts.answers())
    assert not changed, "python -m tests.kept writes the new answers"
