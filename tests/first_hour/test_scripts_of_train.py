"""A script that runs `meshwright train`: its options mean what they mean on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.api import own_jobs
from meshwright.api.inputs import fields_of, read
from meshwright.api.run_requests import Train
from meshwright.api.targets import job_for
from meshwright.choices import SYNONYMS
from meshwright.frameworks import open_file
from meshwright.notes import no_notes

TARGET = "qwen3-4b"


def script(*words: str) -> str:
    Path("a.sh").write_text(f"#!/bin/bash\nmeshwright train {' '.join((TARGET, *words))}\n")
    return "a.sh"


WORDS = [
    (field.name, field.flag, word)
    for field in fields_of(Train)
    if "cli" in field.input.surfaces
    for word in (*field.input.choices, *SYNONYMS.get(field.input.synonyms, ()))
]


@pytest.mark.parametrize("name", sorted({name for name, _, _ in WORDS}))
def test_every_word_of_an_option_is_read_as_on_the_command_line(name: str) -> None:
    for flag, word in ((flag, word) for one, flag, word in WORDS if one == name):
        with no_notes():
            typed, _ = read(Train, {"recipe": TARGET, name: word}, "cli", strings=True)
            found = own_jobs.read(open_file(script(flag, word)))
        assert found is not None
        assert (found.target, found.overrides) == (TARGET, tuple(typed.overrides))
        assert (found.goal, found.framework) == (typed.goal, typed.framework)


def test_goal_qlora_of_a_script_trains_adapters_on_weights_in_4_bits(meshwright: Any) -> None:
    assert meshwright("check", script("--goal", "lora"), "--gpus", "1xRTX6000Ada").code == 0
    with no_notes():
        recipe = job_for(script("--goal", "qlora", "--epochs", "2"), gpus="1xRTX6000Ada").recipe
    assert (recipe.goal, recipe.peft.method, recipe.train.epochs) == ("peft", "qlora", 2)


@pytest.mark.parametrize(
    ("words", "field", "fix"),
    [
        ("--goal pretrian", "goal", "--goal pretrain"),
        ("--goal lora --nprocs 2", "option", "meshwright train --help"),
        ("--goal sft lr=1e-5 steps", "argument", "train.steps"),
        ("--goal qlora peft.method=lora", "peft.method", "leave out peft.method=lora"),
        ("--goal $GOAL", "file", "meshwright check RECIPE KEY=VALUE"),
    ],
)
def test_what_the_command_refuses_is_refused_in_a_script(meshwright: Any, words: str, field: str, fix: str) -> None:
    answer = meshwright("check", script(words), "--gpus", "1xH100", "--json")
    assert answer.code == 2
    assert answer.json["error"]["field"] == field
    assert "a.sh" in str(answer.json["error"])
    assert fix in " ".join((*answer.json["error"]["fix"], answer.json["error"]["message"]))
