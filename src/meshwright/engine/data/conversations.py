"""Parses dataset rows into conversations: detects the columns and reports malformed rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

from meshwright import json_text
from meshwright.engine.data.column_schemas import CHAT, COLUMN_SCHEMAS, known_columns, spelled_column
from meshwright.engine.data.files import Row, row_error
from meshwright.engine.data.role_fixes import UNKNOWN, meant_role
from meshwright.engine.data.tool_calls import CALL_ROLES, call_message, calls_of, joined_calls, tools_of
from meshwright.errors import InputError, closest, some, unknown
from meshwright.notes import note
from meshwright.similar import misspelled

Message = dict[str, Any]

COLUMN_KEYS = ("messages", "prompt", "response", "text", "system", "context", "input", "history", "tools")
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
    "observation": "tool",
    "tool_response": "tool",
    **dict.fromkeys(CALL_ROLES, "assistant"),
}
ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value", "text")
TEMPLATE_KEYS = ("tool_call_id", "name", "reasoning_content", "thinking")  # passed through to the chat template
CALL_KEYS = ("tool_calls", "function_call")
WEIGHT = "weight"  # of OpenAI's format: 0 leaves an assistant message out of the loss
USED_KEYS = {*ROLE_KEYS, *CONTENT_KEYS, *TEMPLATE_KEYS, *CALL_KEYS, WEIGHT}


SHOWN = 8  # names in a note
REQUIRED = ("messages", "prompt", "response", "text")  # keys whose column every row has; others are optional
CONVERSATION_KEYS = {*REQUIRED} - {"text"}


@dataclass(frozen=True)
class Conversation:
    """A list of messages, or plain text that is trained on in full."""

    messages: list[Message]
    tools: list[Any] | None = None
    text: str = ""
    plain: bool = False  # a prompt and its response: can be joined without a chat template


CHOSEN = "chosen"
PREFERENCES = {CHOSEN, "rejected"}
"""Columns of preference pairs."""
PROMPTS = ("prompt", "question", "instruction", "query", "input")
"""Columns with the prompts of preference pairs, the usual name first."""
ROW_FORMAT = 'write each row as {"prompt": "…", "response": "…"} or {"messages": [{"role": "…", "content": "…"}, …]}'


def detect_columns(columns: Iterable[str], configured: Mapping[str, str], name: str) -> dict[str, str]:
    """Map conversation keys to columns: from data.columns if set, else by matching the known schemas.

    `columns` are those of one row, which must have the required ones. Optional ones are returned whether it has them or
    not: other rows may. An empty name in data.columns (`data.columns.tools=`) leaves an optional column out.
    """
    available = list(columns)
    configured = {key: spelled_column(column, available) for key, column in configured.items()}
    for key, column in configured.items():
        if key not in COLUMN_KEYS and key != "images":
            raise unknown("data.columns", key, COLUMN_KEYS)
        if key in REQUIRED and column not in available:
            raise missing_column(key, column, available, columns, configured)
    selected = {key: column for key, column in configured.items() if key != "images"}
    if set(selected) & set(REQUIRED):
        chosen = _check_columns(selected, available, columns)
        _check_types(chosen, columns)
        return {key: column for key, column in {**({} if "text" in chosen else CHAT), **chosen}.items() if column}
    if known := known_columns(available):
        return {key: column for key, column in {**known, **selected}.items() if column}
    if set(available) >= PREFERENCES:
        raise InputError(
            f"{name} has preference pairs ({', '.join(sorted(PREFERENCES))}); there is no preference training (DPO) "
            "here, only fine-tuning on the chosen answers",
            field="data.columns",
            fix=_working(columns, _preference_columns(columns)) or (ROW_FORMAT,),
        )
    misspelt = _misspelt_schema(available)
    meant = [f"{column}: did you mean {known}?" for known, column in misspelt.values() if known != column]
    raise InputError(
        f"{name} has the columns {', '.join(available)}, which match no known conversation schema "
        "(messages; prompt and response; instruction, input and output; question and answer; text)"
        + "".join(f"; {one}" for one in meant),
        field="data.columns",
        fix=_working(columns, [{key: one for key, (_, one) in misspelt.items()}] if misspelt else [])
        or _working(columns, _column_choices(columns))
        or (ROW_FORMAT,),
    )


ANSWERS = (
    *("answer", "response", "reply", "output", "completion", "target", "solution", "assistant", "antwort", "lösung"),
    *("réponse", "reponse", "respuesta", "risposta", "resposta", "odpowied", "ответ", "回答", "答案", "回复", "답변"),
)
"""How the names of columns with answers start."""
CONTEXTS = ("context", "ctx", "input", "passage", "document", "background", "kontext", "contexte", "contexto")
"""How the names of columns start whose text belongs to the question."""
NO_TEXT = ("index", "idx", "key", "hash", "url", "source", "category", "label", "split", "date", "lang", "priority")
"""Columns that describe a row and are not what a model is trained on."""
NUMBER_WORDS = {"id", "uuid", "nr", "no", "num", "number", "nummer", "numéro", "número"}
"""Words in the names of columns with numbers or identifiers."""
WORD = re.compile(r"[^\W_\d]+")
CODE = re.compile(r"\S*\d\S*")  # the value of a number, a date or an identifier such as INC-1042


def text_columns(row: Mapping[str, Any] | Iterable[str]) -> list[str]:
    """Return the columns that probably have text to train on; of names alone, all that do not only describe a row."""
    values = row if isinstance(row, Mapping) else dict.fromkeys(row, "")
    text = [one for one, value in values.items() if isinstance(value, str)]
    named = [one for one in text if one.lower() not in NO_TEXT]
    kept = [one for one in named if not NUMBER_WORDS & set(WORD.findall(one.lower()))]
    answers = [one for one in kept if one.lower().startswith(ANSWERS)]  # an extracted answer may be a number
    return [one for one in kept if one in answers or not CODE.fullmatch(values[one].strip())] or kept or text


def _misspelt_schema(available: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return by key the known and the actual column of the first schema that the columns spell wrongly; else nothing.

    At least one required column must be spelled right, in any case: else other names that are near would be taken.
    """
    for schema in COLUMN_SCHEMAS:
        near = {key: next(iter(misspelled(one, available)), "") for key, one in schema.required.items()}
        right = [key for key, one in schema.required.items() if one == near[key].lower()]
        if right and all(near.values()) and len(set(near.values())) == len(near):
            optional = {key: (one, one) for key, one in schema.optional.items() if one in available}
            return {**{key: (one, near[key]) for key, one in schema.required.items()}, **optional}
    return {}


def _column_choices(row: Mapping[str, Any] | Iterable[str]) -> list[dict[str, str]]:
    """Return how the columns of a row of an unknown schema may be mapped: its messages, or its texts."""
    lists = [key for key, value in row.items() if isinstance(value, list)] if isinstance(row, Mapping) else []
    found = text_columns(row)
    answers = [one for one in found if one.lower().startswith(ANSWERS)]
    extra = [one for one in found if one.lower().startswith(CONTEXTS) and one not in answers]
    asked = [one for one in found if one not in (*answers, *extra)]
    if not asked or len(asked) + len(answers) < 2:  # the prompt itself is named like a context
        asked, extra = [one for one in found if one not in answers], []
    text = [*asked[:1], *answers[:1]] if asked and answers else asked[:2] or found[:2]
    keys = ("prompt", "response") if len(text) > 1 else ("text",)
    named = dict(zip(keys, text, strict=False))
    if len(text) > 1 and extra:
        named["input"] = extra[0]
    return [*({"messages": one} for one in lists), *([named] if named else [])]


def _preference_columns(row: Mapping[str, Any] | Iterable[str]) -> list[dict[str, str]]:
    """Return how the chosen answers of preference pairs may be mapped: with their prompt, as messages, or as text."""
    columns = [one for one in row if one not in PREFERENCES]
    asked = [one for one in PROMPTS if one in columns]
    texts = text_columns(row) if isinstance(row, Mapping) else []
    asked += [one for one in texts if one in columns and one not in asked and not one.lower().startswith(ANSWERS)]
    return [*({"prompt": one, "response": CHOSEN} for one in asked), {"messages": CHOSEN}, {"text": CHOSEN}]


def _working(
    row: Mapping[str, Any] | Iterable[str], choices: Iterable[Mapping[str, str]], most: int = 2
) -> tuple[str, ...]:
    """Return the mappings that parse a row into a sample with target tokens, as typed in a shell.

    Of names alone, only the mappings of columns that exist are known.
    """
    if not isinstance(row, Mapping):
        names = set(row)
        return tuple(_override(one) for one in choices if set(one.values()) <= names)[:1]
    return tuple(_override(one) for one in choices if _parses(row, one))[:most]


def _parses(row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    if not ({"messages", "text"} & set(columns) or {"prompt", "response"} <= set(columns)):
        return False
    try:
        return not untrainable_reason(parse_conversation(dict(row), columns, ""), "answers")
    except InputError:
        return False


def _check_types(columns: Mapping[str, str], row: Mapping[str, Any] | Iterable[str]) -> None:
    """Raise if data.columns names a column of another type than its key needs, and another mapping parses the row."""
    if not isinstance(row, Mapping) or _parses(row, columns):
        return
    needs = {key: list if key == "messages" else str for key in REQUIRED if key in columns}
    wrong = [key for key, kind in needs.items() if not isinstance(row[columns[key]], (kind, str, type(None)))]
    named = {columns[key] for key in wrong}
    tried = [one for one in (*_preference_columns(row), *_column_choices(row)) if named & set(one.values())]
    if wrong and (fixes := _working(row, tried, 1)):
        column = columns[wrong[0]]
        found = "a list of messages" if isinstance(row[column], list) else "an object"
        raise InputError(f"column {column} contains {found}, not {'messages' if wrong[0] == 'messages' else 'text'}",
            field=f"data.columns.{wrong[0]}", value=column, fix=fixes)  # fmt: skip


def _override(columns: Mapping[str, str]) -> str:
    """Return the overrides that map these columns, as typed in a shell."""
    return " ".join(quote(f"data.columns.{key}={column}") for key, column in columns.items())


def note_unused_columns(name: str, unused: Collection[str]) -> None:
    """Say once which columns of a dataset are not used: a misspelt one would be missed without an error."""
    if unused:
        which = f"column {next(iter(unused))} is" if len(unused) == 1 else f"columns {some(sorted(unused), SHOWN)} are"
        note(f"{name}: {which} not used (data.columns.KEY=COLUMN names the columns to use)")


def _check_columns(
    selected: dict[str, str], available: list[str], row: Mapping[str, Any] | Iterable[str]
) -> dict[str, str]:
    if "messages" in selected or "text" in selected or {"prompt", "response"} <= set(selected):
        return selected
    missing = [key for key in ("prompt", "response") if key not in selected]
    raise InputError(
        f"a sample needs messages, text, or prompt and response; {' and '.join(missing)} is not mapped "
        f"(columns: {', '.join(available)})",
        field="data.columns",
        value=selected,
        fix=_completed(selected, missing, row),
    )


def _completed(
    selected: Mapping[str, str], missing: Sequence[str], row: Mapping[str, Any] | Iterable[str]
) -> tuple[str, ...]:
    """Return the columns that complete a mapping."""
    names = [one for one in (row if isinstance(row, Mapping) else text_columns(row)) if one not in selected.values()]
    for one in [one for one in text_columns(row) if one in names] + names:
        added = dict.fromkeys(missing, one)
        if not isinstance(row, Mapping) or _parses(row, {**selected, **added}):
            return (_override(added),)
    return _working(row, _column_choices(row)) or (ROW_FORMAT,)


def missing_column(
    key: str,
    column: str,
    available: Sequence[str],
    row: Mapping[str, Any] | Iterable[str] = (),
    configured: Mapping[str, str] | None = None,
) -> InputError:
    """Return the error for a column of data.columns that the dataset does not have."""
    suggestions = closest(column, available)
    hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else f"it has {', '.join(available)}"
    fixes = [{key: one} for one in suggestions]
    if isinstance(row, Mapping) and configured:
        others = {
            name: near[0]
            for name, one in configured.items()
            if name != key and name in REQUIRED and one not in available and (near := closest(one, available))
        }
        used = {name: one for name, one in configured.items() if name != "images"}
        fixes = [{**one, **others} for one in fixes if _parses(row, {**used, **one, **others})]
    return InputError(
        f"the dataset has no column {column}; {hint}",
        field=f"data.columns.{key}",
        value=column,
        fix=tuple(map(_override, fixes)) or _working(row, [*_preferred(row), *_column_choices(row)]),
    )


def _preferred(row: Mapping[str, Any] | Iterable[str]) -> list[dict[str, str]]:
    return _preference_columns(row) if set(row) >= PREFERENCES else []


def parse_conversation(row: Row, columns: Mapping[str, str], where: str) -> Conversation:
    """Parse a row into a conversation; an absent or null optional column is empty."""
    for key, column in columns.items():
        if key in REQUIRED and column not in row:
            suggestions = closest(column, row)
            hint = (
                f"; did you mean {' or '.join(suggestions)}?"
                if suggestions
                else f"; it has {', '.join(map(str, row)) or 'none'}"
            )
            raise row_error(where, f"no column {column}{hint}")
    tools = tools_of(_optional(row, columns, "tools"), where)
    if "messages" in columns:
        messages = _messages(row[columns["messages"]], columns["messages"], where)
        system = _text(_optional(row, columns, "system"), columns.get("system", ""), where)
        return Conversation(_with_system(messages, system, columns.get("system", ""), where), tools)
    if "text" in columns:
        text = _text(row[columns["text"]], columns["text"], where)
        return Conversation([], text=text)
    return _prompt_response(row, columns, where, tools)


def _optional(row: Row, columns: Mapping[str, str], key: str) -> Any:
    """Return the value of a key that may have no column; an unnamed column, as pandas writes its index, is none."""
    return row.get(columns[key]) if columns.get(key) else None


def _with_system(messages: list[Message], system: str, column: str, where: str) -> list[Message]:
    """Return the messages with a system message from its own column, unless they contain the same one."""
    own = next((message["content"] for message in messages[:1] if message["role"] in ("system", "developer")), None)
    if not system or own == system:
        return messages
    if own is not None:
        fix = ("remove one of the two", "data.columns.system= (ignores the column)")
        raise row_error(where, f"column {column} differs from the system message of the conversation", fix)
    return [{"role": "system", "content": system}, *messages]


def _prompt_response(row: Row, columns: Mapping[str, str], where: str, tools: list[Any] | None = None) -> Conversation:
    """Build a user turn (context, prompt, input) and its assistant turn."""
    system = _text(_optional(row, columns, "system"), columns.get("system", ""), where)
    prompt, response = (row[columns[key]] for key in ("prompt", "response"))
    if isinstance(prompt, list) and isinstance(response, list) and prompt and isinstance(prompt[0], dict):
        both = _messages(prompt, columns["prompt"], where) + _messages(response, columns["response"], where)
        return Conversation(_with_system(both, system, columns.get("system", ""), where), tools)
    texts = {
        key: _text(row.get(column), column, where)
        for key, column in columns.items()
        if key not in ("response", "tools", "system", "history")
    }
    user_text = "\n\n".join(texts[key] for key in ("context", "prompt", "input") if texts.get(key))
    if not user_text:
        raise row_error(where, f"the prompt ({columns['prompt']}) is empty")
    answer = _answer(response, columns["response"], where)
    history = _history(_optional(row, columns, "history"), columns.get("history", ""), where)
    turns = [*history, {"role": "user", "content": user_text}, {"role": "assistant", "content": answer}]
    return Conversation(_with_system(turns, system, columns.get("system", ""), where), tools, plain=not history)


def _history(value: object, column: str, where: str) -> list[Message]:
    """Return the turns before the prompt: pairs of a question and its answer, or messages."""
    if isinstance(value, str) and value.strip().startswith("["):
        value = _json_list(value, column, where)
    if not value:
        return []
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return _messages(value, column, where)
    pairs = [one for one in value if _is_pair(one)] if isinstance(value, list) else []
    if not isinstance(value, list) or len(pairs) < len(value):
        fix = "data.columns.history= (ignores the column)"
        raise row_error(where, f"column {column} must contain a list of [question, answer] pairs", (fix,))
    return [
        {"role": role, "content": text} for one in pairs for role, text in zip(("user", "assistant"), one, strict=True)
    ]


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) for one in value)


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


def _json_list(text: str, column: str, where: str) -> Any:
    try:
        return json_text.loads(text)
    except ValueError as error:
        raise row_error(where, f"column {column} contains text that is not a JSON list: {error}") from None


def _messages(value: object, column: str, where: str) -> list[Message]:
    if isinstance(value, str):  # CSV has no lists
        value = _json_list(value, column, where)
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise row_error(where, f"column {column} must contain a list of messages, not {found}")
    _require_roles(value, where)
    messages = [_message(one, number, where) for number, one in enumerate(value)]
    return joined_calls(messages, [str(_first(one, ROLE_KEYS)).lower() in CALL_ROLES for one in value])


def _require_roles(messages: Sequence[object], where: str) -> None:
    """Raise for the unknown roles of a conversation, each at its first message."""
    roles = [_first(one, ROLE_KEYS) if isinstance(one, dict) else None for one in messages]
    names = [one for one in dict.fromkeys(roles) if isinstance(one, str) and one.lower() not in ROLES]
    if not names:
        return
    found = ", ".join(f"message {roles.index(one)} {UNKNOWN}{one}" for one in names)
    meant = [role for one in names if (role := meant_role(one))]
    suggestions = (meant or closest(names[0], ROLES)) if len(names) == 1 else []
    hint = f"; did you mean {' or '.join(suggestions)}?" if suggestions else f"; known: {', '.join(ROLES)}"
    raise row_error(where, found + hint)


def _message(value: object, number: int, where: str) -> Message:
    if not isinstance(value, dict):
        raise row_error(where, f"message {number} must be an object with role and content, not {type(value).__name__}")
    raw_role = _first(value, ROLE_KEYS)
    if not isinstance(raw_role, str):
        raise row_error(where, f"message {number} has no role ({' or '.join(ROLE_KEYS)})")
    role = ROLES[raw_role.lower()]
    content = _first(value, CONTENT_KEYS)
    extra = {key: value[key] for key in TEMPLATE_KEYS if value.get(key) is not None}
    calls = calls_of(value, number, where)
    if content is None and not extra and not calls:
        raise row_error(where, f"message {number} ({raw_role}) has no content")
    if raw_role.lower() in CALL_ROLES and not calls:
        content, calls = call_message(content, number, where)
    extra |= {"tool_calls": calls} if calls else {}
    extra |= _weight(value.get(WEIGHT), role, number, where)
    return {"role": role, "content": _content(content, number, where), **extra}


def _weight(value: object, role: str, number: int, where: str) -> dict[str, int]:
    """Return the weight of an assistant message that is not in the loss; others have none."""
    if value is None:
        return {}
    if value not in (0, 1):
        reason = f"message {number} has weight {value}; a message is in the loss (1) or not (0)"
        raise row_error(where, reason, (f'set "{WEIGHT}" to 0 or 1',))
    if value and role != "assistant":
        reason = f"message {number} ({role}) has weight 1, but only assistant messages are in the loss"
        raise row_error(where, reason, (f'remove "{WEIGHT}" from messages of other roles',))
    return {} if value else {WEIGHT: 0}


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
    in_loss = answers_in_loss(conversation, train_on)
    if not in_loss:
        return f"{'the last' if train_on == 'last_answer' else 'every'} assistant message has weight 0"
    if not any(message["content"].strip() or message.get("tool_calls") for message in in_loss):
        return "every assistant message is empty"
    return ""


def answers_in_loss(conversation: Conversation, train_on: str) -> list[Message]:
    """Return the answers of a conversation that count in the loss."""
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    weighted = answers[-1:] if train_on == "last_answer" else answers
    return [message for message in weighted if message.get(WEIGHT) != 0]


def unused_names(row: Row, columns: Mapping[str, str]) -> set[str]:
    """Return the columns of a row that are not used, and the keys of its messages, such as messages[].train."""
    column = columns.get("messages", "")
    messages = row.get(column) if column else None
    keys = {key for one in messages if isinstance(one, dict) for key in one} if isinstance(messages, list) else set()
    unused = {one or "(no name)" for one in set(row) - set(columns.values())}
    return {*unused, *(f"{column}[].{key}" for key in keys - USED_KEYS)}
