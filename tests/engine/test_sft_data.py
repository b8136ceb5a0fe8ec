"""Conversations from files to samples: schemas, masks, truncation, packing, grouping, streaming, cache, hold-out."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.engine.tiny_tokenizer import PLAIN, write_tiny_tokenizer

from meshwright.engine.data import sft_cache
from meshwright.engine.data.conversations import Conversation, detect_columns, parse_conversation
from meshwright.engine.data.dataset_registry import open_rows
from meshwright.engine.data.files import find_rows
from meshwright.engine.data.instructions import open_instructions
from meshwright.engine.data.length_grouping import WIDTH_MULTIPLE, WINDOW_STEPS, LengthGrouped
from meshwright.engine.data.packing import pack
from meshwright.engine.data.prompt_response import MockConversations
from meshwright.engine.data.sft_cache import Policy, truncate
from meshwright.engine.data.templates import ChatTemplate, MaskedTokens
from meshwright.engine.data.tokenizers import check_ids, load_tokenizer
from meshwright.errors import InputError
from meshwright.hub import hub_reachable
from meshwright.recipes import types

VOCAB = 256
FORK = multiprocessing.get_context("fork")
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture(autouse=True)
def _separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("MESHWRIGHT_DATA", raising=False)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("plain"), markers=False)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("bare"), chat_template=False)


def recipe(dataset: Path | str, tokenizer: Path | None = None, **data: Any) -> types.Recipe:
    section = types.Data(
        dataset=str(dataset), tokenizer=str(tokenizer or ""), **{"seq_length": 64, "workers": 0, **data}
    )
    return types.Recipe(
        name="sft",
        model="llama3_8b",
        goal="sft",
        cluster="1xH100",
        data=section,
        train=types.Train(global_batch_size=4, per_token_loss=True),
    )


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def target_text(tokenizer: Any, tokens: MaskedTokens) -> str:
    """Return the target tokens as text, with | at gaps between them."""
    runs, last = [], -2
    for place in np.flatnonzero(tokens.loss_mask):
        if place != last + 1:
            runs.append([])
        runs[-1].append(int(tokens.ids[place]))
        last = place
    return "|".join(tokenizer.decode(run) for run in runs)


# Masks.


@pytest.mark.parametrize("kind", ["marked", "plain"])
@pytest.mark.parametrize(
    ("train_on", "expected"), [("answers", "two<|im_end|>|four<|im_end|>"), ("last_answer", "four<|im_end|>")]
)
def test_loss_mask_covers_answers_and_their_end_of_turn_tokens(
    kind: str, train_on: str, expected: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = load_tokenizer(request.getfixturevalue(kind))
    (found,) = ChatTemplate(tokenizer, "", train_on).tokens([Conversation(CHAT)], ["here"])
    assert target_text(tokenizer, found) == expected
    whole = "<|bos|>" + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    assert tokenizer.decode(found.ids) == whole


def test_mask_computed_by_hand(plain: Path) -> None:
    tokenizer = load_tokenizer(plain)
    chat = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}])
    (found,) = ChatTemplate(tokenizer, "", "answers").tokens([chat], ["here"])
    # <bos> <start> u s er \n a <end> \n <start> a s s is t an t \n b c <end> \n, with the pairs of the tiny tokenizer
    texts = [tokenizer.decode([i]) for i in found.ids]
    assert texts[-5:] == ["\n", "b", "c", "<|im_end|>", "\n"]
    assert found.loss_mask.tolist() == [False] * (len(texts) - 4) + [True, True, True, False]


def test_mask_matches_transformers(marked: Path) -> None:
    tokenizer = load_tokenizer(marked)
    theirs = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    (ours,) = ChatTemplate(tokenizer, "", "answers").tokens([Conversation(CHAT)], ["here"])
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.loss_mask.tolist() == [bool(one) for one in theirs["assistant_masks"]]


def test_train_on_all_masks_only_the_first_token(plain: Path) -> None:
    (found,) = ChatTemplate(load_tokenizer(plain), "", "all").tokens([Conversation(CHAT)], ["here"])
    assert found.loss_mask.tolist() == [False] + [True] * (len(found.ids) - 1)


def test_template_that_rewrites_earlier_turns_needs_train_on_last_answer(plain: Path, tmp_path: Path) -> None:
    rewriting = PLAIN.replace(
        "message['content']", "(message['content'] if loop.last or message['role'] == 'user' else 'forgotten')"
    )
    file = tmp_path / "template.jinja"
    file.write_text(rewriting)
    tokenizer = load_tokenizer(plain)
    with pytest.raises(InputError, match=r"chats\.jsonl:3: the chat template renders message 0") as error:
        ChatTemplate(tokenizer, str(file), "answers").tokens([Conversation(CHAT[2:])], ["chats.jsonl:3"])
    assert "data.train_on=last_answer" in error.value.fix
    (found,) = ChatTemplate(tokenizer, str(file), "last_answer").tokens([Conversation(CHAT)], ["here"])
    assert target_text(tokenizer, found) == "four<|im_end|>"


def test_template_gets_tools_and_its_errors_name_the_row(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ tools[0]['name'] }}" + PLAIN)
    tokenizer = load_tokenizer(plain)
    template = ChatTemplate(tokenizer, str(file), "answers")
    (found,) = template.tokens([Conversation(CHAT, tools=[{"name": "clock"}])], ["here"])
    assert tokenizer.decode(found.ids).startswith("clock<|bos|>")
    with pytest.raises(InputError, match=r"chats\.jsonl:9: the chat template rejects"):
        template.tokens([Conversation(CHAT)], ["chats.jsonl:9"])


def test_template_cannot_escape_its_sandbox(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError, match="the chat template rejects"):
        ChatTemplate(load_tokenizer(plain), str(file), "all").tokens([Conversation(CHAT)], ["here"])


def test_templates_get_a_fixed_date(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ strftime_now('%d %b %Y') }}" + PLAIN)
    tokenizer = load_tokenizer(plain)
    (found,) = ChatTemplate(tokenizer, str(file), "answers").tokens([Conversation(CHAT)], ["here"])
    assert tokenizer.decode(found.ids).startswith("26 Jul 2024<|bos|>")


def test_without_a_template_only_prompt_response_pairs_are_accepted(bare: Path) -> None:
    tokenizer = load_tokenizer(bare)
    template = ChatTemplate(tokenizer, "", "answers")
    prompt = parse_conversation(
        {"prompt": "one", "response": "two"}, {"prompt": "prompt", "response": "response"}, "here"
    )
    text = parse_conversation({"text": "abc"}, {"text": "text"}, "here")
    joined, whole = template.tokens([prompt, text], ["here", "here"])
    assert tokenizer.decode(joined.ids) == "one\ntwo<|im_end|>"
    assert target_text(tokenizer, joined) == "two<|im_end|>"
    assert target_text(tokenizer, whole) == "bc<|im_end|>"
    with pytest.raises(InputError, match="needs a chat template"):
        template.tokens([Conversation(CHAT)], ["here"])


# Column schemas and malformed rows.


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"messages": CHAT[1:3]}, "one", "two"),
        ({"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}, "one", "two"),
        ({"prompt": "one", "completion": "two", "id": 7}, "one", "two"),
        ({"instruction": "add", "input": "1 1", "output": "two"}, "add\n\n1 1", "two"),
        ({"instruction": "add", "input": "", "output": "two"}, "add", "two"),
        (
            {"context": "c", "question": "one", "answers": {"text": ["two", "2"], "answer_start": [0, 0]}},
            "c\n\none",
            "two",
        ),
        ({"question": "one", "answer": "two"}, "one", "two"),
        ({"problem": "one", "generated_solution": "two"}, "one", "two"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}]}, CHAT[2]]}, "one", "two"),
    ],
)
def test_known_schemas_are_detected(row: dict[str, Any], prompt: str, response: str) -> None:
    chat = parse_conversation(row, detect_columns(row, {}, "set"), "here")
    assert [message["content"] for message in chat.messages] == [prompt, response]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_columns_can_be_set_and_wrong_ones_are_reported() -> None:
    available = ["quest", "reply", "id"]
    given = {"prompt": "quest", "response": "reply"}
    optional = {"tools": "tools", "system": "system"}  # a later row may have them
    assert detect_columns(available, given, "set") == {**optional, **given}
    assert detect_columns(available, {**given, "tools": "", "system": ""}, "set") == given
    with pytest.raises(InputError, match="no column rely; did you mean reply") as error:
        detect_columns(available, {"prompt": "quest", "response": "rely"}, "set")
    assert error.value.fix == ("data.columns.response=reply",)
    with pytest.raises(InputError, match=r"unknown data\.columns promt; did you mean prompt"):
        detect_columns(available, {"promt": "quest"}, "set")
    with pytest.raises(InputError, match="response is not mapped"):
        detect_columns(available, {"prompt": "quest"}, "set")
    with pytest.raises(InputError, match="columns quest, reply, id, which match no known conversation schema"):
        detect_columns(available, {}, "set")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "not JSON"),
        ('["a"]', "must be a JSON object"),
        ('{"mesages": []}', "no column messages; did you mean mesages"),
        ('{"messages": "x"}', "not a JSON list"),
        ('{"messages": []}', "must contain a list of messages, not an empty list"),
        ('{"messages": [7]}', "message 0 must be an object"),
        ('{"messages": [{"role": "asistant", "content": "x"}]}', "unknown role asistant; did you mean assistant"),
        ('{"messages": [{"content": "x"}]}', "message 0 has no role"),
        ('{"messages": [{"role": "user"}]}', "message 0 .user. has no content"),
        ('{"messages": [{"role": "user", "content": 3}]}', "content of message 0 must be text, not int"),
    ],
)
def test_malformed_row_is_reported_with_line_and_reason(line: str, reason: str, tmp_path: Path, marked: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT}])
    path.write_text(path.read_text() + "\n" + line + "\n")  # an empty line counts as a line
    with pytest.raises(InputError, match=rf"chats\.jsonl:3: .*{reason}"):
        open_instructions(recipe(path, marked), VOCAB)


def test_rows_without_target_tokens_are_dropped_and_logged(
    tmp_path: Path, marked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": [CHAT[1], {"role": "assistant", "content": " "}]}]
    path = write_jsonl(tmp_path / "chats.jsonl", rows)
    open_instructions(recipe(path, marked, seq_length=200), VOCAB)
    logged = capsys.readouterr().err
    assert "1 of 3 conversations" in logged
    assert "messages from messages" in logged
    assert "2 without target tokens, first" in logged
    assert "chats.jsonl:2: no message has the role assistant" in logged
    with pytest.raises(InputError, match="none of its 2 rows has target tokens"):
        open_instructions(recipe(write_jsonl(tmp_path / "none.jsonl", rows[1:]), marked), VOCAB)


# Files.


def test_every_file_format_returns_the_same_rows(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": f"ask {i}", "response": f'say {i}, "é"'} for i in range(5)]
    lines = write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "c.jsonl.gz", "wb") as file:
        file.write(lines.read_bytes())
    quoted = "".join('{},"{}"\n'.format(row["prompt"], row["response"].replace('"', '""')) for row in rows)
    (tmp_path / "d.csv").write_text("prompt,response\n" + quoted)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "e.parquet")
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "f")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "g")
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.csv", "e.parquet", "f", "g"):
        found = find_rows(tmp_path / name, "train")
        assert [row for _, row in found] == rows, name
        assert [row for _, row in found.read(3)] == rows[3:], name
        assert found.count() in (5, None), name
    assert [row for _, row in find_rows(tmp_path / "g", "test")] == rows[:1]


def test_saved_dataset_cannot_escape_its_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a", "response": "b"}]).save_to_disk(tmp_path / "set")
    state = tmp_path / "set" / "state.json"
    file = json.loads(state.read_text())["_data_files"][0]["filename"]
    (tmp_path / "set" / file).rename(tmp_path / file)
    state.write_text(state.read_text().replace(file, f"../{file}"))
    with pytest.raises(InputError, match="outside its folder"):
        find_rows(tmp_path / "set", "train")


def test_folder_is_read_by_split_and_skips_rows_across_files(tmp_path: Path) -> None:
    for name, values in (("train-00000-of-00002", [0, 1]), ("train-00001-of-00002", [2, 3]), ("test", [4])):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": str(i)} for i in values])
    train = find_rows(tmp_path, "train")
    assert [row["text"] for _, row in train] == ["0", "1", "2", "3"]
    assert [row["text"] for _, row in train.read(3)] == ["3"]
    assert [row["text"] for _, row in find_rows(tmp_path, "test")] == ["4"]
    with pytest.raises(InputError, match=r"unknown data\.split tset; did you mean test"):
        find_rows(tmp_path, "tset")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name in ("chats", "more", "test"):
        write_jsonl(mixed / f"{name}.jsonl", [{"text": name}])
    assert [row["text"] for _, row in find_rows(mixed, "train")] == ["chats", "more"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no readable files"):
        find_rows(tmp_path / "empty", "train")


def test_corrupt_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "b.json").write_text("[1,")
    (tmp_path / "c.csv").write_text("prompt,response\nonly one\n")
    for name, reason in (
        ("a.parquet", "not Parquet"),
        ("b.json", "not JSON"),
        ("c.csv", "does not have the header's 2 columns"),
    ):
        with pytest.raises(InputError, match=reason):
            list(find_rows(tmp_path / name, "train"))


# Truncation.


@pytest.mark.parametrize(("truncation", "kept", "loss_mask"), [("end", [0, 1, 2], [1, 2]), ("start", [3, 4, 5], [5])])
def test_long_conversations_are_truncated(truncation: str, kept: list[int], loss_mask: list[int]) -> None:
    tokens = MaskedTokens(np.arange(6, dtype=np.int32), np.array([0, 1, 1, 1, 0, 1], dtype=bool))
    found = truncate(tokens, Policy("answers", truncation, 3), "here")
    assert found is not None
    assert found.ids.tolist() == kept
    assert found.ids[found.loss_mask].tolist() == loss_mask


def test_long_conversations_are_dropped_or_refused() -> None:
    tokens = MaskedTokens(np.arange(6, dtype=np.int32), np.ones(6, dtype=bool))
    assert truncate(tokens, Policy("answers", "drop", 3), "here") is None
    with pytest.raises(InputError, match=r"chats\.jsonl:4: the conversation has 6 tokens, a sample fits 3"):
        truncate(tokens, Policy("answers", "refuse", 3), "chats.jsonl:4")


def test_truncated_and_dropped_rows_are_logged(
    tmp_path: Path, marked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long_prompt = [{"role": "user", "content": "x" * 80}, {"role": "assistant", "content": "y"}]
    long_answer = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 80}]
    rows = [{"messages": m} for m in (long_prompt, long_answer, CHAT[1:3])]
    path = write_jsonl(tmp_path / "chats.jsonl", rows)
    open_instructions(recipe(path, marked), VOCAB)
    logged = capsys.readouterr().err
    assert "2 of 3 conversations" in logged
    assert "1 of them truncated" in logged
    assert "1 dropped: 1 without target tokens after truncation" in logged
    open_instructions(recipe(path, marked, truncation="drop"), VOCAB)
    assert "2 dropped: 2 too long" in capsys.readouterr().err


# Packing.


@pytest.mark.parametrize(("longest", "waste"), [(200, 0.005), (513, 0.03)])
def test_packing_fills_samples_and_loses_nothing(longest: int, waste: float) -> None:
    lengths = np.random.default_rng(0).integers(1, longest + 1, size=3000)
    packs = pack(lengths, 513)
    assert sorted(i for one in packs for i in one) == list(range(3000))
    assert max(int(lengths[one].sum()) for one in packs) <= 513
    assert len(packs) <= (1 + waste) * -(-int(lengths.sum()) // 513)
    assert packs == pack(lengths.tolist(), 513)


def test_packing_is_best_fit_decreasing() -> None:
    assert pack([5, 3, 2, 5], 5) == [[0], [3], [1, 2]]
    assert pack([4, 6, 4, 3, 1], 7) == [[1, 4], [0], [2, 3]]


def packed_set(tmp_path: Path, count: int = 30) -> Path:
    random = np.random.default_rng(1)
    rows = [{"prompt": f"{i}", "response": "x" * int(random.integers(1, 30))} for i in range(count)]
    return write_jsonl(tmp_path / "chats.jsonl", rows)


def test_packed_samples_keep_documents_intact_and_separate(tmp_path: Path, bare: Path) -> None:
    source = open_instructions(recipe(packed_set(tmp_path), bare, packing=True), VOCAB)
    tokenizer = load_tokenizer(bare)
    seen: Counter[str] = Counter()
    count = len(source.corpus)  # type: ignore[attr-defined]
    samples = source.samples(range(count))
    assert samples.tokens.shape == (count, 65)
    assert samples.documents is not None
    for tokens, loss_mask, documents in zip(samples.tokens, samples.loss_mask, samples.documents, strict=True):
        last = int(documents.max())
        boundaries = np.flatnonzero(np.diff(documents))
        assert not loss_mask[boundaries].any()
        for number in range(last + 1):
            indices = np.flatnonzero(documents == number)
            text = tokenizer.decode(tokens[indices[0] : indices[-1] + 2] if indices[-1] == 63 else tokens[indices])
            if text.startswith("<|pad|>"):
                assert not loss_mask[indices].any()
                continue
            seen[text.split("\n")[0]] += 1
            prompt = len(text.split("\n")[0]) + 1
            answer = len(text.split("\n")[1].replace("<|im_end|>", "")) + 1
            assert int(loss_mask[indices].sum()) == answer
            assert np.flatnonzero(loss_mask[indices])[0] == prompt - 1
    assert seen == Counter({str(i): 1 for i in range(30)})


# Shuffle, length groups, streams.


def numbers_of(source: Any, tokenizer: Any, numbers: range, step: int = 4) -> list[str]:
    found = []
    for first in range(numbers.start, numbers.stop, step):
        tokens = source.samples(range(first, first + step)).tokens
        found += [tokenizer.decode(row).split("\n")[0] for row in tokens]
    return found


def test_epoch_visits_every_conversation_once_in_a_new_order(tmp_path: Path, bare: Path) -> None:
    path, tokenizer = packed_set(tmp_path, 32), load_tokenizer(bare)
    source = open_instructions(recipe(path, bare), VOCAB)
    epochs = [numbers_of(source, tokenizer, range(32 * e, 32 * e + 32)) for e in range(2)]
    assert sorted(map(int, epochs[0])) == sorted(map(int, epochs[1])) == list(range(32))
    assert epochs[0] != epochs[1]


def test_length_groups_visit_all_samples_equally_often(tmp_path: Path, bare: Path) -> None:
    path, tokenizer = packed_set(tmp_path, 32), load_tokenizer(bare)
    source = open_instructions(recipe(path, bare, seq_length=256, group_by_length=True), VOCAB)
    window = WINDOW_STEPS * 4
    assert Counter(numbers_of(source, tokenizer, range(window))) == {str(i): window // 32 for i in range(32)}
    first, again = source.samples([0, 1, 2, 3]), source.samples([2, 3])
    assert first.tokens.shape[1] == WIDTH_MULTIPLE + 1 < 257
    assert (first.tokens[2:] == again.tokens).all()


def test_step_is_as_wide_as_its_longest_sample_on_every_rank() -> None:
    inner = MockConversations(VOCAB, 500, seed=3)
    source = LengthGrouped(inner, step_size=8, seed=3, max_width=500)
    widths = []
    for step in range(WINDOW_STEPS):
        numbers = range(8 * step, 8 * step + 8)
        samples = source.samples(numbers)
        parts = [source.samples(numbers[i : i + 2]) for i in range(0, 8, 2)]
        assert (np.concatenate([part.tokens for part in parts]) == samples.tokens).all()
        lengths = samples.loss_mask.shape[1] - samples.loss_mask[:, ::-1].argmax(1)  # answers end a sample
        assert samples.width == min(-(-int(lengths.max()) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, 500)
        widths.append(samples.width)
    assert len(set(widths)) > 3
    assert widths != sorted(widths)
    assert np.mean(widths) < 0.65 * 500
    with pytest.raises(ValueError, match="2 steps"):
        source.samples([7, 8])


def test_stream_returns_row_n_for_sample_n_and_wraps_around(tmp_path: Path, bare: Path) -> None:
    path, tokenizer = packed_set(tmp_path, 10), load_tokenizer(bare)
    given = recipe(path, bare, streaming=True)
    source = open_instructions(given, VOCAB)
    assert numbers_of(source, tokenizer, range(24)) == [str(i % 10) for i in range(24)]
    resumed = open_instructions(given, VOCAB)
    assert numbers_of(resumed, tokenizer, range(16, 24)) == [str(i % 10) for i in range(16, 24)]
    other_rank = open_instructions(given, VOCAB)
    assert [tokenizer.decode(t).split("\n")[0] for t in other_rank.samples([2, 3, 6, 7]).tokens] == ["2", "3", "6", "7"]
    assert (other_rank.samples([1]).tokens == source.samples([1]).tokens).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"streaming": True, "packing": True}, "does not know sample lengths"),
        ({"streaming": True, "validation_part": 0.1}, "selects samples by their content"),
        ({"group_by_length": True, "packing": True}, "all have the same length"),
    ],
)
def test_incompatible_settings_are_rejected(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        open_instructions(recipe("mock", **changes), VOCAB)


def test_streamed_rows_without_target_tokens_are_logged(
    tmp_path: Path, bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": ""}, {"prompt": "a" * 80, "response": "b"}]
    source = open_instructions(recipe(write_jsonl(tmp_path / "chats.jsonl", rows), bare, streaming=True), VOCAB)
    assert source.samples([0, 1, 2]).loss_mask.any(1).tolist() == [True, False, False]
    assert (
        "chats.jsonl:2: every assistant message is empty; 1 row without target tokens so far" in capsys.readouterr().err
    )


def test_length_grouping_with_pipelines_is_rejected() -> None:
    piped = msgspec.structs.replace(recipe("mock", group_by_length=True), layout=types.Layout(pp=2))
    with pytest.raises(InputError, match="pipelines need samples of equal length"):
        open_instructions(piped, VOCAB)


# Held-out data.


def test_held_out_rows_are_selected_by_content_and_never_trained_on(tmp_path: Path, bare: Path) -> None:
    rows = [{"prompt": f"{i % 200}", "response": "x"} for i in range(400)]  # every row twice
    given = recipe(write_jsonl(tmp_path / "chats.jsonl", rows), bare, validation_part=0.2)
    sides = []
    for held_out in (False, True):
        source = open_instructions(given, VOCAB, held_out=held_out)
        texts = numbers_of(source, load_tokenizer(bare), range(len(source.corpus)), 1)  # type: ignore[attr-defined]
        assert set(Counter(texts).values()) == {2}
        sides.append(set(texts))
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 200
    assert 20 <= len(sides[1]) <= 60


def test_evaluation_reads_another_dataset_or_split(tmp_path: Path, bare: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"prompt": "t", "response": "x"}])
    write_jsonl(folder / "test.jsonl", [{"prompt": "e", "response": "x"}])
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "o", "response": "x"}])
    tokenizer = load_tokenizer(bare)
    for validation, first in (("test", "e"), (str(other), "o")):
        source = open_instructions(recipe(folder, bare, validation=validation), VOCAB, held_out=True)
        assert tokenizer.decode(source.samples([0]).tokens[0])[0] == first


def test_evaluation_without_validation_data_is_rejected_before_the_first_step(tmp_path: Path, bare: Path) -> None:
    given = recipe(packed_set(tmp_path), bare)
    given = msgspec.structs.replace(given, train=msgspec.structs.replace(given.train, eval_every=5))
    with pytest.raises(InputError, match=r"train\.eval_every=5, but no validation data is set"):
        open_instructions(given, VOCAB)


# The cache.


def test_data_is_tokenized_once_and_again_after_changes(
    tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    inner = sft_cache._build
    monkeypatch.setattr(sft_cache, "_build", lambda *args: (built.append(args[0]), inner(*args)))
    path = packed_set(tmp_path)
    given = recipe(path, bare)
    ranks = [threading.Thread(target=open_instructions, args=(given, VOCAB)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(built) == 1
    open_instructions(recipe(path, bare, packing=True), VOCAB)  # other samples, same tokens
    assert len(built) == 1
    open_instructions(recipe(path, bare, truncation="start"), VOCAB)
    path.write_text(path.read_text() + '{"prompt": "new", "response": "x"}\n')
    open_instructions(given, VOCAB)
    assert len(built) == len(set(built)) == 3
    assert not list((tmp_path / "cache" / "conversations").glob("*.*/"))  # no partial folders


def test_tokens_do_not_depend_on_workers(tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_cache, "PARALLEL_ROWS", 1)
    monkeypatch.setattr(sft_cache, "CHUNK", 8)
    monkeypatch.setattr(sft_cache, "worker_pool", lambda workers: ProcessPoolExecutor(workers, FORK))
    path = packed_set(tmp_path)
    alone = open_instructions(recipe(path, bare), VOCAB).samples(range(30))
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "other"))
    together = open_instructions(recipe(path, bare, workers=2), VOCAB).samples(range(30))
    assert (alone.tokens == together.tokens).all()
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(InputError, match=r"chats\.jsonl:31: not JSON"):
        open_instructions(recipe(path, bare, workers=2), VOCAB)


def test_corrupt_cache_is_detected(tmp_path: Path, bare: Path) -> None:
    given = recipe(packed_set(tmp_path), bare)
    open_instructions(given, VOCAB)
    (file,) = (tmp_path / "cache").rglob("ids.bin")
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InputError, match="files are inconsistent") as error:
        open_instructions(given, VOCAB)
    assert error.value.fix == (f"rm -r {file.parent}",)


# Dataset names, tokenizers, mock data.


def test_dataset_names_resolve_to_folders_or_report_where_was_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hub_reachable()
    with pytest.raises(
        InputError, match=r"searched the path squad.*the local Hugging Face cache; the hub as rajpurkar/squad"
    ) as error:
        open_rows("squad", "train")
    assert error.value.fix[0] == "hf download rajpurkar/squad --repo-type dataset --local-dir FOLDER/squad"
    with pytest.raises(InputError, match="did you mean squad"):
        open_rows("sqaud", "train")
    with pytest.raises(InputError, match="no such file or folder"):
        open_rows("./squad.jsonl", "train")
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path))
    for config in ("main", "socratic"):
        (tmp_path / "gsm8k" / config).mkdir(parents=True)
        write_jsonl(tmp_path / "gsm8k" / config / "train.jsonl", [{"question": config, "answer": "x"}])
    assert [row["question"] for _, row in open_rows("gsm8k", "train")] == ["main"]


def test_registered_dataset_is_read_by_its_name(tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path))
    row = {"id": "1", "title": "t", "context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [0]}}
    (tmp_path / "llm-finetune").mkdir()
    write_jsonl(tmp_path / "llm-finetune" / "train.jsonl", [row])
    source = open_instructions(recipe("llm-finetune", bare), VOCAB)
    assert load_tokenizer(bare).decode(source.samples([0]).tokens[0]).startswith("c\n\nq\na<|im_end|>")


def test_missing_or_too_large_tokenizers_are_reported(tmp_path: Path, bare: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(InputError, match="no tokenizer in this folder"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="not a folder and not in the local"):
        load_tokenizer("nobody/nothing")
    check_ids(load_tokenizer(bare), VOCAB)
    with pytest.raises(InputError, match="has ids up to 255, but the model's vocabulary has 200 tokens"):
        open_instructions(recipe(packed_set(tmp_path), bare), 200)


@pytest.mark.parametrize("packing", [False, True])
def test_mock_answers_follow_from_their_prompts(packing: bool) -> None:
    source = open_instructions(recipe("mock", packing=packing), VOCAB)
    samples = source.samples(range(50))
    assert (samples.tokens == MockConversations(VOCAB, 64, 1234, packing).samples(range(50)).tokens).all()
    follows = (samples.tokens[:, 1:] - samples.tokens[:, :-1]) % VOCAB == 1
    assert follows[samples.loss_mask].all()
    assert 0.2 < samples.loss_mask.mean() < 0.8
    assert len(set(samples.loss_mask.sum(1).tolist())) > 10
    if packing:
        assert samples.documents is not None
        assert not samples.loss_mask[:, :-1][np.diff(samples.documents) != 0].any()
        assert len(set(samples.documents.max(1).tolist())) > 1
