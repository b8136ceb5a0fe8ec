"""All known messages, from the tables of the frameworks."""

from __future__ import annotations

from functools import cache

from meshwright.rules.messages import frameworks, megatron, own, torch
from meshwright.rules.messages.message import Message

TABLES = (megatron.TABLE, torch.TABLE, frameworks.TABLE, own.TABLE)


@cache
def all_messages() -> tuple[Message, ...]:
    """Return every known message."""
    return tuple(
        Message(text, source, tuple(ids.split()))
        for table in TABLES
        for source, rows in table.items()
        for text, ids in rows.items()
    )


def messages_of(id: str) -> tuple[Message, ...]:
    """Return the messages that a rule, a finding or a known error explains."""
    return tuple(one for one in all_messages() if id in one.ids)
