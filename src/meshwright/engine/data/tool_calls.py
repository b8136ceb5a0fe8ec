"""Tools and tool calls of conversations in the form that chat templates expect, whichever format the data has.

OpenAI: `tool_calls` with a JSON text as arguments, or the older `function_call`. LLaMA-Factory and ms-swift: a message
of its own whose text is the call as JSON, and tools without the `{"type": "function", "function": …}` around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright import json_text
from meshwright.engine.data.files import row_error

CALL_ROLES = ("function_call", "tool_call")  # roles of messages whose text is a call
THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
TAGGED_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MARKED = "renderedcall"  # start of a name that no data has
EXAMPLE = '{"name": …, "arguments": {…}}'


def tools_of(value: object, where: str) -> list[Any] | None:
    """Return the tools of a row as functions; None if it has none."""
    found = _decoded(value, "the tools are", where)
    if not found:
        return None
    if not isinstance(found, list):
        raise row_error(where, f"the tools must be a list, not {type(found).__name__}")
    return [_tool(_decoded(one, f"tool {number} is", where), number, where) for number, one in enumerate(found)]


def _tool(value: object, number: int, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise row_error(where, f"tool {number} must be an object with name and parameters, not {type(value).__name__}")
    if "function" in value or "name" not in value:
        return value
    return {"type": "function", "function": {key: one for key, one in value.items() if key != "type"}}


def calls_of(message: Mapping[str, Any], number: int, where: str) -> list[Any]:
    """Return the tool calls in a message's tool_calls or function_call."""
    calls = _decoded(message.get("tool_calls"), f"the tool_calls of message {number} are", where) or []
    if not isinstance(calls, list):
        raise row_error(where, f"the tool_calls of message {number} must be a list, not {type(calls).__name__}")
    older = message.get("function_call")
    return [_call(one, number, where) for one in (*calls, *([older] if older else []))]


def call_message(text: object, number: int, where: str) -> tuple[str, list[Any]]:
    """Return the text before a call, such as a thought, and the calls of a message that is one, or a list of them."""
    if not isinstance(text, str):
        found: list[Any] = [text]
        before = ""
    elif tagged := TAGGED_CALL.findall(text):
        before, found = TAGGED_CALL.sub("", text).strip(), [_json(one, number, where) for one in tagged]
    else:
        thought = THOUGHT.match(text)
        before = thought[0] if thought else ""
        found = [_json(text[len(before) :], number, where)]
    calls = [call for one in found for call in (one if isinstance(one, list) else [one])]
    if not calls:
        raise row_error(where, f"message {number} has no call: {EXAMPLE} is one")
    return before, [_call(one, number, where) for one in calls]


def joined_calls(messages: Sequence[Mapping[str, Any]], calls: Sequence[bool]) -> list[dict[str, Any]]:
    """Return the messages, with consecutive calls joined to parallel calls; `calls` says which messages are calls."""
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        before = found[-1] if found else {}
        if number and calls[number] and calls[number - 1] and before.get("weight") == message.get("weight"):
            found[-1] = {**before, "tool_calls": [*before["tool_calls"], *message["tool_calls"]]}
        else:
            found.append(dict(message))
    return found


def printed_as_python(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Return whether a rendered text has the arguments of a call as Python prints them: {'city': 'Rome'}."""
    calls = (call["function"]["arguments"] for one in messages for call in one.get("tool_calls", ()))
    return any(str(arguments) in text for arguments in calls if arguments and isinstance(arguments, dict))


def with_marked_calls(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the messages with every call under a name of its own, and the number of the message by that name."""
    found, names = [], dict[str, int]()
    for number, message in enumerate(messages):
        calls = []
        for call in message.get("tool_calls", ()):
            name = f"{MARKED}{len(names)}x"
            names[name] = number
            calls.append({**call, "function": {**call["function"], "name": name}})
        found.append({**message, "tool_calls": calls} if calls else {**message})
    return found, names


def marked_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool under a name that no data has."""
    function = tool.get("function")
    return (
        {**tool, "function": {**function, "name": MARKED}} if isinstance(function, dict) else {**tool, "name": MARKED}
    )


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of tool calls as JSON text, which some chat templates expect."""
    return [
        {**one, "tool_calls": [_text_arguments(call) for call in one["tool_calls"]]} if "tool_calls" in one else {**one}
        for one in messages
    ]


def _text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = function["arguments"]
    if not isinstance(text, str):
        text = json.dumps(text, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _call(value: object, number: int, where: str) -> dict[str, Any]:
    """Return a call as {"type": "function", "function": {"name", "arguments"}} with arguments as values, not text."""
    call = value if isinstance(value, dict) else {}
    function = call.get("function", {key: one for key, one in call.items() if key not in ("id", "type")})
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise row_error(where, f"message {number} has a tool call without the name of a function: {EXAMPLE} is one")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _object_or_text(arguments)
    rest = {key: call[key] for key in ("id",) if call.get(key) is not None}
    named = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {**rest, "type": "function", "function": named}


def _object_or_text(text: str) -> Any:
    """Return JSON text as an object: templates print it as JSON themselves; other text stays as it is."""
    try:
        found = json_text.loads(text or "{}")
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def _json(text: str, number: int, where: str) -> Any:
    try:
        return json_text.loads(text)
    except ValueError as error:
        raise row_error(
            where, f"message {number} is a tool call that is not JSON ({error}): {EXAMPLE} is one"
        ) from None


def _decoded(value: object, what: str, where: str) -> Any:
    """Return a value, decoded if it is JSON text."""
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return json_text.loads(value)
    except ValueError as error:
        raise row_error(where, f"{what} not JSON: {error}") from None
