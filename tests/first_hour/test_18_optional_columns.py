"""Optional columns of chat data are the union over all rows; absent or null means empty."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.engine.data.dataset_registry import open_rows
from meshwright.engine.data.sft_cache import Policy, TokenizedConversations, tokenize_conversations
from meshwright.engine.data.streaming import StreamedConversations
from meshwright.engine.data.templates import ChatTemplate
from meshwright.engine.data.tokenizers import load_tokenizer
from meshwright.errors import InputError

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int"}}}}]
OTHER = [{"type": "function", "function": {"name": "sub", "description": "a minus b"}}]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": f"{text}!"}]


MESSAGES = [
    {"messages": chat("one")},
    {"messages": chat("two"), "tools": TOOLS},
    {"messages": chat("three"), "system": "be brief", "tools": None},
    {"messages": chat("four"), "tools": OTHER, "system": None},
]
PROMPTS = [
    {"instruction": "one", "output": "1"},
    {"instruction": "two", "output": "2", "input": "more"},
    {"instruction": "three", "output": "3", "system": "be brief", "tools": TOOLS},
]
EXPECTED = {
    "messages": ["<user>one", "<tools>", "<system>be brief<user>three", '"name": "sub"'],
    "instruction": ["<user>one<", "two\n\nmore", "<tools>"],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))


def write_jsonl(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    (file := path.with_suffix(".jsonl")).write_text("\n".join(map(json.dumps, rows)))
    return file


def write_json(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    (file := path.with_suffix(".json")).write_text(json.dumps(list(rows)))
    return file


def _filled(rows: Sequence[dict[str, Any]], as_json: bool) -> list[dict[str, Any]]:
    """The rows of a table: every column in every row; lists of objects as JSON where a format has no lists."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [
        {n: json.dumps(row[n]) if as_json and isinstance(row.get(n), list) else row.get(n) for n in names}
        for row in rows
    ]


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    import csv

    filled = _filled(rows, as_json=True)
    with (file := path.with_suffix(".csv")).open("w", newline="") as out:
        writer = csv.DictWriter(out, list(filled[0]))
        writer.writeheader()
        writer.writerows(filled)
    return file


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(_filled(rows, as_json=False)), file := path.with_suffix(".parquet"))
    return file


def write_saved(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    from datasets import Dataset

    Dataset.from_list(_filled(rows, as_json=False)).save_to_disk(str(path))
    return path


def tokenized(path: Path, template: Path, **columns: str) -> TokenizedConversations:
    policy = Policy("answers", "end", 4096)
    return tokenize_conversations(
        open_rows(str(path), "train"), columns, load_tokenizer("bytes"), str(template), policy, 1
    )


def texts(found: TokenizedConversations) -> list[str]:
    tokenizer = load_tokenizer("bytes")
    return [tokenizer.decode(found.tokens(i).ids) for i in range(len(found))]


@pytest.mark.parametrize("write", [write_jsonl, write_json, write_csv, write_parquet, write_saved])
@pytest.mark.parametrize("rows", [MESSAGES, PROMPTS], ids=["messages", "instruction"])
@pytest.mark.parametrize("backwards", [False, True])
def test_every_row_keeps_its_optional_columns(
    write: Callable[..., Path], rows: list[dict[str, Any]], backwards: bool, tmp_path: Path
) -> None:
    (template := tmp_path / "template.jinja").write_text(TEMPLATE)
    ordered = rows[::-1] if backwards else rows
    found = texts(tokenized(write(ordered, tmp_path / "rows"), template))
    assert len(found) == len(rows)
    for text, expected in zip(found[::-1] if backwards else found, EXPECTED[next(iter(rows[0]))], strict=True):
        assert expected in text
    assert sum("<tools>" in text for text in found) == sum(bool(row.get("tools")) for row in rows)
    assert not any("null" in text for text in found)  # keys that other rows have are not part of a tool


def test_streaming_reads_them_too(tmp_path: Path) -> None:
    (template := tmp_path / "template.jinja").write_text(TEMPLATE)
    from meshwright.engine.data.conversations import detect_columns

    rows = open_rows(str(write_jsonl(MESSAGES, tmp_path / "rows")), "train")
    tokenizer = load_tokenizer("bytes")
    stream = StreamedConversations(
        rows,
        detect_columns(rows.first(), {}, rows.name),
        ChatTemplate(tokenizer, str(template), "answers"),
        Policy("answers", "end", 4096),
        1024,
    )
    found = [tokenizer.decode(ids) for ids in stream.samples([0, 1, 2, 3]).tokens]
    assert ["<tools>" in text for text in found] == [False, True, False, True]
    assert "<system>be brief" in found[2]


def test_the_columns_found_anywhere_are_reported(tmp_path: Path) -> None:
    (template := tmp_path / "template.jinja").write_text(TEMPLATE)
    stats = tokenized(write_jsonl(MESSAGES, tmp_path / "rows"), template).stats
    assert "messages from messages, tools from tools, system from system" in stats.lines()[0]
    few = tokenized(write_jsonl(MESSAGES[:1], tmp_path / "few"), template).stats
    assert "(messages from messages;" in few.lines()[0]


def test_a_template_without_tools_is_refused(tmp_path: Path) -> None:
    (template := tmp_path / "plain.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    path = write_jsonl(MESSAGES, tmp_path / "rows")
    with pytest.raises(InputError, match=r"rows\.jsonl:2: the chat template does not render the tools of the row"):
        tokenized(path, template)
    assert len(texts(tokenized(path, template, tools=""))) == len(MESSAGES)


def test_wrong_and_conflicting_columns_are_refused_and_can_be_left_out(tmp_path: Path) -> None:
    (template := tmp_path / "template.jinja").write_text(TEMPLATE)
    path = write_jsonl(MESSAGES, tmp_path / "rows")
    with pytest.raises(InputError, match="the dataset has no column tolls"):
        tokenized(path, template, tools="tolls")
    twice = [{"messages": [{"role": "system", "content": "a"}, *chat("x")], "system": "b"}]
    with pytest.raises(InputError, match="column system differs from the system message"):
        tokenized(write_jsonl(twice, tmp_path / "twice"), template)
    assert "<system>a<user>x" in texts(tokenized(tmp_path / "twice.jsonl", template, system=""))[0]
    assert not any("<tools>" in text for text in texts(tokenized(path, template, tools="")))


def test_files_of_a_folder_may_have_different_columns(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    write_jsonl([{"messages": chat(str(n))} for n in range(3)], folder / "chats")
    (folder / "pairs.csv").write_text("prompt,response\nq1,a1\nq2,a2\n")
    tokenizer = load_tokenizer("bytes")
    rows = open_rows(str(folder), "train", False)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    found = tokenize_conversations(rows, {}, tokenizer, str(template), Policy("answers", "end", 64), 0)
    assert (len(found), set(found.stats.columns)) == (5, {"messages", "prompt", "response"})
    columns = {"messages": "messages"}
    with pytest.raises(InputError):  # columns that the user names are those of every file
        tokenize_conversations(rows, columns, tokenizer, str(template), Policy("answers", "end", 64), 0)
