"""A fine-tuning on one A10G from a table: its columns, its length in epochs and days, errors of other trainers."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

PEFT = "qwen3_4b_peft_config"
BYTES = "data.tokenizer=bytes"
MAPPED = ("data.columns.prompt=text", "data.columns.response=label")
PLANNED = ("recommend", "qwen3-4b", "--gpus", "g5.2xlarge", "--goal", "qlora", "--price", "1.2")
ROWS = [(f'Größe {i}\n"falsch"', ("Rechnung", "Lieferung")[i % 2]) for i in range(40)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write(name: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Write a table with quotes and newlines in its cells, as pandas does."""
    with Path(name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return name


def test_a_table_with_the_index_of_pandas_is_read(meshwright: Any) -> None:
    table = write("indexed.csv", ("", "text", "label"), [(str(i), *row) for i, row in enumerate(ROWS)])
    for columns, shown in ((MAPPED, "loss    | Rechnung"), ((), "40 of 40 conversations used")):
        answer = meshwright("samples", PEFT, "--dataset", table, BYTES, "--count", "1", *columns)
        assert answer.code == 0, answer.err
        assert shown in answer.out
    assert "(no name)" in meshwright("check", table).out
    questions = write("q.csv", ("", "question", "answer"), [(str(i), *row) for i, row in enumerate(ROWS)])
    assert meshwright("check", questions).code == 0


def test_the_fix_of_a_missing_column_takes_the_answer_though_it_is_a_number(meshwright: Any) -> None:
    table = write("extract.csv", ("question", "context", "answer"), [("Nr.?", text, "INC-1") for text, _ in ROWS])
    refused = meshwright("samples", PEFT, "--dataset", table, BYTES, *MAPPED)
    assert "data.columns.prompt=question data.columns.response=answer data.columns.input=context" in refused.err


@pytest.mark.parametrize("length", [("--dataset", "t.csv", "--epochs", "3"), ("train.steps=20",)])
def test_days_are_the_deadline_of_epochs_or_steps(length: tuple[str, ...], meshwright: Any) -> None:
    write("t.csv", ("text", "label"), ROWS)
    for days, said in (("2", "--days 2 is met"), ("0.01", "are more than --days 0.01")):
        long = [one.replace("=20", "=2000") if days == "0.01" else one for one in length]
        long = [one if one != "3" or days == "2" else "9000" for one in long]
        answer = meshwright(*PLANNED, "--days", days, *long)
        assert said in answer.out
        assert "days train on" not in answer.out
    if "--epochs" not in length:
        return
    assert (
        "the samples of me/mine are not known here"
        in meshwright(*PLANNED, "--dataset", "me/mine", "--days", "2", "--epochs", "3").out
    )
    sized = meshwright("size", "qwen3-4b", "--gpu", "A10G", "--goal", "qlora", "--days", "2", *length)
    assert "In 2 days" in sized.out or "in 2 days" in sized.out


ERRORS = {
    "error.bitsandbytes-missing": "ImportError: Using `bitsandbytes` 4-bit quantization requires the latest version "
    "of bitsandbytes: `pip install -U bitsandbytes`",
    "error.no-labels": "ValueError: The model did not return a loss from the inputs, only the following keys: logits. "
    "For reference, the inputs it received are input_ids,attention_mask.",
    "error.uneven-columns": "ValueError: Unable to create tensor, you should probably activate truncation and/or "
    "padding with 'padding=True' 'truncation=True' to have batched tensors with the same length.",
    "error.unsloth-gpu": "NotImplementedError: Unsloth cannot find any torch accelerator? You need a GPU.",
    "error.not-utf-8": "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xfc in position 14: invalid start byte",
    "error.dataset-access": "DatasetNotFoundError: Dataset 'alpaca' doesn't exist on the Hub or cannot be accessed.",
    "error.frozen-inputs": "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
}


@pytest.mark.parametrize("error", ERRORS)
def test_the_doctor_knows_the_errors_of_a_first_fine_tuning(error: str, meshwright: Any) -> None:
    Path("colab.txt").write_text(
        f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n{ERRORS[error]}\n'
    )
    answer = meshwright("doctor", "colab.txt")
    assert f"error {error}" in answer.out, answer.err


def test_labels_beside_texts_that_are_not_trained_on_are_reported(meshwright: Any) -> None:
    table = write("tickets.csv", ("text", "label"), ROWS)
    fix = "data.columns.prompt=text data.columns.response=label"
    commands = (("check", table), ("check", PEFT, "--gpus", "A10G"), PLANNED, ("samples", PEFT, BYTES))
    for command in commands:
        named = () if command[1] == table else ("--dataset", table)
        named = (f"data.dataset={table}",) if command[1:2] == (PEFT,) and command[0] == "check" else named
        answer = meshwright(*command, *named)
        shown = " ".join((answer.out + answer.err).split())
        assert "column label is not used: every token of text is trained on" in shown, command
        assert fix in shown, command
        for settled in (MAPPED, ("data.columns.text=text",)):
            answer = meshwright(*command, *named, *settled)
            assert "column label is not used: every token" not in answer.out + answer.err, command
    plain = write("pages.csv", ("text", "source"), ROWS)
    assert "data.unused-answers" not in meshwright("check", plain).out


def test_findings_of_data_are_explained(meshwright: Any) -> None:
    for finding in ("data.rows", "data.unused-answers", "data.few-updates", "data.missing-file", "engine.no-config"):
        answer = meshwright("explain", finding)
        assert answer.code == 0, answer.err
        assert "cause" in answer.out


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        (("samples", PEFT, "--dataset", "tickets.xlsx", BYTES), "pandas.read_excel"),
        (("tokenize", "tickets.xlsx", "--tokenizer", "bytes", "--out", "tokens"), "pandas.read_excel"),
        (("samples", PEFT, "--dataset", "alpaca", BYTES), "--dataset OWNER/alpaca"),
        (("cost",), "recommend MODEL --gpus GPUS --goal GOAL --price PRICE"),
        (("push", "run"), "hf upload REPO OUT"),
        (("convert", "run", "out", "--gguf"), "convert_hf_to_gguf.py"),
    ],
)
def test_words_and_files_of_other_programs_are_answered(typed: tuple[str, ...], fix: str, meshwright: Any) -> None:
    Path("tickets.xlsx").write_bytes(b"PK\x03\x04")
    answer = meshwright(*typed)
    assert answer.code == 2
    assert fix in answer.err


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_rows_of_a_table_without_a_prompt_have_a_command_that_leaves_them_out(delimiter: str, meshwright: Any) -> None:
    rows = [("" if i in (3, 7) else text, label) for i, (text, label) in enumerate(ROWS)]
    with Path("t.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([("text", "label"), *rows])
    refused = meshwright("samples", PEFT, "--dataset", "t.csv", BYTES, *MAPPED).err
    assert "the prompt (text) is empty" in refused
    [fix] = [line for line in refused.splitlines() if line.startswith("fix:")]
    command = fix.partition(" | ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    kept = shlex.split(command)[-1]
    with Path(kept).open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file, delimiter=delimiter)) == [["text", "label"], *map(list, (r for r in rows if r[0]))]
    assert "38 of 38 conversations used" in meshwright("samples", PEFT, "--dataset", kept, BYTES, *MAPPED).out


def test_a_model_trained_from_random_weights_stops_at_the_end_of_a_turn(meshwright: Any) -> None:
    table = write("tickets.csv", ("text", "label"), ROWS)
    typed = ("--tiny", "--dataset", table, *MAPPED, "--out", "run", "train.steps=1", "data.seq_length=96")
    assert meshwright("train", "qwen3_600m_sft_config", *typed).code == 0
    model = Path("run", "model")
    ends = [
        json.loads((model / name).read_text())["eos_token_id"] for name in ("config.json", "generation_config.json")
    ]
    assert ends[0] is not None
    assert ends[0] == ends[1]
