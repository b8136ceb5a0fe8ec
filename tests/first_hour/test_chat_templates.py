"""A chat template of one's own is part of the fine-tuned model; the summary says which step was exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.tiny_tokenizer import PLAIN, write_tiny_tokenizer
from transformers import AutoTokenizer

from meshwright.cli.run_report import _not_the_best
from meshwright.engine.hf_io.tokenizer_files import set_chat_template

TEMPLATE = PLAIN.replace("{{ bos_token }}", "{{ bos_token }}<|im_start|>ours\n")


def template_in(folder: Path) -> str | None:
    found: str | None = AutoTokenizer.from_pretrained(folder).chat_template
    return found


def tune(meshwright: Any, recipe: str, at: Path) -> Path:
    """Fine-tune two steps with a template file, given as a relative path, for a tokenizer without a template."""
    tokenizer, rows = write_tiny_tokenizer(at / "tokenizer", chat_template=False), []
    for number in range(4):
        turns = (("user", f"what is {number}?"), ("assistant", f"it is {number}"))
        rows.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    (at / "chats.jsonl").write_text("\n".join(rows))
    (at / "chatml.jinja").write_text(TEMPLATE)
    words = ["--dataset", "chats.jsonl", f"data.tokenizer={tokenizer}", "data.chat_template=chatml.jinja"]
    done = meshwright("train", recipe, "--tiny", *words, "train.steps=2", "--out", str(at / "run"))
    assert done.code == 0, done.err
    assert template_in(tokenizer) is None
    return at / "run"


def test_the_template_is_saved_with_the_model(meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tune(meshwright, "llama3_8b_sft", tmp_path)
    assert template_in(run / "model") == TEMPLATE
    # The run has its own copy: the user's file may be gone, or be looked for from another folder.
    (tmp_path / "chatml.jinja").unlink()
    said = meshwright("generate", str(run), "hello", "--max-tokens", "1", "--json").json
    expected = AutoTokenizer.from_pretrained(run / "model").apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_dict=False
    )
    assert (said["chat"], said["prompt_tokens"]) == (True, len(expected))
    assert meshwright("convert", str(run), str(tmp_path / "out")).code == 0
    assert template_in(tmp_path / "out") == TEMPLATE
    losses = [
        meshwright("evaluate", str(one), "--dataset", "chats.jsonl", "data.seq_length=64", "--json").json["loss"]
        for one in (run, run / "model")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_adapters_and_merged_models_have_it_too(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tune(meshwright, "llama3_8b_peft", tmp_path)
    assert meshwright("convert", str(run), "merged", "--merge").code == 0
    assert meshwright("convert", str(run / "model"), "again", "--merge").code == 0
    assert [template_in(one) for one in (run / "model", Path("merged"), Path("again"))] == [TEMPLATE] * 3
    # A run of an earlier version has no copy: without the user's file the model is still converted, with a warning.
    (run / "chat_template.jinja").unlink()
    (tmp_path / "chatml.jinja").unlink()
    old = meshwright("convert", str(run), "old")
    assert old.code == 0, old.err
    assert "old has no chat template: data.chat_template=chatml.jinja" in old.err
    assert template_in(Path("old")) is None


def test_it_replaces_every_template_that_the_tokenizer_had(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "older"}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "oldest"}))
    set_chat_template(folder, TEMPLATE)
    assert template_in(folder) == TEMPLATE
    assert json.loads((folder / "tokenizer_config.json").read_text()) == settings
    assert not (folder / "chat_template.json").exists()


@pytest.mark.parametrize(
    ("best", "kept", "shown"),
    [
        (4, "x", " (step 8; best: meshwright convert 'my run' OUT --checkpoint best)"),
        (4, None, " (step 8; best: step 4, not kept (checkpoint.keep_best=false))"),
        (8, "x", ""),
        (None, None, ""),
    ],
)
def test_the_summary_says_that_the_model_is_not_the_best(best: int | None, kept: str | None, shown: str) -> None:
    answer = {"first_step": 3, "steps": 6, "best_step": best, "best_checkpoint": kept, "folder": "my run"}
    assert _not_the_best(answer) == shown
