"""Where only texts that were sent along may be read, no name reaches the files of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright import api, file_access
from meshwright.errors import InputError
from meshwright.models import config_of

CONFIG = json.dumps(config_of("llama3_8b"))
RECIPE = 'base = "llama3_8b_sft_config"\n[layout]\ntp = 3\n'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files that could be opened, as the working folder."""
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "config.json").write_text(CONFIG)
    (tmp_path / "mine.toml").write_text(RECIPE)
    (tmp_path / "mine.yaml").write_text("recipe: x\n")
    (tmp_path / "pointing.toml").write_text(f'base = "llama3_8b_sft_config"\nmodel = "{tmp_path}/config.json"\n')
    (tmp_path / "cluster.toml").write_text('gpu = "H100"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


ASKED: dict[str, Callable[[], Any]] = {
    "a config": lambda: api.recommend("config.json", "8xH100", "sft"),
    "a config with ./": lambda: api.recommend("./config.json", "8xH100", "sft"),
    "a folder": lambda: api.recommend("org", "8xH100", "sft"),
    "home": lambda: api.recommend("~/config.json", "8xH100", "sft"),
    "a cluster": lambda: api.recommend("llama3-8b", "cluster.toml", "sft"),
    "a recipe to estimate": lambda: api.estimate("mine.toml"),
    "a recipe to plan": lambda: api.plan("mine.toml", "8xH100"),
    "a recipe to export": lambda: api.export("mine.toml", "torchtitan"),
    "a file to check": lambda: api.check("mine.yaml"),
    "a model of a check": lambda: api.check("llama3_8b_sft_config", overrides=["model=config.json"]),
    "a calibration": lambda: api.recommend("llama3-8b", "8xH100", "sft", calibration="mine.toml"),
    "a recipe by name": lambda: api.recipe("mine.toml"),
    "a model to look up": lambda: api.model_catalogue("org"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_names_of_files_are_refused(files: Path, asked: str) -> None:
    with file_access.only({}), pytest.raises(InputError) as refused:
        ASKED[asked]()
    assert str(files) not in str(refused.value.to_dict())


@pytest.mark.parametrize("name", ["config.json", "none.json", "org", "nowhere", "/etc", "/etc/none", "org/x", "no/x"])
def test_a_refusal_does_not_tell_whether_a_file_exists(files: Path, name: str) -> None:
    def reason(text: str) -> str:
        with file_access.only({}), pytest.raises(InputError) as refused:
            api.recommend(text, "8xH100", "sft")
        return refused.value.reason.replace(text, "")

    there = reason(name)
    for path in files.rglob("*"):
        path.rename(path.with_name(path.name + ".gone")) if path.is_file() else None
    assert reason(name) == there


def test_a_text_that_was_sent_is_read_under_its_name(files: Path) -> None:
    with file_access.only({"other.toml": RECIPE}):
        found = api.check("other.toml", gpus="8xH100")
    assert found.file == "other.toml"
    assert not found.ok
    (files / "other.toml").write_text(RECIPE)
    assert api.check_response(api.check("other.toml", gpus="8xH100")) == api.check_response(found)


def test_a_config_that_was_sent_is_a_model() -> None:
    with file_access.only({"config.json": CONFIG}):
        plan = api.recommend("config.json", "8xH100", "sft", seq=8192)  # an own model has no recipe with a length
    named = api.recommend("llama3-8b", "8xH100", "sft")
    assert plan.question.model_ref == "config.json"
    assert plan.layout_dict() == named.layout_dict()
    assert api.plan_response(plan).estimate == api.plan_response(named).estimate


def test_a_sent_recipe_cannot_name_a_file(files: Path) -> None:
    text = (files / "pointing.toml").read_text()
    assert api.check("pointing.toml").model is not None
    with file_access.only({"pointing.toml": text}), pytest.raises(InputError, match="file paths are not allowed"):
        api.check("pointing.toml")


@pytest.mark.parametrize("named", ["automodel --config mine.yaml", "torchrun train.py --config mine.yaml"])
def test_a_sent_script_cannot_name_a_file(files: Path, named: str) -> None:
    with file_access.only({"run.sh": f"#!/bin/bash\nsource ./secret.sh\n{named}\n"}), pytest.raises(InputError):
        api.check("run.sh")


def test_files_are_open_again_afterwards(files: Path) -> None:
    with pytest.raises(InputError), file_access.only({}):
        api.recipe("mine.toml")
    assert api.recipe("mine.toml").layout.tp == 3
