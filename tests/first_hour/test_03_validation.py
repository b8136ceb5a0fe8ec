"""Validation while training is shown, logged, kept and true; the best checkpoint is kept; early stopping works."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.engine import tiny
from meshwright.engine.data.finite import FiniteSource, Union, whole_set
from meshwright.engine.data.held_out import held_out_set
from meshwright.engine.data.sample_types import Sample
from meshwright.engine.data.shuffle import Shuffled
from meshwright.recipes import load

TINY = ("train", "llama3_8b_sft", "--tiny", "data.tokenizer=bytes", "checkpoint.export=none")


def write_chats(path: Path, first: int, count: int) -> Path:
    rows = (
        {"prompt": f"what is {i} plus {i}?", "response": f"it is {2 * i}" + "!" * (i % 7)}
        for i in range(first, first + count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr(tiny, "MICRO_BATCHES", 2)  # half of those of --tiny
    chats, held_out = write_chats(tmp_path / "chats.jsonl", 0, 24), write_chats(tmp_path / "held out.jsonl", 100, 5)
    return (*TINY, "--dataset", str(chats), f"data.validation={held_out}", "train.eval_every=2")


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_validation_is_shown_logged_kept_and_equals_evaluate(
    meshwright: Any, typed: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [*typed, "train.steps=5", "checkpoint.keep=1", "checkpoint.save_every=1", "schedule.name=constant"]
    answer = meshwright(*words, "--out", str(run))
    assert answer.code == 0, answer.err
    # Which file, how many samples; a line per validation; the last and the best in the summary.
    assert f"validation: 5 samples of {tmp_path / 'held out.jsonl'}, every 2 steps" in answer.err
    shown = [line for line in answer.out.splitlines() if line.startswith("validation ")]
    assert [line.split()[2] for line in shown] == ["2/5", "4/5", "5/5"]
    assert all("of 5 samples" in line and "perplexity" in line for line in shown)
    assert "val     loss" in answer.out
    assert "best    loss" in answer.out
    logged = records(run, "validation")
    assert [one["step"] for one in logged] == [2, 4, 5]
    assert {(one["samples"], one["tokens"]) for one in logged} == {(5, logged[0]["tokens"])}
    assert records(run, "header")[0]["validation"] == {"dataset": str(tmp_path / "held out.jsonl"), "samples": 5}
    # `evaluate` measures the same samples, and says which; a smaller number is not rounded up.
    last = meshwright("evaluate", str(run), "--json").json
    assert last["dataset"] == str(tmp_path / "held out.jsonl")
    assert (last["samples"], last["available"], last["tokens"], last["step"]) == (5, 5, logged[0]["tokens"], 5)
    assert last["loss"] == pytest.approx(logged[-1]["loss"], rel=1e-5)
    few = meshwright("evaluate", str(run), "--samples", "3")
    assert "of 3 samples of" in few.out
    assert "the dataset has 5 samples; --samples 5 uses all" in few.out
    # The finished run still knows its validations.
    again = meshwright(*words, "--out", str(run), "--json").json
    assert [(one["step"], one["loss"]) for one in again["validation"]] == [(o["step"], o["loss"]) for o in logged]
    assert set(again["validation"][0]) == {"step", "loss", "perplexity", "tokens", "samples", "seconds", "best"}


def test_best_checkpoint_is_kept_and_chosen(meshwright: Any, typed: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    # A learning rate that grows until the model breaks: the best validation is not the last.
    broken = ["optimizer.lr=0.9", "schedule.name=constant", "schedule.warmup_steps=7", "optimizer.clip_grad=0"]
    words = [*typed, "--out", str(run), "train.steps=8", "checkpoint.keep=1", "checkpoint.save_every=1", *broken]
    done = meshwright(*words, "--json").json
    losses = {one["step"]: one["loss"] for one in done["validation"]}
    best = min(losses, key=lambda step: losses[step])
    assert best != 8, losses
    assert done["best_step"] == best
    assert done["best_checkpoint"] == str(run / "checkpoints" / f"step-{best:08d}")
    assert sorted(one.name for one in (run / "checkpoints").glob("step-*")) == [f"step-{best:08d}", "step-00000008"]
    chosen = meshwright("evaluate", str(run), "--checkpoint", "best", "--json").json
    assert (chosen["step"], chosen["best_step"]) == (best, None)
    assert chosen["loss"] == pytest.approx(losses[best], rel=1e-5)
    latest = meshwright("convert", str(run), str(tmp_path / "latest"), "--json")
    assert (latest.json["step"], latest.json["best_step"]) == (8, best)
    assert f"the one with the lowest validation loss is step {best}: --checkpoint best" in latest.err
    assert meshwright("convert", str(run / "checkpoints" / "best"), str(tmp_path / "model")).code == 0
    wrong = meshwright("generate", str(run), "hello", "--checkpoint", "bset")
    assert wrong.code == 2
    assert "did you mean best?" in wrong.err


def test_early_stop_says_so_and_is_not_silently_continued(
    meshwright: Any, typed: tuple[str, ...], tmp_path: Path
) -> None:
    stops = [*typed, "--out", str(tmp_path / "run"), "train.steps=9", "train.early_stop_delta=100"]
    first = meshwright(*stops, "train.early_stop_patience=1")
    assert first.code == 0, first.err
    assert "stopped early: no validation loss lower by more than 100 in 1 validation since step" in first.out
    note = meshwright("doctor", str(tmp_path / "run"), "--json").json["notes"][-1]
    assert note.startswith("the log ends at step 4 of 9: stopped early: no validation loss lower by more than 100")
    kept = meshwright(*stops, "train.early_stop_patience=1", "--json").json["best_step"]
    assert f"best checkpoint: step {kept} (meshwright convert {tmp_path / 'run'} OUT --checkpoint best)" in note
    again = meshwright(*stops, "train.early_stop_patience=1", "--json")
    assert again.code == 0
    assert (again.json["steps"], again.json["first_step"]) == (0, 5)
    assert "stopped early" in again.json["stopped_early"]
    more = meshwright(*stops, "train.early_stop_patience=0", "--json").json
    assert (more["first_step"], more["steps"], more["stopped_early"]) == (5, 5, None)
    assert [one["step"] for one in more["validation"]] == [2, 4, 6, 8, 9]


def test_resume_and_validation_change_nothing(meshwright: Any, typed: tuple[str, ...], tmp_path: Path) -> None:
    words = [*typed, "train.steps=6", "checkpoint.save_every=3", "peft.dropout=0.1"]
    words[1] = "llama3_8b_peft"  # dropout: validation must not use up random numbers
    whole = meshwright(*words, "--out", str(tmp_path / "whole"), "--json").json
    without = [word for word in words if word != "train.eval_every=2"]
    plain = meshwright(*without, "--out", str(tmp_path / "plain"), "--json").json
    assert whole["losses"] == plain["losses"]
    # As after a crash: only the checkpoint of step 3 is left.
    part = shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for step in (part / "checkpoints").glob("step-*"):
        if step.name != "step-00000003":
            shutil.rmtree(step)
    resumed = meshwright(*words, "--out", str(part), "--json").json
    assert (resumed["first_step"], resumed["losses"]) == (4, whole["losses"][3:])

    def known(answer: dict[str, Any]) -> list[Any]:
        return [(one["step"], one["loss"], one["best"]) for one in answer["validation"]] + [answer["best_step"]]

    assert known(resumed) == known(whole)


def test_a_set_that_is_not_used_or_missing_is_reported(meshwright: Any, typed: tuple[str, ...], tmp_path: Path) -> None:
    unused = meshwright(*typed[:-1], "train.steps=1", "train.eval_every=0")
    assert "is not used while training; train.eval_every=N" in unused.err
    missing = meshwright(*typed[:-2], "data.validation=nowhere.jsonl", "train.eval_every=1")
    assert missing.code == 2
    assert "data.validation=nowhere.jsonl" in missing.err
    neither = meshwright(*typed[:-2], "train.eval_every=1")
    assert neither.code == 2
    assert "no validation data is set" in neither.err


class Numbered:
    """A corpus whose samples contain their own number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Sample:
        return Sample(np.full(5, index), np.ones(4, dtype=bool))


@pytest.mark.parametrize(
    "source", [Shuffled(Numbered(11), 7), Union([Shuffled(Numbered(4), 7), Shuffled(Numbered(7), 7)], 7)]
)
def test_each_sample_is_used_once_and_padding_has_no_targets(source: Any) -> None:
    finite, total = whole_set(source, batch=4, batches=0)
    assert (finite.size, total) == (11, 11)
    found = [finite.samples(range(first, first + 4)) for first in (0, 4, 8)]
    seen = [
        int(row[0]) for batch in found for row, mask in zip(batch.tokens, batch.loss_mask, strict=True) if mask.any()
    ]
    expected = range(11) if isinstance(source, Shuffled) else [*range(4), *range(7)]
    assert sorted(seen) == sorted(expected)
    assert whole_set(source, batch=4, batches=2)[0].size == 8
    assert isinstance(finite, FiniteSource)


@pytest.mark.slow
def test_validation_loss_does_not_depend_on_the_layout(meshwright: Any, typed: tuple[str, ...]) -> None:
    words = [*typed, "train.steps=2", "train.global_batch_size=8", "--json"]
    two = ["--nproc", "2", "layout.tp=1"]
    layouts: list[list[str]] = [["layout.micro_batch_size=1"], ["layout.micro_batch_size=4"], two]
    layouts += [[*two, "layout.pp=2"], ["--nproc", "2", "layout.tp=2"], [*two, "layout.cp=2"]]
    found = [meshwright(*words, *layout).json["validation"][-1] for layout in layouts]
    for one in found:
        assert (one["samples"], one["tokens"]) == (5, found[0]["tokens"])
        assert one["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)


class Sized(Numbered):
    """A corpus of samples of different lengths, padded to 200 targets."""

    def length(self, index: int) -> int:
        return 3 + 17 * index

    def sample(self, index: int) -> Sample:
        tokens, mask = np.zeros(201, dtype=np.int64), np.zeros(200, dtype=bool)
        tokens[: self.length(index)], mask[: self.length(index) - 1] = index + 1, True
        return Sample(tokens, mask)


def test_steps_of_short_samples_are_narrow_and_lose_no_target() -> None:
    finite, _ = whole_set(Shuffled(Sized(11), 7), batch=4, batches=0)
    steps = [range(first, first + 4) for first in (0, 4, 8)]
    whole = [finite.samples(step) for step in steps]
    assert [one.width for one in whole] == [192, 128, 64]  # of 200: the longest of each step, in tiles of 64
    assert sum(int(one.loss_mask.sum()) for one in whole) == sum(2 + 17 * n for n in range(11))
    for step, one in zip(steps, whole, strict=True):  # every rank gets the same width, also one with padding alone
        assert {finite.samples([number]).width for number in step} == {one.width}
    assert {one.width for one in map(whole_set(Shuffled(Sized(11), 7), 4, 0, cuts=False)[0].samples, steps)} == {200}


def test_the_kempner_validation_recipe_validates(meshwright: Any, tmp_path: Path) -> None:
    typed = ("train", "kempner_13b_24gpu_validation_config", "--tiny", "--out", str(tmp_path / "run"))
    short = ("train.steps=2", "train.eval_every=1", "train.eval_steps=1", "train.profile=false")
    ended = meshwright(*typed, *short, "checkpoint.export=none")
    assert ended.code == 0
    lines = (ended.out + ended.err).splitlines()
    shown = [line for line in lines if line.startswith("validation  step")]
    assert [line.split()[2] for line in shown] == ["1/2", "2/2"]
    assert "val     loss" in ended.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [(row["step"], row["loss"]) for row in rows if row["kind"] == "validation"]
    assert [step for step, _ in logged] == [1, 2]
    assert logged[1][1] < logged[0][1]
    assert f"loss {logged[1][1]:.4f}" in shown[1]


def test_the_kempner_validation_recipe_validates_by_itself() -> None:
    recipe = load("kempner_13b_24gpu_validation_config")
    assert (recipe.train.eval_every, recipe.train.eval_steps) == (200, 20)
    assert held_out_set(recipe) is not None


def test_validation_texts_in_another_column_are_tokenized_apart(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, column in (("train", "text"), ("held_out", "content")):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({column: "some words " * 20}) + "\n" for _ in range(9)))
    typed = ("train", "llama3_8b_pretrain", "--tiny", "--dataset", "train.jsonl", "data.tokenizer=bytes")
    words = ("train.steps=1", "train.eval_every=1", "checkpoint.export=none")
    refused = meshwright(*typed, *words, "data.validation=held_out.jsonl").err
    assert "error: data.validation=held_out.jsonl: held_out.jsonl:1: has no 'text'; it has content" in refused
    command, _, setting = refused.partition("fix:   meshwright ")[2].strip().partition(", then ")
    assert meshwright(*command.split()).code == 0
    assert "validation  step 1/1" in meshwright(*typed, *words, setting).out


def test_the_validation_data_of_a_run_are_held_out_also_if_they_are_typed() -> None:
    from meshwright.engine.post_training.perplexity import _is_validation_of
    from meshwright.recipes.types import Data

    assert _is_validation_of(Data(validation="val.jsonl"), "./val.jsonl")
    assert not _is_validation_of(Data(validation="val.jsonl"), "test.jsonl")
    assert not _is_validation_of(Data(), ".")
