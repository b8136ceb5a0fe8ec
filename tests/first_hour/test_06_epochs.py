"""train.epochs: passes over the data, shown and counted exactly; train shows the findings of check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.test_data_files import write_megatron, write_shards

from meshwright.engine.epochs import EndedSource, repeat_warning, with_steps
from meshwright.errors import InputError
from meshwright.recipes import files, overrides
from meshwright.recipes.index import load

ROWS = [{"prompt": f"question {i}", "response": f"answer {i}"} for i in range(5)]
RECIPE = "qwen3_600m_sft_config"
SMALL = ("--tiny", "--dataset", "chats.jsonl", "data.packing=false", "train.global_batch_size=4", "--json")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_three_epochs_are_trained_shown_and_resumed(here: Path, meshwright: Any) -> None:
    words = ("train", RECIPE, *SMALL, "train.epochs=3", "--out", "run", "schedule.warmup_steps=50")
    answer = meshwright(*words)
    assert answer.code == 0, answer.err
    assert "train.epochs=3: 5 samples per epoch, 15 samples in 4 steps of 4, 3 in the last" in answer.err
    assert "epoch 3.00/3.00" in answer.err
    assert (answer.json["steps"], answer.json["samples_per_epoch"], answer.json["epochs"]) == (4, 5, 3.0)
    lines = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["kind"] == "step"] == [0.8, 1.6, 2.4, 3.0]
    warning = "warmup_steps=50, but training has only 4 steps"
    assert f"warning: {warning} (learning_rate.warmup-too-long)  fix: schedule.warmup_steps=1" in answer.err
    assert answer.err.index(warning) < answer.err.index("step 1/4")
    assert [one["message"] for one in answer.json["findings"]] == [warning]
    again = meshwright(*words)  # the run is complete: nothing is left to train
    assert (again.code, again.json["steps"], again.json["epochs"]) == (0, 0, 3.0)


def test_a_small_file_that_is_repeated_is_warned_about(here: Path, meshwright: Any) -> None:
    answer = meshwright("train", RECIPE, *SMALL, "train.steps=20")
    assert answer.code == 0, answer.err
    said = "train.steps=20 with 4 samples each repeat the 5 samples of chats.jsonl 16 times; fix: train.epochs=3 or"
    assert f"warning: {said} train.steps=4" in answer.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train.epochs=3", "train.steps=10"], 2, "train.epochs=3 and train.steps=10 both set the length"),
        (["train.epochs=3", "data.dataset=mock"], 1, "mock data is generated without end"),
        (["train.epochs=3", "data.streaming=true", "data.packing=false"], 1, "does not count the samples in advance"),
        (["train.epochs=3", 'data.blend={"a": 1.0, "b": 2.0}'], 1, "epochs=3 of a blend"),
        (["data.group_by_length=true", "data.packing=true"], 1, "packed samples all have the same length"),
        (["data.streaming=true", "data.packing=true"], 1, "does not know sample lengths in advance"),
    ],
)
def test_what_has_no_epochs_or_lengths_is_refused(words: list[str], code: int, said: str, meshwright: Any) -> None:
    answer = meshwright("check", RECIPE, "--gpus", "1xH100", *words)
    assert answer.code == code
    assert said in answer.out + answer.err


def test_check_does_not_guess_the_steps_of_epochs(meshwright: Any) -> None:
    words = ("check", RECIPE, "--gpus", "1xH100", "train.epochs=1", "schedule.warmup_steps=5000", "--json")
    found = [
        any(one["rule"] == "learning_rate.warmup-too-long" for one in meshwright(*words, *data).json["findings"])
        for data in ((), ("data.dataset=someone/a-dataset",))
    ]
    assert found == [True, False]  # the registry has the samples of squad; nobody counted the other
    plan = meshwright("recommend", "qwen3-0.6b", "--gpus", "1xH100", "--goal", "sft", "train.epochs=2", "--json")
    assert (plan.json["contract"]["steps"], plan.json["contract"]["epochs"]) == (None, 2.0)


def test_exports_write_epochs_or_refuse_them(meshwright: Any) -> None:
    words = ("export", RECIPE, "--gpus", "1xH100", "train.epochs=3", "--json")
    written = meshwright(*words, "--to", "automodel").json
    text = next(iter(written["files"].values()))
    assert "num_epochs: 3" in text
    assert "max_steps" not in text
    assert not any(one["field"] in ("train.epochs", "train.steps") for one in written["unmapped"])
    refused = meshwright(*words, "--to", "megatron-lm")
    assert refused.code == 2
    assert "has no epochs here: set the length in steps" in refused.err


def test_files_have_epochs_or_steps() -> None:
    recipe = overrides.apply(load(RECIPE), ["train.epochs=2"])
    assert "steps" not in files.content_of(recipe)["train"]
    assert files.from_text(files.to_text(recipe), "toml").train.epochs == 2
    assert overrides.apply(recipe, ["train.steps=7"]).train.epochs == 0
    with pytest.raises(InputError, match="both set the length"):
        files.from_text(f'base = "{RECIPE}"\n[train]\nepochs = 2\nsteps = 9\n', "toml")


class Numbers:
    """A finite source whose sample n is n."""

    def __init__(self, size: int) -> None:
        self.size = size

    def epoch_size(self, limit: int) -> int:
        return self.size

    def samples(self, numbers: list[int]) -> Any:
        from meshwright.engine.data.sample_types import Samples

        tokens = np.array([[n, n, n] for n in numbers])
        return Samples(tokens, np.ones((len(numbers), 2), dtype=bool))


@pytest.mark.parametrize(
    ("epochs", "size", "batch", "steps", "total"), [(3, 10, 8, 4, 30), (1, 8, 8, 1, 8), (0.5, 10, 2, 3, 5)]
)
def test_every_sample_counts_exactly_as_often(epochs: float, size: int, batch: int, steps: int, total: int) -> None:
    changes = [f"train.epochs={epochs}", f"train.global_batch_size={batch}", "data.dataset=x"]
    recipe, found = with_steps(overrides.apply(load(RECIPE), changes), lambda: Numbers(size), shown=False)
    assert (recipe.train.steps, recipe.train.epochs, found) == (steps, 0, total)
    source = EndedSource(Numbers(size), total, per_token=False)
    masks = np.concatenate([source.samples(range(i * batch, (i + 1) * batch)).loss_mask for i in range(steps)])
    assert masks.any(1).sum() == total
    assert masks[:total].all()


def test_few_passes_are_not_warned_about() -> None:
    recipe = overrides.apply(load(RECIPE), ["train.steps=10", "train.global_batch_size=8"])
    assert repeat_warning(recipe, 16, 1) == ""
    assert repeat_warning(recipe, None, 1) == ""
    assert "80 times" in repeat_warning(recipe, 1, 1)


@pytest.mark.parametrize("kind", ["shards", "megatron"])
def test_epochs_of_tokenized_data_are_counted_in_tokens(here: Path, meshwright: Any, kind: str) -> None:
    """A token takes two or four bytes there, not those of text."""
    documents = [[5] * 400, [6] * 1001]
    if kind == "shards":
        write_shards(here / "tokens", documents, 10_000)
    else:
        write_megatron(here / "tokens", documents)
    words = ("recommend", "qwen3-0.6b", "--gpus", "1xH100", "--goal", "pretrain", "--dataset", "tokens")
    budget = meshwright(*words, "--epochs", "3", "--seq", "128", "train.global_batch_size=2", "--json").json["budget"]
    assert budget["steps"] == -(-3 * (1400 // 128) // 2)
    assert "1,401 tokens, 10 packed samples" in budget["tokens_from"]
