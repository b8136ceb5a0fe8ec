"""Tables from a spreadsheet, a learning rate that trains nothing, containers."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

import meshwright as library

PEFT = "qwen3_8b_peft_config"
TABLE = ("Ticket Nr.", "Beschreibung", "Lösung")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write_table(path: Path, delimiter: str, header: tuple[str, ...] = TABLE, encoding: str = "utf-8") -> None:
    other = ", bitte" if delimiter != "," else "; bitte"
    rows = [(str(1000 + i), f"Drucker {i} für Raum {i}{other}", f"Kabel {i} tauschen{other}") for i in range(12)]
    path.write_text("".join(f"{delimiter.join(row)}\n" for row in (header, *rows)), encoding=encoding)


def write_pairs(path: Path, rows: int = 40) -> None:
    pairs = ({"prompt": f"what is {i}", "response": f"it is {i}, as asked"} for i in range(rows))
    path.write_text("\n".join(map(json.dumps, pairs)) + "\n")


def test_tables_of_a_spreadsheet_are_read_with_their_delimiter(here: Path, meshwright: Any) -> None:
    for name, delimiter, said in (
        ("excel.csv", ";", "columns are separated by semicolons"),
        ("table.tsv", "\t", "columns are separated by tabs"),
        ("tabs.csv", "\t", "columns are separated by tabs"),
        ("comma.csv", ",", ""),
    ):
        write_table(here / name, delimiter)
        refused = meshwright("samples", PEFT, "--dataset", name, "data.tokenizer=bytes")
        [fix] = [line.removeprefix("fix:   ") for line in refused.err.splitlines() if line.startswith("fix:")]
        words = shlex.split(fix)
        assert words == ["data.columns.prompt=Beschreibung", "data.columns.response=Lösung"]
        shown = meshwright("samples", PEFT, "--dataset", name, "data.tokenizer=bytes", *words)
        assert "loss    | Kabel 0 tauschen" in shown.out
        assert "Drucker 0 für Raum 0" in shown.out
        planned = meshwright("recommend", "qwen3-8b", "--gpus", "1xH100", "--goal", "lora", "--dataset", name, *words)
        checked = meshwright("check", name).out
        for text in (planned.out, checked):
            assert said in text
            assert ("separated by" in text) == bool(said)
    write_table(here / "latin.csv", ",", ("nr", "prompt", "response"), "latin-1")
    for typed in (("samples", PEFT, "--dataset", "latin.csv"), ("train", PEFT, "--tiny", "--dataset", "latin.csv")):
        refused = meshwright(*typed, "data.tokenizer=bytes").err
        assert "latin.csv: the file is not UTF-8" in refused
        command, _, then = refused.partition("fix:   ")[2].strip().partition(", then ")
        subprocess.run(command, shell=True, check=True)
        assert meshwright("samples", PEFT, *shlex.split(then), "data.tokenizer=bytes").code == 0


def test_the_doctor_says_that_the_rate_trains_nothing(here: Path, meshwright: Any) -> None:
    for rate, still in ((1e-9, True), (1e-4, False)):
        folder = here / f"run{rate}"
        folder.mkdir()
        settings = msgspec.to_builtins(library.recipe(PEFT))
        settings["optimizer"]["lr"] = rate
        header = {"kind": "header", "recipe": PEFT, "settings": settings, "world": 1}
        noise = [0.01 * (i * 7 % 5 - 2) for i in range(30)]
        rows: list[dict[str, Any]] = [
            {"kind": "step", "step": i + 1, "loss": 6.4 + noise[i] - (0 if still else 0.05 * i), "lr": rate}
            for i in range(30)
        ]
        for step in range(5, 31, 5):
            loss = 6.4148 - (0 if still else 0.05 * step)
            rows.insert(6 * step // 5 - 1, {"kind": "validation", "step": step, "loss": loss})
        lines = (json.dumps(one, separators=(",", ":")) for one in (header, *rows))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        found = {one["rule"]: one for one in meshwright("doctor", folder.name, "--json").json["findings"]}
        assert ("loss.flat" in found) == ("learning_rate.adapters" in found) == still
        if still:
            message = found["loss.flat"]["message"]
            assert "the validation loss is 6.4148 in 6 evaluations" in message
            assert "The learning rate 1e-09 is too small: about 0.0001 is usual" in message
            assert found["loss.flat"]["remedies"][0]["try"] == ["optimizer.lr=0.0001"]


def test_containers_need_the_data_of_a_relative_path_and_the_weights(here: Path, meshwright: Any) -> None:
    write_pairs(here / "big.jsonl")
    launch = ("launch", PEFT, "--gpus", "2xA100-80", "--image", "r/x:1", "--scheduler")
    for scheduler, mount in (("kubernetes", "CLAIM"), ("skypilot", str(here))):
        paths = ("big.jsonl", str(here / "big.jsonl"))
        answers = [meshwright(*launch, scheduler, "--dataset", one) for one in paths]
        shown = [one.out + one.err for one in answers]
        assert shown[0] == shown[1]
        assert f"needs {here} (data): if the image does not contain it, add --mount {mount}:{here}" in shown[0]
        assert "needs the weights Qwen/Qwen3-8B" in shown[0]
    mounted = meshwright(*launch, "kubernetes", "--mount", "data:/weights", "checkpoint.pretrained=/weights").err
    assert "needs the weights" not in mounted


def test_refused_data_leaves_no_folder_and_answers_that_are_cut_are_named(here: Path, meshwright: Any) -> None:
    write_pairs(here / "pairs.jsonl")
    refused = meshwright("train", PEFT, "--tiny", "--dataset", "pairs.jsonl", "--out", "runs/slow", "seq_length=8")
    assert refused.code == 2
    assert not (here / "runs").exists()
    (here / "empty").mkdir()
    (here / "run_a").mkdir()
    (here / "run_a" / "metrics.jsonl").write_text('{"kind":"step","step":1,"loss":5.0}\n')
    compared = meshwright("compare", "run_a", "empty").err
    assert "target=empty: the folder has no finished step" in compared
    assert "did you mean" not in compared
    cut = meshwright("samples", PEFT, "--dataset", "pairs.jsonl", "data.tokenizer=bytes", "data.seq_length=48")
    assert "warning: pairs.jsonl: of 40 conversations 30 are truncated" in cut.err
    [longer] = [word for word in cut.err.split() if word.startswith("data.seq_length=") and "48" not in word]
    whole = meshwright("samples", PEFT, "--dataset", "pairs.jsonl", "data.tokenizer=bytes", longer)
    assert (" 0 truncated" in whole.out, "warning" in whole.err) == (True, False)
    for typed in (("check", PEFT, "--gpus", "1xH100"), ("export", PEFT, "--to", "automodel")):
        named, by_key = (
            meshwright(*typed, *words, "--json").json
            for words in (("--dataset", "pairs.jsonl"), ("data.dataset=pairs.jsonl",))
        )
        assert json.dumps(named) == json.dumps(by_key)


def test_an_export_to_trl_writes_instructions_as_messages(here: Path, meshwright: Any) -> None:
    write_pairs(here / "pairs.jsonl", 3)
    export = ("export", PEFT, "--to", "trl", "--gpus", "2xA100-80", "--out", "out")
    written = meshwright(*export, "--dataset", "pairs.jsonl")
    assert written.code == 0
    assert "pairs.messages.jsonl: the rows of" in written.out.replace("\n", " ")
    [row, *_] = map(json.loads, (here / "out" / "pairs.messages.jsonl").read_text().splitlines())
    assert [one["content"] for one in row["messages"]] == ["what is 0", "it is 0, as asked"]
