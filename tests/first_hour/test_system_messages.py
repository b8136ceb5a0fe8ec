"""Chats with system messages train models whose chat templates have no system role: Mistral 7B, Gemma."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.tiny_tokenizer import write_tiny_tokenizer

from meshwright.engine.data.conversations import Conversation
from meshwright.engine.data.files import find_rows
from meshwright.engine.data.sft_cache import Policy, TokenizedConversations, tokenize_conversations
from meshwright.engine.data.system_messages import with_merged_system
from meshwright.engine.data.tokenizers import load_tokenizer
from meshwright.engine.post_training.generate import _prompt_ids
from meshwright.errors import InputError
from meshwright.recipes.types import Data, recipe_fields

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""
SETTING = "data.merge_system=true"


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def chat(number: int, *first: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*first, turn("user", f"and {number}?"), turn("assistant", f"it is {number}")]}


def tokenized(path: Path, data: Data, tokenizer: Any) -> TokenizedConversations:
    rows = find_rows(path, "train", path.name)
    return tokenize_conversations(rows, {}, tokenizer, data.chat_template, Policy.of(data), 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with chats that have a system message, but for the first, and the same merged by hand."""
    monkeypatch.chdir(tmp_path)
    write_tiny_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "mistral.jinja").write_text(TEMPLATE)
    system, text = turn("system", "Be brief."), "Be brief.\n\nwhat is this?"
    before = [turn("user", "what is this?"), turn("assistant", "a number")]
    merged = [turn("user", text), turn("assistant", "a number")]
    written(tmp_path / "chats.jsonl", [chat(0), *(chat(n, system, *before) for n in range(1, 9))])
    written(tmp_path / "by_hand.jsonl", [chat(0), *(chat(n, *merged) for n in range(1, 9))])
    return tmp_path


def test_the_error_offers_the_setting_and_not_to_drop_the_rows(folder: Path, meshwright: Any) -> None:
    typed = ["samples", "llama3_8b_sft_config", "--dataset", "chats.jsonl", "data.chat_template=mistral.jinja"]
    typed += ["data.tokenizer=tokenizer", "data.seq_length=128"]
    refused = meshwright(*typed)
    assert refused.code == 2
    assert "chats.jsonl:2: the chat template rejects its system message: Conversation roles must" in refused.err
    assert f"fix:   {SETTING}" in refused.err
    assert "sed" not in refused.err
    assert meshwright(*typed, SETTING).code == 0
    checked = ["check", *typed[1:], "--gpus", "8xH100"]
    assert SETTING in meshwright(*checked).out
    assert "data.rows" not in meshwright(*checked, SETTING).out


@pytest.mark.parametrize("train_on", ["answers", "last_answer", "all"])
def test_the_tokens_are_those_of_chats_merged_by_hand(folder: Path, train_on: Any) -> None:
    tokenizer = load_tokenizer("tokenizer")
    settings: dict[str, Any] = {"chat_template": "mistral.jinja", "train_on": train_on, "seq_length": 128}
    ours = tokenized(folder / "chats.jsonl", Data(merge_system=True, **settings), tokenizer)
    by_hand = tokenized(folder / "by_hand.jsonl", Data(**settings), tokenizer)
    assert len(ours) == 9
    np.testing.assert_array_equal(ours.ids, by_hand.ids)
    np.testing.assert_array_equal(ours.loss_mask, by_hand.loss_mask)


def test_another_mistake_of_a_row_is_not_taken_for_it(folder: Path, meshwright: Any) -> None:
    rows = [chat(0), {"messages": [turn("user", "a"), turn("user", "b"), turn("assistant", "c")]}]
    written(folder / "chats.jsonl", rows)
    typed = ["--dataset", "chats.jsonl", "data.chat_template=mistral.jinja", "data.tokenizer=tokenizer"]
    refused = meshwright("samples", "llama3_8b_sft_config", *typed)
    assert "rejects the conversation" in refused.err
    assert SETTING not in refused.err


def test_each_message_goes_in_front_of_the_user_message_that_follows() -> None:
    chatted = Conversation([turn("system", "A"), turn("system", "B"), turn("user", "q"), turn("assistant", "a")])
    assert with_merged_system(chatted, "here").messages[0] == turn("user", "A\n\nB\n\nq")
    image = {"type": "image"}
    parts = Conversation([turn("system", "A"), turn("user", [image, {"type": "text", "text": "q"}])])
    found = with_merged_system(parts, "here").messages[0]["content"]
    assert found == [{"type": "text", "text": "A\n\n"}, image, {"type": "text", "text": "q"}]
    plain = Conversation(chatted.messages[2:])
    assert with_merged_system(plain, "here") is plain
    with pytest.raises(InputError, match=r"message 0 \(system\) has no user message after it"):
        with_merged_system(Conversation([turn("system", "A"), turn("assistant", "a")]), "here")


def test_the_setting_is_part_of_the_contract_and_reported_where_it_has_no_effect(meshwright: Any) -> None:
    field = recipe_fields()["data.merge_system"]
    assert (field.kind, field.default) == ("contract", False)
    done = meshwright("check", "llama3_8b_pretrain_config", "--gpus", "8xH100", SETTING)
    assert "unused.merge-system" in done.out


def test_generate_names_the_prompt_without_a_system_message(folder: Path) -> None:
    tokenizer = load_tokenizer("tokenizer")
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(InputError, match="rejects the system message") as refused:
        _prompt_ids(tokenizer, [turn("system", "Be brief."), turn("user", "Hi")], None)
    assert tuple(refused.value.fix) == ("'Be brief.\n\nHi' as the prompt, without a system message",)
