"""The files that Megatron-LM's and Megatron-Bridge's owners run get no error, but those of the ledger."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks import corpora
from benchmarks.corpora.megatron import CORPORA

EVERY = {"megatron-lm-tests": 12}
"""A default run checks every so many kept entries of a corpus."""
KEPT = [name for name in CORPORA if (corpora.KEPT / f"{name}.json").exists()]


def false_errors(name: str, entries: list[dict[str, object]]) -> list[str]:
    outcomes = corpora.run_kept(CORPORA[name], entries)
    assert [one.path for one in outcomes if one.unread] == []
    return [f"{one.path}: {error.rule}: {error.message}" for one in outcomes for error in one.false_errors]


@pytest.mark.parametrize("name", KEPT)
def test_sample_of_kept_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert false_errors(name, corpora.kept_entries(name)[:: EVERY.get(name, 6)]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_all_kept_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert false_errors(name, corpora.kept_entries(name)) == []


def test_every_exception_has_a_reason_and_a_corpus() -> None:
    mine = [one for one in corpora.ledger() if one["corpus"] in CORPORA]
    assert mine
    assert all(one["reason"] and one["path"] and one["rule"] for one in mine)


def test_kept_entries_have_no_local_paths() -> None:
    for name in KEPT:
        text = (corpora.KEPT / f"{name}.json").read_text()
        assert os.path.expanduser("~") + "/" not in text
