"""Local datasets as AutoModel reads them: JSON rows with messages, or with the columns that the file maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from meshwright import file_access
from meshwright.errors import InputError
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.recipes.key_maps.automodel_composite_keys import CHAT_DATASET, COLUMN_DATASET
from meshwright.recipes.types import Data, Recipe

RULE = "automodel.dataset-rows"
JSON = (".jsonl", ".ndjson", ".json")
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = ("system", "human", "user", "gpt", "assistant", "chatgpt", "model", "bot")  # in conversations
CHATS = ("messages", "conversations")  # columns that ChatDataset reads
SYSTEM = "system"  # a column that our engine reads beside messages, or beside a prompt and its response
WEIGHTS = "an assistant message has weight 0, and every one would be trained on: only meshwright train leaves it out"
NO_TEXT = (
    "AutoModel has no dataset class for plain text in fine-tuning: its samples are messages, or prompts and answers"
)
TEXT_READERS = ("--to accelerate", "--to deepspeed")  # targets whose written program trains on texts
CHECKED_ROWS = 20_000  # of a file that is only checked


def unreadable(data: Data) -> str:
    """Return why AutoModel cannot read a local dataset; empty if it can, or if the rows cannot be seen here."""
    path = _local(data.dataset)
    if path is None or not path.is_file():
        return ""
    suffix, name = path.suffix.lower(), data.dataset
    if data.columns and set(data.columns) != {"prompt", "response"}:
        return "AutoModel maps the columns of a question and an answer only"
    if suffix not in (JSON if data.columns else (*JSON, ".parquet")):
        return f"{name} is not JSON: AutoModel reads a local file as JSON or JSONL rows"
    if "[" in data.split and suffix in JSON:
        return f"AutoModel reads all rows of a local file, not {data.split}"
    try:
        for where, row in islice(_rows(data), CHECKED_ROWS):
            if reason := _row_problem(row, data.columns):
                return f"{where}: {reason}"
    except InputError:  # train reports rows that cannot be parsed at all
        return ""
    return ""


def as_messages(data: Data) -> str:
    """Return a local dataset as JSON lines with messages; raise InputError for a row that has none."""
    from meshwright.engine.data.conversations import REQUIRED, detect_columns, parse_conversation

    first: Mapping[str, str] = {}
    lines = []
    for where, row in _rows(data):
        first = first or detect_columns(row, data.columns, data.dataset)
        same = bool(data.columns) or all(name in row for key, name in first.items() if key in REQUIRED)
        found = parse_conversation(row, first if same else detect_columns(row, {}, where), where)
        if found.text and not found.messages:
            raise InputError(NO_TEXT, "data.dataset", data.dataset, fix=TEXT_READERS)
        tools = {} if found.tools is None else {"tools": found.tools}
        line = {"messages": _with_call_ids([_known_role(one) for one in found.messages]), **tools}
        if reason := _row_problem(line, {}):
            raise InputError(f"{where}: cannot be converted to messages: {reason}", "data.dataset", data.dataset)
        lines.append(msgspec.json.encode(line).decode())
    return "\n".join((*lines, ""))


def readable(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe with datasets that AutoModel reads, and the converted files that it names."""
    data, files = recipe.data, {}
    parts = {"dataset": data}
    if _local(data.validation) is not None:
        parts["validation"] = msgspec.structs.replace(data, dataset=data.validation)
    if recipe.goal == "pretrain" or data.images or data.blend or not any(map(_needs_messages, parts.values())):
        return recipe, {}
    changes: dict[str, Any] = {"columns": {}, "split": "train"}
    for key, part in parts.items():
        name = f"{Path(part.dataset).name.partition('.')[0]}.messages.jsonl"
        files[name], changes[key] = as_messages(part), name
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(data, **changes)), files


def _needs_messages(data: Data) -> bool:
    """Return whether a local dataset is converted: rows that AutoModel cannot read, or not in every version.

    Older versions raise ValueError for ShareGPT's conversations.
    """
    if unreadable(data):
        return True
    path = _local(data.dataset)
    if path is None or not path.is_file() or data.columns:
        return False
    with suppress(InputError):  # train reports rows that cannot be parsed at all
        return any("messages" not in row and "conversations" in row for _, row in islice(_rows(data), CHECKED_ROWS))
    return False


def _local(name: str) -> Path | None:
    path = Path(name).expanduser() if name and not file_access.closed() else None
    return path if path is not None and path.exists() else None


def _rows(data: Data) -> Iterator[tuple[str, dict[str, Any]]]:
    from meshwright.engine.data.files import find_rows  # only for a dataset that is here

    return iter(find_rows(Path(data.dataset).expanduser(), data.split, data.dataset))


def _row_problem(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """Return why AutoModel's dataset class stops at a row: ChatDataset, or with columns the one that maps them."""
    if row.get(SYSTEM):
        return f"AutoModel ignores the column {SYSTEM}"
    if columns:
        missing = [name for name in columns.values() if name not in row]
        return f"the row has no {missing[0]}" if missing else ""
    column = next((one for one in CHATS if one in row), "")
    if not column:
        return f"ChatDataset needs a messages list, and the row has {', '.join(map(str, row))}"
    messages = row[column]
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        return f"ChatDataset needs a list of messages in {column}"
    if has_weights(row):
        return WEIGHTS
    for one in messages if column == "conversations" else ():
        if (role := one.get("from", one.get("role"))) not in SHAREGPT_ROLES:
            return f"ChatDataset has no role {role} in conversations"
    for one in messages if column == "messages" else ():
        if one.get("role") not in ROLES:
            return f"ChatDataset has no role {one.get('role', one.get('from'))}"
        if one["role"] == "tool" and not _is_id(one.get("tool_call_id")):
            return "ChatDataset needs a tool_call_id in tool messages"
        if one["role"] == "assistant" and "tool_calls" in one and not _are_calls(one["tool_calls"]):
            return "ChatDataset needs tool_calls as a list of functions with a name and arguments"
    return ""


def has_weights(row: Mapping[str, Any]) -> bool:
    """Return whether an assistant message of a row has weight 0: the trainers of other frameworks ignore it."""
    messages = next((row[one] for one in CHATS if isinstance(row.get(one), list)), ())
    zero = (one for one in messages if isinstance(one, dict) and one.get("weight") == 0)
    return any(one.get("role", one.get("from")) in ("assistant", "gpt") for one in zero)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(isinstance(one, dict) and _is_call(one) for one in calls)


def _is_call(call: Mapping[str, Any]) -> bool:
    function = call.get("function")
    named = isinstance(function, dict) and _is_id(function.get("name")) and function.get("arguments") is not None
    return named and (not call.get("id") or isinstance(call["id"], str))


def _with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with an id in every tool call, and in every tool message that of the call it answers.

    Answers without an id are those of the preceding calls, in their order; AutoModel numbers calls in the same way.
    """
    found, pending, answers = [], [], 0
    for one in messages:
        if one["role"] == "assistant":
            calls = [_with_id(call, f"call_{place}") for place, call in enumerate(one.pop("tool_calls", None) or ())]
            found.append({**one, "tool_calls": calls} if calls else one)
            pending, answers = [call["id"] for call in calls if isinstance(call, dict)], 0
        elif one["role"] == "tool":
            if not _is_id(one.get("tool_call_id")):
                one["tool_call_id"] = pending[0] if pending else f"call_{answers}"
            pending = [id for id in pending if id != one["tool_call_id"]]
            answers += 1
            found.append(one)
        else:
            found.append(one)
    return found


def _with_id(call: Any, id: str) -> Any:
    """Return a tool call with its id; a function that is written without its call gets one."""
    if not isinstance(call, dict):
        return call
    whole = call if "function" in call or "name" not in call else {"type": "function", "function": call}
    return {**whole, "id": whole.get("id") or id}


def _known_role(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else dict(message)


def _dataset_rows(ctx: RuleContext) -> Problem | None:
    if ctx.get("dataset._target_") not in (CHAT_DATASET, COLUMN_DATASET) or ctx.recipe.data.blend:
        return None
    reason = unreadable(ctx.recipe.data)
    if not reason:
        return None
    file = ctx.parsed.files[0] if ctx.parsed.files else "FILE.yaml"
    gpus = "" if ctx.cluster is None else f" --gpus {ctx.cluster}"
    convert = f"meshwright export {file}{gpus} --to automodel --out FOLDER"
    return Problem(f"{reason}; export with --out (launch with --write) writes the rows as messages", (convert,))


DATASET_RULES = (
    FrameworkRule(
        RULE,
        "error",
        ("dataset.path_or_dataset_id",),
        _dataset_rows,
        symptom="KeyError or JSONDecodeError when the first batch is read",
        cause="AutoModel's dataset classes accept one form of rows, and do not look for other columns",
    ),
)
