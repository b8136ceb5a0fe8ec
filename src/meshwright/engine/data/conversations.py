"""Parses dataset rows into conversations: detects the columns and reports malformed rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.engine.data.files import Row, row_error
from meshwright.errors import InputError, closest, unknown

Message = dict[str, Any]

COLUMN_KEYS = ("messages", "prompt", "response", "text", "system", "context", "input", "tools")
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_call": "assistant",
    "observation": "tool",
}
ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value", "text")
TEMPLATE_KEYS = (
    "tool_calls",
    "tool_call_id",
    "name",
    "reasoning_content",
    "thinking",
)  # passed through to the chat template


@dataclass(frozen=True)
class ColumnSchema:
    """A known set of columns and the key that each one maps to."""

    required: dict[str, str]  # key: column
    optional: tuple[tuple[str, str], ...] = ()  # (key, column)


COLUMN_SCHEMAS = (
    ColumnSchema({"messages": "messages"}, (("tools", "tools"),)),
    ColumnSchema({"messages": "conversations"}, (("tools", "tools"), ("system", "system"))),
    ColumnSchema({"messages": "conversation"}, (("tools", "tools"), ("system", "system"))),
    ColumnSchema({"prompt": "prompt", "response": "response"}, (("system", "system"),)),
    ColumnSchema({"prompt": "prompt", "response": "completion"}, (("system", "system"),)),
    ColumnSchema({"prompt": "instruction", "response": "output"}, (("input", "input"), ("system", "system"))),
    ColumnSchema({"prompt": "instruction", "response": "response"}, (("input", "context"), ("system", "system"))),
    ColumnSchema({"prompt": "question", "response": "answers"}, (("context", "context"),)),
    ColumnSchema({"prompt": "question", "response": "answer"}, (("context", "context"),)),
    ColumnSchema({"prompt": "problem", "response": "generated_solution"}),
    ColumnSchema({"prompt": "problem", "response": "solution"}),
    ColumnSchema({"prompt": "input", "response": "output"}, (("system", "system"),)),
    ColumnSchema({"text": "text"}),
)


@dataclass(frozen=True)
class Conversation:
    """A list of messages, or plain text that is trained on in full."""

    messages: list[Message]
    tools: list[Any] | None = None
    text: str = ""
    plain: bool = False  # a prompt and its response: can be joined without a chat template


def detect_columns(columns: Iterable[str], configured: Mapping[str, str], name: str) -> dict[str, str]:
    """Map conversation keys to columns: from data.columns if set, else by matching the known schemas."""
    available = list(columns)
    for key, column in configured.items():
        if key not in COLUMN_KEYS and key != "images":
            raise unknown("data.columns", key, COLUMN_KEYS)
        if column not in available:
            raise _missing_column(key, column, available)
    selected = {key: column for key, column in configured.items() if key != "images"}
    if selected:
        return _check_columns(selected, available)
    for schema in COLUMN_SCHEMAS:
        if set(schema.required.values()) <= set(available):
            return {**schema.required, **{key: column for key, column in schema.optional if column in available}}
    raise InputError(
        f"{name} has the columns {', '.join(available)}, which match no known conversation schema "
        "(messages; prompt and response; instruction, input and output; question and answer; text)",
        field="data.columns",
        fix=("data.columns.prompt=COLUMN data.columns.response=COLUMN", "data.columns.messages=COLUMN"),
    )


def _check_columns(selected: dict[str, str], available: list[str]) -> dict[str, str]:
    if "messages" in selected or "text" in selected or {"prompt", "response"} <= set(selected):
        return selected
    missing = [key for key in ("prompt", "response") if key not in selected]
    raise InputError(
        f"a sample needs messages, text, or prompt and response; {' and '.join(missing)} is not mapped "
        f"(columns: {', '.join(available)})",
        field="data.columns",
        value=selected,
        fix=tuple(f"data.columns.{key}=COLUMN" for key in missing),
    )


def _missing_column(key: str, column: str, available: list[str]) -> InputError:
    suggestions = closest(column, available)
    hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else f"it has {', '.join(available)}"
    return InputError(
        f"the dataset has no column {column}; {hint}",
        field=f"data.columns.{key}",
        value=column,
        fix=tuple(f"data.columns.{key}={one}" for one in suggestions),
    )


def parse_conversation(row: Row, columns: Mapping[str, str], where: str) -> Conversation:
    """Parse a row into a conversation."""
    for column in columns.values():
        if column not in row:
            suggestions = closest(column, row)
            hint = (
                f"; did you mean {' or '.join(suggestions)}?"
                if suggestions
                else f"; it has {', '.join(map(str, row)) or 'none'}"
            )
            raise row_error(where, f"no column {column}{hint}")
    tools = _tools(row.get(columns.get("tools", "")), where)
    if "messages" in columns:
        messages = _messages(row[columns["messages"]], columns["messages"], where)
        system = _text(row[columns["system"]], columns["system"], where) if "system" in columns else ""
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return Conversation(messages, tools)
    if "text" in columns:
        text = _text(row[columns["text"]], columns["text"], where)
        return Conversation([], text=text)
    return _prompt_response(row, columns, where)


def _prompt_response(row: Row, columns: Mapping[str, str], where: str) -> Conversation:
    """Build a user turn (context, prompt, input) and its assistant turn."""
    prompt, response = (row[columns[key]] for key in ("prompt", "response"))
    if isinstance(prompt, list) and isinstance(response, list) and prompt and isinstance(prompt[0], dict):
        both = _messages(prompt, columns["prompt"], where) + _messages(response, columns["response"], where)
        return Conversation(both)
    texts = {
        key: _text(row[column], column, where) for key, column in columns.items() if key not in ("response", "tools")
    }
    user_text = "\n\n".join(texts[key] for key in ("context", "prompt", "input") if texts.get(key))
    if not user_text:
        raise row_error(where, f"the prompt ({columns['prompt']}) is empty")
    answer = _answer(response, columns["response"], where)
    system = [{"role": "system", "content": texts["system"]}] if texts.get("system") else []
    turns = [{"role": "user", "content": user_text}, {"role": "assistant", "content": answer}]
    return Conversation(system + turns, plain=True)


def _answer(value: object, column: str, where: str) -> str:
    """Return the answer, or the first of several (as in SQuAD)."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        value = value["text"]
    if isinstance(value, list):
        if not value:
            return ""
        value = value[0]
    return _text(value, column, where)


def _text(value: object, column: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise row_error(where, f"column {column} contains {type(value).__name__}, not text")
    return value


def _tools(value: object, where: str) -> list[Any] | None:
    if not value:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise row_error(where, f"the tools are not JSON: {error}") from None
    if not isinstance(value, list):
        raise row_error(where, f"the tools must be a list, not {type(value).__name__}")
    return value


def _messages(value: object, column: str, where: str) -> list[Message]:
    if isinstance(value, str):  # CSV has no lists
        try:
            value = json.loads(value)
        except ValueError as error:
            raise row_error(where, f"column {column} contains text that is not a JSON list: {error}") from None
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise row_error(where, f"column {column} must contain a list of messages, not {found}")
    return [_message(one, number, where) for number, one in enumerate(value)]


def _message(value: object, number: int, where: str) -> Message:
    if not isinstance(value, dict):
        raise row_error(where, f"message {number} must be an object with role and content, not {type(value).__name__}")
    raw_role = _first(value, ROLE_KEYS)
    if not isinstance(raw_role, str):
        raise row_error(where, f"message {number} has no role ({' or '.join(ROLE_KEYS)})")
    role = ROLES.get(raw_role.lower())
    if role is None:
        suggestions = closest(raw_role, ROLES)
        hint = f"; did you mean {' or '.join(suggestions)}?" if suggestions else f"; known: {', '.join(ROLES)}"
        raise row_error(where, f"message {number} has the unknown role {raw_role}{hint}")
    content = _first(value, CONTENT_KEYS)
    extra = {key: value[key] for key in TEMPLATE_KEYS if value.get(key) is not None}
    if content is None and not extra:
        raise row_error(where, f"message {number} ({raw_role}) has no content")
    return {"role": role, "content": _content(content, number, where), **extra}


def _first(value: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _content(value: object, number: int, where: str) -> str:
    """Return the text of a content value: a string, or a list of text parts."""
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(key, dict) and key.get("type") == "text" for key in value):
        return "".join(str(key.get("text", "")) for key in value)
    if not isinstance(value, str):
        raise row_error(where, f"the content of message {number} must be text, not {type(value).__name__}")
    return value


def untrainable_reason(conversation: Conversation, train_on: str) -> str:
    """Return why a conversation has no trainable tokens, or an empty string."""
    if not conversation.messages:
        return "" if conversation.text.strip() else "the text is empty"
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    if train_on == "all":
        return ""
    if not answers:
        return "no message has the role assistant"
    if not any(message["content"].strip() or message.get("tool_calls") for message in answers):
        return "every assistant message is empty"
    return ""
