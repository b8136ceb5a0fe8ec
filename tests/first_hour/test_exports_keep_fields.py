"""Exports: a field that is changed survives in the framework's files, or the export says what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from meshwright import frameworks, planner, recipes
from meshwright.choices import FRAMEWORKS
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.frameworks import no_effect
from meshwright.frameworks.to_recipe import complete, import_recipe
from meshwright.recipes import overrides
from meshwright.recipes.capabilities import FRAMEWORK_GOALS
from meshwright.recipes.case import model_of
from meshwright.recipes.types import Recipe, field_value, recipe_fields
from meshwright.recipes.values import bare_type

FIELDS = (
    "precision.compute", "precision.matmul", "precision.master", "precision.moments", "precision.grads",
    "precision.reduce", "precision.fp8_gather", "optimizer.name", "schedule.name", "schedule.wsd_decay_style",
    "moe.balancing", "moe.router_dtype", "data.train_on", "data.documents", "data.truncation", "data.packing",
    "data.group_by_length", "peft.method", "kernels.compile",
)  # fmt: skip
RECIPES = {  # of the last goal that a framework has
    "pretrain": "qwen3_30b_a3b_pretrain_config",
    "sft": "qwen3_30b_a3b_sft_config",
    "peft": "qwen3_30b_a3b_peft_config",
}


def _values(key: str) -> list[str]:
    kind = bare_type(recipe_fields()[key].type)[0]
    return ["true", "false"] if kind is bool else [str(value) for value in get_args(kind)]


def _export(theirs: frameworks.Framework, recipe: Recipe) -> frameworks.ExportedConfig:
    return frameworks.export(theirs, recipe, model_of(recipe), cluster("8xH100"))


def _read_back(theirs: frameworks.Framework, recipe: Recipe, files: Mapping[str, str], folder: Path) -> Recipe:
    """Return the recipe that the files describe, all of them in one folder."""
    for name, text in files.items():
        (folder / name).write_text(text)
    first = frameworks.open_file(folder / next(iter(files)))
    return complete(import_recipe(theirs, first, model_of(recipe)), cluster("8xH100"))


@pytest.mark.parametrize("most", [1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("to", FRAMEWORKS)
def test_no_changed_field_is_lost_silently(to: str, most: int | None, tmp_path: Path) -> None:
    """Other values of each field, at most so many, are read back as written or listed with what happens instead."""
    theirs = frameworks.framework(to)
    goals = FRAMEWORK_GOALS.get(to, ("pretrain", "sft", "peft"))
    name = "llama3_8b_pretrain_config" if to == "kempnerforge" else RECIPES[goals[-1]]  # it has no Qwen
    recipe = planner.with_engine_strategy(recipes.load(name), theirs.engine)
    recipe = overrides.apply(recipe, ["layout.ep=1", "layout.tp=1", "layout.pp=1", "layout.sp=false"])
    lost: list[str] = []
    for key in FIELDS:
        others = [value for value in _values(key) if value != str(field_value(recipe, key)).lower()]
        for value in others[:most]:
            wsd = ["schedule.name=wsd"] if key == "schedule.wsd_decay_style" else []
            changed = overrides.apply(recipe, [*wsd, f"{key}={value}"])
            if no_effect(key, changed, model_of(changed)):
                continue  # said by export itself
            try:
                written = _export(theirs, changed)
            except InputError as error:
                lost += [] if error.field == key else [f"{key}={value}: refused for {error.field}: {error.reason}"]
                continue
            named = [one for one in written.unmapped if one.field == key]
            if named:
                lost += [f"{key}={value}: {one.reason}" for one in named if len(one.reason.split()) < 4]
                continue
            read: Any = field_value(_read_back(theirs, changed, written.files, tmp_path), key)
            lost += [] if str(read).lower() == value else [f"{key}={value}: read back as {read}"]
    assert not lost, "\n".join(lost)


def _args(text: str) -> str:
    return text[text.index("args = ") :]


def test_the_trainer_has_a_stable_phase_and_a_linear_decay_to_a_minimum(meshwright: Any) -> None:
    """Both were lost: the Trainer has warmup_stable_decay, and polynomial with power 1."""
    for to in ("accelerate", "deepspeed"):
        found = meshwright("export", "llama3-8b", "--goal", "sft", "--gpus", "8xH100", "--to", to, "schedule.name=wsd",
                   "schedule.min_lr=5e-7", "optimizer.lr=5e-6", "schedule.wsd_decay_style=cosine")  # fmt: skip
        assert found.code == 0, found
        assert 'lr_scheduler_type="warmup_stable_decay"' in found.out
        assert '"decay_type": "cosine", "min_lr_ratio": 0.1' in found.out
        assert "Unmapped schedule." not in found.out
        found = meshwright("export", "llama3-8b", "--goal", "sft", "--gpus", "8xH100", "--to", to,
                   "schedule.name=linear", "schedule.min_lr=1e-6")  # fmt: skip
        assert '"lr_end": 1e-06, "power": 1.0' in _args(found.out)
        assert '"scheduler"' not in found.out  # a second one in the JSON file would contradict the Trainer's


def test_accelerate_has_fp8_of_both_backends_and_the_trainer_does_not_undo_it(meshwright: Any) -> None:
    """SFTConfig's own bf16=True would replace the fp8 of Accelerate's file."""
    for value, lines in {
        "fp8_delayed": ("backend: TE", "ACCELERATE_FP8_BACKEND=TE"),
        "fp8_tensor": ("backend: AO", "enable_fsdp_float8_all_gather: false"),
    }.items():
        found = meshwright("export", "llama3-8b", "--goal", "sft", "--gpus", "8xH100", "--to", "accelerate",
                   f"precision.matmul={value}", "layout.tp=1")  # fmt: skip
        assert found.code == 0, found.out
        assert all(line in found.out for line in (*lines, "mixed_precision: fp8", "bf16=False")), found.out
    blackwell = meshwright("export", "llama3-8b", "--goal", "sft", "--gpus", "8xB200", "--to", "accelerate",
                   "precision.matmul=mxfp8", "layout.tp=1")  # fmt: skip
    assert "use_mxfp8_block_scaling: true" in blackwell.out


@pytest.mark.parametrize(
    ("to", "override", "engine"),
    [
        ("deepspeed", "precision.matmul=fp8_tensor", "deepspeed"),
        ("accelerate", "optimizer.name=muon", "fsdp1"),
        ("accelerate", "precision.matmul=fp8_block", "fsdp1"),
    ],
)
def test_what_no_file_can_say_is_refused(to: str, override: str, engine: str, meshwright: Any) -> None:
    found = meshwright("export", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--to", to, override, "--json")
    answer = found.json
    name = override.split("=")[1]
    messages = [one["message"] for one in answer["findings"] if one["severity"] == "error"]
    assert found.code == 1
    assert any(f"{engine} does not support" in one and name in one for one in messages), messages


def test_the_engine_that_stands_for_tensor_parallelism_refuses_nothing_of_the_program(meshwright: Any) -> None:
    """The Trainer has lion; the finding was that AutoModel, whose cost model is used at tp=2, does not."""
    found = meshwright(
        "export", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--to", "accelerate", "optimizer.name=lion"
    )
    assert found.code == 0, found.out
    assert 'optim="lion_32bit"' in found.out


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("moe.balancing=bias", "llama3_8b has no experts"),
        ("peft.method=dora", "goal pretrain trains no adapters"),
        ("schedule.wsd_decay_style=linear", "a cosine schedule has no stable phase"),
        ("data.train_on=all", "pretraining reads one stream of tokens"),
    ],
)
def test_a_field_that_this_training_does_not_read_is_noted(override: str, reason: str, meshwright: Any) -> None:
    found = meshwright("export", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--to", "torchtitan", override)
    assert f"{override} has no effect: {reason}" in found.out


def test_a_field_without_a_key_says_who_decides(meshwright: Any) -> None:
    ours = meshwright(
        "export", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--to", "accelerate", "data.documents=line"
    )
    assert "data.documents=line: Accelerate has no key for it: your training program decides" in ours.out
    found = meshwright(
        "export", "llama3_8b_sft_config", "--gpus", "8xH100", "--to", "deepspeed", "data.train_on=last_answer"
    )
    assert "data.train_on=last_answer: TRL has no such loss: it would count all answers" in found.out
