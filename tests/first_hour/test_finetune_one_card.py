"""Fine-tuning on one card as a user of transformers types it."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import meshwright as package
from meshwright.choices import SYNONYMS
from meshwright.engine.data.conversations import detect_columns
from meshwright.engine.data.files import Rows
from meshwright.engine.data.row_errors import COMMAND_ROWS, SHOWN_ERRORS
from meshwright.engine.data.sft_cache import Policy, tokenize_conversations
from meshwright.engine.evaluation import ValidationState
from meshwright.engine.metrics.record import ValidationRecord
from meshwright.engine.post_training.open_checkpoint import FoundCheckpoint
from meshwright.engine.post_training.perplexity import _recipe_of, has_conversations
from meshwright.errors import InputError

OWN_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
BAD = (
    {"messages": []},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "humn", "content": "a"}]},
)


@pytest.mark.parametrize("verb", ["check", "export"])
@pytest.mark.parametrize("goal", ["lora", "QLoRA", "dora", "fine-tune"])
def test_every_goal_takes_the_words_of_recommend(meshwright: Any, verb: str, goal: str) -> None:
    to = ("--to", "automodel") if verb == "export" else ()
    answer = meshwright(verb, "qwen3-8b", "--gpus", "1xH100", "--goal", goal, *to)
    assert "unknown goal" not in answer.err
    assert answer.code in (0, 1)


@pytest.mark.parametrize("verb", ["train", "bench", "dryrun", "launch"])
def test_commands_that_run_take_them_too(verb: str) -> None:
    from meshwright.api.inputs import validated
    from meshwright.api.verbs import VERBS

    request = VERBS[verb].request
    more = {"scheduler": "torchrun"} if verb == "launch" else {}
    read = validated(request(recipe="qwen3-8b", goal="QLoRA", **more))
    assert (read.goal, tuple(read.overrides)) == ("peft", ("peft.method=qlora",))
    assert set(SYNONYMS["goal"]) >= {"lora", "qlora", "dora"}


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("learning_rate=1e-3", "optimizer.lr", 1e-3),
        ("num_train_epochs=3", "train.epochs", 3.0),
        ("per_device_train_batch_size=2", "layout.micro_batch_size", 2),
        ("optim=adamw_8bit", "optimizer.name", "adamw8bit"),
        ("optim=adamw_torch", "optimizer.name", "adamw"),
        ("lora_alpha=16", "peft.alpha", 16.0),
        ("r=4", "peft.rank", 4),
        ("target_modules=q_proj,v_proj", "peft.targets", ("q_proj", "v_proj")),
        ("sequence_len=512", "data.seq_length", 512),
        ("gradient_checkpointing=true", "layout.recompute", "full"),
        ("lr_scheduler_type=constant_with_warmup", "schedule.name", "constant"),
    ],
)
def test_arguments_of_transformers_are_understood(meshwright: Any, typed: str, key: str, value: object) -> None:
    changed = package.recipe("qwen3_8b_peft_config", typed)
    section, name = key.split(".")
    assert getattr(getattr(changed, section), name) == value
    option, _, text = typed.partition("=")
    for written in (f"--{option}", f"--{option.replace('_', '-')}"):
        answer = meshwright("recommend", "qwen3-8b", "--gpus", "1xH100", "--goal", "lora", written, text)
        fix = next(line for line in answer.err.splitlines() if line.startswith("fix:")).split()[1]
        assert fix.startswith(f"{key}=")
        assert package.recipe("qwen3_8b_peft_config", fix) == changed


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("gradient_accumulation_steps", "4", "train.global_batch_size="),
        ("warmup_ratio", "0.1", "schedule.warmup_steps="),
    ],
)
def test_arguments_that_are_something_else_here_say_what(
    meshwright: Any, option: str, value: str, instead: str
) -> None:
    base = ("recommend", "qwen3-8b", "--gpus", "1xH100", "--goal", "lora")
    for typed in ((f"{option}={value}",), (f"--{option}", value)):
        answer = meshwright(*base, *typed)
        assert answer.code == 2
        assert instead in answer.err
    assert "--gpus" not in meshwright("rules", "--cluster", "x").err  # it has no --gpus


def test_one_override_in_python_needs_no_list() -> None:
    assert package.recipe("qwen3_8b_peft_config", "lr=1e-3") == package.recipe("qwen3_8b_peft_config", ["lr=1e-3"])
    assert package.recommend("qwen3-8b", "1xRTX3090", "lora", overrides="train.epochs=3").recipe.train.epochs == 3


def tokenize(path: Path, rows: list[dict[str, Any]], tokenizer: Any) -> Any:
    from meshwright.engine.data.dataset_registry import open_rows

    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found: Rows = open_rows(str(path), "train", False)
    return tokenize_conversations(found, {}, tokenizer, "", Policy("answers", "end", 65), 1)


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    from meshwright.engine.data import byte_level
    from meshwright.engine.data.tokenizers import load_tokenizer

    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return load_tokenizer(str(byte_level.cached_byte_tokenizer()))


def test_all_rows_that_cannot_be_used_are_named_at_once(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "my chats.jsonl"
    rows = [GOOD] * 600
    for place, bad in zip((7, 300, 590), BAD, strict=True):
        rows[place] = bad
    with pytest.raises(InputError) as caught:
        tokenize(path, rows, tokenizer)
    for line, words in ((8, "an empty list"), (301, "has no content"), (591, "unknown role humn")):
        assert f"{path}:{line}: " in caught.value.reason
        assert words in caught.value.reason
    command = caught.value.fix[-1]
    subprocess.run(command, shell=True, check=True)
    kept = Path(shlex.split(command)[-1])
    assert len(tokenize(kept, [json.loads(line) for line in kept.read_text().splitlines()], tokenizer)) == 597


def test_a_file_of_another_form_is_not_listed_row_by_row(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(InputError) as caught:
        tokenize(tmp_path / "bad.jsonl", [GOOD, *([BAD[0]] * 700)], tokenizer)
    assert caught.value.reason.count("an empty list") == 1
    assert caught.value.reason.count(": the same") == SHOWN_ERRORS
    assert f"; {699 - SHOWN_ERRORS} more rows" in caught.value.reason
    assert len(caught.value.fix) == 0
    assert COMMAND_ROWS < 700


def test_models_that_fit_a_card(meshwright: Any) -> None:
    listed = meshwright("models", "qwen25", "--gpus", "1x3090", "--goal", "lora", "--json").json["models"]
    fits = [one["plan"]["fits"] for one in listed]
    assert any(fits)
    assert not all(fits)
    assert fits == sorted(fits, reverse=True)
    first, last = listed[0]["plan"], listed[-1]["plan"]
    assert first["total_gib"] < 24
    assert first["tokens_per_s"] > 0
    assert first["reason"] is None
    assert last["reason"]
    again = meshwright(*first["command"].split()[1:], "--json").json
    assert again["estimate"]["fits"]
    assert again["estimate"]["memory_gib"]["total"] == pytest.approx(first["total_gib"], rel=1e-3)


def test_a_recommendation_without_a_model_offers_the_list(meshwright: Any) -> None:
    ended = meshwright("recommend", "--gpus", "1x3090", "--goal", "lora")
    assert ended.code == 2
    assert "meshwright models --gpus 1x3090 --goal lora" in ended.err
    assert meshwright("models", "--goal", "lora").code == 2


def test_preference_pairs_are_named_and_the_chosen_answers_offered() -> None:
    with pytest.raises(InputError, match="preference pairs") as refused:
        detect_columns(["prompt", "chosen", "rejected"], {}, "prefs.jsonl")
    assert refused.value.fix == ("data.columns.prompt=prompt data.columns.response=chosen",)


def test_lora_in_four_bits_is_qlora(meshwright: Any) -> None:
    typed = (
        "recommend",
        "llama3.1-8b",
        "--gpus",
        "1x4090",
        "--goal",
        "lora",
        "quantization.load_in_4bit=true",
        "--json",
    )
    assert meshwright(*typed).json["contract"]["peft"]["method"] == "qlora"


def test_steps_that_replace_epochs_are_accepted(meshwright: Any) -> None:
    typed = ("recommend", "qwen3-8b", "--gpus", "1x4090", "--goal", "qlora", "--tokens", "1M", "--json")
    (note,) = meshwright(*typed, "train.epochs=3").json["budget"]["notes"]
    assert "train.steps=16 instead of train.epochs" in note
    assert meshwright(*typed, "train.steps=16").json["budget"]["notes"] == []


def test_the_early_stop_names_the_step_that_later_losses_are_compared_with() -> None:
    state = ValidationState()
    for step, loss in ((2, 5.6755), (4, 5.67), (6, 5.66)):
        record = ValidationRecord(step=step, loss=loss, perplexity=None, tokens=1, samples=1, seconds=0.0, best=False)
        state = state.after(record, 10.0)
    assert (state.best_step, state.reference_step, state.reference_loss, state.waited) == (6, 2, 5.6755, 2)


def test_conversations_are_evaluated_by_their_answers(tmp_path: Path) -> None:
    chats, texts = tmp_path / "chats.csv", tmp_path / "texts.jsonl"
    chats.write_text("question,answer\nwhy?,because\n")
    texts.write_text('{"text": "a document"}\n')
    assert has_conversations(str(chats), {})
    assert not has_conversations(str(texts), {})
    assert not has_conversations(str(tmp_path), {})
    assert has_conversations(str(tmp_path), {"messages": "turns"})


@pytest.mark.parametrize(
    ("words", "goal"),
    [
        (("data.columns.prompt=email_text", "data.columns.response=ticket_json"), "sft"),
        (("data.columns=prompt:email_text,response:ticket_json",), "sft"),
        (("data.columns.text=email_text",), "pretrain"),
    ],
)
def test_a_model_folder_is_evaluated_on_the_typed_columns(tmp_path: Path, words: tuple[str, ...], goal: str) -> None:
    table = tmp_path / "tickets.csv"
    table.write_text("id,email_text,ticket_json\n1,no bin,{}\n")
    (tmp_path / "config.json").write_text(json.dumps(OWN_LLAMA))
    recipe, _ = _recipe_of(FoundCheckpoint("model", tmp_path), str(tmp_path), str(table), False, words)
    assert recipe.goal == goal
