"""The columns that rows of conversations and texts usually have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ColumnSchema:
    """A known set of columns and the key that each one maps to."""

    required: dict[str, str]  # key: column
    optional: dict[str, str] = field(default_factory=dict)  # a row without such a column has no value for its key


CHAT = {"tools": "tools", "system": "system"}  # optional columns of conversations
COLUMN_SCHEMAS = (
    ColumnSchema({"messages": "messages"}, CHAT),
    ColumnSchema({"messages": "conversations"}, CHAT),
    ColumnSchema({"messages": "conversation"}, CHAT),
    ColumnSchema({"prompt": "prompt", "response": "response"}, CHAT),
    ColumnSchema({"prompt": "prompt", "response": "completion"}, CHAT),
    ColumnSchema({"prompt": "instruction", "response": "output"}, {"input": "input", "history": "history", **CHAT}),
    ColumnSchema({"prompt": "instruction", "response": "response"}, {"input": "context", **CHAT}),
    ColumnSchema({"prompt": "question", "response": "answers"}, {"context": "context", **CHAT}),
    ColumnSchema({"prompt": "question", "response": "answer"}, {"context": "context", **CHAT}),
    ColumnSchema({"prompt": "problem", "response": "generated_solution"}, CHAT),
    ColumnSchema({"prompt": "problem", "response": "solution"}, CHAT),
    ColumnSchema({"prompt": "input", "response": "output"}, CHAT),
    ColumnSchema({"text": "text"}),
)


def known_columns(available: Iterable[str]) -> dict[str, str]:
    """Return the columns of the first known schema that these have, by key; empty if they match none."""
    columns = list(available)
    for schema in COLUMN_SCHEMAS:
        named = {key: spelled_column(one, columns) for key, one in {**schema.required, **schema.optional}.items()}
        if all(named[key] in columns for key in schema.required):
            return named
    return {}


def spelled_column(name: str, available: Iterable[str]) -> str:
    """Return the column that a name means: itself, or the only one that differs in surrounding spaces.

    A header such as `Question,Answer ` has a name that neither a reader of the file nor a shell shows.
    """
    columns = list(available)
    near = [one for one in columns if isinstance(one, str) and one.strip() == name.strip() != ""]
    return near[0] if name not in columns and len(near) == 1 else name
