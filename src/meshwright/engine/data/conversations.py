"""A row of a data set as a conversation: which columns hold it, and what is wrong with it where it is none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.engine.data.files import Row, bad
from meshwright.errors import InputError, closest, unknown

Message = dict[str, Any]

PARTS = ("messages", "prompt", "response", "text", "system", "context", "input", "tools")
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
FURTHER_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")  # handed on to the template


@dataclass(frozen=True)
class Form:
    """Columns that say what a sample is: which part of it each one holds."""

    needs: dict[str, str]  # part: column
    may: tuple[tuple[str, str], ...] = ()  # part and column, where there is one


FORMS = (
    Form({"messages": "messages"}, (("tools", "tools"),)),
    Form({"messages": "conversations"}, (("tools", "tools"), ("system", "system"))),
    Form({"messages": "conversation"}, (("tools", "tools"), ("system", "system"))),
    Form({"prompt": "prompt", "response": "response"}, (("system", "system"),)),
    Form({"prompt": "prompt", "response": "completion"}, (("system", "system"),)),
    Form({"prompt": "instruction", "response": "output"}, (("input", "input"), ("system", "system"))),
    Form({"prompt": "instruction", "response": "response"}, (("input", "context"), ("system", "system"))),
    Form({"prompt": "question", "response": "answers"}, (("context", "context"),)),
    Form({"prompt": "question", "response": "answer"}, (("context", "context"),)),
    Form({"prompt": "problem", "response": "generated_solution"}),
    Form({"prompt": "problem", "response": "solution"}),
    Form({"prompt": "input", "response": "output"}, (("system", "system"),)),
    Form({"text": "text"}),
)


@dataclass(frozen=True)
class Conversation:
    """Messages in turn, or plain text that is all learnt."""

    messages: list[Message]
    tools: list[Any] | None = None
    text: str = ""
    plain: bool = False  # a prompt and its response, which may be joined without a chat template


def detect_columns(columns: Iterable[str], given: Mapping[str, str], name: str) -> dict[str, str]:
    """Which part of a sample each column holds: as the recipe says, else as the usual forms have it."""
    have = list(columns)
    for part, column in given.items():
        if part not in PARTS and part != "images":
            raise unknown("data.columns", part, PARTS)
        if column not in have:
            raise _no_column(part, column, have)
    told = {part: column for part, column in given.items() if part != "images"}
    if told:
        return _checked(told, have)
    for form in FORMS:
        if set(form.needs.values()) <= set(have):
            return {**form.needs, **{part: column for part, column in form.may if column in have}}
    raise InputError(
        f"{name} has the columns {', '.join(have)}, which is none of the usual forms of conversations "
        "(messages; prompt and response; instruction, input and output; question and answer; text)",
        field="data.columns",
        fix=("data.columns.prompt=COLUMN data.columns.response=COLUMN", "data.columns.messages=COLUMN"),
    )


def _checked(told: dict[str, str], have: list[str]) -> dict[str, str]:
    if "messages" in told or "text" in told or {"prompt", "response"} <= set(told):
        return told
    missing = [part for part in ("prompt", "response") if part not in told]
    raise InputError(
        f"a sample needs messages, text, or prompt and response; {' and '.join(missing)} is not named "
        f"(columns: {', '.join(have)})",
        field="data.columns",
        value=told,
        fix=tuple(f"data.columns.{part}=COLUMN" for part in missing),
    )


def _no_column(part: str, column: str, have: list[str]) -> InputError:
    near = closest(column, have)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(have)}"
    return InputError(
        f"the data set has no column {column}; {hint}",
        field=f"data.columns.{part}",
        value=column,
        fix=tuple(f"data.columns.{part}={one}" for one in near),
    )


def conversation(row: Row, columns: Mapping[str, str], where: str) -> Conversation:
    """The conversation of a row."""
    for column in columns.values():
        if column not in row:
            near = closest(column, row)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(map(str, row)) or 'none'}"
            raise bad(where, f"there is no column {column}{hint}")
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
    return _asked(row, columns, where)


def _asked(row: Row, columns: Mapping[str, str], where: str) -> Conversation:
    """A prompt and its response; what it is asked about stands before it, what it is given to work on after it."""
    prompt, response = (row[columns[part]] for part in ("prompt", "response"))
    if isinstance(prompt, list) and isinstance(response, list) and prompt and isinstance(prompt[0], dict):
        both = _messages(prompt, columns["prompt"], where) + _messages(response, columns["response"], where)
        return Conversation(both)
    texts = {
        part: _text(row[column], column, where) for part, column in columns.items() if part not in ("response", "tools")
    }
    asked = "\n\n".join(texts[part] for part in ("context", "prompt", "input") if texts.get(part))
    if not asked:
        raise bad(where, f"the prompt ({columns['prompt']}) is empty")
    answer = _answer(response, columns["response"], where)
    system = [{"role": "system", "content": texts["system"]}] if texts.get("system") else []
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return Conversation(system + turns, plain=True)


def _answer(value: object, column: str, where: str) -> str:
    """An answer; of several (as in SQuAD) the first."""
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
        raise bad(where, f"the column {column} holds {type(value).__name__}, not text")
    return value


def _tools(value: object, where: str) -> list[Any] | None:
    if not value:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise bad(where, f"the tools are not JSON: {error}") from None
    if not isinstance(value, list):
        raise bad(where, f"the tools must be a list, not {type(value).__name__}")
    return value


def _messages(value: object, column: str, where: str) -> list[Message]:
    if isinstance(value, str):  # CSV has no lists
        try:
            value = json.loads(value)
        except ValueError as error:
            raise bad(where, f"the column {column} holds text that is no JSON list: {error}") from None
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else type(value).__name__
        raise bad(where, f"the column {column} must hold a list of messages, not {kind}")
    return [_message(one, number, where) for number, one in enumerate(value)]


def _message(value: object, number: int, where: str) -> Message:
    if not isinstance(value, dict):
        raise bad(where, f"message {number} must be an object with role and content, not {type(value).__name__}")
    said = _first(value, ROLE_KEYS)
    if not isinstance(said, str):
        raise bad(where, f"message {number} has no role ({' or '.join(ROLE_KEYS)})")
    role = ROLES.get(said.lower())
    if role is None:
        near = closest(said, ROLES)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(ROLES)}"
        raise bad(where, f"message {number} has the unknown role {said}{hint}")
    content = _first(value, CONTENT_KEYS)
    further = {key: value[key] for key in FURTHER_KEYS if value.get(key) is not None}
    if content is None and not further:
        raise bad(where, f"message {number} ({said}) has no content")
    return {"role": role, "content": _content(content, number, where), **further}


def _first(value: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _content(value: object, number: int, where: str) -> str:
    """Text, given as such or as parts that are all text."""
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        raise bad(where, f"the content of message {number} must be text, not {type(value).__name__}")
    return value


def fault(talk: Conversation, train_on: str) -> str:
    """Why nothing can be learnt from a conversation; empty where something can."""
    if not talk.messages:
        return "" if talk.text.strip() else "the text is empty"
    answers = [message for message in talk.messages if message["role"] == "assistant"]
    if train_on == "all":
        return ""
    if not answers:
        return "no message is an answer (role assistant)"
    if not any(message["content"].strip() or message.get("tool_calls") for message in answers):
        return "every answer is empty"
    return ""
