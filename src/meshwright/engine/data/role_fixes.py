"""The command that renames the speakers of a file of chats, such as customer and agent, to roles."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from meshwright.display import plural
from meshwright.engine.data.rewrite import rewritten

SPEAKERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("customer", "client", "caller", "visitor", "guest", "patient", "student", "person", "question",
         "questioner", "enduser", "requester", "sender", "me", "player", "buyer", "employee"), "user",
    ),
    **dict.fromkeys(
        ("agent", "support", "supporter", "supportagent", "customerservice", "customersupport", "operator",
         "representative", "rep", "advisor", "adviser", "staff", "ai", "llm", "chatbot", "claude", "gemini", "expert",
         "doctor", "teacher", "tutor", "answer", "helper", "helpdesk", "consultant", "seller", "narrator"), "assistant",
    ),
    **dict.fromkeys(("instruction", "instructions", "context", "sys"), "system"),
}  # fmt: skip
"""What people call the sides of a conversation, without separators."""
UNKNOWN = "has the unknown role "
_UNKNOWN_ROLE = re.compile(re.escape(UNKNOWN) + r"([\w -]+)")
_PLACE = re.compile(r"(.+\.(?:jsonl|ndjson|json))[:\[]\d+")


def renamed_roles(messages: Iterable[str], unusable: Sequence[int] = ()) -> tuple[str, ...]:
    """Return the command that renames the unknown roles that errors of rows name, if all are known speakers.

    `unusable` are the lines of a JSONL file that the command leaves out: they have other errors.
    """
    of_roles = [one for one in messages if UNKNOWN in one]
    files = {place[1] if (place := _PLACE.match(one)) else "" for one in of_roles}
    names = list(dict.fromkeys(role for one in of_roles for role in _UNKNOWN_ROLE.findall(one)))
    if len(files) != 1 or "" in files or any(meant_role(role) is None for role in names):
        return ()
    command = _command(Path(files.pop()), names, unusable)
    return (f"{command} (leaves out {plural(len(unusable), 'row')})" if unusable else command,)


def meant_role(role: str) -> str | None:
    """Return the role of a speaker such as customer or agent; None for another name."""
    return SPEAKERS.get(_plain(role))


def _plain(role: str) -> str:
    return re.sub(r"[\W_]", "", role).lower()


def _command(path: Path, roles: Sequence[str], unusable: Sequence[int]) -> str:
    renames = [rf's/"(role|from)"( *: *)"{role}"/"\1"\2"{meant_role(role)}"/g' for role in roles]
    program = "; ".join([*renames, *(f"{line}d" for line in unusable)])
    written = path.with_name(f"{path.stem}_roles{path.suffix}")
    return rewritten(f"sed -E {shlex.quote(program)} {shlex.quote(str(path))}", written)
