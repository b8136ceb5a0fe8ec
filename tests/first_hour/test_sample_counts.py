"""Samples of the user's own data are counted as train makes them, and what a template or a row loses is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as library
from meshwright.api import sample_lengths
from meshwright.api.dataset_length import dataset_notes
from meshwright.cli.run import run
from meshwright.errors import InputError

PEFT = "qwen3_8b_peft_config"
QLORA: dict[str, Any] = {"gpus": "1x4090", "goal": "qlora"}
PLAIN = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CALLS = PLAIN.replace(
    "(m.content or '')",
    "(m.content or '') }}{% for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}{{ ''",
)
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"id": 11}'}}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    Path("plain.jinja").write_text(PLAIN)
    Path("calls.jinja").write_text(CALLS)
    return tmp_path


def write(name: str, *rows: Any) -> str:
    Path(name).write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return name


def chat(answer: str, question: str = "Why does the export fail?", **keys: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **keys}


def with_call(**keys: Any) -> dict[str, Any]:
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "open"}
    first, last = chat("It is open.")["messages"]
    return {"messages": [first, called, result, last], **keys}


def budget_of(dataset: str, *words: str) -> str:
    plan = library.recommend("qwen3-8b", **QLORA, overrides=[f"data.dataset={dataset}", "train.epochs=3", *words])
    assert plan.budget is not None
    return str(plan.budget.tokens_from)


LONG = "connection reset " * 4_000


def test_recommend_counts_the_samples_that_train_makes() -> None:
    name = write("tickets.jsonl", *(chat(LONG if number % 10 == 0 else "Restart it.") for number in range(100)))
    words = ("data.tokenizer=bytes", "data.seq_length=512")
    counted = library.samples(PEFT, dataset=name, count=1, overrides=[*words, "data.packing=true"])
    assert f"{counted.samples_per_epoch} packed samples, counted with bytes" in budget_of(
        name, *words, "data.packing=true"
    )
    padded = library.samples(PEFT, dataset=name, count=1, overrides=[*words, "data.packing=false"])
    assert f": {padded.samples_per_epoch} samples" in budget_of(name, *words, "data.packing=false")
    dropped = (*words, "data.packing=true", "data.truncation=drop")
    fewer = library.samples(PEFT, dataset=name, count=1, overrides=dropped).samples_per_epoch
    assert fewer < counted.samples_per_epoch
    assert f"{fewer} packed samples" in budget_of(name, *dropped)


def test_without_a_tokenizer_long_rows_count_as_they_are_cut() -> None:
    name = write("tickets.jsonl", *(chat(LONG if number % 10 == 0 else "Restart it.") for number in range(100)))
    text = budget_of(name, "data.seq_length=512")
    assert "about 16 packed samples, at 4 bytes per token, " in text
    assert "about 6 packed samples" in budget_of(name, "data.seq_length=512", "data.truncation=drop")


@pytest.mark.parametrize("keys", [{}, {"tools": [TOOL]}])
def test_tool_calls_that_the_template_drops_are_refused_everywhere(keys: dict[str, Any]) -> None:
    name = write("tools.jsonl", chat("It works."), with_call(**keys), chat("It does not."))
    words = ("data.tokenizer=bytes", "data.chat_template=plain.jinja")
    reason = "tools.jsonl:2: the chat template does not render the tool calls of message 1: an empty answer"
    with pytest.raises(InputError, match=reason) as caught:
        library.samples(PEFT, dataset=name, overrides=words)
    assert "data.chat_template=FILE of a template that renders tools" in caught.value.fix
    assert any(one.startswith("sed '2d'") for one in caught.value.fix)
    checked = library.check(PEFT, gpus="1xH100", overrides=[f"data.dataset={name}", *words])
    assert reason in checked.findings[0].message
    planned = library.recommend("qwen3-8b", **QLORA, overrides=[f"data.dataset={name}", *words])
    assert reason in planned.findings[0].message
    assert not planned.ok
    with pytest.raises(InputError, match=reason):
        library.train("qwen3_600m_peft_config", tiny=True, dataset=name, overrides=[*words, "data.seq_length=512"])


def test_tools_that_the_template_drops_are_refused_or_ignored_on_request() -> None:
    name = write("tools.jsonl", with_call(tools=[TOOL]))
    words = ("data.tokenizer=bytes", "data.chat_template=calls.jinja")
    with pytest.raises(InputError, match="does not render the tools of the row") as caught:
        library.samples(PEFT, dataset=name, overrides=words)
    assert "data.columns.tools= (ignores the column)" in caught.value.fix
    found = library.samples(PEFT, dataset=name, overrides=[*words, "data.columns.tools="])
    assert found.kept == 1


def test_the_byte_tokenizer_renders_tools() -> None:
    name = write("tools.jsonl", with_call(tools=[TOOL]))
    [one] = library.samples(PEFT, dataset=name, overrides=["data.tokenizer=bytes"], count=1).samples
    assert any(span.in_loss and '"name": "lookup"' in span.text for span in one.spans)


def test_rows_that_train_refuses_are_errors_of_recommend() -> None:
    name = write("rows.jsonl", chat("It works."), '{"messages": [', chat("It does not."))
    for words in ([], ["train.epochs=3"]):
        plan = library.recommend("qwen3-8b", **QLORA, overrides=[f"data.dataset={name}", *words])
        first = plan.findings[0]
        assert (first.severity, first.rule) == ("error", "data.rows")
        assert "rows.jsonl:2: not JSON" in first.message
        assert "sed '2d' rows.jsonl" in first.no_fix


def test_missing_tokenizers_and_weights_are_warnings_of_check() -> None:
    write("rows.jsonl", chat("It works."))
    words = ["data.tokenizer=./nofolder", "checkpoint.pretrained=./nomodel", "data.dataset=rows.jsonl"]
    found = [
        one for one in library.check(PEFT, gpus="1xH100", overrides=words).findings if "is not on this" in one.message
    ]
    assert [(one.severity, one.field) for one in found] == [
        ("warning", "data.tokenizer"),
        ("warning", "checkpoint.pretrained"),
    ]


def test_many_epochs_over_few_rows_get_a_note() -> None:
    write("rows.jsonl", *(chat("It works.") for _ in range(150)))
    plan = library.recommend("qwen3-8b", **QLORA, overrides=["data.dataset=rows.jsonl", "train.epochs=30"])
    assert any("train.epochs=30 repeats" in one for one in dataset_notes(plan.recipe, dp=1))
    few = library.recommend("qwen3-8b", **QLORA, overrides=["data.dataset=rows.jsonl", "train.epochs=3"])
    assert not any("repeats" in one for one in dataset_notes(few.recipe, dp=1))


def test_tiny_keeps_the_rows_of_chat_data(capsys: pytest.CaptureFixture[str]) -> None:
    question = "The export fails with error 735 since Monday, and nobody knows why. " * 3
    name = write("rows.jsonl", *(chat("Restart it.", question) for _ in range(8)))
    library.train("qwen3_600m_peft_config", tiny=True, dataset=name, out="run", overrides=["train.steps=1"])
    assert "8 of 8 conversations" in capsys.readouterr().err


def test_four_bits_of_a_recipe_are_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["estimate", PEFT, "--gpus", "1x4090", "load_in_4bit=true"])
    assert caught.value.code == 2
    assert "write --goal qlora or peft.method=qlora" in capsys.readouterr().err
    assert library.estimate(PEFT, gpus="1x4090", overrides=["peft.method=qlora"]).recipe.peft.method == "qlora"


def test_explain_says_what_is_trained_in_place_of_preferences() -> None:
    for word in ("dpo", "DPO", "grpo"):
        found = library.explain(word)
        assert found.meaning.startswith("not supported: our engine trains with next-token")
        assert found.meaning.endswith("choose sft or peft")


BANNER = """***** Running training *****
[INFO|trainer.py:2407] >>   Num examples = 2,994
[INFO|trainer.py:2411] >>   Total train batch size (w. parallel, distributed & accumulation) = 16
[INFO|trainer.py:2413] >>   Total optimization steps = 562
"""


def test_the_doctor_reads_the_batch_of_the_trainers_banner() -> None:
    steps = "".join(
        f"{{'loss': {2.9 - number / 100}, 'grad_norm': 1.0, 'learning_rate': 1e-4, 'epoch': 0.1}}\n"
        f" {number}%|█ | {number * 10}/562 [{number * 4:02d}:00<1:00:00, 24.0s/it]\n"
        for number in range(1, 11)
    )
    write("console.log", BANNER + steps)
    words = ["peft.method=qlora", "data.seq_length=4096"]
    found = library.diagnose("console.log", recipe=PEFT, gpus="1xRTX4090", overrides=words)
    assert not any("does not state the global batch size" in one for one in found.notes)
    figures = {one.name: one.measured for one in found.figures}
    assert figures["tokens/s/GPU"] == pytest.approx(16 * 4096 / figures["step time"], rel=0.01)


def test_speed_says_that_its_steps_have_full_samples_where_those_of_the_data_are_shorter(meshwright: Any) -> None:
    row = {"messages": [{"role": "user", "content": "Hi " * 40}, {"role": "assistant", "content": "yes " * 300}]}
    Path("chats.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    Path("sft.py").write_text(
        "from trl import SFTConfig, SFTTrainer\nfrom datasets import load_dataset\n"
        'args = SFTConfig(output_dir="out", per_device_train_batch_size=2, max_length=4096, bf16=True)\n'
        'SFTTrainer(model="Qwen/Qwen3-0.6B", args=args, train_dataset=load_dataset("json", data_files="chats.jsonl"))\n'
    )
    words = ("recommend", "sft.py", "--gpus", "1xH100")
    answer = meshwright(*words)
    assert answer.code == 0
    lines = [line.strip() for line in answer.out.splitlines()]
    said = next(line for line in lines if line.startswith("of samples of "))
    assert "tokens on average, takes" in said
    budget = meshwright(*words, "--json").json["budget"]
    own = float(said.partition("takes ")[2].partition(" s")[0])
    assert own * budget["steps"] == pytest.approx(budget["days"] * 86400 * budget["goodput"]["share"], rel=0.02)


BEHIND = "x" * 700  # a question whose answer starts after 512 tokens


def notes(name: str) -> str:
    rows = [chat("Restart it.", f"{number} {BEHIND if number % 10 == 0 else 'why?'}") for number in range(40)]
    return write(name, *rows, *(chat(" ", f"{number}") for number in range(3)))


def row_findings(found: Any) -> list[Any]:
    return [one for one in found.findings if one.rule == "data.rows"]


def test_rows_that_train_drops_are_counted_the_same_everywhere() -> None:
    name = notes("notes.jsonl")
    words = [f"data.dataset={name}", "data.tokenizer=bytes", "data.seq_length=512", "train.epochs=3"]
    shown = library.samples(PEFT, overrides=words, count=1)
    assert (shown.kept, shown.dropped, shown.truncated) == (36, 7, 0)
    assert "notes.jsonl:11: " in " ".join(shown.dropped_rows)
    expected = ("3 of 43 rows will be dropped", "4 more of 43 rows will be dropped (counted with bytes; 7 in all)")
    checked = library.check(PEFT, gpus="1xH100", overrides=words)
    planned = library.recommend("qwen3-8b", goal="peft", gpus="1xH100", overrides=words)
    estimated = library.estimate(PEFT, gpus="1xH100", overrides=words)
    for answer in (checked, planned, estimated):
        found = row_findings(answer)
        assert [one.severity for one in found] == ["warning", "warning"]
        assert all(one.message.startswith(text) for one, text in zip(found, expected, strict=True))
        assert found[1].fix == ("data.seq_length=1024",)
    [left] = row_findings(
        library.check(PEFT, gpus="1xH100", overrides=[*words[:2], words[3], *row_findings(checked)[1].fix])
    )
    assert left.message.startswith("3 of 43 rows")


def test_without_a_tokenizer_answers_behind_the_cut_are_estimated() -> None:
    name = notes("notes.jsonl")
    words = [f"data.dataset={name}", "data.seq_length=128", "data.packing=true", "train.epochs=3"]
    found = library.recommend("qwen3-8b", goal="peft", gpus="1xH100", overrides=words)
    assert row_findings(found)[1].message.startswith("about 4 of 43 rows will be dropped (estimated by bytes)")
    assert "4 rows longer than data.seq_length=128 dropped" in found.budget.tokens_from  # type: ignore[union-attr]
    long_answers = write("long.jsonl", *(chat("Restart it. " * 90, f"{number}") for number in range(20)))
    words[0] = f"data.dataset={long_answers}"
    cut = library.recommend("qwen3-8b", goal="peft", gpus="1xH100", overrides=words)
    assert not row_findings(cut)
    assert "20 rows longer than data.seq_length=128 cut" in cut.budget.tokens_from  # type: ignore[union-attr]
    fronts = library.check(PEFT, gpus="1xH100", overrides=[*words, "data.truncation=start"])
    assert not row_findings(fronts)


def test_a_length_that_needs_another_layout_is_suggested_with_it() -> None:
    name = write("notes.jsonl", *(chat("Restart it.", f"{number} " + "x" * 7000) for number in range(4)), chat("Yes."))
    words = [
        f"data.dataset={name}",
        "data.tokenizer=bytes",
        "train.epochs=100",
        "peft.method=qlora",
        "data.seq_length=1024",
    ]
    [found] = row_findings(
        library.check("qwen3_8b_peft_config", gpus="1xA10G", overrides=[*words, "peft.method=qlora"])
    )
    assert found.fix[0].startswith("data.seq_length=")
    after = library.check(PEFT, gpus="1xA10G", overrides=[*words[:-1], *found.fix])
    assert after.ok
    assert not row_findings(after)


def test_lengths_are_counted_once_for_a_state_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    name = notes("notes.jsonl")
    words = [f"data.dataset={name}", "data.tokenizer=bytes", "data.seq_length=512", "train.epochs=3"]
    first = row_findings(library.check(PEFT, gpus="1xH100", overrides=words))
    sample_lengths._tokenize.cache_clear()
    monkeypatch.setattr("meshwright.engine.data.tokenizers.load_tokenizer", lambda *_: pytest.fail("loads a tokenizer"))
    monkeypatch.setattr("meshwright.engine.data.rendered.load_tokenizer", lambda *_: pytest.fail("loads a tokenizer"))
    assert row_findings(library.check(PEFT, gpus="1xH100", overrides=words)) == first
    Path(name).write_text(Path(name).read_text() + json.dumps(chat("Yes.")) + "\n")
    with pytest.raises(pytest.fail.Exception):
        library.check(PEFT, gpus="1xH100", overrides=words)


def test_one_command_leaves_out_rows_of_every_kind() -> None:
    name = write("rows.jsonl", chat("Yes."), '{"messages": [', chat(" "), chat("No."))
    [found] = row_findings(library.check(PEFT, gpus="1xH100", overrides=[f"data.dataset={name}"]))
    assert found.no_fix.endswith("sed '2d;3d' rows.jsonl > rows_kept.jsonl")
    again = write("rows_kept.jsonl", chat("Yes."), chat(" "))
    [found] = row_findings(library.check(PEFT, gpus="1xH100", overrides=[f"data.dataset={again}"]))
    assert found.no_fix.endswith("sed '2d' rows_kept.jsonl > rows_kept2.jsonl")
