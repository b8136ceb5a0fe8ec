"""System messages in front of the user messages that follow them, for chat templates without a system role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.engine.data.conversations import Conversation, Message
from meshwright.engine.data.files import row_error
from meshwright.errors import InputError

SEPARATOR = "\n\n"  # as in the templates of Gemma and Mistral that accept a system message


def with_merged_system(conversation: Conversation, where: str) -> Conversation:
    """Return a conversation whose system messages are the beginning of the user message that follows each."""
    messages = conversation.messages
    if not any(one["role"] == "system" for one in messages):
        return conversation
    merged: list[Message] = []
    system: list[str] = []
    for number, one in enumerate(messages):
        if one["role"] == "system":
            system.append(str(one["content"]))
            continue
        if system and one["role"] != "user":
            raise _nothing_follows(number - 1, where)
        texts = [text for text in system if text]
        merged.append({**one, "content": _after(SEPARATOR.join(texts), one["content"])} if texts else one)
        system = []
    if system:
        raise _nothing_follows(len(messages) - 1, where)
    return replace(conversation, messages=merged)


def _after(system: str, content: Any) -> Any:
    """Return the content of a user message after a system text; with images, content is a list of parts."""
    if not isinstance(content, list):
        return f"{system}{SEPARATOR}{content}"
    starts_with_text = bool(content) and content[0].get("type") == "text"
    text = f"{system}{SEPARATOR}{content[0]['text'] if starts_with_text else ''}"
    return [{"type": "text", "text": text}, *content[starts_with_text:]]


def _nothing_follows(number: int, where: str) -> InputError:
    return row_error(where, f"data.merge_system=true, but message {number} (system) has no user message after it")
