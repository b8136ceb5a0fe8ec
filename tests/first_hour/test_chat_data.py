"""Chat data of other tools: tool calls, weights, history, rejected rows; and a model before and after training."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import meshwright as library

PEFT = "qwen3_8b_peft_config"
CALL = {"name": "get_weather", "arguments": {"city": "Rome"}}
OTHER = {"name": "get_time", "arguments": {}}
TOOL = {"name": "get_weather", "description": "w", "parameters": {"type": "object", "properties": {}}}
TEMPLATE = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}{{ '<' + message.role + '>' + message.content }}
{%- for call in message.tool_calls or () %}{{ '<call>' + call.function.name }}
{{- ARGUMENTS }}{{ '</call>' }}{% endfor %}{{ '</s>' }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
QWEN = TEMPLATE.replace("ARGUMENTS", "call.function.arguments | tojson")  # a text would be printed in quotes
DEEPSEEK = TEMPLATE.replace("ARGUMENTS", "'' + call.function.arguments")  # rejects an object
PRINTED = TEMPLATE.replace("ARGUMENTS", "call.function.arguments")  # prints an object as Python does
MARKED = """{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}
{{- message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}</s>{% endfor %}"""
ALTERNATING = """{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}{{ '<' + message.role + '>' + message.content + '</s>' }}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
WORDS = ("data.tokenizer=bytes", "data.chat_template=chat.jinja", "data.seq_length=1024")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "chat.jinja").write_text(QWEN)
    return tmp_path


def write(name: str, *rows: Any) -> str:
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return name


def said(*turns: tuple[str, str], **keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns], **keys}


def shared(*turns: tuple[str, Any], **keys: Any) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": value} for who, value in turns], **keys}


def spans(name: str, *words: str, template: str = QWEN) -> list[tuple[bool, str]]:
    Path("chat.jinja").write_text(template)
    [one] = library.samples(PEFT, dataset=name, count=1, overrides=[*WORDS, *words]).samples
    return [(span.in_loss, span.text) for span in one.spans]


def openai(calls: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    """A row of OpenAI's format: arguments are text."""
    listed = [
        {"id": str(i), "type": "function", "function": {**one, "arguments": json.dumps(one["arguments"])}}
        for i, one in enumerate(calls)
    ]
    row = said(("user", "weather?"), ("assistant", ""), ("tool", "12"), ("assistant", "12."), **keys)
    row["messages"][1] |= {"content": None, "tool_calls": listed}
    return row


def test_tool_calls_of_every_format_are_trained_on_as_the_same_text(here: Path, meshwright: Any) -> None:
    wrapped = [{"type": "function", "function": TOOL}]
    around = (("human", "weather?"), ("observation", "12"), ("gpt", "12."))
    one, two = json.dumps(CALL), json.dumps([CALL, OTHER])
    for calls, given in (([CALL], [("function_call", one)]), ([CALL, OTHER], [("function_call", two)])):
        expected = spans(write("openai.jsonl", openai(calls, tools=wrapped)))
        turns = (around[0], *given, *around[1:])
        assert spans(write("share.jsonl", shared(*turns, tools=json.dumps([TOOL])))) == expected
        [first, _] = [text for in_loss, text in expected if in_loss]
        assert first.startswith('<call>get_weather{"city": "Rome"}</call>')
        assert ("get_time{}" in first) == (len(calls) == 2)
        assert '<tools>{"type": "function", "function": {"name": "get_weather"' in expected[0][1]
        for template in (DEEPSEEK, PRINTED):
            assert next(text for in_loss, text in spans("openai.jsonl", template=template) if in_loss) == first
    parallel = (around[0], ("tool_call", one), ("tool_call", json.dumps(OTHER)), *around[1:])
    assert spans(write("swift.jsonl", shared(*parallel, tools=[TOOL]))) == expected
    older = said(("user", "weather?"), ("assistant", ""), ("function", "12"), ("assistant", "12."))
    older["messages"][1] |= {"content": None, "function_call": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    assert spans(write("older.jsonl", older))[1] == (True, '<call>get_weather{"city": "Rome"}</call></s>')
    thought = shared(around[0], ("function_call", f"<think>hm</think>{one}"), *around[1:])
    assert spans(write("thought.jsonl", thought))[1][1].startswith("<think>hm</think><call>get_weather")
    bad = shared(around[0], ("function_call", "get_weather(Rome)"), *around[1:])
    for typed in (("check", write("bad.jsonl", bad)), ("samples", PEFT, "--dataset", "bad.jsonl", *WORDS)):
        refused = meshwright(*typed)
        assert "bad.jsonl:1: message 1 is a tool call that is not JSON" in " ".join((refused.out + refused.err).split())
    exported = meshwright(
        "export", PEFT, "--to", "automodel", "--gpus", "1xH100", "--dataset", "share.jsonl", "--out", "o"
    )
    assert exported.code == 0
    row = json.loads((here / "o" / "share.messages.jsonl").read_text())
    assert [one["role"] for one in row["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_messages_of_weight_0_are_not_in_the_loss(here: Path, meshwright: Any) -> None:
    row = said(("user", "q"), ("assistant", "bad"), ("user", "r"), ("assistant", "good"))
    for number, weight in ((0, 0), (1, 0), (3, 1.0)):
        row["messages"][number]["weight"] = weight
    name = write("w.jsonl", row, row)
    for template in (QWEN, MARKED):
        in_loss = [text for in_loss, text in spans(name, template=template) if in_loss]
        assert [text.removesuffix("</s>") for text in in_loss] == ["good"]
    refused = meshwright("samples", PEFT, "--dataset", name, *WORDS, "data.train_on=all").err
    assert "w.jsonl:1: message 0 has weight 0, and data.train_on=all trains on every token" in refused
    assert "fix:   data.train_on=answers" in refused
    for framework in ("trl", "automodel"):
        words = ("--to", framework, "--gpus", "1xH100", "--dataset", name, "--out", "o")
        assert "an assistant message has weight 0" in meshwright("export", PEFT, *words).err
    none = said(("user", "q"), ("assistant", "bad"))
    none["messages"][1]["weight"] = 0
    half = said(("user", "q"), ("assistant", "so"))
    half["messages"][1]["weight"] = 0.5
    for one, reason in (
        (none, "every assistant message has weight 0"),
        (half, "message 1 has weight 0.5; a message is in the loss (1) or not (0)"),
    ):
        for typed in (("check", write("bad.jsonl", one)), ("samples", PEFT, "--dataset", "bad.jsonl", *WORDS)):
            refused = meshwright(*typed)
            assert reason in " ".join((refused.out + refused.err).split())
    half["messages"][1] |= {"weight": 1, "train": False}
    assert "not used: messages[].train" in " ".join(meshwright("check", write("keys.jsonl", half)).out.split())


def test_the_history_of_an_instruction_is_part_of_the_conversation(here: Path, meshwright: Any) -> None:
    row = {"instruction": "q2", "input": "", "output": "a2", "system": "S", "history": [["q1", "a1"]]}
    found = spans(write("alpaca.jsonl", row))
    assert "".join(text for _, text in found) == (
        "<system>S</s><user>q1</s><assistant>a1</s><user>q2</s><assistant>a2</s>"
    )
    assert [text for in_loss, text in found if in_loss] == ["a1</s>", "a2</s>"]
    other = write("other.jsonl", {**row, "history": "none so far"})
    refused = meshwright("check", other).out
    assert "column history must contain a list of [question, answer] pairs" in " ".join(refused.split())
    assert "q1" not in str(spans(other, "data.columns.history="))


def test_a_run_is_compared_with_its_base_on_the_same_samples(here: Path, meshwright: Any) -> None:
    rows = [said(("user", f"what is {i}?"), ("assistant", f"it is {i}.")) for i in range(20)]
    data = write("chats.jsonl", *rows)
    words = ("--dataset", data, *WORDS[:2], "data.seq_length=64", "data.validation_part=0.2")
    train = ("train", PEFT, "--tiny", *words, "train.global_batch_size=4", "train.eval_every=1", "--out", "run")
    done = meshwright(*train, "train.steps=2", "optimizer.lr=0.02")
    assert done.code == 0, done.err
    after, before = (meshwright("evaluate", "run", *more, "--json").json for more in ((), ("--base",)))
    assert (after["samples"], after["part"], after["base"]) == (before["samples"], before["part"], None)
    assert after["tokens"] == before["tokens"]
    assert before["loss"] > after["loss"]
    assert "the model that run started from" in meshwright("evaluate", "run", "--base").out
    base = before["base"]
    alone = meshwright("evaluate", base, *words, "--json").json
    assert alone["loss"] == pytest.approx(before["loss"])
    assert (alone["tokens"], alone["part"]) == (before["tokens"], "20% held out")
    whole = meshwright("evaluate", base, *words[:-1], "--json").json
    assert (whole["samples"], whole["part"]) == (20, "")
    assert "--base" in meshwright("evaluate", base, *words, "--base").err
    assert "names other data" in meshwright("evaluate", base, *words, "data.dataset=mock").err
    write("chats.jsonl", *(said(("user", f"and {i}?"), ("assistant", f"it is {i}.")) for i in range(20)))
    resumed = meshwright(*train, "train.steps=3", "optimizer.lr=0.02", "--accept-changes")
    assert "the data changed, so chats.jsonl (20% held out) are other samples now" in resumed.err
    said_twice = [library.generate(base, one, max_tokens=1) for one in ("hi", [{"role": "user", "content": "hi"}])]
    assert said_twice[0].prompt_tokens == said_twice[1].prompt_tokens
    with pytest.raises(library.MeshwrightError, match="a list must have messages"):
        library.generate(base, ["hi"])


def test_rows_that_the_template_rejects_are_counted_and_a_command_drops_them(here: Path, meshwright: Any) -> None:
    good = [said(("user", f"q{i}"), ("assistant", f"a{i}")) for i in range(30)]
    tools = [openai([CALL]) if i % 3 == 0 else row for i, row in enumerate(good)]
    Path("chat.jinja").write_text(ALTERNATING)
    Path("msgs.json").write_text(json.dumps(tools, indent=1))
    Path("in.json").write_text(json.dumps({"data": tools}))
    write("msgs.jsonl", *tools)
    for name in ("msgs.json", "in.json", "msgs.jsonl"):
        place = f"{name}:1" if name.endswith("l") else f"{name}[0]"
        alone = meshwright("check", name).out
        assert f"{name}, a dataset: ok" in alone
        assert "30 conversations (messages from messages)" in alone
        refused = meshwright("samples", PEFT, "--dataset", name, *WORDS).err
        assert f"{place}: the chat template rejects the conversation: roles must alternate" in refused
        assert "; 4 more rows\n" in refused
        typed = ("check", PEFT, "--gpus", "1xH100", f"data.dataset={name}", WORDS[1], "--json")
        [found] = [one for one in meshwright(*typed).json["findings"] if one["rule"] == "data.rows"]
        assert found["message"] in refused
        [command] = [one for one in refused.partition("fix:   ")[2].split(" | ") if one.startswith(("sed", "python3"))]
        subprocess.run(command, shell=True, check=True)
        kept = shlex.split(command)[-1]
        assert meshwright("samples", PEFT, "--dataset", kept, *WORDS, "--json").json["kept"] == 20
        assert meshwright("check", PEFT, "--gpus", "1xH100", f"data.dataset={kept}", *WORDS[:2]).code == 0
    write("all.jsonl", *([openai([CALL])] * 3))
    assert "_kept" not in meshwright("samples", PEFT, "--dataset", "all.jsonl", *WORDS).err
    Path("config.json").write_text('{"train_batch_size": 8}')
    assert "a dataset" not in meshwright("check", "config.json").out


def test_repeated_and_dropped_rows_are_named(here: Path, meshwright: Any) -> None:
    good, other = said(("user", "q"), ("assistant", "a")), said(("user", "r"), ("assistant", "b"))
    empty, asked = said(("user", "q"), ("assistant", " ")), said(("user", "q"))
    write("rows.jsonl", good, other, good, empty, asked)
    reasons = ("rows.jsonl:4: every assistant message is empty", "rows.jsonl:5: no message has the role assistant")
    checked = meshwright("check", "rows.jsonl")
    shown = meshwright("samples", PEFT, "--dataset", "rows.jsonl", *WORDS)
    for text in (" ".join(one.out.split()) for one in (checked, shown)):
        assert all(one in text for one in reasons), text
        assert "1 repeated" in text
    assert "rows.jsonl:3 (the same as rows.jsonl:1)" in " ".join(checked.out.split())
    assert "sed '4d;5d' rows.jsonl > rows_kept.jsonl" in " ".join(checked.out.split())
    write("more.jsonl", other)
    several = meshwright("samples", PEFT, "--dataset", "rows.jsonl,more.jsonl", *WORDS).err
    [blend] = shlex.split(several.partition("fix:   ")[2])
    found = meshwright("samples", PEFT, blend, *WORDS, "--json").json
    assert (found["dataset"], found["rows"], found["kept"]) == ("rows.jsonl, more.jsonl", 6, 4)
    assert {one["where"].partition(":")[0] for one in found["samples"]} == {"rows.jsonl", "more.jsonl"}


def test_check_needs_neither_the_tokenizer_nor_its_packages(
    here: Path, meshwright: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's folder may be elsewhere, and `check` is in the install without torch."""
    write("chats.jsonl", said(("user", "q"), ("assistant", "a")), said(("user", "q")))
    folder = here / "model"
    folder.mkdir()
    typed = ("check", PEFT, "--gpus", "1xH100", "data.dataset=chats.jsonl", f"data.tokenizer={folder}", "--json")
    for missing in (False, True):
        if missing:
            monkeypatch.setattr("meshwright.extras._importable", lambda module: module != "transformers")
        found = [one for one in meshwright(*typed).json["findings"] if one["rule"] == "data.rows"]
        assert [one["severity"] for one in found] == ["warning"]
        assert "1 of 2 rows will be dropped: chats.jsonl:2" in found[0]["message"]


AXOLOTL = """base_model: Qwen/Qwen3-4B
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
datasets: [{path: chats.jsonl, type: chat_template}]
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 8
num_epochs: 3
optimizer: adamw_torch
learning_rate: 0.0002
bf16: true
"""
TRL = """from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("json", data_files="chats.jsonl", split="train")
args = SFTConfig(output_dir="out", max_length=2048, bf16=True, gradient_checkpointing=True)
SFTTrainer(model="Qwen/Qwen3-4B", args=args, train_dataset=ds, peft_config=LoraConfig(task_type="CAUSAL_LM")).train()
"""


@pytest.mark.parametrize(("name", "text"), [("axolotl.yml", AXOLOTL), ("sft.py", TRL)])
@pytest.mark.parametrize("beside", [True, False])
def test_check_of_another_trainers_config_reports_rows_that_nothing_can_read(
    name: str, text: str, beside: bool, meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]})
    odd = json.dumps({"messages": [{"role": "agent", "content": "hi"}]})  # another trainer may have this role
    (tmp_path / name).write_text(text)
    (data := tmp_path / "chats.jsonl").write_text(f"{chat}\n\n{odd}\n")
    monkeypatch.chdir(tmp_path if beside else "/")
    typed = ("check", name if beside else str(tmp_path / name), "--gpus", "1xH100", "--json")
    assert [one for one in meshwright(*typed).json["findings"] if one["rule"] == "data.rows"] == []
    data.write_text(f"{chat}\n" + '{"messages": [{"role": "user"\n' + f"{chat}\n")
    answer = meshwright(*typed)
    found = [one for one in answer.json["findings"] if one["rule"] == "data.rows"]
    assert answer.code == 1
    assert len(found) == 1
    assert "chats.jsonl:2: not JSON" in found[0]["message"]
    assert "the file cannot be loaded" in found[0]["message"]


def test_check_reports_the_texts_that_a_pretraining_refuses(here: Path, meshwright: Any) -> None:
    typed = ("check", "qwen3_600m_pretrain_config", "--gpus", "1xH100", "data.tokenizer=bytes", "--json")
    write("rows.jsonl", {"text": "one"}, {"text": None}, {"content": "two"}, {"text": ""})
    (here / "texts").mkdir()
    (here / "texts" / "a.txt").write_bytes(b"one\n\ntwo\n\ndrei: \xe4\n")
    write("other.jsonl", {"content": "one"}, {"content": "two"})
    write("chats.jsonl", {"messages": []})
    reasons = {
        "rows.jsonl": (
            "rows.jsonl:2: 'text' is empty, not text; rows.jsonl:3: has no 'text'",
            "sed '2d;3d' rows.jsonl",
        ),
        "texts": ("texts/a.txt:5: not UTF-8", "meshwright tokenize texts --tokenizer bytes --out TOKENS --skip-bad-"),
        "other.jsonl": ("other.jsonl:1: has no 'text'; it has content", "data.columns.text=content"),
        "chats.jsonl": ("it has messages (of type list)", "data.columns.text=COLUMN | --goal sft"),
    }
    for name, (reason, fix) in reasons.items():
        for answer in (meshwright(*typed, f"data.dataset={name}"), meshwright(*typed, f"data.blend={name}:1")):
            [found] = [one for one in answer.json["findings"] if one["rule"] == "data.rows"]
            assert (answer.code, found["severity"]) == (1, "error")
            assert reason in found["message"], found
            fixes = found.get("no_fix") or " | ".join(found["fix"])
            assert fix in fixes, found
            assert "sed" not in fixes or name == "rows.jsonl"
    reads = meshwright(*typed, "data.dataset=other.jsonl", "data.columns.text=content").json["findings"]
    assert "data.rows" not in {one["rule"] for one in reads}
    folder = meshwright("check", "texts")
    assert (folder.code, "but data (texts/a.txt)" in folder.err) == (2, True)
    assert folder.err.partition("fix:   ")[2].strip().endswith("data.dataset=texts")
    alone = " ".join(meshwright("check", "rows.jsonl").out.split())
    assert "rows.jsonl:3" in alone
    write("kept.jsonl", {"text": "one"}, {"text": None})
    alone = " ".join(meshwright("check", "kept.jsonl").out.split())
    assert "--goal pretrain refuses it: kept.jsonl:2: 'text' is empty" in alone
    assert "2 texts (text from text)" in alone


@pytest.mark.parametrize(
    ("typed", "weights"),
    [
        ("texts/books:0.7,code.jsonl:0.3", [0.7, 0.3]),
        ("0.7 texts/books 0.3 code.jsonl", [0.7, 0.3]),
        ("texts/books,code.jsonl", [1, 1]),
        ('{"texts/books": 2, "code.jsonl": 1}', [2, 1]),
    ],
)
def test_several_sources_of_a_pretraining_are_written_as_a_blend(
    typed: str, weights: list[float], here: Path, meshwright: Any
) -> None:
    (here / "texts" / "books").mkdir(parents=True)
    (here / "texts" / "books" / "a.txt").write_text("one two three")
    write("code.jsonl", {"text": "def f(): pass"})
    words = ("train", "qwen3_600m_pretrain_config", "--tiny", "data.tokenizer=bytes")
    refused = meshwright(*words, "--dataset", typed)
    assert (refused.code, "write them as a blend" in refused.err) == (2, True)
    [blend] = shlex.split(refused.err.partition("fix:   ")[2])
    assert blend.startswith("data.blend=")
    accepted = meshwright("recipe", words[1], blend, "--json").json["recipe"]["data"]["blend"]
    assert accepted == dict(zip(("texts/books", "code.jsonl"), weights, strict=True))
    if typed.startswith("0.7"):
        [fix] = shlex.split(meshwright(*words, f"data.blend={typed}").err.partition("fix:   ")[2])
        assert meshwright("recipe", words[1], fix, "--json").json["recipe"]["data"]["blend"] == accepted
    gone = typed.replace("code.jsonl", "gone.jsonl")
    assert "of which gone.jsonl is not here" in meshwright(*words, "--dataset", gone).err
