"""A column of labels or answers beside one of texts, which is not trained on unless data.columns names it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshwright.engine.data.conversations import ANSWERS

LABELS = ("label", "class", "intent", "sentiment", "klasse", "etikett")
"""How the names of columns with labels start."""


class UnusedAnswers(NamedTuple):
    """A column that a fine-tuning on texts does not learn, and the overrides that train it or mean the texts alone."""

    column: str
    reason: str
    fix: tuple[str, ...]
    keeps: str

    @property
    def message(self) -> str:
        """The reason with what to write."""
        return f"{self.reason}; {shlex.join(self.fix)} trains it, {shlex.quote(self.keeps)} means the texts alone"


def unused_answers(
    configured: Mapping[str, str], columns: Mapping[str, str], unused: Iterable[str]
) -> UnusedAnswers | None:
    """Return the column of labels or answers that is not used; data.columns.text, if set, means the texts alone."""
    text = columns.get("text", "")
    column = next((one for one in sorted(unused) if one.lower().startswith((*LABELS, *ANSWERS))), "")
    if not text or not column or "text" in configured:
        return None
    reason = f"column {column} is not used: every token of {text} is trained on, and {column} is not the answer"
    fix = (f"data.columns.prompt={text}", f"data.columns.response={column}")
    return UnusedAnswers(column, reason, fix, f"data.columns.text={text}")
