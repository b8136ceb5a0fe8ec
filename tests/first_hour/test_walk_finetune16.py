"""A sixteenth walk through a fine-tuning: tables from a spreadsheet, a rate that trains nothing, containers."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

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
