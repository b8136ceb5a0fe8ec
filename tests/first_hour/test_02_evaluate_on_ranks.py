"""`evaluate RUN --nproc 2` works on a pretraining run, also where ranks cannot be forked."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from meshwright.engine import processes
from meshwright.rules import check


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = (f"line {i}: {' '.join('abcdefgh'[(i + j) % 8] * 3 for j in range(12))}\n" for i in range(60))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_evaluate_on_two_ranks(
    meshwright: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: bool
) -> None:
    out = str(tmp_path / "run")
    words = ["train", "llama3_8b_pretrain", "--tiny", "--out", out, "--dataset", str(corpus), "data.tokenizer=bytes"]
    trained = meshwright(*words, "train.steps=2", "train.eval_every=2", "data.validation_part=0.2")
    assert trained.code == 0, trained.err
    alone = meshwright("evaluate", out, "--json").json
    # A parent that has used CUDA or OpenMP threads cannot fork: then everything a rank receives is pickled.
    if not forks:
        monkeypatch.setattr(processes, "_can_fork", lambda: False)
    answer = meshwright("evaluate", out, "--nproc", "2", "--json")
    assert answer.code == 0, answer.err
    found = answer.json
    assert found["ranks"] == 2
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert [found[key] for key in ("samples", "tokens")] == [alone[key] for key in ("samples", "tokens")]


def test_a_checked_case_can_be_sent_to_a_spawned_rank() -> None:
    from meshwright import costs
    from meshwright.clusters import cluster
    from meshwright.models import find
    from meshwright.recipes import load
    from meshwright.recipes.case import Case

    for name in ("llama3_8b_pretrain_config", "qwen3_30b_a3b_sft_config", "llama3_70b_peft_config"):
        recipe = load(name)
        case = Case(recipe, find(recipe.model), cluster("8xH100"), memory_of=costs.memory)
        case.cached(lambda one: one.tp)  # the rules cache functions of themselves, as this one
        check(case)
        sent = pickle.loads(pickle.dumps(case))
        assert (sent.recipe, sent.model, sent.cluster, sent.memory.total) == (
            case.recipe,
            case.model,
            case.cluster,
            case.memory.total,
        )
