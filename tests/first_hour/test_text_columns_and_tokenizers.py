"""Text in another column, and tokenizers that are not on this machine: the printed fixes work as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.engine.data.text_errors import bad_lines, bad_lines_error
from meshwright.recipes.types import Data

ROWS = [{"id": one, "content": f"the text of document {one}"} for one in range(3)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (tmp_path / "rows.csv").write_text("id,content\n" + "".join(f"{row['id']},{row['content']}\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_the_fix_names_the_column(name: str, here: Path, meshwright: Any) -> None:
    typed = ("tokenize", name, "--tokenizer", "bytes", "--out", "tokens")
    answer = meshwright(*typed)
    assert answer.code == 2
    assert "has no 'text'; it has id" in answer.err
    assert "fix:   --column content" in answer.err
    assert "text_column" not in answer.err
    assert meshwright(*typed, "--column", "content").code == 0

    error = bad_lines_error(bad_lines(Path(name), Data()), Path(name), Data())  # as train does
    assert error.fix[0] == "data.columns.text=content"
    assert not bad_lines(Path(name), Data(columns={"text": "content"}))


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        (("tokenize", "rows.jsonl", "--tokenizer", "gpt2", "--out", "tokens"), "--tokenizer"),
        (("train", "llama3_8b_pretrain_config", "--dataset", "rows.jsonl", "data.tokenizer=gpt2"), "data.tokenizer"),
    ],
)
def test_a_tokenizer_that_is_not_here(typed: tuple[str, ...], field: str, here: Path, meshwright: Any) -> None:
    answer = meshwright(*typed)
    assert answer.code == 2
    assert "tokenizer=gpt2: no such folder, and no model of this id in the local Hugging Face cache" in answer.err
    assert "hf download gpt2 --include '*token*' --include '*.jinja'" in answer.err
    assert f"{field} bytes" in answer.err or f"{field}=bytes" in answer.err
