"""Columns that a front end reads from a local data file, compared with those that the file has.

What is read is that of its source: Axolotl's prompt_strategies, LLaMA-Factory's data/parser.py and converter.py,
ms-swift's dataset/preprocessor, and TRL's SFTTrainer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

from meshwright import file_access, json_text
from meshwright.errors import InputError, some
from meshwright.frameworks.front_ends.describe import FrontEnd
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.rules.rule import Finding

RULE = "data.columns-not-read"
ITEMS = "[]."  # between a column and a key of the items in it
ROWS = 200  # of a file that are read for its columns
FORMATS = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
CHATS = ("messages", "conversations", "conversation")
AXOLOTL: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("alpaca", "alpaca_chat", "alpaca_instruct", "alpaca_chat.load_concise", "alpaca_chat.load_no_prompt",
            "alpaca_instruct.load_no_prompt"),
        ("instruction", "output"),
    ),
    "alpaca_chat.load_qa": ("question", "answer"), "alpaca_chat.load_camel_ai": ("message_1", "message_2"),
    "alpaca_w_system": ("instruction", "output", "system"),
    "alpaca_w_system.load_open_orca": ("question", "response", "system_prompt"),
    "alpaca_w_system.load_open_orca_chatml": ("question", "response", "system_prompt"),
    "gpteacher": ("instruction", "response"), "jeopardy": ("question", "category", "answer"),
    "summarizetldr": ("article", "summary"), "oasst": ("INSTRUCTION", "RESPONSE"), "metharme": ("prompt", "generation"),
    "input_output": ("segments",), "completion": ("text",), "chat_template": ("messages",),
}  # fmt: skip
"""Columns that a type of Axolotl's datasets needs; those with {OWN} may be named otherwise."""
OWN = {"chat_template": "field_messages", "completion": "field"}
"""Key of a dataset that names the column of its type."""
FACTORY: Mapping[str, Mapping[str, str]] = {
    "alpaca": {"prompt": "instruction", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "conversations"},
}
"""Columns of a formatting in LLaMA-Factory's dataset_info.json, as they are named there, with their defaults."""
TRL = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"text"}, {"input_ids"})
SWIFT_RESPONSES = ("response", "answer", "output", "targets", "target", "answer_key", "answers", "solution", "text",
    "completion", "content")  # fmt: skip
SWIFT_READ = (*CHATS, *SWIFT_RESPONSES, "chosen_messages", "rejected_messages", "label", "positive_messages",
    "rejected_response")  # fmt: skip
SHAREGPT = {"role": "from", "content": "value"}
"""Keys of a message as Axolotl's chat templates name them, with those of ShareGPT's rows."""
_ITEM = re.compile(r"(datasets\[(\d+)\])\.path")


def column_findings(one: FrontEnd, folder: Path | None, settings: Settings, is_command: bool) -> Iterator[Finding]:
    """Yield the local data files whose columns are not those that their type reads."""
    if file_access.closed():
        return
    readers = {"axolotl": _axolotl, "llama-factory": _factory, "trl": _trl}
    if one.name == "ms-swift":
        yield from _swift(folder, settings, is_command)
    elif one.name in readers:
        yield from readers[one.name](folder, settings)


def _text(settings: Settings, key: str) -> str:
    setting = settings.get(key)
    return "" if setting is None or setting.unresolved or setting.value is None else str(setting.value)


def _columns(folder: Path | None, name: str) -> tuple[str, ...]:
    """Return the columns of a local data file in the order of its rows; empty if it is none, or cannot be read."""
    return tuple(one for one in _keys(folder, name) if ITEMS not in one)


def _message_keys(folder: Path | None, name: str, column: str) -> set[str]:
    """Return the keys that the messages in a column of a local data file have."""
    start = f"{column}{ITEMS}"
    return {one.removeprefix(start) for one in _keys(folder, name) if one.startswith(start)}


def _keys(folder: Path | None, name: str) -> tuple[str, ...]:
    """Return the columns of a local data file, and the keys of the items in them: messages, messages[].role."""
    if Path(name).suffix.lower() not in FORMATS:
        return ()
    places = [Path(name).expanduser(), *([folder / name] if folder is not None else [])]
    try:
        path = next((place for place in places if place.is_file()), None)
        return () if path is None else _keys_of(path.resolve(), path.stat().st_mtime_ns)
    except (InputError, OSError):  # other checks and the training itself name unreadable rows
        return ()


@lru_cache(maxsize=32)  # a check parses its file again for every fix that it tries
def _keys_of(path: Path, changed: int) -> tuple[str, ...]:
    """Return the columns and the keys of their items in the first rows of a file; `changed` is when it was written."""
    from meshwright.engine.data.files import find_rows

    found: dict[str, None] = {}
    for _, row in islice(find_rows(path, "train"), ROWS):
        found |= dict.fromkeys(str(key) for key, value in row.items() if value is not None)
        lists = ((key, item) for key, value in row.items() if isinstance(value, list) for item in value)
        found |= dict.fromkeys(f"{key}{ITEMS}{part}" for key, item in lists if isinstance(item, dict) for part in item)
    return tuple(found)


def _axolotl(folder: Path | None, settings: Settings) -> Iterator[Finding]:
    for key, setting in settings.items():
        item = _ITEM.fullmatch(key)
        if item is None or setting.unresolved:
            continue
        name = item[1]
        files = [str(setting.value), *(_text(settings, f"{name}.{one}") for one in ("data_files", "data_files[0]"))]
        has = next(filter(None, (_columns(folder, one) for one in files if one)), ())
        kind = _text(settings, f"{name}.type").partition(":")[0]
        needed = AXOLOTL.get(kind, ())
        if kind in OWN and (own := _text(settings, f"{name}.{OWN[kind]}")):
            needed = (own,)
        if f"{name}.type.field_instruction" in settings:
            kind, needed = "field_instruction", (_text(settings, f"{name}.type.field_instruction"),)
        missing = [one for one in needed if one not in has]
        if not has or not missing:
            messages = set[str]().union(*(_message_keys(folder, one, one_of) for one in files for one_of in needed))
            yield from _axolotl_roles(settings, name, setting, messages) if kind == "chat_template" else ()
            continue
        at = settings.get(f"{name}.type") or settings.get(f"{name}.type.field_instruction") or setting
        fix = tuple(f"{name}.{change}" for change in _axolotl_type(has))
        yield _finding(f"{name}.type", f"type: {kind}" if kind in AXOLOTL else kind, setting, at, needed, has, fix)


def _axolotl_roles(settings: Settings, name: str, data: SourcedValue, has: set[str]) -> Iterator[Finding]:
    """Yield that the messages have their role or text under another key than the one that Axolotl reads."""
    for part, own in SHAREGPT.items():
        mapped, older = f"{name}.message_property_mappings.{part}", f"{name}.message_field_{part}"
        read = _text(settings, mapped) or _text(settings, older) or part
        if read in has or own not in has:
            continue
        key = mapped if mapped in settings else older if older in settings else f"{name}.type"
        at = settings.get(key) or data
        message = f"Axolotl reads the {part} of a message from {read}, but the messages of {data.value} have {own}"
        yield Finding(RULE, "error", mapped, message, (f"{mapped}: {own}",), at.file, at.line)


def _axolotl_type(has: Sequence[str]) -> tuple[str, ...]:
    """Return the settings of a dataset with these columns; empty if no type reads them."""
    chat = next((one for one in CHATS if one in has), "")
    if chat:
        if chat == "messages":
            return ("type: chat_template",)
        mappings = (f"message_property_mappings.{part}: {own}" for part, own in SHAREGPT.items())
        return ("type: chat_template", f"field_messages: {chat}", *mappings)
    for kind in ("alpaca", "alpaca_chat.load_qa", "completion", "input_output"):
        if set(AXOLOTL[kind]) <= set(has):
            return (f"type: {kind}",)
    pairs = (("prompt", "completion"), ("prompt", "response"), ("instruction", "response"), ("input", "output"),
        ("question", "response"))  # fmt: skip
    pair = next((one for one in pairs if set(one) <= set(has)), None)
    return () if pair is None else (f"type.field_instruction: {pair[0]}", f"type.field_output: {pair[1]}")


def _finding(
    key: str,
    what: str,
    data: SourcedValue,
    at: SourcedValue,
    needed: Sequence[str],
    has: Sequence[str],
    fix: tuple[str, ...],
    hint: str = "",
) -> Finding:
    columns = some(list(has), 8)
    message = f"{what} reads the columns {' and '.join(needed)}, but {data.value} has {columns}{hint}"
    return Finding(RULE, "error", key, message, fix, at.file, at.line)


def _factory(folder: Path | None, settings: Settings) -> Iterator[Finding]:
    place = _text(settings, "dataset_dir") or "data"
    folders = [Path(place).expanduser(), *([folder / place] if folder is not None else [])]
    registry = next((one / "dataset_info.json" for one in folders if (one / "dataset_info.json").is_file()), None)
    setting = settings.get("dataset")
    if registry is None or setting is None or setting.unresolved:
        return
    try:
        entries = json_text.loads(registry.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    names = setting.value if isinstance(setting.value, list) else str(setting.value).split(",")
    for name in (str(one).strip() for one in names):
        entry = entries.get(name) if isinstance(entries, dict) else None
        if not isinstance(entry, dict) or "file_name" not in entry:
            continue
        kind = str(entry.get("formatting", "alpaca"))
        own = entry.get("columns")
        columns = FACTORY.get(kind, {})
        if entry.get("ranking") or (isinstance(own, dict) and own.get("kto_tag")):  # their answers have other columns
            columns = {key: default for key, default in columns.items() if key != "response"}
        needed = [str(own[key]) if isinstance(own, dict) and own.get(key) else default
            for key, default in columns.items() if not isinstance(own, dict) or own.get(key)]  # fmt: skip
        has = _columns(None, str(registry.parent / str(entry["file_name"])))
        if not has or not needed or set(needed) <= set(has):
            continue
        data = SourcedValue(entry["file_name"], setting.line, setting.file)
        what = f"{registry.name}: formatting {kind} of {name}"
        yield _finding("dataset", what, data, setting, needed, has, (), _factory_entry(has))


def _factory_entry(has: Sequence[str]) -> str:
    """Return what to write into the dataset's entry of dataset_info.json; empty if nothing reads these columns."""
    chat = next((one for one in CHATS if one in has), "")
    if chat == "messages":
        tags = (
            '"tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}'
        )
        return f'; write in its entry: "formatting": "sharegpt", "columns": {{"messages": "messages"}}, {tags}'
    if chat:
        return f'; write in its entry: "formatting": "sharegpt", "columns": {{"messages": "{chat}"}}'
    from meshwright.engine.data.column_schemas import known_columns

    known = known_columns(has)
    if "text" in known:
        return '; write in its entry: "columns": {"prompt": "text"}'
    if "prompt" not in known:
        return ""
    pair = f'{{"prompt": "{known["prompt"]}", "response": "{known["response"]}"}}'
    return f'; write in its entry: "formatting": "alpaca", "columns": {pair}'


def _trl(folder: Path | None, settings: Settings) -> Iterator[Finding]:
    own = _text(settings, "dataset_text_field")
    for key, setting in settings.items():
        if not re.fullmatch(r"datasets\[\d+\]\.data_files(\[0\])?", key) or setting.unresolved:
            continue
        has = set(found := _columns(folder, str(setting.value)))
        # Rows with prompts alone, choices or labels are those of other trainers of TRL.
        if not has or any(one <= has for one in TRL) or own in has or has & {"prompt", "chosen", "label", "images"}:
            continue
        needed = ("messages (or prompt and completion, or text)",)
        yield _finding(key, "SFTTrainer", setting, setting, needed, found, (), "; rename them in the file")


def _swift(folder: Path | None, settings: Settings, is_command: bool) -> Iterator[Finding]:
    setting = settings.get("dataset")
    if setting is None or setting.unresolved or "columns" in settings:
        return
    for name in setting.value if isinstance(setting.value, list) else [setting.value]:
        path = str(name).partition("#")[0]
        found = _columns(folder, path)
        if not found or {one.lower() for one in found} & set(SWIFT_READ):
            continue
        mapping = json.dumps({found[-1]: "response"})
        fix = (f"--columns '{mapping}'" if is_command else f"columns: '{mapping}'",) if len(found) > 1 else ()
        needed = ("messages", "or query and response")
        yield _finding(
            "dataset", "ms-swift", SourcedValue(path, setting.line, setting.file), setting, needed, found, fix
        )
