"""The planner's answers to a list of questions are the kept ones."""

from __future__ import annotations

import json

import pytest

from . import kept_answers

KEPT = json.loads(kept_answers.FILE.read_text())


@pytest.mark.parametrize("question", kept_answers.QUESTIONS, ids=lambda one: " ".join(map(str, one[:3])))
def test_answer(question: tuple[str, str, str, dict[str, object]]) -> None:
    kept, now = KEPT[" ".join(map(str, question))], kept_answers.answer(*question)
    assert now == kept, "python -m tests.planner.kept_answers writes the new answers"
