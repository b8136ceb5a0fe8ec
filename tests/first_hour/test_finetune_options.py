"""Options of other trainers, what --tiny changes, some rows of a file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.recipes import load
from meshwright.recipes.format_override import format_override
from meshwright.recipes.key_maps import REMOVED_KEYS
from meshwright.recipes.key_maps.hugging_face import KEYS
from meshwright.recipes.types import field_value, recipe_fields

from .mistakes import Answer, call

SFT, PEFT = "qwen3_600m_sft_config", "qwen3_600m_peft_config"
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", SFT),
    "bench": ("bench", PEFT),
    "check": ("check", PEFT, "--gpus", "1xH100"),
    "estimate": ("estimate", SFT, "--gpus", "1xH100"),
    "recommend": ("recommend", "qwen3-0.6b", "--gpus", "1xH100", "--goal", "sft"),
    "plan": ("plan", "qwen3-0.6b", "--gpus", "1xH100", "--goal", "lora"),
    "launch": ("launch", SFT, "--scheduler", "slurm"),
}
VALUES = {
    "eval_strategy": "steps",
    "save_strategy": "epoch",
    "evaluation_strategy": "epoch",
    "logging_strategy": "steps",
    "output_dir": "out",
    "report_to": "wandb",
    "warmup_ratio": "0.03",
    "resume_from_checkpoint": "out/checkpoint-5",
    "gpus": "2xH100",
    "cluster": "8xH100",
    "goal": "sft",
    "model": "qwen3-1.7b",
    "dtype": "bfloat16",
    "torch_dtype": "torch.float16",
    "scheduler.min_lr_ratio": "0.1",
    "lr_scheduler.min_lr_factor": "0.1",
    "model.hierarchical_context_parallel_sizes": "2 4",
}
COUNTED = ("_steps", "samples", "examples", "size", "per_epoch", "seed", "dp", "devices", "num_nodes", "epoch")


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that would train end before the first step: only what was typed is tried."""
    from meshwright.engine import train

    def started(*_: Any, **__: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(train, "train", started)


def value_of(key: str) -> str:
    """Return a value that users of other trainers write for a key."""
    known = {one.key: one for one in KEYS}.get(key)
    if known is not None:
        own = field_value(load(PEFT), known.field)
        return next(iter(known.values), None) or format_override(known.field, own).partition("=")[2] or "mock"
    return VALUES.get(key) or ("4" if key.endswith(COUNTED) else "true")


def accepted(command: tuple[str, ...], answer: Answer) -> list[str]:
    """Return the fixes of an answer that the same command refuses as an input."""
    refused = []
    for fix in answer.error["fix"]:
        assert "…" not in fix
        if fix.startswith(("without ", "remove ")) or ": the model in place" in fix:  # another target, in words
            continue
        words = shlex.split(fix)
        typed = tuple(words[1:]) if words[0] == "meshwright" else (*_without(command, words), *words)
        if typed[-1] == "--help" or words[:2] == ["meshwright", "import"]:
            continue
        after = call(*typed)
        if after.code == 2:
            refused.append(f"{' '.join(typed)}: {after.error.get('message')}")
    return refused


def _without(command: tuple[str, ...], words: list[str]) -> tuple[str, ...]:
    """Return a command without the options that a fix sets."""
    replaced = [place for place, word in enumerate(command) if word.startswith("--") and word in words]
    return tuple(word for place, word in enumerate(command) if place not in replaced and place - 1 not in replaced)


def refused_fixes(name: str, key: str) -> list[str]:
    command, value = COMMANDS[name], value_of(key)
    found = []
    for typed in ((f"{key}={value}",), (f"--{key}", value)):
        if typed[0].startswith("--") and "." in key:
            continue
        answer = call(*command, *typed)
        if answer.code == 2:
            found += accepted(command, answer)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_accepts_what_it_suggests_for_another_trainers_option(name: str) -> None:
    place, quick = list(COMMANDS).index(name), name not in ("recommend", "plan")
    for key in list(REMOVED_KEYS)[place :: 14 if quick else 80]:
        assert not refused_fixes(name, key), key


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_accepts_what_it_suggests_for_every_option(name: str) -> None:
    for key in (*REMOVED_KEYS, *(one.key for one in KEYS)):
        assert not refused_fixes(name, key), key


def test_the_best_checkpoint_is_no_option_of_train() -> None:
    answer = call("train", SFT, "gradient_accumulation_steps=4", "load_best_model_at_end=true")
    assert answer.code == 2
    assert answer.error["fix"] == ["train.global_batch_size=4"]
    assert "evaluate and convert take it with --checkpoint best; leave it out" in answer.error["message"]


def test_values_follow_from_the_ranks_and_the_size_of_the_run() -> None:
    words = ("warmup_ratio=0.1", "gradient_accumulation_steps=4", "micro_batch_size=2", "--tiny", "--nproc", "2")
    assert call("train", SFT, *words).error["fix"] == ["train.global_batch_size=16 schedule.warmup_steps=2"]
    assert call("train", SFT, "warmup_ratio=0.1", "train.epochs=2").error["fix"] == ["schedule.warmup_steps=50"]
    assert call("train", SFT, "warmup_ratio=0.1").error["fix"] == ["schedule.warmup_steps=100"]


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("eval_strategy=steps eval_steps=20", "train.eval_every=20 data.validation_part=0.1"),
        ("eval_steps=20 eval_strategy=no", "train.eval_every=0"),
        ("evals_per_epoch=3 eval_strategy=steps", "train.eval_every=6 data.validation_part=0.1"),
        (
            "eval_strategy=epoch gradient_accumulation_steps=4 micro_batch_size=2 warmup_ratio=0.1",
            "train.global_batch_size=8 train.eval_every=18 data.validation_part=0.1 schedule.warmup_steps=5",
        ),
    ],
)
def test_one_fix_of_several_options_sets_a_field_once_and_counts_what_it_sets(
    typed: str, fix: str, tmp_path: Path
) -> None:
    file = tmp_path / "letters.jsonl"
    file.write_text("\n".join(json.dumps({"instruction": f"letter {i}", "output": "{}"}) for i in range(160)))
    words = ("recommend", SFT, "--gpus", "1xH100", "--dataset", str(file), "--epochs", "3", "data.packing=false")
    error = call(*words, *typed.split()).error
    assert error["fix"] == [fix]
    kept = [one for one in typed.split() if one.startswith("micro")]
    assert call(*words, *kept, *fix.split()).code == 0


def test_all_unknown_options_are_reported_at_once() -> None:
    answer = call("train", SFT, "--seq", "2048", "--samples", "100", "--report_to", "wandb", "--push_to_hub")
    assert answer.error["fix"] == ["data.seq_length=2048 data.split=train[:100] --wandb"]
    assert "--push_to_hub is none either" in answer.error["message"]
    answer = call("check", SFT, "report_to=wandb", "output_dir=out")
    assert answer.error["fix"] == ["without report_to output_dir"]


def test_the_command_that_replaces_an_option_has_no_other_unknown_option() -> None:
    answer = call("convert", "run", "--to", "hf", "--out", "merged", "--checkpoint", "best")
    assert answer.code == 2
    assert "it writes a Hugging Face folder" in answer.error["message"]
    answer = call("generate", "run", "--prompt", "Where is my order?", "--zzz_mode", "slow")
    assert answer.error["fix"] == ["meshwright generate run 'Where is my order?' --json"]


def test_the_price_of_epochs_needs_their_dataset() -> None:
    words = ("size", "qwen3-14b", "--gpu", "L40S", "--goal", "qlora", "--epochs", "3", "--price", "2.20")
    answer = call(*words, "--dataset", "medpix")  # whose card publishes no number of samples
    assert answer.error["fix"][0] == "--dataset FILE --price 2.20"


def test_several_files_are_refused_before_a_gpu_is_rented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = '{"instruction": "Where is it?", "output": "On its way."}\n'
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text(row * 400)
    words = ("qwen3-0.6b", "--goal", "lora", "--gpus", "1xL40S", "--dataset")
    answer = call("recommend", *words, "a.jsonl,b.jsonl").json
    [found] = [one for one in answer["findings"] if one["field"] == "data.dataset"]
    assert found["fix"] == ["data.blend=a.jsonl:1.0,b.jsonl:1.0"]
    answer = call("recommend", *words, "a.jsonl,b.jsonl", "--epochs", "3").json
    [found] = [one for one in answer["findings"] if one["field"] == "data.dataset"]
    assert "a blend has no epochs" in found["message"]
    assert found["no_fix"] == "mkdir mixed && cp -r a.jsonl b.jsonl mixed, then data.dataset=mixed"
    Path("mixed").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (Path("mixed") / name).write_text(row * 400)
    assert not [one for one in call("recommend", *words, "mixed", "--epochs", "3").json["findings"]
        if one["field"] == "data.dataset"]  # fmt: skip
    sized = call("size", *words, "mixed", "--epochs", "3", "--price", "2.20", "--max-gpus", "1")
    assert sized.code == 0
    assert sized.json["smallest"]["cost"] > 0


def test_an_option_without_a_counterpart_ends_its_sentence() -> None:
    message = call("doctor", "run.log", "--program", "sft.py").error["message"]
    assert "meshwright doctor has no such option. Try 'meshwright doctor --help'." in message


@pytest.mark.parametrize("value", ["out", "out/checkpoint-500", "out/checkpoints/step-00000020"])
def test_a_run_resumes_in_its_folder(value: str) -> None:
    for typed in ((f"resume_from_checkpoint={value}",), ("--resume_from_checkpoint", value)):
        assert call("train", SFT, *typed).error["fix"] == ["--out out"]


def test_tiny_says_every_value_that_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.engine.model_families import family_of
    from meshwright.engine.tiny import tiny_recipe
    from meshwright.notes import print_once

    print_once.cache_clear()
    recipe = load("qwen3_600m_sft_config")
    scaled, _ = tiny_recipe(recipe, family_of(recipe).config_for(recipe), 1, {"layout.micro_batch_size": 1})
    (line,) = capsys.readouterr().err.splitlines()
    for key in recipe_fields():
        old, new = field_value(recipe, key), field_value(scaled, key)
        assert (f" {key} " in line) == (old != new), key
    assert "train.global_batch_size 8 → 4" in line


@pytest.mark.parametrize(("split", "rows"), [("train[:20]", 20), ("train[70:]", 10), ("train[10:30]", 20)])
def test_some_rows_of_a_file_are_a_slice_of_its_split(tmp_path: Path, split: str, rows: int) -> None:
    from meshwright.engine.data.files import find_rows

    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "response": f"{i}."}) + "\n" for i in range(80)))
    found = find_rows(path, split)
    assert len(list(found)) == rows
    assert len(list(found.read(5))) == rows - 5
    assert found.state() != find_rows(path, "train").state()
    asked = ("estimate", SFT, "--gpus", "1xH100", "--dataset", str(path), f"data.split={split}")
    shown = json.dumps(call(*asked, "data.packing=false").json)
    assert f"{rows} samples of about" in shown


@pytest.mark.parametrize("split", ["train[:x]", "train[5:5]", "train[:10%]"])
def test_a_slice_that_is_none_is_refused_with_one(tmp_path: Path, split: str) -> None:
    from meshwright.engine.data.files import find_rows
    from meshwright.errors import InputError

    path = tmp_path / "chats.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n')
    with pytest.raises(InputError) as refused:
        find_rows(path, split)
    find_rows(path, str(refused.value.fix[0]).partition("=")[2])


@pytest.mark.parametrize(("share", "count"), [(0.1, 8), (0.02, 2), (0.5, 40), (0.001, 1)])
def test_the_share_that_is_held_out_is_exact(share: float, count: int) -> None:
    from meshwright.engine.data.instructions import split_by_content

    class Conversations:
        hashes = np.random.default_rng(0).integers(0, 2**63, 80, dtype=np.uint64)

        def __len__(self) -> int:
            return 80

    found: Any = Conversations()
    held_out, others = (split_by_content(found, share, side) for side in (True, False))
    assert len(held_out) == count
    assert sorted([*held_out, *others]) == list(range(80))


@pytest.mark.parametrize("word", ["report_to", "modules_to_save", "tf32", "resume_from_checkpoint", "efsdp"])
def test_explain_knows_words_of_other_trainers(word: str) -> None:
    assert call("explain", word).code == 0


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("Cannot use chat template functions because tokenizer.chat_template is not set and no template argument was "
         "passed!", "data.chat_template=FILE"),
        ("Target modules {'c_attn'} not found in the base model. Please check the target modules and try again.",
         "peft.targets=all-linear"),
    ],
)  # fmt: skip
def test_explain_knows_messages_of_fine_tuning(message: str, fix: str) -> None:
    assert fix in json.dumps(call("explain", f"ValueError: {message}").json)


def test_a_length_is_the_option_of_commands_that_have_it() -> None:
    asked = ("recommend", "qwen3-0.6b", "--gpus", "1xH100", "--max_seq_length", "512")
    assert call(*asked).error["fix"] == ["--seq 512"]


def test_the_command_of_a_fine_tuning_says_which_weights_it_starts_from(meshwright: Any) -> None:
    asked = ("recommend", "qwen3-0.6b", "--gpus", "1xH100", "--goal")
    out = meshwright(*asked, "lora").out
    assert "hf download Qwen/Qwen3-0.6B" in out
    assert "checkpoint.pretrained=FOLDER" in out
    assert "checkpoint.pretrained" not in meshwright(*asked, "pretrain").out
