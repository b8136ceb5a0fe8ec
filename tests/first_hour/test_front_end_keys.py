"""Every key of a front end is accounted for; columns, preference pairs and validation losses."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import meshwright
from meshwright.choices import ENGINES, synonym
from meshwright.engine.data.conversations import ROW_FORMAT, detect_columns, parse_conversation, untrainable_reason
from meshwright.engine.post_training.convert import _require_folder_name
from meshwright.errors import InputError
from meshwright.frameworks.front_ends import FRONT_ENDS
from meshwright.frameworks.front_ends.describe import FrontEnd
from meshwright.frameworks.other_trainers import FOUR_BITS, IMPLIED, LOSS_KEYS, STRATEGIES, VARIANTS
from meshwright.recipes.capabilities import CAPABILITIES, FRAMEWORK_GOALS, engines_with, rows_of
from meshwright.recipes.key_maps.hugging_face import ARGUMENTS, KEYS
from meshwright.recipes.types import recipe_fields
from meshwright.recipes.values import bare_type

FACTORY = """model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
dataset: clauses_qa
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
"""
HEADS = {
    "axolotl": "base_model: Qwen/Qwen3-4B\nsequence_len: 2048\nadapter: lora\n",
    "llama-factory": "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\ntemplate: qwen\n",
    "ms-swift": "model: Qwen/Qwen3-4B\ntuner_type: lora\ndataset: a/b\n",
    "trl": "model_name_or_path: Qwen/Qwen3-4B\ndataset_name: a/b\nuse_peft: true\n",
}
"""The start of a file of each front end."""
SAMPLES = {"bool": ("true", "false"), "int": ("0", "7"), "float": ("0.0", "0.5"), "str": ("abc", "steps")}
SPECIAL = {*VARIANTS, *LOSS_KEYS, *STRATEGIES, *FOUR_BITS, *IMPLIED, "warmup_steps", "warmup_ratio", "max_samples"}
ROWS = {row.key: row.field for row in (*KEYS, *ARGUMENTS)}


def refused(path: Path, text: str, gpus: str | None = "1xRTX4090") -> InputError:
    path.write_text(text)
    with pytest.raises(InputError) as error:
        meshwright.import_file(str(path), gpus=gpus)
    return error.value


@pytest.mark.parametrize(("line", "word"), [
    ("packing: false", "data.packing=false"), ("packing: true", "data.packing=true"), ("", "data.packing=false"),
    ("weight_decay: 0.0", "optimizer.weight_decay=0.0"), ("seed: 0", "train.seed=0"), ("train_on_prompt: true",
    "data.train_on=all"), ("save_strategy: 'no'", "checkpoint.save_every=0"), ("use_dora: true", "peft.method=dora"),
    ("warmup_ratio: 0.0", "schedule.warmup_steps=0"), ("eval_strategy: steps\neval_steps: 50", "train.eval_every=50"),
])  # fmt: skip
def test_a_setting_of_llama_factory_is_in_the_command(tmp_path: Path, line: str, word: str) -> None:
    fix = refused(tmp_path / "sft.yaml", FACTORY + line + "\n").fix[0]
    assert word in fix.split()


def test_a_share_of_unknown_steps_is_listed(tmp_path: Path) -> None:
    error = refused(tmp_path / "sft.yaml", HEADS["trl"] + "warmup_ratio: 0.1\n")
    assert "warmup_ratio=0.1" in error.message
    assert "warmup_steps" not in error.fix[0]


def values_of(one: FrontEnd) -> Iterator[tuple[str, str]]:
    """Yield two values of each key that a recipe's field follows from, and of each tenth of the others."""
    keys = one.table.owners[""]
    meant = {*ROWS, *one.names, *SPECIAL}
    others = sorted(set(keys) - meant)[::10]
    for name in sorted({key for key in meant if key in keys} | set(others)):
        kind = next((kind for kind in keys[name].types if kind in SAMPLES), "bool")
        for value in SAMPLES[kind]:
            yield name, value


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_every_key_of_a_front_end_is_accounted_for(tmp_path: Path, name: str) -> None:
    """A key is in the command, or listed, or switches off what no recipe does."""
    one, head = FRONT_ENDS[name], HEADS[name]
    started = {line.split(":")[0] for line in head.splitlines()} | {"model", "rl", "rlhf_type", *one.not_with}
    missing = []
    before = refused(tmp_path / "file.yaml", head).fix[0]
    for key, value in values_of(one):
        if key in started or (key in IMPLIED and value == "true"):
            continue
        error = refused(tmp_path / "file.yaml", f"{head}{key}: {value}\n")
        field = ROWS.get(key, "")
        stated = f" {key}=" in error.message or (field and f" {field}=" in error.fix[0]) or f" {key}=" in error.fix[0]
        if (
            not stated
            and error.fix[0] == before
            and (field not in ("peft.method", "") or value != "false" or key in IMPLIED)
        ):
            missing.append((key, value))
    assert not missing


def test_an_axolotl_file_without_gpus_states_its_assumption(tmp_path: Path) -> None:
    batch = "micro_batch_size: 2\ngradient_accumulation_steps: 4\n"
    error = refused(tmp_path / "qlora.yml", HEADS["axolotl"] + batch, gpus=None)
    assert "assumed by the fix: gpus=1xH100 (global batch 8: micro_batch_size 2 × grad" in error.message
    assert {"1xH100", "train.global_batch_size=8"} <= set(error.fix[0].split())
    error = refused(tmp_path / "qlora.yml", HEADS["axolotl"] + batch, gpus="2xA100")
    assert "assumed" not in error.message
    assert "train.global_batch_size=16" in error.fix[0]


def test_a_torchtune_file_names_what_check_reads(tmp_path: Path) -> None:
    text = "model:\n  _component_: torchtune.models.llama3_2.lora_llama3_2_3b\ntokenizer:\n  _component_: a.b\n"
    assert (
        "check also reads those of axolotl, llama-factory, ms-swift, trl" in refused(tmp_path / "a.yaml", text).message
    )


ASKED = {"role": "user", "content": "What is the notice period?"}
SAID = {"role": "assistant", "content": "71 days."}
LISTS = [ASKED, SAID]
ROWS_OF_DATA: dict[str, dict[str, object]] = {
    "implicit prompt": {"chosen": LISTS, "rejected": LISTS},
    "ultrafeedback": {"prompt": "What?", "chosen": LISTS, "rejected": LISTS},
    "explicit prompt": {"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID]},
    "strings": {"prompt": "What?", "chosen": "71", "rejected": "no"},
    "question": {"question": "What?", "chosen": "71", "rejected": "no"},
    "own name": {"id": "7", "frage": "What is it?", "chosen": "71 days", "rejected": "no"},
    "whole texts": {"chosen": "Human: What?\n\nAssistant: 71", "rejected": "Human: What?\n\nAssistant: no"},
    "objects": {"prompt": "What?", "chosen": {"text": {"a": 1}}, "rejected": {"text": {"a": 1}}},
    "unknown texts": {"nr": 1, "frage": "Was ist das?", "antwort": "Ein Tag."},
    "unknown list": {"chat": LISTS},
    "list of numbers": {"ids": [1, 2], "frage": "Was ist das?", "antwort": "Ein Tag."},
    "nested": {"a": {"b": "c"}},
    "numbers": {"a": 1, "b": 2},
}  # fmt: skip
CONFIGURED: tuple[dict[str, str], ...] = ({}, {"prompt": "prompt", "response": "chosen"}, {"messages": "chosen"},
    {"text": "frage"}, {"prompt": "frag"}, {"prompt": "fragee", "response": "antwortt"})  # fmt: skip


@pytest.mark.parametrize("row", ROWS_OF_DATA.values(), ids=ROWS_OF_DATA)
@pytest.mark.parametrize("configured", CONFIGURED, ids=str)
def test_a_printed_fix_of_columns_parses_the_data(row: dict[str, object], configured: dict[str, str]) -> None:
    try:
        detect_columns(row, configured, "data.jsonl")
    except InputError as error:
        for fix in error.fix:
            if fix == ROW_FORMAT:
                continue
            words = [word.removeprefix("data.columns.").split("=") for word in shlex.split(fix)]
            typed = dict(words)
            typed = typed if set(typed) & {"messages", "text"} or len(typed) > 1 else {**configured, **typed}
            found = parse_conversation(row, detect_columns(row, typed, "data.jsonl"), "")
            assert not untrainable_reason(found, "answers")


@pytest.mark.parametrize(("shape", "fix"), [
    ("implicit prompt", "data.columns.messages=chosen"), ("ultrafeedback", "data.columns.messages=chosen"),
    ("explicit prompt", "data.columns.prompt=prompt data.columns.response=chosen"),
    ("strings", "data.columns.prompt=prompt data.columns.response=chosen"),
    ("question", "data.columns.prompt=question data.columns.response=chosen"),
    ("whole texts", "data.columns.text=chosen"),
])  # fmt: skip
def test_the_fix_of_preference_pairs_fits_their_columns(shape: str, fix: str) -> None:
    with pytest.raises(InputError, match="no preference training") as error:
        detect_columns(ROWS_OF_DATA[shape], {}, "dpo.jsonl")
    assert error.value.fix[0] == fix


def test_a_column_of_messages_typed_as_a_response_is_explained() -> None:
    with pytest.raises(InputError, match="column chosen contains a list of messages, not text") as error:
        detect_columns(ROWS_OF_DATA["ultrafeedback"], {"prompt": "prompt", "response": "chosen"}, "dpo.jsonl")
    assert error.value.fix == ("data.columns.messages=chosen",)


STATE = {"global_step": 280, "max_steps": 400, "epoch": 2.0, "num_train_epochs": 3, "is_local_process_zero": True}


def plateau() -> Iterator[dict[str, float]]:
    """Yield the records of a training that learns nothing after step 80 while its validation loss rises."""
    for step in range(10, 290, 10):
        loss = 1.43 + 1.6 * math.exp(-step / 20) + 0.004 * (-1) ** (step // 10)
        yield {"epoch": round(step / 140, 4), "grad_norm": 0.4, "learning_rate": 1e-4, "loss": loss, "step": step}
        if step % 20 == 0:
            rise = 0.22 * max(0, step - 100) / 180 + max(0, 100 - step) / 1e4
            yield {"epoch": round(step / 140, 4), "eval_loss": 1.44 + rise, "step": step}


def test_a_validation_loss_that_rises_is_reported_beside_a_flat_training_loss(tmp_path: Path) -> None:
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({**STATE, "log_history": list(plateau())}, indent=2))
    log = tmp_path / "console.log"
    log.write_text("\n".join(str({key: row[key] for key in row if key != "step"}) for row in plateau()))
    for path in (state, log):
        (found,) = (one for one in meshwright.diagnose(str(path)).findings if one.id == "loss.validation-rises")
        assert "the validation loss rose from 1.44 in step 1" in found.message
        said = [text for one in found.remedies for text in one.try_]
        assert any(text.startswith("use the checkpoint of") for text in said)
        assert "fewer epochs, or early stopping" in said
        assert any("optimizer.lr=" in text for text in said) or path is log


def test_a_validation_loss_that_stays_is_not_reported(tmp_path: Path) -> None:
    rows = [{**row, **({"eval_loss": 1.44} if "eval_loss" in row else {})} for row in plateau()]
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({**STATE, "log_history": rows}))
    assert not any("validation" in one.id for one in meshwright.diagnose(str(state)).findings)


@pytest.mark.parametrize("name", ["out.gguf", "model.bin", "x/model.PT", "model.safetensors", "m.onnx"])
def test_convert_refuses_an_output_that_is_named_like_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="names a file, but convert writes a Hugging Face folder") as error:
        _require_folder_name(tmp_path / name, "run1", merge=True, adapted=True)
    stem = str((tmp_path / name).with_suffix("")) + "-hf"
    assert error.value.fix[0].startswith(f"meshwright convert run1 {stem} --merge")
    assert ("convert_hf_to_gguf.py" in error.value.fix[0]) == name.endswith("gguf")
    (tmp_path / "made.gguf").mkdir()
    _require_folder_name(tmp_path / "made.gguf", "run1", merge=True, adapted=True)


def test_explain_names_the_engines_that_execute_a_term() -> None:
    """Adapters are executed by no engine whose configs cannot state them; other values by those of the table."""
    for field in recipe_fields().values():
        if len(rows_of(field.flat)) > 1:  # a row for each kind of layout: some layout of the first executes it
            continue
        for value in get_args(bare_type(field.type)[0]):
            engines = engines_with(field.flat, value)
            for engine in ENGINES:
                rows = [row for row in CAPABILITIES if row.field == field.flat and engine in row.runs]
                refused = any(value not in row.runs[engine] for row in rows)
                no_goal = field.key.startswith("peft.") and "peft" not in FRAMEWORK_GOALS.get(engine, ("peft",))
                assert (engine in engines) == (not refused and not no_goal), (field.key, value, engine)
    for term in ("lora", "qlora", "dora"):
        meaning = meshwright.explain(term).meaning
        assert "Executed by" in meaning
        assert "torchtitan" not in meaning
        assert "kempnerforge" not in meaning


@pytest.mark.parametrize("goal", ["full sft", "full fine-tuning", "finetune", "instruct", "Full-Parameter"])
def test_words_for_training_all_weights(goal: str) -> None:
    found = synonym("goal", goal)
    assert found is not None
    assert found.value == "sft"


def test_explain_compares_two_terms_and_knows_words_for_held_out_data() -> None:
    found = meshwright.explain("LoRA vs QLoRA")
    assert [one.name for one in found.matches] == ["lora", "qlora"]
    assert all(one.meaning for one in found.matches)
    for word in ("holdout", "val_fraction"):
        explained = meshwright.explain(word)
        assert explained.field is not None
        assert explained.field.key == "data.validation_part"
